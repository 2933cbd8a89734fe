# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What is wrong with the variables of a gateway, found before anything is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
name: gateway_problems
short_description: What is wrong with the variables of a gateway
version_added: 0.1.0
author: The twospark.serving maintainers
description:
  - Checks what types alone cannot say; ranges, names that HAProxy can take, and values that contradict each other.
  - Names every problem at once, with the variable, its value, what is allowed and what to do.
    Of a secret it names only the variable.
positional: _input, host, address, gateways, hostvars, defaults
options:
  _input:
    description: The variables of the role C(gateway), without their prefix C(gateway_).
    type: dict
    required: true
  host:
    description: Inventory name of the gateway's host.
    type: str
    required: true
  address:
    description: Address of the gateway's host.
    type: str
    required: true
  gateways:
    description: Inventory names of all gateways.
    type: list
    elements: str
    default: []
  hostvars:
    description: The variables of all hosts by their inventory names.
    type: dict
    default: {}
  defaults:
    description: The role's defaults, for gateways that do not set a variable.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: Check the variables
  ansible.builtin.assert:
    that: problems | length == 0
    fail_msg: "{{ problems | join('\n') }}"
  vars:
    problems: "{{ settings | twospark.serving.gateway_problems(inventory_hostname, ansible_host) }}"
"""

RETURN = r"""
_value:
  description: A text for each problem; empty when all is well.
  type: list
  elements: str
  sample: ["gateway_workers (spark-a): the name is taken; give each worker its own."]
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_interface
from typing import Any

from ansible_collections.twospark.serving.plugins.filter.gateway_workers import LOADS_ON_DEMAND
from ansible_collections.twospark.serving.plugins.module_utils._plan import Problems

NAME = re.compile(r"[A-Za-z0-9_.:-]+")
ADDRESS = re.compile(r"[A-Za-z0-9_.:-]+")
PATH = re.compile(r"/[A-Za-z0-9._~/-]*\*?")
MODEL = re.compile(r"[^\s\x00-\x1f](.*[^\s\x00-\x1f])?")
KINDS = ("vllm", "openai", "llama_cpp", *LOADS_ON_DEMAND)
# A bearer token (RFC 6750, 2.1): anything else cannot stand in the header.
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
LOOPBACK = re.compile(r"127\.\d+\.\d+\.\d+|::1|localhost")

# The client that the workers' key stands for.
OPERATOR = "operator"
LONGEST_NAME = 63
SHORTEST_KEY = 16
CLIENT_LIMITS = {
    "max_requests": "Requests that it may have in flight at once.",
    "requests_per_minute": "Requests that it may send in a minute.",
}

# What gateways that share one address must have alike, or it would not be the same endpoint after a move.
ALIKE = (
    *("virtual_address", "virtual_router_id", "virtual_preempt"),
    *("port", "tls_certificate", "tls_generate", "clients", "paths"),
)
# The wildcard of each version of IP.
WILDCARDS = {4: "0.0.0.0", 6: "::"}

# Each whole number: lowest, highest, what it is.
NUMBERS = {
    "port": (1, 65535, "The TCP port for clients, like 8080."),
    "metrics_port": (1, 65535, "The TCP port for monitors, like 8405."),
    "hold_seconds": (
        0,
        3600,
        "Seconds that a request may wait for a worker to become live; 0 refuses it at once.",
    ),
    "queue_timeout": (1, 86400, "Seconds that a request may wait for a free worker."),
    "stream_timeout": (1, 604800, "Seconds of silence after which a request is given up."),
    "reload_grace": (1, 604800, "Seconds that requests may last on after a reload."),
    "retry_after": (1, 86400, "Seconds after which a refused client shall come again."),
    "max_connections": (16, 1000000, "Connections that the gateway holds at once."),
    "virtual_router_id": (
        1,
        255,
        "The number of these gateways among all that speak VRRP in their network.",
    ),
    "threads": (1, 64, "Threads of the gateway; two suffice."),
    "max_body_mib": (1, 64, "MiB that a request may have; each one that waits may take as much memory."),
    "pools": (1, 256, "Sets of workers with the same models that the gateway can tell apart."),
    "affinity_bound": (
        101,
        1000,
        "Per cent of the average load that a copy may have before its conversations go elsewhere.",
    ),
    "spill_after": (
        0,
        65535,
        "Requests that wait before a worker may load a model that others have loaded; 0 lets them wait.",
    ),
}


