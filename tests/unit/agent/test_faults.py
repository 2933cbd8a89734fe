# SPDX-License-Identifier: GPL-3.0-or-later
"""Random sequences of faults against the supervisor, in virtual time: hours of an engine's life in milliseconds.

Docker, engine, peer and systemd are played by one World, which also checks what must hold at every moment: never
two containers, READY only after a completion, no sign of life to the watchdog before READY or once wedged.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_agent import supervisor as module
from vllm_agent.config import (
    Agent,
    Api,
    Config,
    MemoryGate,
    PairConfig,
    StartLimit,
    Timeouts,
    WatchdogConfig,
)
from vllm_agent.container import ContainerError
from vllm_agent.engine import Counters, EngineError, NotListening
from vllm_agent.memory import Memory
from vllm_agent.pair import PairError
from vllm_agent.status import Phase
from vllm_agent.supervisor import Supervisor

SEQUENCES = 300
LIMITS = Timeouts(start=600, verify=60, drain=100, drain_notice=3, engine_shutdown=30, container_stop=45)
LONGEST_LIFE = 4 * 3600.0
LONGEST_STOP = LIMITS.drain_notice + LIMITS.drain + LIMITS.container_stop + 120


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer, moves the clock to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for ever"
        self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time costs nothing, and whose signals are sent by the test."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self.handlers: dict[int, Callable[[], None]] = {}
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        self.handlers[sig] = lambda: callback(*args)

    def remove_signal_handler(self, sig: int) -> bool:
        return self.handlers.pop(sig, None) is not None


class World:
    """One host and its neighbour during one life of the agent; `rng` decides what happens."""

    def __init__(self, rng: random.Random, rank: int | None) -> None:
        self.rng = rng
        self.loop = asyncio.get_running_loop()
        self.rank = rank
        self.containers = 0
        self.exit: asyncio.Future[int] = self.loop.create_future()
        self.ready_at = 0.0
        self.deaf = rng.random() < 0.2
        self.wedged = rng.random() < 0.1
        self.scrapes_fail = False
        self.running = 0
        self.tokens = 0.0
        self.verified = rank == 1  # a headless rank takes the head's word
        self.messages: list[str] = []
        self.asked_at: float | None = None
        self.faults: list[str] = []

    def kill(self, status: int) -> None:
        """The container, if there is one, is gone."""
        if self.containers:
            self.containers = 0
            self.exit.set_result(status)

    async def play(self, fault: str) -> None:
        """Make one thing happen."""
        assert isinstance(self.loop, VirtualLoop)
        if fault == "sigterm":
            if handler := self.loop.handlers.get(signal.SIGTERM):
                self.asked_at = self.asked_at or self.loop.time()
                handler()
            return
        if fault == "request":
            self.running += 1
            return
        if fault == "answer":
            self.running = 0
            return
        self.faults.append(fault)
        match fault:
            case "exit":
                self.kill(self.rng.choice([0, 1, 125, 137, -9]))
            case "wedge":
                self.wedged = True
            case "unwedge":
                self.wedged = False
            case "scrapes":
                self.scrapes_fail = not self.scrapes_fail
            case "peer" if self.rank is not None:
                FakePair.current.happen()


class FakeContainer:
    world: World

    def __init__(self, name: str, command: list[str], on_line: Callable[[str], None]) -> None:
        self._on_line = on_line

    async def start(self) -> None:
        await asyncio.sleep(self.world.rng.random())
        if self.world.rng.random() < 0.05:
            self.world.faults.append("no docker")
            raise ContainerError("docker cannot be run")
        assert self.world.containers == 0, "two containers"
        self.world.containers = 1
        self.world.ready_at = self.world.loop.time() + self.world.rng.choice([5, 100, 400, 900])
        if self.world.ready_at - self.world.loop.time() > LIMITS.start:
            self.world.faults.append("slow")
        self._on_line("Loading safetensors checkpoint shards:  40% Completed")

    async def is_running(self) -> bool:
        await asyncio.sleep(0.1)
        return self.world.containers == 1

    async def wait(self) -> int:
        return await asyncio.shield(self.world.exit)

    async def end(self, grace: float | None, hurry: asyncio.Event) -> None:
        if grace is not None and self.world.containers:
            patience = asyncio.create_task(hurry.wait())
            takes = grace if self.world.deaf else min(grace, 2.5)
            await asyncio.wait({patience}, timeout=takes)
            patience.cancel()
        await self.remove()

    async def remove(self) -> None:
        await asyncio.sleep(0.2)
        self.world.kill(137)


class FakeEngine:
    world: World

    def __init__(self, port: int, served_model_name: str, api_key: str) -> None:
        self.port = port

    async def port_is_open(self) -> bool:
        return False

    def _check(self) -> None:
        if not self.world.containers or self.world.loop.time() < self.world.ready_at:
            raise NotListening(f"nobody listens on port {self.port}")

    async def healthy(self) -> bool:
        await asyncio.sleep(0.01)
        with contextlib.suppress(NotListening):
            self._check()
            return True
        return False

    async def counters(self) -> Counters:
        await asyncio.sleep(0.01)
        self._check()
        if self.world.scrapes_fail:
            raise EngineError("/metrics failed")
        if self.world.running and not self.world.wedged:
            self.world.tokens += 50
        return Counters(self.world.running, 0, self.world.tokens, 0, 0, None)

    async def complete_one_token(self, seconds: float) -> None:
        self._check()
        begun = self.world.loop.time()
        while self.world.wedged:
            await asyncio.sleep(1)
            if self.world.loop.time() - begun > seconds:
                raise EngineError(f"/v1/completions did not answer within {seconds:g} s")
        self._check()
        self.world.tokens += 2
        self.world.verified = True


class FakeNotifier:
    world: World
    watchdog_seconds = 120.0

    def send(self, *assignments: str) -> None:
        world, before = self.world, self.world.messages
        if "READY=1" in assignments:
            assert world.verified, "READY without a completion"
        if "WATCHDOG=1" in assignments:
            assert "READY=1" in before or "READY=1" in assignments, "the watchdog was fed before READY"
            assert "WATCHDOG=trigger" not in before, "the watchdog was fed although the engine is wedged"
        before.extend(assignments)


class FakePair:
    """The other rank, which also has its faults."""

    current: FakePair
    world: World

    def __init__(self, config: Config, pair: PairConfig, on_peer_phase: Any, on_lost: Any) -> None:
        FakePair.current = self
        self.is_head = pair.rank == 0
        self.peer = "the other rank"
        self.told: list[Phase] = []
        self._on_peer_phase, self._on_lost = on_peer_phase, on_lost
        self._closed = False

    def describe(self) -> None:
        return None

    def tell(self, phase: Phase, cause: str = "") -> None:
        self.told.append(phase)

    async def form(self, report: Callable[[str], None]) -> None:
        await asyncio.sleep(self.world.rng.choice([0.1, 30, 300]))
        if self.world.rng.random() < 0.1:
            self.world.faults.append("no peer")
            raise PairError("no peer")

    async def wait_for_peer(self, *phases: Phase) -> None:
        takes = self.world.rng.choice([1, 30, 3000])
        if takes > 1000:
            self.world.faults.append("slow peer")
        await asyncio.sleep(takes)

    def happen(self) -> None:
        if self._closed:
            return
        match self.world.rng.choice(["failed", "lost", "draining", "stopping"]):
            case "failed":
                self._on_peer_phase(Phase.FAILED, "no luck")
            case "lost":
                self._closed = True
                self._on_lost(PairError("the connection ended"))
            case "draining":
                self._on_peer_phase(Phase.DRAINING, "")
            case "stopping":
                self._on_peer_phase(Phase.STOPPING, "")

    async def close(self) -> None:
        self._closed = True


def configuration(rank: int | None, model: Path) -> Config:
    pair = None
    if rank is not None:
        pair = PairConfig(rank=rank, size=2, head="127.0.0.2", peer="127.0.0.1", heartbeat_port=1,
                          peer_wait_seconds=900, heartbeat_timeout=10)  # fmt: skip
    return Config(
        mode="replica" if rank is None else "tp",
        unit="vllm.service",
        container="vllm",
        image="vllm:1",
        model=str(model),
        served_model_name="tiny",
        command=["docker", "run", "--name", "vllm"],
        environment_file="",
        api=None if rank == 1 else Api(port=1),
        agent=Agent(port=1),
        memory=MemoryGate(budget_gib=50, wait_seconds=100, drop_page_cache=False),
        timeouts=LIMITS,
        start_limit=StartLimit(burst=10**6, served_seconds=1800),
        watchdog=WatchdogConfig(interval=15, canary_timeout=30, strikes=3),
        pair=pair,
    )


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Put a World in the place of everything around the supervisor."""

    async def docker(*_: str) -> tuple[int, str]:
        return 0, ""

    for name, player in {
        "Container": FakeContainer,
        "Engine": FakeEngine,
        "Notifier": FakeNotifier,
        "Pair": FakePair,
        "StatusServer": lambda *_: None,
        "docker": docker,
        "running_containers": lambda: asyncio.sleep(0, {}),
    }.items():
        monkeypatch.setattr(module, name, player)

    def set_world(world: World) -> None:
        for player in (FakeContainer, FakeEngine, FakeNotifier, FakePair):
            monkeypatch.setattr(player, "world", world, raising=False)

    return set_world


