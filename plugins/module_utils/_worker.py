# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The servers of a worker's host, worked out from the inventory. Private to the collection.

The role worker runs what this returns, and the gateway sends requests to it: neither has a word of its own on ports and names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ._plan import Problems

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
PATH = re.compile(r"/[^\x00-\x1f\"\\%]+")
MODEL = re.compile(r"[^\s\x00-\x1f](.*[^\s\x00-\x1f])?")
OPTION = re.compile(r"[a-z_][a-z0-9_]*(\.[a-z_][a-z0-9_]*)*")

DEFAULTS: dict[str, Any] = {
    "embeddings": False,
    "max_requests": 4,
    "context": 4096,
    "weight": 1,
    "options": {},
}
# The health is told at a port of its own, so far above that of the API.
HEALTH_PORT_OFFSET = 1000

# Each number: lowest, highest, whole, what to do.
NUMBERS = {
    "port": (1, 65535, True, "Give a free TCP port."),
    "health_port": (1, 65535, True, "Give a free TCP port."),
    "max_requests": (1, 256, True, "Requests that it serves at once; more wait in the gateway."),
    "context": (16, 1 << 24, True, "Tokens that one request may have, prompt and answer together."),
    "memory_gib": (0.0625, 4096, False, "GiB that it may have; one that takes more is ended."),
    "weight": (0, 256, True, "Its share of the requests against that of others."),
}

# Of llama.cpp's own parameters, those that something else says.
OWNED_OPTIONS = {
    "api_keys": "worker_api_key",
    "embedding": "embeddings",
    "hostnames": "worker_host",
    "model": "path",
    "model_alias": "model",
    "n_ctx": "context",
    "n_parallel": "max_requests",
    "port": "port",
    # The program that runs the server reads these; the log of a more talkative one has the end of the key.
    "endpoint_metrics": "the role",
    "verbosity": "the role",
}


def worker_servers(servers: Sequence[Mapping[str, Any]], host: str) -> dict[str, Any]:
    """Complete the ``servers`` (``worker_servers``) of ``host``.

    Returns ``servers``, each with all of its keys and with ``parameters`` (llama.cpp's own, by name), and ``problems``, a text for
    each; the servers count only when there is none.
    """
    problems = Problems()
    found = [
        _server(f"worker_servers[{index}] ({given.get('name')}) of {host}", given, host, problems)
        for index, given in enumerate(servers)
    ]
    names = Counter(server["name"] for server in found)
    ports = Counter(server[key] for server in found for key in ("port", "health_port"))
    problems += [
        f"worker_servers of {host}: {count} have the name {name!r}; give each its own."
        for name, count in names.items()
        if count > 1
    ]
    problems += [
        f"worker_servers of {host}: the port {port} is taken {count} times, as port or health_port (by default port + "
        f"{HEALTH_PORT_OFFSET}); give each its own."
        for port, count in ports.items()
        if count > 1
    ]
    return {"servers": found, "problems": problems}


def _server(label: str, given: Mapping[str, Any], host: str, problems: Problems) -> dict[str, Any]:
    """One server with all of its keys."""
    server = {**DEFAULTS, **{key: value for key, value in given.items() if value is not None}}
    name = server["name"] = str(server.get("name"))
    if not NAME.fullmatch(name):
        problems.append(
            f"{label}: name is {name!r}; allowed are up to 32 letters, digits, _ and -, like small-chat. Rename the server; what "
            "clients ask for is its model."
        )
    server.setdefault("model", name)
    if not MODEL.fullmatch(str(server["model"])):
        problems.append(f"{label}: model is {server['model']!r}; allowed is the name that clients ask for.")
    if not PATH.fullmatch(str(server.get("path"))):
        problems.append(
            f"{label}: path is {server.get('path')!r}; allowed is the full path of a GGUF file on {host}, like /srv/models/small.gguf."
        )
    for key, (low, high, whole, hint) in NUMBERS.items():
        value = server.get(key, server["port"] + HEALTH_PORT_OFFSET if key == "health_port" else None)
        number = problems.number(f"{label}: {key}", value, low, high, hint, whole)
        server[key] = int(number) if whole else number
    server["embeddings"] = problems.truth(f"{label}: embeddings", server["embeddings"])
    server["parameters"] = _parameters(label, server, problems)
    del server["options"]
    return server


def _parameters(label: str, server: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """What llama.cpp is told."""
    options = problems.mapping(f"{label}: options", server["options"])
    for option in options:
        if not OPTION.fullmatch(str(option)):
            problems.append(
                f"{label}: options has {option!r}; allowed are names of llama.cpp's parameters, like cpuparams.n_threads."
            )
        elif owner := OWNED_OPTIONS.get(str(option).partition(".")[0]):
            problems.append(f"{label}: options has {option!r}; that is what {owner} says. Take it out.")
    # An embedding is computed of the whole text at once.
    batch = {"n_batch": server["context"], "n_ubatch": server["context"]} if server["embeddings"] else {}
    return {
        "model.path": server.get("path"),
        "model_alias": [server["model"]],
        "n_parallel": server["max_requests"],
        # llama.cpp divides it among its requests.
        "n_ctx": server["context"] * server["max_requests"],
        "embedding": server["embeddings"],
        "ui": False,
        # Prompts of before are kept in memory, 8 GiB of it, unless this says less.
        "cache_ram_mib": 0,
        # It tells the last letters of its key to the log otherwise.
        "verbosity": 2,
        **batch,
        **options,
    }
