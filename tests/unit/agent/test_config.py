# SPDX-License-Identifier: GPL-3.0-or-later
"""Every wrong configuration is refused with the key, its value and what is allowed."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vllm_agent import __version__
from vllm_agent.__main__ import main
from vllm_agent.config import ConfigError, load, read_environment, secrets_of

REPLICA: dict[str, Any] = {
    "mode": "replica",
    "unit": "vllm-replica.service",
    "container": "vllm-replica",
    "image": "vllm:1",
    "model": "/srv/models/tiny",
    "served_model_name": "tiny",
    "command": ["docker", "run", "--rm", "--name", "vllm-replica", "vllm:1", "vllm", "serve"],
    "environment_file": "/etc/vllm/replica.env",
    "api": {"port": 8000},
    "agent": {"port": 9401},
    "memory": {"budget_gib": 97.4, "wait_seconds": 300, "drop_page_cache": True},
    "timeouts": {
        "start": 3600,
        "verify": 120,
        "drain": 300,
        "drain_notice": 3,
        "engine_shutdown": 30,
        "container_stop": 45,
    },
    "start_limit": {"burst": 3, "served_seconds": 1800},
    "watchdog": {"interval": 15, "canary_timeout": 300, "strikes": 3},
    "pair": None,
}
RANK: dict[str, Any] = {
    "rank": 1, "size": 2, "head": "198.18.78.11", "peer": "198.18.78.11", "heartbeat_port": 9403,
    "peer_wait_seconds": 900, "heartbeat_timeout": 10,
}  # fmt: skip
MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """REPLICA with one key, given as a.b, set or (MISSING) removed."""
    document = copy.deepcopy(REPLICA)
    *parents, name = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    if value is MISSING:
        del place[name]
    else:
        place[name] = value
    return document


def load_document(folder: Path, document: Any) -> Any:
    file = folder / "replica.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return load(file)


def test_a_complete_configuration_is_read(tmp_path: Path) -> None:
    config = load_document(tmp_path, REPLICA)
    assert config.memory.budget_gib == 97.4
    assert config.timeouts.container_stop == 45
    assert config.api.port == 8000
    assert config.pair is None


def test_a_headless_rank_is_read(tmp_path: Path) -> None:
    config = load_document(tmp_path, REPLICA | {"mode": "tp", "api": None, "pair": RANK})
    assert config.api is None
    assert config.pair.heartbeat_timeout == 10


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("mode", "both", 'mode is "both"; allowed: replica or tp'),
        ("unit", "", 'unit is ""; allowed: a text that is not empty'),
        ("image", 7, "image is 7; allowed: a text that is not empty"),
        ("image", MISSING, "image is missing; every key is required"),
        ("memory.budget_gib", MISSING, "memory.budget_gib is missing; every key is required"),
        ("memory.budget_gib", "97", 'memory.budget_gib is "97"; allowed: a number of at least 0'),
        ("memory.budget_gib", True, "memory.budget_gib is true; allowed: a number of at least 0"),
        ("memory.drop_page_cache", 1, "memory.drop_page_cache is 1; allowed: true or false"),
        ("agent.port", 70000, "agent.port is 70000; allowed: an integer of at least 1 and at most 65535"),
        ("agent.port", 80.5, "agent.port is 80.5; allowed: an integer of at least 1 and at most 65535"),
        ("timeouts.drain", -1, "timeouts.drain is -1; allowed: a number of at least 0"),
        ("timeouts.later", 3, "timeouts.later is not a key; allowed: start, verify, drain,"),
        ("timeouts", [], "timeouts is []; allowed: an object"),
        ("watchdog.strikes", 0, "watchdog.strikes is 0; allowed: an integer of at least 1"),
        ("command", [], "command is []; allowed: a list of texts that is not empty"),
        ("command", ["docker", 1], 'command is ["docker", 1]; allowed: a list of texts'),
        ("command", ["docker", "run", "x"], "allowed: a docker run with --name vllm-replica"),
        ("command", ["docker", "run", "--name", "vllm-replica-2"], "allowed: a docker run with --name vllm-replica"),
        ("timeouts.engine_shutdown", 45, "timeouts.engine_shutdown is 45; allowed: less than timeouts.container_stop"),
        ("api", None, "api must be null on rank 1"),
        ("pair", RANK, "pair must be set in mode tp and null in mode replica; mode is replica"),
        ("mode", "tp", "pair must be set in mode tp"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named(tmp_path: Path, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_document(tmp_path, changed(path, value))
    assert str(caught.value).startswith(f"{tmp_path}/replica.json: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "pair.rank is 2; allowed: an integer of at least 0 and at most 1"),
        ({"size": 4}, "pair.size is 4"),
        (
            {"heartbeat_timeout": 60},
            "pair.heartbeat_timeout is 60; allowed: a number of at least 1 and at most 15",
        ),
        ({"head": "spark-a"}, 'pair.head is "spark-a"; allowed: an IP address'),
        ({"peer": ""}, 'pair.peer is ""; allowed: a text that is not empty'),
        ({"rank": 0}, "api must be null on rank 1, which is headless, and set everywhere else"),
    ],
)
def test_a_wrong_rank_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_document(tmp_path, REPLICA | {"mode": "tp", "api": None, "pair": RANK | change})


@pytest.mark.parametrize("text", ["{", '{"mode": NaN}', "[]", "\x00"])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"replica\.json"):
        load_document(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read: No such file"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize(("document", "status"), [(REPLICA, 0), (REPLICA | {"mode": "both"}, 2)])
def test_the_configuration_can_be_checked_alone(
    tmp_path: Path, document: dict[str, Any], status: int
) -> None:
    file = tmp_path / "replica.json"
    file.write_text(json.dumps(document))
    assert main(["--config", str(file), "--check"]) == status


def test_the_environment_is_read_as_docker_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "replica.env"
    file.write_text(
        "# VLLM_API_KEY=old\n\nVLLM_API_KEY=sk=1234 'x'\nHF_TOKEN=hf_abcdefg\nSHORT_KEY=abc\nPLAIN=plainvalue\n"
    )
    environment = read_environment(str(file))
    assert environment["VLLM_API_KEY"] == "sk=1234 'x'"
    assert secrets_of(environment) == ["sk=1234 'x'", "hf_abcdefg"]


def test_the_agent_has_the_version_of_the_collection() -> None:
    galaxy = Path(__file__).resolve().parents[3] / "galaxy.yml"
    assert f"\nversion: {__version__}\n" in galaxy.read_text()
