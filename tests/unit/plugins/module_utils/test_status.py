# SPDX-License-Identifier: GPL-3.0-or-later
"""What an operator is told, and that every state which is not as wanted is named with what mends it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _status as status


def unit(active: str = "inactive", **more: Any) -> dict[str, Any]:
    since = "Mon 2026-11-30 08:00:00 UTC"
    return {
        "active": active,
        "sub": "",
        "result": "success",
        "status": "",
        "since": since,
        "stale": False,
        **more,
    }


def spark(wanted: str = "replica", phase: str | None = "serving", **units: dict[str, Any]) -> dict[str, Any]:
    units = {"replica": unit(), "tp": unit(), **units}
    return {
        "wanted": wanted,
        "enabled": [] if wanted == "stopped" else ["replica", "tp"] if wanted == "both" else [wanted],
        "active": [mode for mode, state in units.items() if state["active"] == "active"],
        "units": units,
        "agent": phase
        and {
            "phase": phase,
            "requests": {"running": 3, "waiting": 0},
            "tokens_per_second": 92.4,
            "kv_cache_usage": 0.125,
            "last_start_seconds": 412.4,
            "starts": 3,
            "failures": 1,
            "strikes": 0,
        },
    }


GOOD = spark(replica=unit("active"))
TP = spark("tp", tp=unit("active"))
STRUCK = {**GOOD, "agent": {**GOOD["agent"], "strikes": 2}}
UP = {"status": 200}


def test_when_all_are_stopped_it_says_what_serves_again() -> None:
    stopped = {"a": spark("stopped", None), "b": spark("stopped", None)}
    assert "switch_mode.yml -e mode=replica (or tp)" in status.status_report(stopped, {})["table"][-1]


@pytest.mark.parametrize(
    ("sparks", "gateway", "words"),
    [
        ({"a": GOOD, "b": GOOD}, UP, ""),
        ({"a": TP, "b": TP}, UP, ""),
        ({"a": TP, "b": TP, "c": GOOD}, UP, ""),
        ({"a": spark("stopped", None), "b": spark("stopped", None)}, {"status": 503}, ""),
        ({"a": GOOD, "b": TP}, UP, "split"),
        ({"a": GOOD, "b": spark("stopped", None)}, UP, "split"),
        ({"a": spark("both", replica=unit("active"))}, UP, "both modes"),
        ({"a": {"unreachable": True, "msg": "no route"}, "b": GOOD}, UP, "a was not reached: no route"),
        ({"a": GOOD, "b": {}}, UP, "b was not reached"),
        ({"a": spark(replica=unit("failed", result="exit-code"))}, UP, "has failed (exit-code)"),
        (
            {"a": spark(phase=None, replica=unit("failed", status="failed: engine exited"))},
            UP,
            "has failed (engine exited)",
        ),
        (
            {"a": spark(phase=None, replica=unit("failed", result="signal", status="serving: 3 running"))},
            UP,
            "has failed (signal)",
        ),
        ({"a": STRUCK}, UP, "did not answer 2 times"),
        ({"a": spark(replica=unit("activating", status="loading 40 %"))}, UP, "loading 40 %"),
        ({"a": spark(replica=unit("inactive"))}, UP, "does not serve yet"),
        ({"a": spark(replica=unit("active"), tp=unit("activating"))}, UP, "runs tp, which is not wanted"),
        (
            {"a": spark("stopped", replica=unit("active"))},
            UP,
            "runs replica, and no mode is enabled there, so a reboot ends it",
        ),
        (
            {"a": {**spark(replica=unit("failed")), "port_problems": ["port 8000 is taken"]}},
            UP,
            "a: port 8000 is taken",
        ),
        ({"a": spark(phase="wedged", replica=unit("active"))}, UP, "its agent is wedged"),
        ({"a": spark(phase=None, replica=unit("active"))}, UP, "its agent is silent"),
        ({"a": spark(replica=unit("active", stale=True))}, UP, "former settings"),
        ({"a": GOOD}, {}, "the gateway on gw does not answer"),
        ({"a": GOOD}, {"status": -1}, "the gateway on gw does not answer"),
        ({"a": GOOD}, {"status": 503}, "reaches no engine"),
    ],
)
def test_problems(sparks: dict[str, Any], gateway: dict[str, int], words: str) -> None:
    report = status.status_report(sparks, {"gw": gateway})
    assert bool(report["problems"]) == bool(words), report["problems"]
    assert words in "\n".join(report["problems"])
    assert [line.split()[0] for line in report["table"][1 : len(sparks) + 1]] == list(sparks)


def test_the_table() -> None:
    report = status.status_report({"spark-a": GOOD, "b": {"unreachable": True}}, {})
    assert report["table"] == [
        "host     wanted   unit            phase        since                last start  starts  failures  running  waiting"
        "  tokens/s  KV",
        "spark-a  replica  replica active  serving      2026-11-30 08:00:00  412 s       3       1         3        0"
        "        92        12%",
        "b        ?        ?               not reached",
    ]


@pytest.mark.parametrize(
    ("capacity", "cell"),
    [
        (None, "12%"),
        ({"kv_tokens": 760_001}, "12% of 760,001 tokens"),
        ({"kv_tokens": 760_001, "full_context_requests": 2.9}, "12% of 760,001 tokens (2.9 full contexts)"),
    ],
)
def test_the_room_that_the_engine_told(capacity: dict[str, Any] | None, cell: str) -> None:
    shown = {**GOOD, "agent": {**GOOD["agent"], "capacity": capacity}}
    header, line = status.status_report({"a": shown}, {})["table"]
    assert line[header.index("KV") :] == cell


@pytest.mark.parametrize(
    ("shown", "cell"),
    [
        (spark(phase="loading", replica=unit("activating", status="loading: 120 s of usually 412 s")),
         "loading: 120 s of usually 412 s"),
        (spark(phase="loading", replica=unit("activating", status="")), "loading"),
        (spark(phase=None, replica=unit("activating", status="waiting for memory: 3 GiB")), "waiting for memory: 3 GiB"),
        (spark(phase=None, replica=unit("failed", status="failed: engine exited")), "failed"),
        (spark(phase=None, replica=unit()), "-"),
    ],
)  # fmt: skip
def test_the_phase_tells_how_far_a_start_is(shown: dict[str, Any], cell: str) -> None:
    header, line = status.status_report({"a": shown}, {})["table"]
    assert line[header.index("phase") : header.index("since")].strip() == cell


HELD = {
    "stdout": '[{}, {"addr_info": [{}, {}]}, {"ifname": "eth0", "addr_info": [{"local": "192.0.2.10", "prefixlen": 32}]}]'
}
FREE = {"stdout": "[]"}


@pytest.mark.parametrize(
    ("held", "line", "problem"),
    [
        ({}, "", ""),
        ({"a": {"skipped": True}, "b": {"skipped": True}}, "", ""),
        ({"a": FREE, "b": HELD}, "the gateways' address 192.0.2.10 is on b", ""),
        ({"a": {"unreachable": True}, "b": HELD}, "the gateways' address 192.0.2.10 is on b", ""),
        ({"a": FREE, "b": FREE}, "", "no gateway holds the gateways' address (gateway_virtual_address): journalctl -u keepalived on a, b"),
        ({"a": HELD, "b": HELD}, "the gateways' address 192.0.2.10 is on a", "a, b all hold the gateways' address"),
    ],
)  # fmt: skip
def test_the_gateways_address(held: dict[str, Any], line: str, problem: str) -> None:
    report = status.status_report({"spark-a": GOOD}, {}, held)
    assert line in "\n".join(report["table"])
    assert len(report["table"]) >= 2 + bool(line)
    assert bool(report["problems"]) == bool(problem)
    assert problem in "\n".join(report["problems"])


def test_a_switch_that_is_under_way_is_told() -> None:
    who = "anna on laptop (process 4711, switch to tp, since 2026-11-30 08:00:03Z)"
    sparks = {
        "a": {**GOOD, "changed_by": who},
        "b": {**GOOD, "changed_by": who},
        "c": {**GOOD, "changed_by": ""},
    }
    assert status.status_report(sparks, {})["table"][-1] == f"a, b is being changed by {who}"


def test_the_last_switches_are_told() -> None:
    def record(began: str, mode: str, succeeded: bool = True) -> str:
        gateways = {"g": {"away": 321.7, "held": 16, "failed": 0, "answered": 3, "given up": 0}}
        return json.dumps(
            {"began": began, "mode": mode, "succeeded": succeeded, "sparks": {}, "gateways": gateways}
        )

    first = "\n".join(
        [record("2026-11-30 08:00:03Z", "tp"), record("2026-11-30 09:00:03Z", "replica", False)]
    )
    second = "\n".join(
        [record("2026-11-30 09:00:03Z", "replica", False), record("2026-11-30 10:00:03Z", "tp"), "{half"]
    )
    lines = status.status_report({"a": GOOD}, {}, {}, [first, second, ""])["table"]
    assert [line.split()[2:5] for line in lines[-3:]] == [
        ["tp", "well", "322"],
        ["replica", "back", "322"],
        ["tp", "well", "322"],
    ]
    assert status.status_report({"a": GOOD}, {})["table"][-1].startswith("a ")
