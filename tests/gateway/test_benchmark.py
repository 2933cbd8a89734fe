# SPDX-License-Identifier: GPL-3.0-or-later
"""What the benchmark concludes from what it saw."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gateway.load import Stream
from benchmarks.gateway.tables import tables


@pytest.mark.parametrize(
    ("numbers", "complete", "told", "verdict"),
    [
        ([0, 1, 2], True, False, "ok"),
        ([0, 1], False, False, "cut"),
        ([0, 1], True, True, "cut"),
        ([], False, False, "refused"),
        ([0, 1], True, False, "wrong"),
        ([], True, False, "wrong"),
        ([0, 1, 1, 2], True, False, "wrong"),
        ([0, 2], False, False, "wrong"),
        ([0, 2, 1], True, False, "wrong"),
    ],
)
def test_a_stream_is_judged_by_what_its_client_can_know(
    numbers: list[int], complete: bool, told: bool, verdict: str
) -> None:
    assert Stream(0, complete=complete, told=told, numbers=numbers).verdict(3) == verdict


def request(gateway: str, number: int, per_second: float, p50_ms: float) -> dict[str, Any]:
    case = {"connections": 32, "bytes": 1000, "model_first": False, "errors": 0}
    return {
        "gateway": gateway,
        "round": number,
        "per_second": per_second,
        "p50_ms": p50_ms,
        "p99_ms": 1,
        **case,
    }


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_tables_tell_medians_the_best_peer_and_who_is_left_out() -> None:
    machine = {
        "processor": "P",
        "cores": 2,
        "memory_gb": 8,
        "system": "S",
        "kernel": "6",
        "date": "2026-01-01",
    }
    figures = {
        "ours": (50, 100, 60),
        "haproxy": (200, 300, 240),
        "nginx": (400, 800, 480),
        "direct": (900, 900, 900),
    }
    result = {
        "machine": {**machine, "load_average_at_start": 0, "load_average_at_end": 1},
        "plan": {"rounds": 3, "wrk_seconds": 1, "stream_rounds": 1, "returns": 1, "streams": 1},
        "quick": True,
        "seconds": 1,
        "versions": {"ours": "1", "haproxy": "2", "nginx": "3"},
        "left_out": {"smg": "pip says no"},
        "problems": {},
        "throughput": [
            # The direct way slows down round by round; what a gateway adds does not.
            request(name, number, figure, 10 * number + (0 if name == "direct" else 300 / figures[name][0]))
            for name in figures
            for number, figure in enumerate(figures[name])
        ],
        **{name: [] for name in ("streaming", "return", "memory", "held", "stop", "rolling", "growth")},
    }
    text = tables(result)
    assert "- Left out: smg: pip says no" in text
    assert row(text, "requests a second")[1:] == ["more", "60", "240", "480", "0.12 (nginx)", "0.25"]
    assert row(text, "latency added, 32 at once, p50")[1:] == [
        "less",
        "6",
        "1.50",
        "0.75",
        "8.00 (nginx)",
        "4.00",
    ]