def gateway_problems(
    settings: Mapping[str, Any],
    host: str,
    address: str,
    gateways: Sequence[str] = (),
    hostvars: Mapping[str, Mapping[str, Any]] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> list[str]:
    """Name everything that is wrong with ``settings``; see DOCUMENTATION."""
    problems = Problems()
    numbers = {
        name: problems.number(f"gateway_{name}", settings.get(name), low, high, hint, whole=True)
        for name, (low, high, hint) in NUMBERS.items()
    }
    problems.number(
        "gateway_connect_timeout",
        settings.get("connect_timeout"),
        0.05,
        60,
        "Seconds that a worker may take to accept a connection.",
    )
    problems.truth("gateway_affinity", settings.get("affinity"))
    for name in ("address", "metrics_address"):
        if not ADDRESS.fullmatch(str(settings.get(name))):
            problems.append(
                f"gateway_{name} is {settings.get(name)!r}; allowed is one address, like 0.0.0.0 or 192.0.2.20."
            )
    if not re.fullmatch(r"[^\s'\"#\\]+", str(settings.get("log"))):
        problems.append(
            f"gateway_log is {settings.get('log')!r}; allowed is a socket like /dev/log or an address like 192.0.2.9:514."
        )
    if settings.get("api_key") and not TOKEN.fullmatch(str(settings["api_key"])):
        problems.append(
            "gateway_api_key (by default vllm_api_key) has a character that a bearer token cannot have; "
            "allowed are letters, digits and -._~+/ with = at the end. Make another, like: openssl rand -hex 32"
        )
    certificate = str(settings.get("tls_certificate") or "")
    generate = problems.truth("gateway_tls_generate", settings.get("tls_generate"))
    if certificate and generate:
        problems.append(
            f"gateway_tls_certificate is {certificate!r} and gateway_tls_generate is true; allowed is one of them. Take one out."
        )
    if certificate and not re.fullmatch(r"/[^\s'\"#\\]+", certificate):
        problems.append(
            f"gateway_tls_certificate is {certificate!r}; allowed is the path of a file on the gateway, like /etc/ssl/private/gateway.pem."
        )
    for path in settings.get("paths") or []:
        if not PATH.fullmatch(str(path)):
            problems.append(
                f"gateway_paths has {path!r}; allowed is a path like /v1/completions, or the beginning of paths like /v1/audio/*."
            )
    _check_workers(settings.get("workers") or [], numbers["pools"], problems)
    problems += [
        f"gateway_critical_models has {model!r}; allowed are names of models, as clients ask for them. Mend it."
        for model in settings.get("critical_models") or []
        if not isinstance(model, str) or not MODEL.fullmatch(model)
    ]
    _check_aliases(problems.mapping("gateway_aliases", settings.get("aliases")), problems)
    _check_clients(settings.get("clients") or [], str(settings.get("api_key") or ""), problems)
    _check_ports(settings, numbers, host, address, problems)
    _check_virtual_address(settings, gateways, hostvars or {}, problems)
    _check_alike(gateways, hostvars or {}, defaults or {}, problems)
    return problems


def _check_virtual_address(
    settings: Mapping[str, Any],
    gateways: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
    problems: Problems,
) -> None:
    problems.truth("gateway_virtual_preempt", settings.get("virtual_preempt"))
    interface = str(settings.get("virtual_interface") or "")
    if not re.fullmatch(r"[A-Za-z0-9_.:@-]{0,15}", interface):
        problems.append(
            f"gateway_virtual_interface is {interface!r}; allowed is the name of a network interface, like enp1s0, or nothing."
        )
    given = str(settings.get("virtual_address") or "")
    if not given:
        return
    try:
        virtual = ip_interface(given)
    except ValueError:
        virtual = None
    if virtual is None or any(
        (virtual.is_loopback, virtual.is_multicast, virtual.is_unspecified, virtual.is_link_local)
    ):
        problems.append(
            f"gateway_virtual_address is {given!r}; allowed is a free IPv4 or IPv6 address of the gateways' network, like 192.0.2.10 or "
            "192.0.2.10/24, or nothing."
        )
        return
    if len(gateways) < 2:
        problems.append(
            f"gateway_virtual_address is {given}, and the group gateways has {len(gateways)} host; allowed are two or more. "
            "Put another host into the group, or take the address out."
        )
    bound, wildcard = str(settings.get("address")), WILDCARDS[virtual.version]
    if bound != wildcard:
        problems.append(
            f"gateway_address is {bound!r} and gateway_virtual_address is {given}; allowed is {wildcard} with it: a gateway must answer at "
            f"the virtual address as soon as it has it. Set gateway_address to {wildcard}."
        )
    if str(settings.get("metrics_address")) == str(virtual.ip):
        problems.append(
            f"gateway_metrics_address is {virtual.ip}, the virtual address, which only one gateway has at a time; allowed is an address "
            "of the host's own, or 127.0.0.1."
        )
    for name in hostvars:
        for variable in ("ansible_host", "fabric_address"):
            if str(hostvars[name].get(variable)) == str(virtual.ip):
                problems.append(
                    f"gateway_virtual_address is {given}, which is {variable} of {name}; allowed is an address that no host has. "
                    "Choose another."
                )


def _check_alike(
    gateways: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
    problems: Problems,
) -> None:
    """Do all gateways of one virtual address have the same settings? Values may be secret, so they are not told."""

    def value(gateway: str, name: str) -> Any:
        variable = f"gateway_{name}"
        given = hostvars[gateway].get(variable, defaults.get(variable))
        return given if isinstance(given, list) else str(given)

    if not any(hostvars[gateway].get("gateway_virtual_address") for gateway in gateways):
        return
    for name in ALIKE:
        differing = [gateway for gateway in gateways if value(gateway, name) != value(gateways[0], name)]
        if differing:
            problems.append(
                f"gateway_{name} of {', '.join(differing)} is not that of {gateways[0]}; allowed is one value for all gateways, since they share "
                "gateway_virtual_address. Set it once, for the group gateways."
            )


def _check_workers(workers: list[Mapping[str, Any]], pools: float, problems: Problems) -> None:
    if not workers:
        problems.append(
            "gateway_workers is empty; allowed is one worker or more. Put a host into group sparks, or list the workers."
        )
        return
    names: set[str] = set()
    places: dict[tuple[Any, ...], str] = {}
    weights = []
    for worker in workers:
        name = str(worker.get("name"))
        label = f"gateway_workers ({name})"
        if not NAME.fullmatch(name):
            problems.append(
                f"{label}: name is {name!r}; allowed are letters, digits and _.:- in it. Rename the worker."
            )
        if name in names:
            problems.append(f"{label}: the name is taken; give each worker its own.")
        names.add(name)
        if not NAME.fullmatch(str(worker.get("host", name))):
            problems.append(
                f"{label}: host is {worker['host']!r}; allowed are letters, digits and _.:- in it."
            )
        if not ADDRESS.fullmatch(str(worker.get("address"))):
            problems.append(
                f"{label}: address is {worker.get('address')!r}; allowed is one address or host name, like 192.0.2.11."
            )
        port = problems.number(
            f"{label}: port", worker.get("port"), 1, 65535, "The port of its API.", whole=True
        )
        health_port = problems.number(
            f"{label}: health_port",
            worker.get("health_port", port),
            1,
            65535,
            "The port that answers for its health.",
            whole=True,
        )
        problems.number(
            f"{label}: max_requests",
            worker.get("max_requests"),
            1,
            65535,
            "Requests that it serves at once; more wait in the gateway.",
            whole=True,
        )
        weights.append(
            problems.number(
                f"{label}: weight",
                worker.get("weight", 1),
                0,
                256,
                "Its share against the others'.",
                whole=True,
            )
        )
        _check_kind(label, worker, problems)
        problems.number(
            f"{label}: keep_alive",
            worker.get("keep_alive", 0),
            0,
            86400,
            "Seconds that it keeps an idle connection open; 0 where that is not known.",
        )
        place = (worker.get("address"), port, health_port)
        if place in places:
            problems.append(
                f"{label}: address, port and health_port are those of {places[place]}, so its cap would not hold. Take one out."
            )
        places.setdefault(place, name)
    if pools < len(workers):
        problems.append(
            f"gateway_pools is {pools:g}, and there are {len(workers)} workers; allowed is at least one for each, or the models of some "
            "would have none. Raise it."
        )
    if not any(weights):
        problems.append(
            "gateway_workers: every weight is 0, so none would get a request. Give one a weight from 1 to 256."
        )


def _check_kind(label: str, worker: Mapping[str, Any], problems: Problems) -> None:
    """What a worker speaks, and what it is expected to have."""
    kind = worker.get("kind", "openai")
    if kind not in KINDS:
        problems.append(
            f"{label}: kind is {kind!r}; allowed are {', '.join(KINDS)}. Take openai for any other that lists its models at /v1/models."
        )
    path = str(worker.get("health_path", "/health"))
    if not PATH.fullmatch(path) or path.endswith("*"):
        problems.append(f"{label}: health_path is {path!r}; allowed is a path like /health.")
    if worker.get("key") and not TOKEN.fullmatch(str(worker["key"])):
        problems.append(
            f"{label}: key has a character that a bearer token cannot have; allowed are letters, digits and -._~+/ with = at the end."
        )
    if problems.truth(f"{label}: on_demand", worker.get("on_demand", False)) and kind not in LOADS_ON_DEMAND:
        problems.append(
            f"{label}: on_demand is true; allowed is that for {' and '.join(LOADS_ON_DEMAND)}, since {kind} does not load a model when "
            "it is asked for it. Take it out."
        )
    models = worker.get("models") or []
    for model in models if isinstance(models, list) else [models]:
        if not isinstance(models, list) or not isinstance(model, str) or not MODEL.fullmatch(model):
            problems.append(
                f"{label}: models has {model!r}; allowed is a list of models' names, as it tells them."
            )


def _check_aliases(aliases: Mapping[str, Any], problems: Problems) -> None:
    for alias, model in aliases.items():
        if not all(isinstance(name, str) and MODEL.fullmatch(name) for name in (alias, model)):
            problems.append(
                f"gateway_aliases has {alias!r}: {model!r}; allowed are two names of models, like chat: qwen3.8-flash-next."
            )
        elif model in aliases:
            problems.append(
                f"gateway_aliases has {alias!r}: {model!r}, which is an alias too; allowed is the name of a model. Name that one."
            )


def _check_clients(clients: list[Mapping[str, Any]], operators_key: str, problems: Problems) -> None:
    """Names and keys of those who may ask. A key is never shown."""
    if clients and not operators_key:
        problems.append(
            "gateway_clients is set, and neither gateway_api_key nor vllm_api_key is: with it the role checks the gateway, and only "
            "with it do the workers refuse who comes past the gateway. Set vllm_api_key, like: openssl rand -hex 32"
        )
    names: set[str] = set()
    hashes = {_hash(""): "nobody, since it is empty", _hash(operators_key): OPERATOR}
    for index, client in enumerate(clients):
        name = str(client.get("name"))
        label = f"gateway_clients[{index}] ({name})"
        if not NAME.fullmatch(name) or len(name) > LONGEST_NAME:
            problems.append(
                f"{label}: name is {name!r}; allowed are up to {LONGEST_NAME} letters, digits and _.:- in it. Rename the client."
            )
        if name == OPERATOR or name in names:
            problems.append(f"{label}: name is taken; give each client its own, and none {OPERATOR!r}.")
        names.add(name)
        key, given = str(client.get("key") or ""), str(client.get("key_sha256") or "").lower()
        if bool(key) == bool(given):
            problems.append(
                f"{label}: {'both key and key_sha256 are' if key else 'neither key nor key_sha256 is'} set; allowed is one of them."
            )
        elif key and (not TOKEN.fullmatch(key) or len(key) < SHORTEST_KEY):
            problems.append(
                f"{label}: key has fewer than {SHORTEST_KEY} characters, or one that a bearer token cannot have; allowed are letters, "
                "digits and -._~+/ with = at the end. Make another, like: openssl rand -hex 32"
            )
        elif given and not re.fullmatch(r"[0-9a-f]{64}", given):
            problems.append(
                f"{label}: key_sha256 is not 64 hexadecimal digits. Make it like: printf %s KEY | sha256sum"
            )
        else:
            hashed = given or _hash(key)
            if hashed in hashes:
                problems.append(
                    f"{label}: its key is also that of {hashes[hashed]}; give each client its own."
                )
            hashes[hashed] = name
        for limit, hint in CLIENT_LIMITS.items():
            if client.get(limit) is not None:
                problems.number(f"{label}: {limit}", client[limit], 1, 1000000, hint, whole=True)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _check_ports(
    settings: Mapping[str, Any], numbers: Mapping[str, float], host: str, address: str, problems: Problems
) -> None:
    """Two listeners on this host cannot have the same port."""
    taken = {"gateway_metrics_port": settings.get("metrics_port")}
    for worker in settings.get("workers") or []:
        where = str(worker.get("address"))
        if worker.get("host", worker.get("name")) == host or where == address or LOOPBACK.fullmatch(where):
            for name in ("port", "health_port"):
                taken[f"{name} of worker {worker.get('name')} on this host"] = worker.get(name)
    for variable in ("gateway_port", "gateway_metrics_port"):
        port = f"{numbers[variable.removeprefix('gateway_')]:g}"
        for owner, other in taken.items():
            if owner != variable and str(other) == port:
                problems.append(
                    f"{variable} is {port}, as is {owner}; allowed is a free port. Give one of them another."
                )


class FilterModule:
    """The filter under its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filter name to function."""
        return {"gateway_problems": gateway_problems}
