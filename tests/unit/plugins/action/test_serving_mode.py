# SPDX-License-Identifier: GPL-3.0-or-later
"""How a switch waits: as long as it may, past a blink of the network, and no longer than there is something to wait for."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from ansible.errors import AnsibleConnectionFailure

from ansible_collections.twospark.serving.plugins.action import serving_mode as action

ASKED: dict[str, Any] = {"changed": True, "reached": False, "actions": ["start vllm-tp.service"]}
LOADING = {"settled": False, "reached": False, "phase": "loading", "status": "loading: 40%", "units": {}}
SERVING = {
    "settled": True,
    "reached": True,
    "phase": "serving",
    "status": "",
    "units": {"tp": {}},
    "engine_seconds": 5.0,
}
FAILED = {**LOADING, "settled": True, "phase": "failed", "cause": "vllm-tp.service has failed"}
LOST = AnsibleConnectionFailure("no route")


class Clock:
    """Time that passes only where somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Host:
    """Answers the modules' calls, one after the other; the last answer stays."""

    def __init__(self, clock: Clock, *answers: Any) -> None:
        self.clock, self.answers = clock, list(answers)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, module_name: str, module_args: dict[str, Any], task_vars: Any) -> dict[str, Any]:
        self.calls.append((module_name.rpartition(".")[2], module_args))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if not answer.get("settled", True):
            self.clock.sleep(module_args["seconds"])
        return dict(answer)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(action, "time", found)
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    display = MagicMock()
    display.display.side_effect = lines.append
    monkeypatch.setattr(action, "Display", lambda: display)
    return lines


def run(host: Host, check_mode: bool = False, **arguments: Any) -> dict[str, Any]:
    task = MagicMock(args={"mode": "tp", **arguments}, check_mode=check_mode, async_val=0)
    module = action.ActionModule(task, MagicMock(), MagicMock(), MagicMock(), MagicMock(), MagicMock())
    module._execute_module = host
    return dict(module.run(task_vars={"inventory_hostname": "spark-a"}))


def test_it_tells_each_phase_and_how_long_it_lasted(clock: Clock, shown: list[str]) -> None:
    host = Host(clock, ASKED, LOADING, LOADING, SERVING)
    result = run(host)
    assert (result["reached"], result["engine_seconds"], result["after"]) == (True, 5.0, {"tp": {}})
    assert result["durations"]["loading"] == 10.0
    assert shown == ["spark-a 0:10 loading: 40%", "spark-a 0:20 serving"]
    assert [name for name, _arguments in host.calls] == ["serving_mode", *["serving_wait"] * 3]
    # The phase that was seen last is what the next look waits in.
    assert [arguments["phase"] for _name, arguments in host.calls[1:]] == ["", "loading", "loading"]


@pytest.mark.parametrize(
    ("asked", "check_mode", "arguments"),
    [
        ({**ASKED, "reached": True}, False, {}),
        (ASKED, True, {}),
        (ASKED, False, {"wait": False}),
        ({**ASKED, "failed": True}, False, {}),
    ],
)
def test_where_nothing_is_to_be_awaited(
    clock: Clock, asked: dict[str, Any], check_mode: bool, arguments: dict[str, Any]
) -> None:
    host = Host(clock, asked)
    assert run(host, check_mode, **arguments) == asked
    assert len(host.calls) == 1


def test_a_start_that_fails_ends_it(clock: Clock, shown: list[str]) -> None:
    result = run(Host(clock, ASKED, LOADING, FAILED))
    assert (result["failed"], result["msg"]) == (True, "vllm-tp.service has failed")


def test_patience_with_the_engine_has_an_end(clock: Clock, shown: list[str]) -> None:
    result = run(Host(clock, ASKED, {**LOADING, "cause": "it does not serve yet"}), timeout=35)
    assert (result["failed"], result["msg"]) == (True, "Waited for 35 s. it does not serve yet")
    assert clock.now == 1035


def test_a_network_that_blinks(clock: Clock, shown: list[str]) -> None:
    result = run(Host(clock, ASKED, LOADING, LOST, LOST, SERVING))
    assert result["reached"]
    assert sum("spark-a is not reached" in line for line in shown) == 2


def test_a_host_that_is_lost(clock: Clock, shown: list[str]) -> None:
    with pytest.raises(AnsibleConnectionFailure):
        run(Host(clock, ASKED, LOADING, LOST))
    assert clock.now - 1010 == pytest.approx(action.PATIENCE_SECONDS, abs=3)


def test_a_look_that_fails(clock: Clock, shown: list[str]) -> None:
    result = run(Host(clock, ASKED, {"failed": True, "msg": "no systemctl"}))
    assert (result["failed"], result["msg"]) == (True, "no systemctl")
