# SPDX-License-Identifier: GPL-3.0-or-later
"""The rendered configuration, and variables that cannot be used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import CONFIGURATIONS, SPARK_A, Ansible, gateway_of

CANARY = "canary-0123456789"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_haproxy_has_nothing_to_say(configurations: dict[str, Path], name: str) -> None:
    done = gateway_of(configurations[name]).check()
    assert (done.returncode, done.stdout + done.stderr) in [(0, "Configuration file is valid\n"), (0, "")]


def test_the_workers_come_from_the_group_of_sparks(configurations: dict[str, Path]) -> None:
    text = (configurations["default"] / "haproxy.cfg").read_text()
    text = text[text.index("backend pool1\n") : text.index("backend pool2\n")]
    servers = re.findall(r"^    server (\S+) (\S+) port (\d+) .*maxconn (\d+)", text, re.MULTILINE)
    assert servers == [
        ("spark-a", "192.0.2.11:8000", "9401", "12"),
        ("spark-b", "192.0.2.12:8000", "9401", "8"),
        ("spark-a-tp", "192.0.2.11:8000", "9402", "4"),
    ]


def test_the_configuration_has_no_secret(configurations: dict[str, Path]) -> None:
    key = CONFIGURATIONS["pair"]["gateway_api_key"]
    assert key not in (configurations["pair"] / "haproxy.cfg").read_text()
    assert key in (configurations["pair"] / "keys.map").read_text()


WORKER = {"gateway_workers": [SPARK_A]}
GOOD: dict[str, dict[str, Any]] = {
    "own-key": {**WORKER, "gateway_api_key": CANARY},
    "shared-key": {**WORKER, "vllm_api_key": CANARY},
}
# Variables, and what is said of them.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unfit-key": (
        {**WORKER, "gateway_api_key": f"{CANARY} {CANARY}"},
        "gateway_api_key (by default vllm_api_key) has",
    ),
    "key-beside-a-slip": (
        {**WORKER, "gateway_api_key": CANARY, "gateway_threads": "many"},
        "gateway_threads",
    ),
    "no-number": ({**WORKER, "gateway_port": "lots"}, "gateway_port"),
    "clash": ({**WORKER, "gateway_port": 8405}, "gateway_port is 8405, as is gateway_metrics_port"),
    "impatient": (
        {**WORKER, "gateway_queue_timeout": 0},
        "gateway_queue_timeout is 0; allowed is a whole number from 1",
    ),
    "no-cap": ({"gateway_workers": [{"name": "a", "address": "192.0.2.1", "port": 1}]}, "max_requests"),
    "slip": ({"gateway_workers": [{**SPARK_A, "max_request": 3}]}, "max_request"),
    "twins": ({"gateway_workers": [SPARK_A, SPARK_A]}, "the name is taken"),
    "no-worker": ({}, "gateway_workers is empty; allowed is one worker or more."),
}


def test_bad_variables_are_named_and_no_secret_is_told(ansible: Ansible) -> None:
    """However much Ansible is asked to say, and whether the variables are right or wrong."""
    hosts = GOOD | {name: variables for name, (variables, _) in BAD.items()}
    done, problems = ansible.check(hosts, {}, "-vvvv")
    assert done.returncode == 0, done.stdout
    assert set(problems) == set(BAD)
    for name, (_, expected) in BAD.items():
        assert expected in problems[name]
    assert CANARY not in done.stdout + done.stderr + str(problems)