async def live(seed: int, folder: Path, set_world: Callable[[World], None]) -> None:
    rng = random.Random(seed)
    rank = rng.choice([None, 0, 1])
    world = World(rng, rank)
    set_world(world)
    (folder / "proc").mkdir(exist_ok=True)
    available = rng.choice([100, 100, 100, 10])
    if available < 50:
        world.faults.append("memory")
    (folder / "proc/meminfo").write_text(f"MemAvailable: {available * 2**20} kB\n")

    async def happenings() -> None:
        kinds = ["sigterm", "request", "answer", "exit", "wedge", "unwedge", "scrapes", "peer"]
        for kind in rng.choices(kinds, weights=[2, 4, 2, 1, 1, 1, 1, 1], k=rng.randrange(8)):
            await asyncio.sleep(rng.choice([0, 0.3, 5, 60, 1000]))
            await world.play(kind)
        await asyncio.sleep(rng.choice([0, 2, 2000]))
        await world.play("sigterm")

    agent = Supervisor(configuration(rank, folder), "", [], Memory(folder / "proc"), folder)
    life = asyncio.create_task(agent.run())
    await asyncio.sleep(0.01)
    fate = asyncio.create_task(happenings())
    async with asyncio.timeout(LONGEST_LIFE):
        status = await life
    ended = world.loop.time()
    fate.cancel()

    assert world.containers == 0, "a container is left"
    assert status in (0, 1)
    if status == 0:
        assert world.asked_at is not None, "ended well although nobody asked"
    if world.asked_at is not None:
        assert ended - world.asked_at <= LONGEST_STOP
        if not world.faults and not world.wedged:
            assert status == 0, "failed although nothing happened"
    assert any(message.startswith("STOPPING=1") for message in world.messages)
    if status == 1 and world.asked_at is None:
        assert world.faults or world.wedged
    await asyncio.sleep(1)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "something still runs"


@pytest.mark.parametrize("tens", range(SEQUENCES // 10))
def test_it_always_ends_in_a_state_that_systemd_can_act_on(
    tens: int, tmp_path: Path, played: Callable[[World], None]
) -> None:
    for seed in range(tens * 10, tens * 10 + 10):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            try:
                runner.run(live(seed, tmp_path, played))
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error
