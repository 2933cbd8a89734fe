# SPDX-License-Identifier: GPL-3.0-or-later
"""The measurements. Each returns one flat record per gateway, round and case, with units in the names."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.gateways import OURS, Gateway, launched
from benchmarks.gateway.load import Stream, ask, client, open_loop, stream, write_body, wrk
from benchmarks.gateway.processes import wait_until
from benchmarks.gateway.worker import Worker, careful_workers, fast_workers, healthy

Record = dict[str, Any]
DIRECT = "direct"
WORKERS = 4


@dataclass(frozen=True)
class Plan:
    """How much is measured; durations in seconds."""

    rounds: int
    wrk_seconds: int
    # Connections, bytes of the body, and whether `model` comes first in it.
    cases: tuple[tuple[int, int, bool], ...]
    stream_rounds: int
    returns: int
    outage: float
    watched: float
    streams: int
    stop_seconds: float
    workers: tuple[int, ...]
    models: tuple[int, ...]


def quick(outage: float) -> Plan:
    cases = ((1, 1_000, False), (32, 1_000, False), (32, 2_000_000, False))
    return Plan(1, 1, cases, 1, 1, outage, 8, 1000, 3, (64,), (500,))


def full(outage: float) -> Plan:
    sizes = (1_000, 200_000, 2_000_000)
    cases = ((1, 1_000, False), *((32, size, first) for size in sizes for first in (True, False)))
    return Plan(3, 3, cases, 3, 2, outage, 60, 1000, 6, (2, 16, 64), (1, 50, 500))


class Bench:
    """Runs the measurements; a gateway that cannot start is noted in ``left_out`` and the others go on."""

    def __init__(self, plan: Plan, names: Sequence[str], directory: Path, left_out: dict[str, str]) -> None:
        self.plan, self.names, self.directory, self.left_out = plan, names, directory, left_out
        self._folders = 0

    def _folder(self) -> Path:
        self._folders += 1
        return self.directory / str(self._folders)

    @contextlib.contextmanager
    def _gateways(self, names: Sequence[str], ports: Sequence[int]) -> Iterator[list[Gateway]]:
        """All these gateways at once, in front of the same workers."""
        with contextlib.ExitStack() as stack:
            # The slowest to start comes last in the list, and starts while the others do.
            started = [stack.enter_context(launched(name, self._folder(), ports)) for name in reversed(names)]
            serving = []
            for one in reversed(started):
                if one.serves():
                    serving.append(one)
                    continue
                # On a busy machine the slowest may miss a time limit of its own.
                again = stack.enter_context(launched(one.name, self._folder(), ports))
                if again.serves():
                    serving.append(again)
                elif again.program:
                    self.left_out[one.name] = f"it did not start once: {again.program.last_words()}"
            yield serving

    def throughput(self) -> Iterator[tuple[str, Record]]:
        """Latency, requests a second and CPU by number of connections, size of the body and place of `model`."""
        bodies = {}
        for _, size, first in self.plan.cases:
            bodies[size, first] = self.directory / f"{size}-{first}.json"
            write_body(bodies[size, first], size, first)
        with (
            fast_workers(self._folder(), WORKERS) as ports,
            self._gateways(self.names, ports) as gateways,
        ):
            for number in range(self.plan.rounds):
                for connections, size, first in self.plan.cases:
                    for one in [Gateway(DIRECT, ports[0]), *gateways]:
                        case = {"connections": connections, "bytes": size, "model_first": first}
                        found = wrk(one, connections, self.plan.wrk_seconds, bodies[size, first])
                        yield "throughput", {"gateway": one.name, "round": number, **case, **found}

    def streaming_and_return(self) -> Iterator[tuple[str, Record]]:
        """How late chunks arrive; then all workers go away and come back."""
        for number in range(self.plan.returns):
            with (
                careful_workers(WORKERS) as workers,
                self._gateways(self.names, [worker.port for worker in workers]) as gateways,
            ):
                if number == 0:
                    for round_number in range(self.plan.stream_rounds):
                        direct = [Gateway(DIRECT, worker.port) for worker in workers]
                        for targets in [direct, *([one] for one in gateways)]:
                            found = asyncio.run(_streams(targets))
                            yield "streaming", {"gateway": targets[0].name, "round": round_number, **found}
                outage = away(gateways, workers, self.plan.outage, self.plan.watched)
                for found in asyncio.run(outage):
                    yield "return", {"round": number, **found}

    def memory_and_stop(self) -> Iterator[tuple[str, Record]]:
        """Each gateway alone: its memory, and what its clients see when a worker dies under load."""
        for name in self.names:
            with (
                careful_workers(WORKERS) as workers,
                self._gateways([name], [worker.port for worker in workers]) as gateways,
            ):
                for one in gateways:
                    yield (
                        "rolling",
                        {"gateway": one.name, **asyncio.run(_rolling(one, workers, self.plan.streams))},
                    )
                    yield "memory", {"gateway": one.name, **asyncio.run(_memory(one, self.plan.streams))}
                    yield (
                        "stop",
                        {"gateway": one.name, **asyncio.run(_stop(one, workers[0], self.plan.stop_seconds))},
                    )
                    if name == OURS:
                        yield (
                            "held",
                            {"gateway": one.name, **asyncio.run(_held(one, workers, self.plan.streams))},
                        )

    def growth(self) -> Iterator[tuple[str, Record]]:
        """Ours with more workers, and with more models."""
        if OURS not in self.names:
            return
        body = self.directory / "growth.json"
        write_body(body, 1000, False)
        sizes = [(count, 1) for count in self.plan.workers]
        sizes += [(WORKERS, count) for count in self.plan.models]
        for workers, models in sizes:
            with (
                fast_workers(self._folder(), workers, models) as ports,
                self._gateways([OURS], ports) as gateways,
            ):
                for one in gateways:
                    assert one.program
                    time.sleep(1)
                    before = one.program.cpu_seconds()
                    time.sleep(2)
                    idle = (one.program.cpu_seconds() - before) / 2
                    for number in range(self.plan.rounds):
                        record = {
                            "gateway": one.name,
                            "round": number,
                            "workers": workers,
                            "models": models,
                            "idle_cpu_percent": 100 * idle,
                            **wrk(one, 32, self.plan.wrk_seconds, body),
                            "resident_mb": one.program.resident_mb(),
                            "list_of_models": wrk(one, 1, self.plan.wrk_seconds, None, "/v1/models"),
                        }
                        yield "growth", record


async def _streams(targets: Sequence[Gateway]) -> Record:
    """16 clients read 60 chunks each, 25 a second; a chunk's delay is from the worker's writing to the client's reading."""
    async with client() as session:
        wanted = {"chunks": 60, "interval": 0.04}
        users = (stream(session, targets[number % len(targets)], wanted) for number in range(16))
        seen = await asyncio.gather(*users)
    delays = sorted(delay for each in seen for delay in each.delays_ms)
    verdicts = Counter(each.verdict(60) for each in seen)
    if len(delays) < 2:
        return {"chunks": len(delays), **verdicts}
    percentiles = statistics.quantiles(delays, n=100)
    return {
        "chunks": len(delays),
        "p50_ms": percentiles[49],
        "p99_ms": percentiles[98],
        "max_ms": delays[-1],
        **verdicts,
    }


