# SPDX-License-Identifier: GPL-3.0-or-later
"""Continuous batching on the measured throughput curve: slots, a waiting queue, a KV cache with preemption."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from standin.config import EngineConfig
    from standin.faults import Faults
    from standin.metrics import EngineMetrics

# Tokens per second of one copy by requests served at once, as measured.
SHORT_PROMPTS = ((1, 36.0), (4, 82.0), (8, 109.0), (16, 150.0))
LONG_PROMPTS = ((1, 36.0), (4, 81.0), (8, 113.0), (16, 87.0))
# Between these mean prompt lengths (in tokens) the two curves blend. Assumed: only "short" and "longer" is known.
SHORT_TOKENS, LONG_TOKENS = 500, 2000
# Measured for two copies together 210 tokens/s, for the split model 180.
TP_SPEEDUP = 180 / 105
PREFILL_TOKENS_PER_SECOND = 3000.0  # assumed, not measured
# Share of drafts whose token at each position is accepted, times itself per position. Assumed.
ACCEPTANCE = 0.8

TICK_SECONDS = 0.02
CACHED_BLOCKS = 50_000


class EngineDeadError(Exception):
    """The engine is gone; what was in flight is lost."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class QueueFullError(Exception):
    """A queue limit refuses the request."""


def interpolate(curve: Sequence[tuple[int, float]], x: float) -> float:
    """Piecewise linear; flat beyond both ends."""
    xs = [point[0] for point in curve]
    i = bisect_left(xs, x)
    if i == 0:
        return curve[0][1]
    if i == len(curve):
        return curve[-1][1]
    (x0, y0), (x1, y1) = curve[i - 1], curve[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def throughput(requests: int, mean_prompt_tokens: float) -> float:
    """Tokens per second that one copy generates in all."""
    longness = min(1.0, max(0.0, (mean_prompt_tokens - SHORT_TOKENS) / (LONG_TOKENS - SHORT_TOKENS)))
    short, long = interpolate(SHORT_PROMPTS, requests), interpolate(LONG_PROMPTS, requests)
    return short + (long - short) * longness


class Request:
    """One sequence to generate: `target` tokens after a prompt of `prompt_tokens`. Target 0 only reads the prompt."""

    def __init__(self, prompt: bytes, prompt_tokens: int, target: int, finish_reason: str) -> None:
        self.prompt = prompt
        self.prompt_tokens = prompt_tokens
        self.target = target
        self.finish_reason = finish_reason
        self.generated = 0
        self.error: Exception | None = None
        self.done = False
        self.prefill_left = float(prompt_tokens)
        self.cached_tokens: int | None = None  # None until the prefix cache was asked
        self.credit = 0.0
        self.preemptions = 0
        self.arrived = time.monotonic()
        self.scheduled = self.first_token = self.last_token = 0.0
        self._changed = asyncio.Event()

    @property
    def kv_tokens(self) -> int:
        """What it holds in the KV cache once its prompt is read."""
        return self.prompt_tokens + self.generated

    @property
    def kv_tokens_now(self) -> int:
        """What it holds so far; it grows while the prompt is read, and no counter does."""
        return max(0, self.kv_tokens - math.ceil(self.prefill_left))

    async def progress(self, seen: int) -> int:
        """Wait for more than `seen` tokens, or the end; returns how many there are. Raises what ended it badly."""
        while self.generated <= seen and not self.done:
            await self._changed.wait()
            self._changed.clear()
        if self.error:
            raise self.error
        return self.generated

    def notify(self) -> None:
        """Wake whoever waits for progress."""
        self._changed.set()


class PrefixCache:
    """Which prompt prefixes were read lately, in whole blocks; the oldest go first."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def lookup(self, prompt: bytes) -> int:
        """How many leading blocks are known; remembers all of them."""
        known, unbroken, chain = 0, True, 0
        for end in range(self._block_bytes, len(prompt), self._block_bytes):
            chain = hash((chain, prompt[end - self._block_bytes : end]))
            unbroken = unbroken and chain in self._blocks
            known += unbroken
            self._blocks[chain] = None
            self._blocks.move_to_end(chain)
        while len(self._blocks) > CACHED_BLOCKS:
            self._blocks.popitem(last=False)
        return known


class Scheduler:
    """Runs the batch. `step` is awaited before each step: it returns when every process has answered."""

    def __init__(
        self,
        config: EngineConfig,
        metrics: EngineMetrics,
        faults: Faults,
        step: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._faults = faults
        self._step = step
        self._speed = config.settings.speed * (TP_SPEEDUP if config.tensor_parallel_size > 1 else 1)
        self._cache = PrefixCache(4 * config.block_size)
        self._pending = asyncio.Event()
        self._drafts = 0.0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.dead = False
        acceptance = [ACCEPTANCE ** (i + 1) for i in range(config.speculative_tokens)]
        self._acceptance, self._tokens_per_draft = acceptance, 1 + sum(acceptance)

    @property
    def unfinished(self) -> int:
        """Requests running and waiting."""
        return len(self.running) + len(self.waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return sum(r.kv_tokens_now for r in self.running) / max(1, self._config.kv_tokens)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the sequences of one call. Raises QueueFullError, or EngineDeadError."""
        if self.dead:
            raise EngineDeadError
        args = self._config.args
        limit = args.max_num_queued_reqs
        if limit is not None and self.unfinished + len(requests) > limit:
            self._metrics.add("admission_rejections.max_num_queued_reqs")
            raise QueueFullError(f"The request queue is full: at most {limit} requests at once.")
        limit = args.max_num_queued_tokens
        in_prefill = sum(r.prompt_tokens for r in [*self.waiting, *self.running] if not r.generated)
        if limit is not None and in_prefill >= limit:
            self._metrics.add("admission_rejections.max_num_queued_tokens")
            raise QueueFullError(f"Too many prompt tokens are queued: at most {limit}.")
        self.waiting.extend(requests)
        self._pending.set()
        self._show()

    def abort(self, request: Request) -> None:
        """Forget a request whose client has left; nothing happens when it has ended."""
        if not request.done:
            self._finish(request, "abort")

    def fail(self, error: Exception) -> None:
        """End everything in flight with an error, and take nothing more."""
        self.dead = True
        for request in [*self.running, *self.waiting]:
            request.error = error
            self._finish(request, "error")

    async def run(self) -> None:
        """Serve for ever; cancel the task to freeze the batch."""
        advanced = time.monotonic()
        while True:
            if not self.unfinished:
                self._pending.clear()
                await self._pending.wait()
                advanced = time.monotonic()
            await self._faults.unwedged.wait()
            await self._step()
            self._admit()
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            # What was held up for longer does not catch up.
            self._advance(min(now - advanced, 10 * TICK_SECONDS))
            advanced = now
            self._show()

    def _admit(self) -> None:
        free = self._config.kv_tokens - sum(r.kv_tokens for r in self.running)
        while self.waiting and len(self.running) < self._config.args.max_num_seqs:
            request = self.waiting[0]
            if request.kv_tokens > free and self.running:
                break
            free -= request.kv_tokens
            self.running.append(self.waiting.popleft())
            request.scheduled = request.scheduled or time.monotonic()
            if request.cached_tokens is None:
                self._look_up_prefix(request)

    def _look_up_prefix(self, request: Request) -> None:
        request.cached_tokens = 0
        if self._config.prefix_caching:
            request.cached_tokens = self._cache.lookup(request.prompt) * self._config.block_size
            self._metrics.add("prefix_cache_queries", request.prompt_tokens)
        cached = request.cached_tokens = min(request.cached_tokens, request.prompt_tokens - 1)
        request.prefill_left -= cached
        for name in ("prefix_cache_hits", "prompt_tokens_cached"):
            self._metrics.add(name, cached)
        self._metrics.add("prompt_tokens_cached_by_source.device", cached)
        self._metrics.add("prompt_tokens_by_source.local_cache_hit", cached)

    def _advance(self, seconds: float) -> None:
        now = time.monotonic()
        speed = self._speed / self._faults.slowdown
        budget = PREFILL_TOKENS_PER_SECOND * speed * seconds
        batch = list(self.running)
        mean_prompt = sum(r.prompt_tokens for r in batch) / max(1, len(batch))
        share = throughput(len(batch), mean_prompt) * speed * seconds / max(1, len(batch))
        tokens = 0
        for request in batch:
            if request.prefill_left > 0:
                read = min(budget, request.prefill_left)
                budget -= read
                request.prefill_left -= read
                if request.prefill_left <= 0:
                    tokens += self._prompt_is_read(request, now)
            else:
                request.credit += share
                count = min(int(request.credit), request.target - request.generated)
                request.credit -= count
                if count:
                    tokens += count
                    self._emit(request, count, now)
        if tokens:
            self._metrics.observe("iteration_tokens_total", tokens)
        self._preempt()

    def _prompt_is_read(self, request: Request, now: float) -> int:
        """Account for the prompt; the first token comes with it. Returns the tokens of this step."""
        if request.first_token:  # read again after a preemption
            return 0
        computed = request.prompt_tokens - (request.cached_tokens or 0)
        self._metrics.add("prompt_tokens", request.prompt_tokens)
        self._metrics.add("prompt_tokens_by_source.local_compute", computed)
        self._metrics.observe("request_prefill_kv_computed_tokens", computed)
        self._metrics.observe("time_to_first_token_seconds", now - request.arrived)
        request.first_token = request.last_token = now
        self._emit(request, min(1, request.target), now)
        return computed + 1

    def _emit(self, request: Request, count: int, now: float) -> None:
        if request.generated:
            for _ in range(count):
                self._metrics.observe("inter_token_latency_seconds", (now - request.last_token) / count)
            self._count_drafts(count)
        request.generated += count
        request.last_token = now
        self._metrics.add("generation_tokens", count)
        if request.generated >= request.target:
            self._finish(request, request.finish_reason)
        request.notify()

    def _count_drafts(self, tokens: int) -> None:
        if not self._acceptance:
            return
        before = int(self._drafts)
        self._drafts += tokens / self._tokens_per_draft
        drafts = int(self._drafts) - before
        self._metrics.add("spec_decode_num_drafts", drafts)
        self._metrics.add("spec_decode_num_draft_tokens", drafts * len(self._acceptance))
        for position, share in enumerate(self._acceptance):
            accepted = int(int(self._drafts) * share) - int(before * share)
            self._metrics.add("spec_decode_num_accepted_tokens", accepted)
            self._metrics.add(f"spec_decode_num_accepted_tokens_per_pos.{position}", accepted)

    def _preempt(self) -> None:
        """When the cache overflows, the latest request gives its blocks back and reads its prompt again later."""
        while len(self.running) > 1 and self.kv_usage > 1:
            victim = self.running.pop()
            victim.prefill_left = float(victim.kv_tokens)
            victim.preemptions += 1
            self._metrics.add("num_preemptions")
            self.waiting.appendleft(victim)

    def _finish(self, request: Request, reason: str) -> None:
        request.done = True
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.notify()
        self._show()
        self._metrics.add(f"request_success.{reason}")
        if not request.first_token:
            return
        now, observe = time.monotonic(), self._metrics.observe
        observe("e2e_request_latency_seconds", now - request.arrived)
        observe("request_queue_time_seconds", request.scheduled - request.arrived)
        observe("request_inference_time_seconds", now - request.scheduled)
        observe("request_prefill_time_seconds", request.first_token - request.scheduled)
        observe("request_decode_time_seconds", now - request.first_token)
        if request.generated > 1:
            observe(
                "request_time_per_output_token_seconds", (now - request.first_token) / (request.generated - 1)
            )
        observe("request_prompt_tokens", request.prompt_tokens)
        observe("request_generation_tokens", request.generated)
        observe("request_num_preemptions", request.preemptions)

    def _show(self) -> None:
        self._metrics.set("num_requests_running", len(self.running))
        self._metrics.set("num_requests_waiting", len(self.waiting))
        self._metrics.set("num_requests_waiting_by_reason.capacity", len(self.waiting))
        self._metrics.set("kv_cache_usage_perc", min(1.0, self.kv_usage))
