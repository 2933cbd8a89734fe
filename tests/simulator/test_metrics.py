# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics are those of a real vLLM: compared with a dump of 0.32.0, and followed through requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from tests.simulator.conftest import StartEngine

DUMP = Path(__file__).with_name("vllm-metrics-0.32.0.txt")
# The dump's values of these labels tell what was called, not what the engine is.
FREE_LABELS = {"handler", "method", "status", "model_name"}
LABELS = 'engine="0",model_name="tiny"'


def shapes(text: str) -> dict[str, tuple[str, set[frozenset[tuple[str, str]]]]]:
    """Of each metric the type, and the labels of its samples (with their values where they are fixed)."""
    found: dict[str, tuple[str, set[frozenset[tuple[str, str]]]]] = {}
    for family in text_string_to_metric_families(text):
        free = set(family.samples[0].labels) if family.name.endswith("_info") else FREE_LABELS
        for sample in family.samples:
            labels = frozenset((k, "" if k in free else v) for k, v in sample.labels.items())
            found.setdefault(sample.name, (family.type, set()))[1].add(labels)
    return found


async def test_every_metric_of_the_dump_exists(start: StartEngine) -> None:
    # A context of 512 tokens gives the buckets that the model of the dump had.
    engine = await start("--max-model-len", "512").ready()
    await engine.complete()
    _, text = await engine.get("/metrics")
    expected, got = shapes(DUMP.read_text()), shapes(text)
    for name, shape in expected.items():
        assert got.get(name) == shape, name
    assert {name for name in got if name.startswith("vllm:")} == {
        n for n in expected if n.startswith("vllm:")
    }


async def test_values_follow_requests(start: StartEngine) -> None:
    engine = await start("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}').ready()
    prompt = "0123456789abcdef" * 8  # 32 tokens: two blocks, of which the last is read anew each time
    await engine.complete(100, prompt=prompt)
    await engine.complete(100, prompt=prompt, ignore_eos=False)

    async def total(name: str, extra: str = "") -> float:
        return await engine.metric(f"vllm:{name}{{{extra or LABELS}}}")

    assert await total("prompt_tokens_total") == 64
    assert await total("generation_tokens_total") == 164
    assert await total("prefix_cache_queries_total") == 64
    assert await total("prefix_cache_hits_total") == 16
    assert await total("prompt_tokens_cached_total") == 16
    assert await total("request_success_total", 'engine="0",finished_reason="length",model_name="tiny"') == 1
    assert await total("request_success_total", 'engine="0",finished_reason="stop",model_name="tiny"') == 1
    assert await total("num_requests_running") == 0
    assert await total("kv_cache_usage_perc") == 0
    for name, count in {
        "time_to_first_token_seconds": 2,
        "inter_token_latency_seconds": 162,
        "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2,
        "request_decode_time_seconds": 2,
        "request_generation_tokens": 2,
    }.items():
        assert await total(f"{name}_count") == count, name
    assert await total("e2e_request_latency_seconds_sum") > 0
    drafts = await total("spec_decode_num_drafts_total")
    accepted = await total("spec_decode_num_accepted_tokens_total")
    assert await total("spec_decode_num_draft_tokens_total") == 2 * drafts
    assert drafts + accepted == pytest.approx(162, abs=4)
    positions = [
        await total(
            "spec_decode_num_accepted_tokens_per_pos_total", f'engine="0",model_name="tiny",position="{i}"'
        )
        for i in (0, 1)
    ]
    assert sum(positions) == accepted
    assert positions[0] > positions[1] > 0


async def test_no_spec_decode_metrics_without_speculation(start: StartEngine) -> None:
    engine = await start().ready()
    assert "spec_decode" not in (await engine.get("/metrics"))[1]