async def away(
    gateways: Sequence[Gateway],
    workers: Sequence[Worker],
    outage: float,
    watched: float,
    stop: Callable[[Worker], None] = Worker.kill,
    apart: float = 0,
) -> list[Record]:
    """Stop all workers for so long, and watch for so long after the first completion of the first one that is back; the
    others come ``apart`` seconds after one another. Each gateway gets 10 requests a second all the time."""

    async def come_back(worker: Worker, later: float) -> None:
        await asyncio.sleep(later)
        worker.start()

    over = asyncio.Event()
    patience = outage + watched
    async with client() as session:
        loops = [
            asyncio.create_task(open_loop(10, over, lambda one=one: ask(session, one, patience)))  # type: ignore[misc]
            for one in gateways
        ]
        await asyncio.sleep(2)
        down = time.monotonic()
        await asyncio.gather(*(asyncio.to_thread(stop, worker) for worker in workers))
        await asyncio.sleep(outage)
        starts = [
            asyncio.create_task(come_back(worker, number * apart)) for number, worker in enumerate(workers)
        ]
        first = Gateway(DIRECT, workers[0].port)
        await asyncio.to_thread(wait_until, lambda: first.chat() == 200, 10)
        up = time.monotonic()
        await asyncio.sleep(watched)
        await asyncio.gather(*starts)
        over.set()
        answers = await asyncio.gather(*loops)
    return [
        {"gateway": one.name, "outage_seconds": outage, "watched_seconds": watched, **_judged(seen, down, up)}
        for one, seen in zip(gateways, answers, strict=True)
    ]


