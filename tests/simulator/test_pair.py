# SPDX-License-Identifier: GPL-3.0-or-later
"""A model split over two hosts (two loopback addresses): meeting, serving, and every way to lose a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.simulator.conftest import Engine, StartEngine

HEAD, WORKER = "127.0.0.2", "127.0.0.3"


def listening(pids: set[int]) -> set[tuple[str, int]]:
    """The TCP addresses that processes listen on."""
    inodes = set()
    for pid in pids:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
            except OSError:
                continue
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
    found = set()
    with open("/proc/net/tcp") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


@dataclass
class Pair:
    """Starts the two ranks of one split model."""

    start: StartEngine
    master_port: int

    def rank(self, rank: int, *flags: str, **environment: str) -> Engine:
        """One rank, on its own address."""
        address = (HEAD, WORKER)[rank]
        common = ["--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", str(rank), "--master-addr", HEAD,
                  "--master-port", str(self.master_port), *(["--headless"] if rank else [])]  # fmt: skip
        environment = {"VLLM_HOST_IP": address, "STANDIN_SPEED": "1"} | environment
        return self.start(*common, *flags, address=address, **environment)

    async def ready(self, **environment: str) -> tuple[Engine, Engine]:
        """Both ranks, the worker first, once they serve."""
        worker, head = self.rank(1), self.rank(0, **environment)
        return await head.ready(), worker


@pytest.fixture
def pair(start: StartEngine) -> Pair:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return Pair(start, probe.getsockname()[1])


def call(engine: Engine, tokens: int) -> asyncio.Future[tuple[int, object]]:
    return asyncio.ensure_future(engine.complete(tokens))


async def test_a_pair_serves(pair: Pair) -> None:
    head, worker = await pair.ready()
    status, answer = await head.complete(20)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 20)
    assert answer["system_fingerprint"].startswith("vllm-0.33.0-standin-tp2-")
    [line] = [line for line in head.log.splitlines() if "GPU KV cache size" in line]
    assert int(line.split("size: ")[1].split()[0].replace(",", "")) > 3_000_000
    assert set(head.children()) == {"EngineCore", "Worker"}
    assert set(worker.children()) == {"Worker"}
    # The master port on all addresses, the rest on each rank's own; no API on the headless rank.
    ports = listening({head.process.pid, worker.process.pid})
    assert ("0.0.0.0", pair.master_port) in ports
    assert (HEAD, head.port) in ports
    others = [address for address, port in ports if port not in (pair.master_port, head.port)]
    assert sorted(others) == [HEAD, WORKER]
    assert not worker.accepts_connections()


async def test_the_head_waits_for_its_worker_and_for_no_probe(pair: Pair) -> None:
    head = pair.rank(0)

    def connect() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HEAD, pair.master_port)) == 0

    await head.until(connect)
    await asyncio.sleep(0.5)
    assert head.process.poll() is None
    assert "Loading safetensors" not in head.log
    pair.rank(1)
    await head.ready()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_alone_gives_up(pair: Pair, rank: int) -> None:
    engine = pair.rank(rank, "--distributed-timeout-seconds", "1")
    assert await engine.ended(5) == 1
    assert time.monotonic() - engine.started > 1
    assert "timed out after 1 s waiting for the other rank" in engine.log


async def test_an_address_that_nobody_reaches(pair: Pair) -> None:
    """A rank that announces a wrong address is found, but the pair never forms."""
    pair.rank(1, VLLM_HOST_IP="127.0.0.9")
    head = pair.rank(0, "--distributed-timeout-seconds", "2", VLLM_HOST_IP="198.51.100.1")
    assert await head.ended(5) == 1
    assert "198.51.100.1" in head.log


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=lambda how: how.name)
async def test_the_head_s_end_leaves_a_useless_worker(pair: Pair, how: signal.Signals) -> None:
    head, worker = await pair.ready()
    head.process.send_signal(how)
    await head.ended(2.5)
    new_head = pair.rank(0)
    await new_head.until(lambda: "distributed_init_method" in new_head.log)
    await asyncio.sleep(1)
    assert worker.process.poll() is None
    assert not new_head.accepts_connections()
    new_head.process.terminate()
    new_head.process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.5)
    assert new_head.process.poll() is None


async def test_a_worker_killed_in_flight(pair: Pair) -> None:
    head, worker = await pair.ready()
    request = call(head, 100_000)
    await head.running(1)
    began = time.monotonic()
    worker.kill()
    await asyncio.sleep(1)
    assert (await head.get("/health"))[0] == 200
    assert (await request)[0] == 500
    assert await head.ended() == 0
    assert 4 < time.monotonic() - began < 6


async def test_a_worker_stopped_while_idle(pair: Pair) -> None:
    head, worker = await pair.ready(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS="2")
    began = time.monotonic()
    worker.process.terminate()
    assert await worker.ended(14) == 0
    assert 11 < time.monotonic() - began < 13
    assert (await head.get("/health"))[0] == 200
    # The next request finds out, and only the engine's own long time-out ends it.
    request = call(head, 1)
    await asyncio.sleep(1.5)
    assert not request.done()
    assert (await head.get("/health"))[0] == 200
    assert (await request)[0] == 500
    assert await head.ended(3) == 0


async def test_a_worker_restarted_alone_does_not_rejoin(pair: Pair) -> None:
    head, worker = await pair.ready()
    worker.kill()
    again = pair.rank(1, "--distributed-timeout-seconds", "1")
    assert await again.ended(5) == 1
    assert (await head.get("/health"))[0] == 200
    request = call(head, 1)
    await asyncio.sleep(0.7)
    assert not request.done()
    request.cancel()


async def test_a_frozen_worker_holds_the_pair(pair: Pair) -> None:
    head, worker = await pair.ready()
    worker.process.send_signal(signal.SIGSTOP)
    request = call(head, 1)
    await asyncio.sleep(0.7)
    assert not request.done()
    worker.process.send_signal(signal.SIGCONT)
    assert (await request)[0] == 200
