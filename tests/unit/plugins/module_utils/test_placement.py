# SPDX-License-Identifier: GPL-3.0-or-later
"""When a critical model is warned of, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.module_utils._placement import placement_warnings, places


def worker(name: str, state: str = "read", warm: Any = (), cold: Any = (), **more: Any) -> dict[str, Any]:
    return {"name": name, "address": name, "weight": 1, "state": state, "warm": warm, "cold": cold, **more}


A = worker("spark-a", warm=["big"])
B = worker("spark-b", warm=["big"])
OLLAMA = worker("ollama", warm=["small"], cold=["big"])
HEAD = "The model big (gateway_critical_models) is loaded "


@pytest.mark.parametrize(
    ("workers", "warning"),
    [
        pytest.param([A, B], None, id="on two"),
        pytest.param([A, worker("ollama", warm=["big", "small"])], None, id="on two of different kinds"),
        pytest.param(
            [A, worker("beside-a", warm=["big"], address="spark-a")],
            "on one machine alone, by spark-a and beside-a; should that be lost, nobody serves it. "
            "To have it on two: serve it on a second worker.",
            id="on two of one machine",
        ),
        pytest.param(
            [A, worker("retired", warm=["big"], weight=0), worker("other", cold=["big"], weight=0)],
            "on spark-a alone; should that be lost, nobody serves it. To have it on two: serve it on a second worker.",
            id="what has no weight gets nothing",
        ),
        pytest.param([A, B, OLLAMA, worker("c", "down", ["big"])], None, id="on two, whatever else there is"),
        pytest.param(
            [A, worker("other", warm=["small"])],
            "on spark-a alone; should that be lost, nobody serves it. To have it on two: serve it on a second worker.",
            id="on one, and nobody else has it",
        ),
        pytest.param(
            [A, OLLAMA],
            "on spark-a alone; should that be lost, requests wait until ollama has loaded it (a cold load). "
            "To have it on two: ask ollama for it once and let it stay loaded there.",
            id="a fail-over would be a cold load",
        ),
        pytest.param(
            [A, OLLAMA, worker("swap", cold=["big"])],
            "on spark-a alone; should that be lost, requests wait until ollama or swap has loaded it (a cold load). "
            "To have it on two: ask ollama or swap for it once and let it stay loaded there.",
            id="of several",
        ),
        pytest.param(
            [A, worker("spark-b", "down", ["big"])],
            "on spark-a alone; should that be lost, nobody serves it. "
            "To have it on two: bring back spark-b, which had it or shall have it.",
            id="the other copy is down",
        ),
        pytest.param(
            [A, worker("spark-b", "unreachable", ["big"]), OLLAMA],
            "on spark-a alone; should that be lost, requests wait until ollama has loaded it (a cold load). To have it on two: "
            "bring back spark-b, which had it or shall have it, or ask ollama for it once and let it stay loaded there.",
            id="the other copy cannot be reached, and one would load it",
        ),
        pytest.param(
            [A, worker("mute", "failed")],
            "on spark-a alone; should that be lost, requests are tried on mute, of which nobody knows what it has. "
            "To have it on two: mend mute, so that it tells its models.",
            id="one does not tell",
        ),
        pytest.param(
            [A, worker("mute", "failed", ["big"])],
            "on spark-a alone; should that be lost, requests are tried on mute, of which nobody knows what it has. "
            "To have it on two: mend mute, so that it tells its models.",
            id="one had it, and does not tell any more",
        ),
        pytest.param(
            [worker("spark-a", "down", ["big"]), OLLAMA],
            "nowhere; requests wait until ollama has loaded it (a cold load). To have it on two: "
            "bring back spark-a, which had it or shall have it, or ask ollama for it once and let it stay loaded there.",
            id="on none, and one would load it",
        ),
        pytest.param(
            [worker("other", warm=["small"])],
            "nowhere; nobody serves it. To have it on two: serve it on a second worker.",
            id="on none",
        ),
        pytest.param(
            [], "nowhere; nobody serves it. To have it on two: serve it on a second worker.", id="no worker"
        ),
        pytest.param(
            # As the gateway's JSON has an empty list.
            [A, worker("new", "unread", {}, {})],
            "on spark-a alone; should that be lost, nobody serves it. To have it on two: serve it on a second worker.",
            id="one has told nothing yet",
        ),
    ],
)
def test_what_is_warned_of(workers: list[dict[str, Any]], warning: str | None) -> None:
    assert placement_warnings(["big"], workers) == ([HEAD + warning] if warning else [])


def test_each_model_is_looked_at() -> None:
    workers = [A, B, OLLAMA]
    assert [text.split()[2] for text in placement_warnings(["small", "big", "none"], workers)] == [
        "small",
        "none",
    ]
    assert places(["small", "big"], workers) == {"small": ["ollama"], "big": ["spark-a", "spark-b"]}
    assert placement_warnings([], workers) == []


PAIR = [
    worker("spark-a", "down", ["big"]),
    worker("spark-b", "down", ["big"]),
    worker("spark-a-tp", warm=["big"]),
]
COPIES = [
    worker("spark-a", warm=["big"]),
    worker("spark-b", "down", ["big"]),
    worker("spark-a-tp", "down", ["big"]),
]


@pytest.mark.parametrize(
    ("workers", "advice"),
    [
        pytest.param(
            PAIR, "switch to mode replica, since in mode tp the pair is one worker.", id="in mode tp"
        ),
        pytest.param(COPIES, "bring back spark-b, which had it or shall have it.", id="in mode replica"),
    ],
)
def test_of_copies_and_pair_only_one_can_be_brought_back(workers: list[dict[str, Any]], advice: str) -> None:
    (warning,) = placement_warnings(["big"], workers, ["spark-a", "spark-b"])
    assert warning.endswith(f"To have it on two: {advice}")
