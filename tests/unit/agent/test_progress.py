# SPDX-License-Identifier: GPL-3.0-or-later
"""Busy, idle and wedged told apart, as tables of looks at an engine."""

from __future__ import annotations

import pytest

from vllm_agent.engine import Counters
from vllm_agent.progress import Verdict, Watch, capacity, loaded_fraction

BUSY, IDLE, SUSPECT = Verdict.BUSY, Verdict.IDLE, Verdict.SUSPECT


def counters(work: float, in_flight: int = 0) -> Counters:
    """Counters that show this much work, and requests in flight of which all but one wait."""
    running = min(in_flight, 1)
    return Counters(running, in_flight - running, work, 0, 0, None)


@pytest.mark.parametrize(
    ("looks", "verdicts"),
    [
        pytest.param([(0, 0), (0, 0), (0, 0)], [IDLE, IDLE, IDLE], id="idle"),
        pytest.param([(0, 1), (5, 1), (9, 3)], [IDLE, BUSY, BUSY], id="busy"),
        pytest.param([(5, 0), (5, 1), (5, 1)], [IDLE, SUSPECT, SUSPECT], id="in flight without progress"),
        pytest.param([(5, 4), (6, 4), (6, 4)], [IDLE, BUSY, SUSPECT], id="stalls after progress"),
        pytest.param([(5, 0), None, (5, 0)], [IDLE, SUSPECT, IDLE], id="a failed scrape is not idleness"),
        pytest.param([(5, 0), None, (6, 0)], [IDLE, SUSPECT, BUSY], id="nor does it hide progress"),
        pytest.param([(50, 1), (3, 1), (3, 1)], [IDLE, IDLE, SUSPECT], id="a counter reset re-baselines"),
        pytest.param([(50, 1), (3, 1), (4, 1)], [IDLE, IDLE, BUSY], id="progress after a reset"),
        pytest.param([(1, 0)] * 5, [IDLE, IDLE, IDLE, SUSPECT, SUSPECT], id="nothing at all for long"),
        pytest.param([(1, 0), (1, 0), (2, 0), (2, 0), (2, 0)], [IDLE, IDLE, BUSY, IDLE, IDLE], id="quiet since"),
    ],
)  # fmt: skip
def test_verdicts(looks: list[tuple[float, int] | None], verdicts: list[Verdict]) -> None:
    watch = Watch(strikes_allowed=3, quiet_seconds=30)
    seen = [watch.look(10.0 * at, counters(*look) if look else None) for at, look in enumerate(looks)]
    assert seen == verdicts
    assert not watch.wedged


def test_a_long_prompt_shows_in_the_kv_cache_alone() -> None:
    """While it is read in chunks no counter moves, and a canary would wait behind it."""
    watch = Watch(strikes_allowed=3, quiet_seconds=30)
    usages = [0.1, 0.2, 0.3, 0.3, 0.0]
    seen = [watch.look(at, Counters(1, 0, 5, 0, 0, usage)) for at, usage in enumerate(usages)]
    assert seen == [IDLE, BUSY, BUSY, SUSPECT, BUSY]


def test_three_failed_canaries_in_a_row_mean_wedged() -> None:
    watch = Watch(strikes_allowed=3, quiet_seconds=30)
    watch.look(0, counters(5, 1))
    for strike in range(1, 4):
        assert not watch.wedged
        assert watch.look(strike, counters(5, 1)) is SUSPECT
        watch.canary_failed()
    assert watch.wedged


def test_progress_takes_strikes_back() -> None:
    watch = Watch(strikes_allowed=3, quiet_seconds=30)
    watch.look(0, counters(5, 1))
    watch.canary_failed()
    watch.canary_failed()
    watch.look(1, counters(6, 1))
    watch.canary_failed()
    assert watch.strikes == 1


def test_a_reset_is_no_excuse_for_strikes() -> None:
    watch = Watch(strikes_allowed=2, quiet_seconds=30)
    watch.look(0, counters(5, 1))
    watch.canary_failed()
    watch.look(1, counters(0, 1))
    watch.canary_failed()
    assert watch.wedged


def test_an_answered_canary_takes_strikes_back_and_begins_a_quiet_time() -> None:
    watch = Watch(strikes_allowed=3, quiet_seconds=30)
    watch.look(0, counters(5))
    assert watch.look(30, counters(5)) is SUSPECT
    watch.canary_failed()
    watch.canary_passed(31)
    assert watch.strikes == 0
    assert watch.look(40, counters(5)) is IDLE


@pytest.mark.parametrize(
    ("line", "fraction"),
    [
        ("Loading safetensors checkpoint shards:  40% Completed | 2/5 [00:01<00:02,  1.2it/s]", 0.4),
        ("(Worker_TP0 pid=99) Loading safetensors checkpoint shards: 100% Completed | 5/5", 1.0),
        ("Loading pt checkpoint shards:   0% Completed | 0/5", 0.0),
        ("Capturing CUDA graphs (decode, FULL):  40%|####      | 2/5", None),
        ("INFO 40% of nothing", None),
    ],
)
def test_loaded_fraction(line: str, fraction: float | None) -> None:
    assert loaded_fraction(line) == fraction


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "GPU KV cache size: 760,001 tokens, Maximum concurrency for 262,144 tokens per request: 2.90x",
            {"kv_tokens": 760_001, "context_tokens": 262_144, "full_context_requests": 2.9},
        ),
        ("(EngineCore pid=7) INFO GPU KV cache size: 12,345 tokens", {"kv_tokens": 12_345}),
        (
            "INFO Maximum concurrency for 4,096 tokens per request: 16.00x",
            {"context_tokens": 4096, "full_context_requests": 16},
        ),
        ("CPU + host KV cache size: 999 tokens, and more", {"kv_tokens": 999}),
        ("INFO Available KV cache memory: 12.62 GiB", {}),
    ],
)
def test_capacity(line: str, told: dict[str, float]) -> None:
    assert capacity(line) == told
