# SPDX-License-Identifier: GPL-3.0-or-later
"""What is said of a switch, and what follows from how it went."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _switch as switch

GOOD: dict[str, Any] = {"changed": True}
BAD: dict[str, Any] = {"failed": True, "msg": "vllm-tp.service has failed (exit-code)"}
LOST: dict[str, Any] = {"unreachable": True, "msg": "no route to host"}
ANSWERS = {"gateway": ""}
SILENT = {"gateway": "answered 503"}


def pair(
    brought_a: dict[str, Any], brought_b: dict[str, Any], former: str = "replica", **more: Any
) -> dict[str, Any]:
    return {
        host: {"former": former, "wish": "tp", "brought": brought, **more}
        for host, brought in (("a", brought_a), ("b", brought_b))
    }


@pytest.mark.parametrize(
    ("sparks", "gateways", "causes", "comes_back"),
    [
        (pair(GOOD, GOOD), ANSWERS, [], False),
        (pair(GOOD, BAD), ANSWERS, ["b: vllm-tp.service has failed (exit-code)"], True),
        (pair(BAD, BAD), ANSWERS, ["a: vllm-tp", "b: vllm-tp"], True),
        (pair(LOST, BAD), ANSWERS, ["a: not reached (no route to host)", "b: vllm-tp"], True),
        (pair(GOOD, GOOD), SILENT, ["gateway: answered 503"], True),
        # Nothing served before, nobody knows what, or the same mode: there is no way back.
        (pair(GOOD, BAD, "stopped"), ANSWERS, ["b: vllm-tp"], False),
        (pair(GOOD, BAD, "both"), ANSWERS, ["b: vllm-tp"], False),
        (pair(GOOD, BAD, "tp"), ANSWERS, ["b: vllm-tp"], False),
        # The rest of a switch that was killed: nobody comes back to half of a pair.
        (
            {
                "a": {"former": "tp", "wish": "tp", "brought": GOOD},
                "b": {"former": "replica", "wish": "tp", "brought": BAD},
            },
            ANSWERS,
            ["b: vllm-tp"],
            False,
        ),
    ],
)
def test_what_went_wrong_and_what_follows(
    sparks: dict[str, Any], gateways: dict[str, str], causes: list[str], comes_back: bool
) -> None:
    outcome = switch.switch_outcome("tp", sparks, gateways)
    assert len(outcome["causes"]) == len(causes)
    assert all(said.startswith(cause) for said, cause in zip(outcome["causes"], causes, strict=True))
    assert bool(outcome["former"]) is comes_back
    assert bool(outcome["message"]) is bool(causes)


def test_a_third_spark_keeps_its_copy() -> None:
    sparks = {host: {"former": "tp", "wish": "replica", "brought": BAD} for host in "ab"}
    sparks["c"] = {"former": "replica", "wish": "replica", "brought": GOOD}
    outcome = switch.switch_outcome("replica", sparks, ANSWERS)
    assert outcome["former"] == {"a": "tp", "b": "tp", "c": "replica"}
    assert "Bringing back tp." in outcome["message"]


def test_who_wants_it_stopped_does_not_want_it_back() -> None:
    sparks = {"a": {"former": "replica", "wish": "stopped", "brought": LOST}}
    assert switch.switch_outcome("stopped", sparks, {})["former"] == {}


def test_nothing_comes_back_that_is_not_wanted() -> None:
    outcome = switch.switch_outcome("tp", pair(GOOD, BAD), ANSWERS, come_back=False)
    assert outcome["former"] == {}
    assert "rollback is false" in outcome["message"]


def test_without_a_failure_there_is_nothing_to_say() -> None:
    outcome = switch.switch_outcome("tp", pair(GOOD, GOOD), ANSWERS)
    assert switch.switch_end(outcome, "tp", pair(GOOD, GOOD, returned={}), ANSWERS) == ""


def test_the_cause_stands_last() -> None:
    sparks = pair(GOOD, BAD, returned=GOOD)
    told = switch.switch_end(switch.switch_outcome("tp", sparks, ANSWERS), "tp", sparks, ANSWERS)
    assert "replica serves again on a, b." in told
    assert told.splitlines()[-1] == "- b: vllm-tp.service has failed (exit-code)"


@pytest.mark.parametrize(
    ("returned", "again", "said"),
    [(BAD, ANSWERS, "- a: vllm-tp"), (GOOD, SILENT, "- gateway: answered 503\n- a: replica is back")],
)
def test_a_way_back_that_fails_says_what_stands_and_what_to_try(
    returned: dict[str, Any], again: dict[str, str], said: str
) -> None:
    sparks = pair(GOOD, BAD, returned=returned)
    told = switch.switch_end(switch.switch_outcome("tp", sparks, ANSWERS), "tp", sparks, again)
    assert said in told
    assert "playbooks/status.yml" in told
    assert "playbooks/switch_mode.yml -e mode=replica" in told
    assert told.splitlines()[-1] == "- b: vllm-tp.service has failed (exit-code)"


def test_the_announcement() -> None:
    agent = {"requests": {"running": 3, "waiting": 1}}
    sparks: dict[str, Any] = {
        "a": {"wanted": "replica", "agent": agent, "last_starts": {"replica": 400, "tp": 612.4}},
        "b": {"wanted": "stopped", "agent": None, "last_starts": {"replica": None, "tp": None}},
    }
    lines = switch.switch_announcement("tp", sparks, {"a": "tp", "b": "tp"})
    assert lines[0] == "from replica and stopped to tp"
    assert [line.split() for line in lines[2:]] == [
        ["a", "replica", "tp", "4", "612", "s"],
        ["b", "stopped", "tp", "-", "-"],
    ]


def serving(wanted: str, active: str = "active") -> dict[str, Any]:
    return {
        "wanted": wanted,
        "active": [wanted] if active == "active" else [],
        "units": {"replica": {"active": active}, "tp": {"active": "inactive"}},
    }


@pytest.mark.parametrize(
    ("sparks", "words"),
    [
        ({"a": serving("replica"), "b": serving("replica")}, []),
        ({"a": serving("replica")}, []),
        # What is down is what one may want to restart, alone.
        ({"a": serving("replica", "failed")}, []),
        ({"a": serving("replica"), "b": serving("replica", "failed")}, ["b does not serve its copy"]),
        ({"a": serving("tp"), "b": serving("tp")}, ["a is half of a pair", "b is half of a pair"]),
        ({"a": serving("stopped")}, ["a is in mode stopped"]),
        ({"a": serving("both"), "b": serving("replica")}, ["a is in mode both"]),
    ],
)
def test_what_is_in_the_way_of_a_rolling_restart(sparks: dict[str, Any], words: list[str]) -> None:
    problems = switch.rolling_problems(sparks)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


METRICS = """\
# TYPE gateway_held_requests_total counter
gateway_held_requests_total {held}
gateway_hold_expired_total 0
gateway_model_away_seconds_total{{model="a"}} {away}
gateway_model_away_seconds_total{{model="b"}} 90000
haproxy_frontend_http_responses_total{{proxy="gateway",code="2xx"}} {answered}
haproxy_frontend_http_responses_total{{proxy="gateway",code="5xx"}} 1
haproxy_frontend_http_responses_total{{proxy="metrics",code="5xx"}} 9
"""


def test_the_report() -> None:
    sparks = pair(GOOD, GOOD, durations={"draining": 4.2, "loading": 312.0}, engine=305.4)
    before = {
        "gateway": METRICS.format(held=3, away=1.5, answered=1000),
        "other": "",
        "reloaded": METRICS.format(held=50, away=9, answered=9),
    }
    after = {
        "gateway": METRICS.format(held=19, away=321.7, answered=1300),
        "other": "",
        "reloaded": METRICS.format(held=16, away=2, answered=5),
    }
    report = switch.switch_report("tp", "2026-11-30 08:00:03Z", sparks, before, after)
    assert report["record"]["gateways"]["gateway"] == {
        "held": 16,
        "given up": 0,
        "answered": 300,
        "failed": 0,
        "away": 320.2,
    }
    assert report["record"]["gateways"]["reloaded"]["held"] == 16
    assert report["record"]["succeeded"]
    assert not switch.switch_report("tp", "", sparks, before, after, ["why"])["record"]["succeeded"]
    assert "other" not in report["record"]["gateways"]
    assert report["record"]["sparks"]["a"] == {
        "from": "replica",
        "to": "tp",
        "seconds": {"draining": 4.2, "loading": 312.0},
        "engine": 305.4,
    }
    lines = [line.split() for line in report["table"] if line]
    assert lines[1] == [
        "a",
        "replica",
        "tp",
        *["draining", "4.2", "s,", "loading", "312.0", "s"],
    ]
    assert lines[4] == ["gateway", "320.2", "s", "16", "0", "300", "0"]
