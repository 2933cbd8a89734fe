# SPDX-License-Identifier: GPL-3.0-or-later
"""What the benchmark of a switch concludes from what it saw, and that it sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gateway.gateways import OURS
from benchmarks.switch.absence import absences
from benchmarks.switch.reports import parts
from benchmarks.switch.tables import tables
from tests.gateway.test_benchmark import row

MACHINE = {
    "processor": "P",
    "cores": 2,
    "memory_gb": 8,
    "system": "S",
    "kernel": "6",
    "date": "2026-01-01",
    "load_average_at_start": 0,
    "load_average_at_end": 1,
}


def absence(gateway: str, outage: float, first: float | None, failed: tuple[int, int]) -> dict[str, Any]:
    return {
        "gateway": gateway,
        "outage_seconds": outage,
        "watched_seconds": 35,
        "first_good_seconds": first,
        "last_failed_seconds": first or 35,
        "sent_during": 200,
        "failed_during": failed[0],
        "sent_after": 350,
        "failed_after": failed[1],
        "longest_wait_seconds": outage,
    }


def result(**measured: Any) -> dict[str, Any]:
    return {
        "machine": MACHINE,
        "quick": True,
        "seconds": 1,
        "versions": {"ours": "1"},
        **measured,
    }


def test_the_tables_tell_median_and_worst_and_all_that_failed() -> None:
    text = tables(
        result(
            away=[
                absence(name, outage, first, failed)
                for outage, ours, nginx in ((31, 0.1, 29), (41, 0.3, 19), (51, 0.2, 9))
                for name, first, failed in ((OURS, ours, (0, 0)), ("nginx", nginx, (200, nginx * 10)))
            ]
        )
    )
    assert row(text, "first 200")[1:] == ["0.20", "19"]
    assert row(text, "the same: worst")[1:] == ["0.30", "29"]
    assert row(text, "failed of those sent while")[1:] == ["0", "100"]
    assert row(text, "failed of those sent in the 35 s")[1:] == ["0", "54.3"]
    assert row(text, "41 ") == ["41", "0.30", "19", "0 / 550", "390 / 550"]


def test_who_never_answers_is_said_to() -> None:
    text = tables(result(away=[absence(OURS, 5, 0.1, (0, 0)), absence("nginx", 5, None, (200, 350))]))
    assert row(text, "first 200")[1:] == ["0.10", "never"]


def test_requests_wait_for_copies_that_are_away(tmp_path: Path) -> None:
    (seen,) = absences([1.5], tmp_path, names=[OURS], watched=2)
    assert 0 < seen["first_good_seconds"] < 1
    assert seen["longest_wait_seconds"] > 1
    assert seen["sent_during"] > 15
    assert (seen["failed_during"], seen["failed_after"]) == (0, 0)


def report(**changes: Any) -> dict[str, Any]:
    def spark(stop: float, engine: float) -> dict[str, Any]:
        phases = {"draining": stop - 1, "stopping": 1, "waiting for memory": 2, "loading": engine}
        return {"seconds": phases, "engine": engine}

    gateways = {"one": {"away": 319.5}, "other": {"away": 320.0}}
    sparks = {"a": spark(4, 305), "b": spark(6, 309)}
    whole = {"began": "then", "mode": "tp", "succeeded": True, "sparks": sparks, "gateways": gateways}
    return {**whole, **changes}


def test_the_time_without_the_model_is_taken_apart() -> None:
    told = parts(report(), run=350)
    assert told == {
        "mode": "tp",
        "away_seconds": 320,
        "stop_seconds": 6,
        "engine_seconds": 305,
        "rest_seconds": 9,
        "overhead_seconds": 15,
        "run_seconds": 350,
        "around_seconds": 30,
    }
    text = tables(result(switches=[told, parts(report())]))
    assert row(text, "tp, median of 2")[1:] == ["320", "6", "305", "9", "15", "350", "30"]


@pytest.mark.parametrize(
    "changes", [{"succeeded": False}, {"gateways": {}}, {"sparks": {"a": {"seconds": {}}}}]
)
def test_what_tells_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="then"):
        parts(report(**changes))
