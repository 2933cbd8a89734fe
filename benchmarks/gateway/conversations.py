# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations through the gateway to two copies with prefix caches: what affinity gains beside least connections.

HAProxy and its configuration are real. The copies only pretend: a token is a word, and computing one takes its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import statistics
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmarks.gateway.gateways import CHAT
from benchmarks.gateway.processes import LOOPBACK, running
from benchmarks.gateway.worker import MODEL, completion, model_list
from tests.gateway.conftest import Ansible, render
from tests.gateway.rig import environment_of

# Tokens of a block, as in vLLM.
BLOCK = 16
CAP = 12
LEASTCONN = "leastconn"


@dataclass(frozen=True)
class Case:
    """What is asked for, and what a copy can do. Tokens unless another unit is named."""

    # Two sets, each with a system prompt of its own: one that has long conversations and one that has short ones.
    conversations: tuple[int, int] = (24, 24)
    turns: tuple[int, int] = (24, 12)
    system: int = 32
    question: int = 160
    answer: int = 32
    # Of each copy; all conversations at once have about 85,000.
    cache: int = 44_000
    computed_per_second: int = 60_000
    answer_seconds: float = 0.1
    # At least and at most, spread evenly.
    think_seconds: tuple[float, float] = (0.4, 1.0)


CASES = {
    "tight": Case(),
    # All conversations fit into each copy's cache.
    "ample": Case(cache=200_000),
    # A long system prompt and one question: nothing to return to.
    "one-shot": Case(turns=(1, 1), system=2048, question=128),
    # Nearly all places are taken, so many requests wait for one.
    "full": Case(answer_seconds=0.5, think_seconds=(0.05, 0.15)),
}


class Copy:
    """A pretended engine: it computes one prompt at a time, but for the beginning that it has in its cache, and writes at once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._door = socket.create_server((LOOPBACK, 0))
        self.port = self._door.getsockname()[1]
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._computing = asyncio.Lock()
        self._answers = 0
        self.forget()

    def forget(self) -> None:
        """Count anew; what is cached stays."""
        self.requests = self.prompt_tokens = self.cached_tokens = 0

    def look_up(self, words: Sequence[str]) -> int:
        """Tokens of the prompt that are cached; now all of it is, and what was not used for longest gives way."""
        chain, before = [], 0
        for start in range(0, len(words) - BLOCK + 1, BLOCK):
            before = hash((before, *words[start : start + BLOCK]))
            chain.append(before)
        cached = next((number for number, block in enumerate(chain) if block not in self._blocks), len(chain))
        # The end of a prompt is dropped before its beginning.
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) * BLOCK > self.case.cache:
            self._blocks.popitem(last=False)
        self.requests += 1
        self.prompt_tokens += len(words)
        self.cached_tokens += cached * BLOCK
        return cached * BLOCK

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        words = " ".join(message["content"] for message in body["messages"]).split()
        async with self._computing:
            await asyncio.sleep((len(words) - self.look_up(words)) / self.case.computed_per_second)
        await asyncio.sleep(self.case.answer_seconds)
        self._answers += 1
        return web.json_response(
            completion(" ".join(f"{self.port}-{self._answers}-{word}" for word in range(self.case.answer)))
        )

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async def models(_request: web.Request) -> web.Response:
            return web.json_response(model_list())

        async def health(_request: web.Request) -> web.Response:
            return web.Response()

        application = web.Application(client_max_size=64_000_000)
        application.router.add_get("/health", health)
        application.router.add_get("/v1/models", models)
        application.router.add_post(CHAT, self.chat)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.SockSite(runner, self._door).start()
        try:
            yield
        finally:
            await runner.cleanup()


@dataclass
class Outcome:
    """What came of one way to choose a copy."""

    # Of all tokens of all prompts, the part that was cached; of all turns but the first, the part that came to the copy
    # of the turn before; of all requests, the part that the busier copy got.
    hit_rate: float = 0.0
    returned: float = 0.0
    larger_share: float = 0.0
    per_second: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0


@dataclass
class Clients:
    """People who ask, wait, think and ask again, on and on."""

    case: Case
    url: str
    seed: int
    seconds: list[float] = field(default_factory=list)
    returned: list[bool] = field(default_factory=list)

    def forget(self) -> None:
        self.seconds.clear()
        self.returned.clear()

    async def talk(self, session: aiohttp.ClientSession, group: int, number: int) -> None:
        """One client: a conversation after the other, until cancelled. The first begins somewhere in its middle of time."""
        chance = random.Random(f"{self.seed} {group} {number}")
        conversation = 0
        while True:
            conversation += 1
            name = f"{group}.{number}.{conversation}"
            messages = [{"role": "system", "content": words(f"system{group}", self.case.system)}]
            before = None
            turns = self.case.turns[group]
            for turn in range(turns if conversation > 1 else chance.randint(1, turns)):
                await asyncio.sleep(chance.uniform(*self.case.think_seconds))
                messages.append({"role": "user", "content": words(f"{name}.{turn}", self.case.question)})
                started = time.monotonic()
                async with session.post(self.url, json={"model": MODEL, "messages": messages}) as answer:
                    answer.raise_for_status()
                    message = (await answer.json())["choices"][0]["message"]
                    copy = answer.headers["x-served-by"]
                self.seconds.append(time.monotonic() - started)
                if before:
                    self.returned.append(copy == before)
                before = copy
                messages.append({"role": "assistant", "content": message["content"]})


def words(name: str, count: int) -> str:
    return " ".join(f"{name}-{number}" for number in range(count))


async def play(case: Case, copies: Sequence[Copy], port: int, warm_up: float, seconds: float) -> Outcome:
    """Let the clients talk, and look at what happens after the warm-up; times in seconds."""
    clients = Clients(case, f"http://{LOOPBACK}:{port}{CHAT}", seed=1)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await _until_served(session, port, len(copies))
        tasks = [
            asyncio.create_task(clients.talk(session, group, number))
            for group, count in enumerate(case.conversations)
            for number in range(count)
        ]
        await _unless_failed(tasks, warm_up)
        clients.forget()
        for copy in copies:
            copy.forget()
        await _unless_failed(tasks, seconds)
        requests = [copy.requests for copy in copies]
        outcome = Outcome(
            hit_rate=sum(copy.cached_tokens for copy in copies) / sum(copy.prompt_tokens for copy in copies),
            returned=statistics.fmean(clients.returned) if clients.returned else 0.0,
            larger_share=max(requests) / sum(requests),
            per_second=sum(requests) / seconds,
            p50_ms=1000 * statistics.median(clients.seconds),
            p95_ms=1000 * statistics.quantiles(clients.seconds, n=20)[-1],
        )
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return outcome


async def _unless_failed(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _until_served(session: aiohttp.ClientSession, port: int, copies: int) -> None:
    """Wait until the gateway sends requests to all copies."""
    seen: set[str] = set()
    for _ in range(300):
        with contextlib.suppress(aiohttp.ClientError):
            body = {"model": MODEL, "messages": []}
            async with session.post(f"http://{LOOPBACK}:{port}{CHAT}", json=body) as answer:
                if answer.status == 200:
                    seen.add(answer.headers["x-served-by"])
        if len(seen) == copies:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"after 15 s the gateway sends requests to {len(seen)} of {copies} copies")


def _variables(
    copies: Sequence[Copy], port: int, metrics_port: int, log: int, bound: int | None
) -> dict[str, Any]:
    return {
        "gateway_address": LOOPBACK,
        "gateway_port": port,
        "gateway_metrics_port": metrics_port,
        "gateway_log": f"{LOOPBACK}:{log}",
        "gateway_workers": [
            {
                "name": f"copy-{number}",
                "kind": "vllm",
                "address": LOOPBACK,
                "port": copy.port,
                "health_port": copy.port,
                "max_requests": CAP,
            }
            for number, copy in enumerate(copies, 1)
        ],
        "gateway_affinity": bound is not None,
        "gateway_affinity_bound": bound or 175,
    }


def _held_port(stack: contextlib.ExitStack, kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A port that only HAProxy, which shares it, can take meanwhile. Of a log nobody reads the kernel drops what comes."""
    held = stack.enter_context(socket.socket(socket.AF_INET, kind))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((LOOPBACK, 0))
    port: int = held.getsockname()[1]
    return port


