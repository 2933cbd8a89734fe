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


DRAINING: dict[str, Any] = {
    "active": "deactivating",
    "sub": "stop-sigterm",
    "status": "draining: 3 in flight, 8 s",
    "job": True,
}
QUEUED: dict[str, Any] = {"status": "failed: of a former life", "job": True}


@pytest.mark.parametrize(
    ("replica", "tp", "wish", "settled", "reached", "phase", "status"),
    [
        # The one that stops is told of until it has stopped, also before systemd has begun with it.
        (DRAINING, QUEUED, "tp", False, False, "draining", "draining: 3 in flight, 8 s"),
        ({"active": "active", "status": "serving: 3 running", "job": True}, QUEUED, "tp", False, False, "serving", "serving: 3 running"),
        (DRAINING, {}, "stopped", False, False, "draining", "draining: 3 in flight, 8 s"),
        ({**DRAINING, "status": ""}, {}, "stopped", False, False, "stopping", "stopping"),
        ({}, {}, "stopped", True, True, "stopped", "stopped"),
        ({"active": "failed"}, {}, "stopped", True, True, "stopped", "stopped"),
        # Then the one that starts; what it said in a former life is of no interest.
        ({}, QUEUED, "tp", False, False, "starting", "starting"),
        ({}, {**LOADING, "status": "loading: weights 40%, 31 s"}, "tp", False, False, "loading", "loading: weights 40%, 31 s"),
        ({}, {**RUNNING, "status": "serving"}, "tp", True, True, "serving", "serving"),
        # A restart was asked for and has not begun.
        ({**RUNNING, "job": True, "status": "serving"}, {}, "replica", False, False, "serving", "serving"),
        (DRAINING, {}, "replica", False, False, "draining", "draining: 3 in flight, 8 s"),
        # Nothing comes of it any more.
        ({}, {**FAILED, "status": "failed: no memory"}, "tp", True, False, "failed", "failed: no memory"),
        ({}, {**WAITING, "status": "failed: no memory"}, "tp", True, False, "failed", "failed: no memory"),
        ({}, {}, "tp", True, False, "stopped", ""),
    ],
)  # fmt: skip
def test_how_far_it_is(
    replica: dict[str, Any],
    tp: dict[str, Any],
    wish: str,
    settled: bool,
    reached: bool,
    phase: str,
    status: str,
) -> None:
    units = {"replica": unit("replica", **replica), "tp": unit("tp", **tp)}
    assert modes.progress(units, wish) == modes.Progress(settled, reached, phase, status)


@pytest.mark.parametrize(
    ("replica", "tp", "wish", "words"),
    [
        (DRAINING, QUEUED, "tp", "vllm-replica.service has not stopped yet. Its status: draining"),
        ({}, LOADING, "tp", "vllm-tp.service does not serve yet. Its status: none"),
        ({}, FAILED, "tp", "vllm-tp.service has failed (exit-code)."),
        ({}, WAITING, "tp", "vllm-tp.service failed (success); systemd tries again by itself."),
        ({}, {}, "tp", "vllm-tp.service did not start, or was stopped meanwhile"),
        (DRAINING, {}, "stopped", "vllm-replica.service has not stopped yet."),
    ],
)
def test_why_a_mode_is_not_reached(
    replica: dict[str, Any], tp: dict[str, Any], wish: str, words: str
) -> None:
    units = {"replica": unit("replica", **replica), "tp": unit("tp", **tp)}
    said = modes.unreached(units, wish, lambda mode: f"lines of {mode}")
    assert words in said
    blamed = "replica" if "vllm-replica" in words else "tp"
    assert f"lines of {blamed}" in said
    assert f"journalctl -u vllm-{blamed}.service -e" in said


def test_what_is_told_meanwhile() -> None:
    watch = modes.Watch("spark-a", 100.0)
    looks = [
        (100.5, "draining", "draining: 3 in flight, 0 s", "spark-a 0:00 draining: 3 in flight, 0 s"),
        (110.5, "draining", "draining: 3 in flight, 10 s", ""),
        (129.0, "draining", "draining: 1 in flight, 28 s", ""),
        (130.5, "draining", "draining: 1 in flight, 30 s", "spark-a 0:30 draining: 1 in flight, 30 s"),
        (134.0, "loading", "loading: 0 s", "spark-a 0:34 loading: 0 s"),
        (200.0, "serving", "", "spark-a 1:40 serving"),
    ]
    assert [watch.see(*look[:3]) for look in looks] == [look[3] for look in looks]
    assert watch.durations == {"draining": 33.5, "loading": 66.0}
