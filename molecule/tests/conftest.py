# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of all scenarios share: the endpoint as a client sees it, and what is the same in every mode."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import testinfra
from testinfra.host import Host
from testinfra.utils.ansible_runner import AnsibleRunner

from spark import Spark


@dataclass(frozen=True)
class Answer:
    """An HTTP answer: status, the Spark that it came from (empty when the gateway made it), and the body."""

    status: int
    served_by: str
    body: Any


class Endpoint:
    """The gateway's endpoint, asked from outside."""

    def __init__(self, address: str, port: int = 8080) -> None:
        self.url = f"http://{address}:{port}"

    def get(self, path: str) -> Answer:
        return self._ask(urllib.request.Request(self.url + path))

    def complete(self, **more: object) -> Answer:
        """Ask for a completion by the simulated model."""
        body = {"model": "simulated", "prompt": "hello", "max_tokens": 4, **more}
        headers = {"Content-Type": "application/json"}
        return self._ask(
            urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        )

    def _ask(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Answer(answer.status, answer.headers.get("x-served-by", ""), _body(answer.read()))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers.get("x-served-by", ""), _body(error.read()))


def _body(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")


@pytest.fixture(scope="session")
def endpoint(pytestconfig: pytest.Config) -> Endpoint:
    """The endpoint of the scenario's inventory."""
    runner = AnsibleRunner(pytestconfig.getoption("ansible_inventory"))
    return Endpoint(runner.get_variables("gateway")["ansible_host"])


@pytest.fixture(scope="session")
def sparks(pytestconfig: pytest.Config) -> Callable[[str], list[Spark]]:
    """The Sparks of the scenario's inventory as they are in a mode, in the inventory's order."""
    inventory = pytestconfig.getoption("ansible_inventory")
    runner = AnsibleRunner(inventory)

    def in_mode(mode: str) -> list[Spark]:
        found = []
        for name in runner.get_hosts("sparks"):
            variables = runner.get_variables(name)
            host = testinfra.get_host(f"ansible://{name}", ansible_inventory=inventory)
            container = f"{variables['simulator_project']}-{name}"
            found.append(Spark(name, host, variables["ansible_host"], container, mode))
        return found

    return in_mode


_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Keep a measured figure, to be printed after the tests."""
    figures = request.config.stash.setdefault(_FIGURES, [])
    return lambda text: figures.append(f"{request.node.name}: {text}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was measured."""
    if figures := config.stash.get(_FIGURES, []):
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.line(line)


@pytest.fixture
def fetch(host: Host) -> Callable[[int, str], Answer]:
    """Ask a port of the host from outside, as a gateway does."""

    def get(port: int, path: str) -> Answer:
        return Endpoint(host.ansible.get_variables()["ansible_host"], port).get(path)

    return get


@pytest.fixture
def root(host: Host) -> Callable[[str], str]:
    """Run a command on the host as root and return what it printed."""

    def run(command: str) -> str:
        with host.sudo():
            return str(host.check_output(command))

    return run


@pytest.fixture
def unit(root: Callable[[str], str]) -> Callable[[str], dict[str, str]]:
    """Read a unit's properties as systemd has them."""

    def show(mode: str) -> dict[str, str]:
        lines = root(f"systemctl show vllm-{mode}.service").splitlines()
        return {
            **dict(line.split("=", 1) for line in lines if "=" in line),
            "enabled": root(f"systemctl is-enabled vllm-{mode}.service || true"),
        }

    return show


@pytest.fixture
def containers(root: Callable[[str], str]) -> Callable[[], list[str]]:
    """Names of all containers on the host, those that have ended too."""

    def names() -> list[str]:
        return root("docker ps --all --format '{{.Names}}'").split()

    return names