def _judged(seen: Sequence[Stream], down: float, up: float) -> Record:
    good = [each.ended - up for each in seen if each.status == 200 and each.ended > up]
    during = [each for each in seen if down <= each.started < up]
    after = [each for each in seen if each.started >= up]
    failed_after = [each.started - up for each in after if each.status != 200]
    return {
        "first_good_seconds": min(good, default=None),
        "sent_during": len(during),
        "failed_during": sum(each.status != 200 for each in during),
        "sent_after": len(after),
        "failed_after": len(failed_after),
        # A first good answer is no proof: another worker may still be left out.
        "last_failed_seconds": max(failed_after, default=0.0),
        "longest_wait_seconds": max(
            (each.ended - each.started for each in seen if each.status == 200), default=0.0
        ),
    }


async def _memory(one: Gateway, count: int) -> Record:
    """Resident memory with nothing to do, and with so many streams open."""
    assert one.program
    idle = one.program.resident_mb()
    begun: set[int] = set()
    settled: set[int] = set()
    all_settled = asyncio.Event()

    def settle(number: int) -> None:
        settled.add(number)
        if len(settled) == count:
            all_settled.set()

    async def user(number: int) -> None:
        def begin() -> None:
            begun.add(number)
            settle(number)

        await stream(session, one, {"chunks": 60, "interval": 2}, begin)
        begun.discard(number)
        settle(number)

    async with client() as session:
        tasks = [asyncio.create_task(user(number)) for number in range(count)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await all_settled.wait()
        await asyncio.sleep(1)
        resident, streams = one.program.resident_mb(), len(begun)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"idle_mb": idle, "streams": streams, "streaming_mb": resident}


async def _stop(one: Gateway, victim: Worker, seconds: float) -> Record:
    """40 clients stream without a pause, 1 s each; after 1.5 s one worker dies. What do they see in so many seconds more?"""
    until = time.monotonic() + 1.5 + seconds

    async def user() -> list[Stream]:
        seen = []
        while time.monotonic() < until:
            seen.append(await stream(session, one, {"chunks": 20, "interval": 0.05}))
            if seen[-1].verdict(20) != "ok":
                await asyncio.sleep(0.2)
        return seen

    async with client() as session:
        users = [asyncio.create_task(user()) for _ in range(40)]
        await asyncio.sleep(1.5)
        victim.kill()
        seen = [each for task in users for each in await task]
    verdicts = Counter(each.verdict(20) for each in seen)
    return {"streams": len(seen), **{name: verdicts[name] for name in ("ok", "cut", "refused", "wrong")}}


async def _rolling(one: Gateway, workers: Sequence[Worker], count: int) -> Record:
    """So many clients stream without a pause, 4 s each, while each worker in turn drains, ends and comes back."""
    over = asyncio.Event()

    async def user() -> list[str]:
        verdicts = []
        while not over.is_set():
            verdicts.append((await stream(session, one, {"chunks": 5, "interval": 1})).verdict(5))
            if verdicts[-1] != "ok":
                await asyncio.sleep(0.2)
        return verdicts

    async with client() as session:
        users = [asyncio.create_task(user()) for _ in range(count)]
        await asyncio.sleep(2)
        for worker in workers:
            await asyncio.to_thread(worker.drain)
            worker.start()
            await asyncio.to_thread(wait_until, lambda: healthy(worker.port), 10)  # noqa: B023  (called at once)
            await asyncio.sleep(1)
        over.set()
        verdicts = Counter(each for seen in await asyncio.gather(*users) for each in seen)
    return {
        "streams": verdicts.total(),
        **{name: verdicts[name] for name in ("ok", "cut", "refused", "wrong")},
    }


async def _held(one: Gateway, workers: Sequence[Worker], count: int) -> Record:
    """Resident memory with so many requests that wait for a worker to come, and how many are then served."""
    assert one.program
    for worker in workers:
        worker.kill()
    await asyncio.to_thread(wait_until, lambda: one.get("/health") != 200, 10)
    async with client() as session:
        tasks = [asyncio.create_task(ask(session, one)) for _ in range(count)]
        await asyncio.sleep(4)
        resident = one.program.resident_mb()
        waiting = sum(not task.done() for task in tasks)
        for worker in workers:
            worker.start()
        answers = await asyncio.gather(*tasks)
    return {
        "held": waiting,
        "held_mb": resident,
        "served": sum(answer.status == 200 for answer in answers),
    }