def compare(
    case: Case, bounds: Sequence[int], directory: Path, warm_up: float, seconds: float
) -> dict[str, Outcome]:
    """The same clients with least connections, then with affinity and each of these bounds; times in seconds."""
    ways: dict[str, int | None] = {LEASTCONN: None} | {f"affinity {bound}": bound for bound in bounds}
    outcomes = {}
    with contextlib.ExitStack() as ports:
        rigs = {way: [Copy(case), Copy(case)] for way in ways}
        log = _held_port(ports, socket.SOCK_DGRAM)
        hosts = {
            way.replace(" ", "-"): _variables(rigs[way], _held_port(ports), _held_port(ports), log, bound)
            for way, bound in ways.items()
        }
        folders = render(Ansible(directory), hosts, {})

        async def one(way: str) -> Outcome:
            host = way.replace(" ", "-")
            async with contextlib.AsyncExitStack() as stack:
                for copy in rigs[way]:
                    await stack.enter_async_context(copy.serving())
                command = ["haproxy", "-W", "-db", "-f", str(folders[host] / "haproxy.cfg")]
                stack.enter_context(running(command, folders[host], environment_of(folders[host])))
                return await play(case, rigs[way], hosts[host]["gateway_port"], warm_up, seconds)

        for way in ways:
            outcomes[way] = asyncio.run(one(way))
    return outcomes


def table(outcomes: dict[str, Outcome]) -> str:
    """Side by side, with the ratio of each way to least connections in brackets."""
    rows = {
        "prefix-cache hit rate": ("hit_rate", "{:.3f}"),
        "turns at the copy of the turn before": ("returned", "{:.2f}"),
        "the busier copy's share of requests": ("larger_share", "{:.3f}"),
        "requests a second": ("per_second", "{:.1f}"),
        "latency p50, ms": ("p50_ms", "{:.0f}"),
        "latency p95, ms": ("p95_ms", "{:.0f}"),
    }
    lines = [f"| | {' | '.join(outcomes)} |", f"|---|{'---|' * len(outcomes)}"]
    for title, (name, form) in rows.items():
        base = getattr(outcomes[LEASTCONN], name)
        cells = []
        for way, outcome in outcomes.items():
            value = getattr(outcome, name)
            ratio = f" ({value / base:.2f})" if way != LEASTCONN and base else ""
            cells.append(form.format(value) + ratio)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
