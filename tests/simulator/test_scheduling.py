# SPDX-License-Identifier: GPL-3.0-or-later
"""Slots, queue, limits, aborts and the measured throughput."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

if TYPE_CHECKING:
    from tests.simulator.conftest import Engine, StartEngine

LABELS = 'engine="0",model_name="tiny"'
# As the engine's flag --kv-cache-memory-bytes counts: one token of the KV cache.
BYTES_PER_TOKEN = 16_333


async def generated(engine: Engine) -> tuple[float, float]:
    """The tokens generated so far, and when that was."""
    return await engine.metric(f"vllm:generation_tokens_total{{{LABELS}}}"), time.monotonic()


@pytest.mark.parametrize(
    ("requests", "prompt_tokens", "measured"), [(1, 10, 36), (6, 10, 95.5), (16, 10, 150), (16, 3000, 87)]
)
async def test_the_measured_curve(
    start: StartEngine, requests: int, prompt_tokens: int, measured: float
) -> None:
    engine = await start(STANDIN_SPEED="20").ready()
    prompt = "abcd" * prompt_tokens
    await engine.complete(1, prompt=prompt)  # so that reading the prompt is not part of what follows
    calls = [asyncio.ensure_future(engine.complete(100_000, prompt=prompt)) for _ in range(requests)]
    await engine.running(requests)
    before, began = await generated(engine)
    await asyncio.sleep(1)
    after, ended = await generated(engine)
    for call in calls:
        call.cancel()
    assert (after - before) / (ended - began) / 20 == pytest.approx(measured, rel=0.1)


async def test_more_than_the_slots_wait(start: StartEngine) -> None:
    engine = await start("--max-num-seqs", "2", STANDIN_SPEED="4").ready()
    calls = [asyncio.ensure_future(engine.complete(40)) for _ in range(5)]
    await engine.running(2)
    assert await engine.metric(f"vllm:num_requests_waiting{{{LABELS}}}") == 3
    assert await engine.metric(f'vllm:num_requests_waiting_by_reason{{{LABELS},reason="capacity"}}') == 3
    assert await engine.metric(f"vllm:kv_cache_usage_perc{{{LABELS}}}") > 0
    assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 5


async def test_reading_a_long_prompt_shows_in_the_kv_cache_alone(start: StartEngine) -> None:
    """As in vLLM, whose steps without an output leave the counters as they are."""
    engine = await start(STANDIN_SPEED="1").ready()
    call = asyncio.ensure_future(engine.complete(1, prompt="abcd" * 30_000))
    await engine.running(1)
    usage, counted = [], []
    for _ in range(4):
        await asyncio.sleep(0.3)
        usage.append(await engine.metric(f"vllm:kv_cache_usage_perc{{{LABELS}}}"))
        counted.append(await engine.metric(f"vllm:iteration_tokens_total_count{{{LABELS}}}"))
    call.cancel()
    assert usage == sorted(set(usage))
    assert len(set(counted)) == 1


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--max-num-queued-reqs", "4", "--max-num-seqs", "2"], "max_num_queued_reqs"),
        (["--max-num-queued-tokens", "8", "--max-num-seqs", "1"], "max_num_queued_tokens"),
    ],
)
async def test_queue_limits_answer_503(start: StartEngine, flags: list[str], reason: str) -> None:
    engine = await start(*flags, STANDIN_SPEED="2").ready()
    timeout = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def call() -> tuple[int, bool]:
            body = {"prompt": "0123456789ab", "max_tokens": 20, "ignore_eos": True}
            async with session.post(engine.url("/v1/completions"), json=body) as response:
                return response.status, "Retry-After" in response.headers

        results = await asyncio.gather(*(call() for _ in range(8)))
    refused = [status for status, _ in results].count(503)
    assert sorted({status for status, _ in results}) == [200, 503]
    assert refused == 4 or reason == "max_num_queued_tokens"
    assert not any(retry_after for _, retry_after in results)
    rejections = await engine.metric(
        f'vllm:admission_rejections_total{{model_name="tiny",reason="{reason}"}}'
    )
    assert rejections == refused


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_aborts_its_request(start: StartEngine, stream: bool) -> None:
    engine = await start(STANDIN_SPEED="1").ready()
    call = asyncio.ensure_future(engine.complete(100_000, stream=stream))
    await engine.running(1)
    call.cancel()
    await asyncio.sleep(0)
    await engine.running(0)
    aborted = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}'
    assert await engine.metric(aborted) == 1


async def test_the_server_load_counts_only_when_tracked(start: StartEngine) -> None:
    engines = [start("--enable-server-load-tracking", STANDIN_SPEED="1"), start(STANDIN_SPEED="1")]
    loads = []
    for engine in engines:
        await engine.ready()
        call = asyncio.ensure_future(engine.complete(1000))
        await engine.running(1)
        loads.append((await engine.get("/load"))[1])
        call.cancel()
    assert loads == ['{"server_load": 1}', '{"server_load": 0}']


async def test_a_full_kv_cache_preempts_and_all_still_finish(start: StartEngine) -> None:
    memory = str(400 * BYTES_PER_TOKEN)
    engine = await start("--kv-cache-memory-bytes", memory, "--max-model-len", "400").ready()
    answers = await asyncio.gather(*(engine.complete(200) for _ in range(4)))
    assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [200] * 4
    assert await engine.metric(f"vllm:num_preemptions_total{{{LABELS}}}") > 0
