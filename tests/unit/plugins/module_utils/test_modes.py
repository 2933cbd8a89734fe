# SPDX-License-Identifier: GPL-3.0-or-later
"""From what systemd says to what must be done."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes


def unit(mode: str, **state: Any) -> modes.Unit:
    return modes.Unit(name=modes.UNITS[mode], installed=True, **state)


RUNNING: dict[str, Any] = {"enabled": True, "active": "active", "sub": "running"}
FAILED: dict[str, Any] = {"enabled": True, "active": "failed", "sub": "failed", "result": "exit-code"}
WAITING: dict[str, Any] = {"enabled": True, "active": "activating", "sub": "auto-restart"}
LOADING: dict[str, Any] = {"enabled": True, "active": "activating", "sub": "start", "job": True}


@pytest.mark.parametrize(
    ("replica", "tp", "wish", "steps"),
    [
        # The first installation.
        ({}, {}, "replica", ["enable replica", "start replica"]),
        ({}, {}, "stopped", []),
        # As wanted: nothing to do.
        (RUNNING, {}, "replica", []),
        (LOADING, {}, "replica", []),
        # The switch: the new wish is written down before anything is stopped.
        (RUNNING, {}, "tp", ["enable tp", "disable replica", "stop replica", "start tp"]),
        ({}, RUNNING, "replica", ["enable replica", "disable tp", "stop tp", "start replica"]),
        (RUNNING, {}, "stopped", ["disable replica", "stop replica"]),
        # A switch that was broken off after its first step is taken up where it stands.
        (RUNNING, {"enabled": True}, "tp", ["disable replica", "stop replica", "start tp"]),
        ({}, {"enabled": True}, "tp", ["start tp"]),
        # A mode that nobody wants, started by hand.
        (RUNNING, {"active": "active"}, "replica", ["stop tp"]),
        (RUNNING, {**WAITING, "enabled": False}, "replica", ["stop tp"]),
        # A failed unit of the other mode holds nothing.
        (RUNNING, {"active": "failed"}, "replica", []),
        # The person's word counts anew.
        (FAILED, {}, "replica", ["reset-failed replica", "start replica"]),
        (WAITING, {}, "replica", ["reset-failed replica", "restart replica"]),
        (FAILED, {}, "tp", ["enable tp", "disable replica", "start tp"]),
        # A changed unit file is read before anything else is done, and read once.
        ({**RUNNING, "outdated": True}, {"outdated": True}, "replica", ["daemon-reload"]),
        ({}, {"outdated": True}, "tp", ["daemon-reload", "enable tp", "start tp"]),
        # On its way down or up again by somebody else's hand.
        ({**RUNNING, "active": "deactivating", "sub": "stop-sigterm"}, {}, "replica", ["start replica"]),
        ({**FAILED, "job": True}, {}, "replica", []),
    ],
)
def test_change(replica: dict[str, Any], tp: dict[str, Any], wish: str, steps: list[str]) -> None:
    change = modes.change({"replica": unit("replica", **replica), "tp": unit("tp", **tp)}, wish)
    assert [re.sub(r"vllm-(\w+)\.service", r"\1", str(step)) for step in change.steps] == steps
    # Check mode, diff and deed are made from one list.
    assert bool(change.differences) == bool(steps)
    before, after = change.diff()["before"], change.diff()["after"]
    assert before.count("\n") == after.count("\n") == len(change.differences)
    assert bool(steps) == (before != after)


@pytest.mark.parametrize(
    ("stale", "restart_stale", "steps"),
    [(True, True, ["restart"]), (True, False, []), (False, True, []), (None, True, [])],
)
def test_only_stale_settings_are_restarted_and_only_when_asked(
    stale: bool | None, restart_stale: bool, steps: list[str]
) -> None:
    units = {"replica": unit("replica", **RUNNING, stale=stale), "tp": unit("tp")}
    assert [step.verb for step in modes.change(units, "replica", restart_stale).steps] == steps


SHOWN = """\
Id=vllm-replica.service
LoadState=loaded
ActiveState=activating
SubState=auto-restart
Result=exit-code
NRestarts=2
StatusText=failed: engine exited with status 1 (x=y)
StateChangeTimestamp=Mon 2026-11-30 08:00:00 UTC

Id=vllm-tp.service
LoadState=not-found
ActiveState=inactive
SubState=dead
Job=17
"""


def test_reading_systemctl() -> None:
    shown = modes.parse_show(SHOWN)
    replica = modes.unit_from("vllm-replica.service", shown["vllm-replica.service"], "enabled")
    assert (replica.installed, replica.enabled, replica.restarts) == (True, True, 2)
    assert replica.status == "failed: engine exited with status 1 (x=y)"
    assert replica.down
    assert not replica.stopped
    tp = modes.unit_from("vllm-tp.service", shown["vllm-tp.service"], "not-found")
    assert (tp.installed, tp.enabled, tp.job, tp.stopped) == (False, False, True, False)


@pytest.mark.parametrize(
    ("word", "enabled"),
    [("enabled", True), ("enabled-runtime", True), ("disabled", False), ("masked", False), ("", False)],
)
def test_what_enabled_means(word: str, enabled: bool) -> None:
    assert modes.unit_from("vllm-tp.service", {}, word).enabled is enabled


def test_a_masked_unit_counts_as_not_installed() -> None:
    assert not modes.unit_from("vllm-tp.service", {"LoadState": "masked"}, "masked").installed


def test_tail() -> None:
    assert modes.tail(["a", "", "b  ", "c"], 2) == "b\nc"
