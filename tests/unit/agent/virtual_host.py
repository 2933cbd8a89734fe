# SPDX-License-Identifier: GPL-3.0-or-later
"""One Spark in virtual time: hours of it pass in milliseconds.

The agent runs as it is, with its docker calls, its HTTP and its heartbeat. What it meets is played here: the docker
client and its daemon, the engine in the container, the agent of the other rank, and systemd, which starts the agent
again. Everything that must hold at every moment is checked by `Host.check` where it may break.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import errno
import itertools
import json
import os
import selectors
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from typing import Any

import pytest

from vllm_agent import status as status_module
from vllm_agent import supervisor
from vllm_agent.config import Agent, Api, Config, MemoryGate, PairConfig, StartLimit, Timeouts, WatchdogConfig
from vllm_agent.memory import Holder, Memory
from vllm_agent.status import Phase, Stage, Status
from vllm_agent.supervisor import GIVEN_UP

NAME = "vllm"
HEAD, WORKER = "198.51.100.1", "198.51.100.2"
LIMITS = Timeouts(start=120, verify=40, drain=60, drain_notice=3, engine_shutdown=20, container_stop=30)
GATE = MemoryGate(budget_gib=50, wait_seconds=60, drop_page_cache=False)
START_LIMIT = StartLimit(burst=3, served_seconds=600)
WATCHDOG = WatchdogConfig(interval=15, canary_timeout=60, strikes=3)
PEER_WAIT = 120.0
LOAD_SECONDS = 20.0

# The unit, as the template makes it.
START_SECONDS = 120.0
STOP_SECONDS = LIMITS.drain + LIMITS.drain_notice + LIMITS.container_stop + 120
WATCHDOG_SECONDS = 120.0
RESTART_SECONDS = 60.0
NO_RESTART = (2, GIVEN_UP)

DOCKER_SECONDS = 15  # for one call
END_SECONDS = 75  # for the end of a container, whatever docker does
# Each phase's bound: its own, which the headless rank takes from its head, and what docker may take besides.
LONGEST = {
    Phase.WAITING_FOR_PEER: 3 * DOCKER_SECONDS + max(PEER_WAIT, GATE.wait_seconds + 60),
    Phase.WAITING_FOR_MEMORY: 4 * DOCKER_SECONDS + GATE.wait_seconds,
    Phase.STARTING: 120 + DOCKER_SECONDS,
    Phase.LOADING: GATE.wait_seconds + LIMITS.start + LIMITS.verify,
    Phase.VERIFYING: LIMITS.verify,
    Phase.DRAINING: LIMITS.drain_notice + LIMITS.drain + LIMITS.container_stop + DOCKER_SECONDS,
    Phase.STOPPING: LIMITS.container_stop + END_SECONDS,
    Phase.FAILED: WATCHDOG_SECONDS + 1 + END_SECONDS,
}
LONGEST_START = sum(LONGEST.values()) + LONGEST[Phase.WAITING_FOR_PEER]  # for both of a head's waits
# The quiet time before the first canary, then each canary and the look that finds its result.
LONGEST_WEDGE = (WATCHDOG.strikes + 1) * (WATCHDOG.canary_timeout + WATCHDOG.interval + 10)
PASSING_SECONDS = 10  # a fault of docker that an end must survive
LONGEST_SILENCE = 30.0  # how long an agent may take to tell that its container is gone

OFF_DOCKER = {"docker hangs", "docker fails", "docker gone", "unkillable"}
PEER_ENDS = {"peer lost", "peer silent", "peer failed", "peer draining", "peer stopping", "peer garbage"}
BAD_COMPLETIONS = {"wedge", "completions hang", "completions 400", "completions 503", "completions empty"}
# What may end an engine that serves, and one that does not serve yet. Nothing else may.
ENDS_SERVING = {"engine exits", "port closed", "signal all"} | BAD_COMPLETIONS | PEER_ENDS
ENDS_START = (
    ENDS_SERVING
    | OFF_DOCKER
    | {"run fails", "slow load", "health refuses", "memory short", "model gone", "agent port taken"}
    | {"peer away", "peer refused", "peer stuck"}
)

_life: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer, moves the clock to it."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits for ever"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time costs nothing, and whose signals are sent by the test."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._jumping.now

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        if (life := _life.get()) is not None:
            life.handlers[sig] = lambda: callback(*args)


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    """Note which life of the agent a task belongs to: it ends with that process."""
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    life = context.get(_life) if context is not None else _life.get()
    if life is not None:
        life.tasks.add(task)
        task.add_done_callback(life.tasks.discard)
    return task


class Host:
    """What outlives the agent: the clock, docker, the other rank, and the faults that are at work."""

    def __init__(self, rank: int | None, folder: Path) -> None:
        self.rank = rank
        self.folder = folder
        self.loop = asyncio.get_running_loop()
        self.wrong: list[str] = []
        self.trace: list[str] = []
        self.suffered: Counter[str] = Counter()  # for how long, each fault
        self.wall_offset = 0.0
        self._ills: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._healed = asyncio.Event()
        self._context = contextvars.copy_context()
        self._work: set[asyncio.Task[None]] = set()
        self.docker = Docker(self)
        self.peer = Peer(self) if rank is not None else None
        self.unit = Unit(self)
        self.model = folder / "model"
        self.state = folder / "state"
        self.model.mkdir()
        self.state.mkdir()

    @property
    def now(self) -> float:
        return self.loop.time()

    @property
    def life(self) -> Life | None:
        """The agent that runs now."""
        return self.unit.life

    def check(self, holds: bool, wrong: str) -> None:
        """Note what must not be; the test fails with it."""
        if not holds:
            self.tell(f"WRONG: {wrong}")
            self.wrong.append(wrong)

    def tell(self, event: str) -> None:
        """Keep the story for whoever has to understand a failure."""
        self.trace.append(f"{self.now - 1000:9.2f} {event}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that does not end with the agent."""
        task = self.loop.create_task(work, context=self._context)
        self._work.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.check(False, f"the test itself fails: {error!r}")

    def has(self, *ills: str) -> bool:
        """Is one of these faults at work?"""
        return any(self._ills.get(ill, 0) > self.now for ill in ills)

    def since(self, ill: str) -> float:
        """When this fault, which is at work, began."""
        return self._began[ill]

    @property
    def docker_was_off(self) -> bool:
        """For so long that neither the agent nor systemd need have removed a container.

        After an agent that was killed, systemd alone asks docker for it, and only once.
        """
        lives = self.unit.lives
        was_killed = lives != [] and lives[-1].is_over and lives[-1].exit_status is None
        off = sum(self.suffered[fault] for fault in OFF_DOCKER)
        return off > (0 if was_killed else PASSING_SECONDS)

    def ended(self, ill: str) -> float:
        """When this fault was last at work."""
        return min(self._ills.get(ill, 0), self.now)

    async def without(self, *ills: str) -> None:
        """Wait until none of these faults is at work."""
        while self.has(*ills):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.left(*ills)):
                    await self._healed.wait()

    def left(self, *ills: str) -> float:
        """For how long one of these faults will still be at work."""
        return max(0.0, *(self._ills.get(ill, 0) - self.now for ill in ills))

    def heal(self) -> None:
        """Nothing is wrong any more."""
        self.tell("all is well")
        self._ills = dict.fromkeys(self.ills, self.now)
        self._healed.set()
        self._note_pace()

    @property
    def ills(self) -> set[str]:
        """The faults at work."""
        return {ill for ill in self._ills if self.has(ill)}

    def happen(self, fault: str, seconds: float) -> None:
        """Let a fault begin that lasts for `seconds`, or one that happens at once."""
        if fault == "messages lost":  # never for so long that systemd must take the agent for dead
            if self.now < self._ills.get(fault, 0) + 60:
                return
            seconds = min(seconds, 30)
        self.tell(f"{fault} {seconds:g}")
        self.suffered[fault] += round(seconds)
        if self.life is not None and not self.life.is_over:
            self.life.blame.add(fault)
            self.life.bad_seconds += seconds if fault in BAD_COMPLETIONS else 0
        if fault not in OCCASIONS:
            if not self.has(fault):
                self._began[fault] = self.now
            self._ills[fault] = max(self._ills.get(fault, 0), self.now + seconds)
        if (occasion := OCCASIONS.get(fault) or BEGINNINGS.get(fault)) is not None:
            occasion(self)
        if self.peer is not None:
            self.peer.happen(fault)
        self._note_pace()
        self.loop.call_later(seconds, self._note_pace, context=self._context)

    def _note_pace(self) -> None:
        if self.model.is_dir() is self.has("model gone"):
            self.model.rmdir() if self.model.is_dir() else self.model.mkdir()
        for container in self.docker.containers.values():
            container.advance()


def _engine_exits(status: int) -> Callable[[Host], None]:
    def occasion(host: Host) -> None:
        if (container := host.docker.running) is not None:
            container.die(status)

    return occasion


def _reset_counters(host: Host) -> None:
    for container in host.docker.containers.values():
        container.tokens = container.progress = 0.0
        container.reset_at = host.now


def _close_port(host: Host) -> None:
    for container in host.docker.containers.values():
        container.hang_up()


def _kill_agent(host: Host) -> None:
    if host.life is not None:
        host.life.kill("SIGKILL by hand")


def _signal(host: Host) -> None:
    if host.life is not None:
        host.life.signal()


def _signal_all(host: Host) -> None:
    if host.life is not None:
        for client in tuple(host.life.clients):
            client.end(-signal.SIGTERM)
        host.life.signal()


def _step_clock(host: Host) -> None:
    host.wall_offset -= 5e6 if host.wall_offset > 0 else -3e6


# What happens at once; everything else lasts.
OCCASIONS: dict[str, Callable[[Host], None]] = {
    "stop": lambda host: host.unit.stop(),
    "start": lambda host: host.unit.start(),
    "signal": _signal,
    "signal all": _signal_all,
    "agent killed": _kill_agent,
    "counters reset": _reset_counters,
    "clock steps": _step_clock,
    "peer lost": lambda host: None,
    "peer failed": lambda host: None,
    "peer draining": lambda host: None,
    "peer stopping": lambda host: None,
    "peer garbage": lambda host: None,
} | {f"engine exits {status}": _engine_exits(status) for status in (0, 1, 137, 143)}
# What a lasting fault does when it begins.
BEGINNINGS: dict[str, Callable[[Host], None]] = {"port closed": _close_port}


class Process:
    """A docker client."""

    def __init__(self, output: int | None) -> None:
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._told = b""
        self._output = output

    def say(self, line: str) -> None:
        """Pass a line of the container's output on."""
        if self._output is not None:
            os.write(self._output, line.encode() + b"\n")

    def end(self, status: int, told: str = "") -> None:
        """Exit."""
        if self.returncode is not None:
            return
        if told and self._output is not None:
            self.say(told)
        self.returncode, self._told = status, told.encode()
        self._ended.set()
        if self._output is not None:
            os.close(self._output)
            self._output = None

    def kill(self) -> None:
        self.end(-signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        await self.wait()
        return (self._told, b"") if self.returncode == 0 else (b"", self._told)


class Docker:
    """The daemon. It knows one container of a name, and goes on when a client is killed."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.containers: dict[str, Container] = {}

    @property
    def running(self) -> Container | None:
        """The container that runs."""
        running = [container for container in self.containers.values() if container.runs]
        self.host.check(len(running) < 2, "two containers run")
        return running[0] if running else None

    def client(self, arguments: tuple[str, ...], output: int | None, life: Life | None) -> Process:
        """Start a client; raises OSError."""
        if self.host.has("docker gone"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        process = Process(output if output is None or output < 0 else os.dup(output))
        self.host.spawn(self._serve(process, arguments, life))
        return process

    async def _serve(self, process: Process, arguments: tuple[str, ...], life: Life | None) -> None:
        await asyncio.sleep(0.05)
        await self.host.without("docker hangs")
        if process.returncode is not None:
            return
        if self.host.has("docker fails"):
            return process.end(125 if arguments[0] == "run" else 1, "Cannot connect to the Docker daemon")
        container = self.containers.get(NAME)
        match arguments[0]:
            case "run":
                return await self._run(process, life)
            case "version":
                return process.end(0, "28")
            case "ps":
                return process.end(0, f"{'0' * 64} {NAME}" if self.running else "")
            case "inspect" if container is not None:
                return process.end(0, "true" if container.runs else "false")
            case "stop" if container is not None:
                await container.stop(float(arguments[2]))
            case "kill" if container is not None and container.runs:
                await container.kill()
            case "rm":
                if container is not None:
                    await (container.kill() if container.runs else container.remove())
                return process.end(int(container is not None and not container.gone.is_set()))
            case _:
                return process.end(1, f"No such container: {NAME}")
        process.end(int(not container.gone.is_set()), "did not receive an exit event")

    async def _run(self, process: Process, life: Life | None) -> None:
        assert life is not None
        if self.host.has("run fails"):
            return process.end(125, "docker: Error response from daemon: no such device")
        if NAME in self.containers:
            self.host.check(bool(life.blame & OFF_DOCKER), "a container is started where one is left")
            return process.end(125, f"Conflict. The container name /{NAME} is already in use")
        container = life.container = Container(self.host, process)
        self.containers[NAME] = container
        await asyncio.sleep(0.5)  # created; now the client asks for its start, if it still lives
        if self.containers.get(NAME) is not container:
            process.end(125, f"No such container: {NAME}")
        elif process.returncode is None:
            container.start()


class Container:
    """A container and the engine in it."""

    def __init__(self, host: Host, client: Process) -> None:
        self.host = host
        self._client = client
        self.runs = False
        self.gone = asyncio.Event()
        self.gone_at: float | None = None
        self.verified = False
        self.tokens = 0.0
        self.progress = 0.0
        self.reset_at = 0.0
        self._listens_from = float("inf")
        self._connections: set[EngineConnection] = set()
        self._advanced, self._pace = host.now, 0.0

    def start(self) -> None:
        self.runs = True
        assert self.host.docker.running is self
        self.host.tell("container runs")
        self._listens_from = self.host.now + (600 if self.host.has("slow load") else LOAD_SECONDS)
        self._client.say("Loading safetensors checkpoint shards:  40% Completed")

    def die(self, status: int) -> None:
        """The engine has ended; --rm removes the container."""
        if not self.runs:
            return
        self.runs = False
        self.gone_at = self.host.now
        self.host.tell(f"container exits with {status}")
        self.hang_up()
        self.host.spawn(self._leave(status))

    async def _leave(self, status: int) -> None:
        await self.remove()
        await self.host.without("docker hangs")
        self._client.end(status, "the engine's last words")

    async def remove(self) -> None:
        if self.host.docker.containers.get(NAME) is self:
            del self.host.docker.containers[NAME]
        self.gone.set()

    async def stop(self, seconds: float) -> None:
        """docker stop -t."""
        if not self.host.has("deaf to SIGTERM"):
            self.host.spawn(self._shut_down())
        if not await self._gone_within(seconds):
            await self.kill()

    async def _shut_down(self) -> None:
        await asyncio.sleep(2)
        self.die(0)

    async def kill(self) -> None:
        """SIGKILL, which a process that hangs in the driver only takes later; docker waits for a while."""
        self.host.spawn(self._take_kill())
        await self._gone_within(10)

    async def _take_kill(self) -> None:
        await self.host.without("unkillable")
        self.die(137)

    async def _gone_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.gone.wait()
        return self.gone.is_set()

    @property
    def listens(self) -> bool:
        """Is the engine's port open?"""
        return self.runs and self.host.now >= self._listens_from and not self.host.has("port closed")

    def connect(self) -> tuple[asyncio.StreamReader, EngineConnection]:
        connection = EngineConnection(self)
        self._connections.add(connection)
        return connection.reader, connection

    def hang_up(self) -> None:
        """Every connection ends."""
        for connection in tuple(self._connections):
            connection.reader.feed_eof()
            connection.close()

    def forget(self, connection: EngineConnection) -> None:
        self._connections.discard(connection)

    def advance(self) -> None:
        """Do the work of the time since the last look, at the pace of then."""
        self.progress += (self.host.now - self._advanced) * self._pace
        self._advanced = self.host.now
        works = self.runs and self.host.has("busy", "busy slowly") and not self.host.has("wedge")
        self._pace = (1 / 40 if self.host.has("busy slowly") else 1.0) if works else 0.0

    def take(self, path: str, connection: EngineConnection) -> None:
        """Answer a request, or not."""
        has = self.host.has
        match path:
            case "/health":
                connection.answer(503 if has("health refuses") else 200)
            case "/metrics" if has("metrics fail"):
                connection.answer(500)
            case "/metrics" if not has("metrics hang"):
                self.advance()
                connection.answer(200, self._metrics())
            case "/v1/completions":
                connection.completes = True
                self.host.spawn(self._complete(connection))

    def _metrics(self) -> str:
        in_flight = 4 if self.host.has("busy", "busy slowly") else 0
        in_flight += sum(connection.completes for connection in self._connections)
        return (
            f'vllm:num_requests_running{{engine="0"}} {in_flight}.0\nvllm:num_requests_waiting 0.0\n'
            f"vllm:prompt_tokens_total 0.0\nvllm:generation_tokens_total {self.tokens + int(self.progress) * 50}\n"
        )

    async def _complete(self, connection: EngineConnection) -> None:
        has = self.host.has
        await asyncio.sleep(50 if has("busy slowly") and self.verified else 0.3)
        await self.host.without("wedge", "completions hang")
        if connection.closed:
            return
        if has("completions 400"):
            connection.answer(400, "no such model")
        elif has("completions 503"):
            connection.answer(503, "not now")
        elif has("completions empty"):
            connection.answer(200, '{"choices": []}')
        else:
            self.tokens += 2
            self.verified = True
            connection.answer(200, '{"choices": [{"text": " world"}]}')


class EngineConnection:
    """The agent's end of a connection to the engine, as far as it uses a StreamWriter."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self.reader = asyncio.StreamReader()
        self.closed = False
        self.completes = False

    def write(self, request: bytes) -> None:
        self._container.take(request.split()[1].decode(), self)

    def answer(self, status: int, body: str = "") -> None:
        text = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        self.reader.feed_data(text.encode())
        self.reader.feed_eof()
        self.completes = False

    def close(self) -> None:
        self.closed = True
        self._container.forget(self)


class Peer:
    """The agent of the other rank, at the other end of the heartbeat."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.is_head = host.rank == 1
        self.listener: Callable[[asyncio.StreamReader, Any], None] | None = None
        self._away_until = 0.0
        self._link: PeerConnection | None = None
        self._numbers = itertools.count()
        if not self.is_head:
            host.spawn(self._call_head())

    async def _call_head(self) -> None:
        while True:
            life, listener = self.host.life, self.listener
            if life is not None and listener is not None and not life.is_over and self._may_talk:
                link = self.connect()
                life.context.run(listener, link.reader, link)
            await asyncio.sleep(3)

    @property
    def _may_talk(self) -> bool:
        return self._link is None and self.host.now >= self._away_until and not self.host.has("peer away")

    def connect(self) -> PeerConnection:
        """Begin a connection; raises OSError."""
        if not self._may_talk:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        generation = f"g{next(self._numbers)}" if self.is_head else ""
        self._link = PeerConnection(self, generation)
        return self._link

    def lose(self, link: PeerConnection) -> None:
        """The connection has ended, and systemd starts the other agent again later."""
        if link is self._link:
            self._link = None
            self._away_until = self.host.now + RESTART_SECONDS

    def happen(self, fault: str) -> None:
        link = self._link
        if link is None or not link.greeted:
            return
        later = self.host.loop.call_later
        match fault:
            case "peer lost":
                link.hang_up()
            case "peer garbage":
                link.reader.feed_data(b"\x00\xff\n")
            case "peer failed":
                link.enter(Phase.FAILED)
                later(1, link.hang_up)
            case "peer draining":
                link.enter(Phase.DRAINING)
                later(20, link.enter, Phase.STOPPING)
                later(25, link.hang_up)
            case "peer stopping":
                link.enter(Phase.STOPPING)
                later(3, link.hang_up)


class PeerConnection:
    """The agent's end of the heartbeat, as far as it uses a StreamWriter; the other rank answers at once."""

    def __init__(self, peer: Peer, generation: str) -> None:
        self._peer = peer
        self._host = peer.host
        self._generation = generation
        self.reader = asyncio.StreamReader()
        self.greeted = False
        self._closed = False
        self._phase = Phase.WAITING_FOR_MEMORY
        self._their_phase = ""
        image = "vllm:other" if self._host.has("peer refused") else "vllm:1"
        identity = {"version": 1, "rank": 0 if peer.is_head else 1, "mode": "tp", "image": image}
        self._send(identity | {"model": str(self._host.model), "generation": generation})

    def get_extra_info(self, _: str) -> tuple[str, int]:
        return (HEAD if self._peer.is_head else WORKER), 1

    def write(self, lines: bytes) -> None:
        for line in lines.splitlines():
            self._take(json.loads(line))

    def close(self) -> None:
        self._closed = True
        self._peer.lose(self)

    def hang_up(self) -> None:
        """The other rank ends the connection."""
        if not self._closed:
            self.reader.feed_eof()
        self.close()

    def enter(self, phase: Phase) -> None:
        """Tell another phase; an end is final."""
        ending = (Phase.DRAINING, Phase.STOPPING, Phase.FAILED)
        if phase in ending or self._phase not in ending:
            self._phase = phase
            self._beat()

    def _take(self, message: dict[str, Any]) -> None:
        if "busy" in message:
            return
        if "phase" not in message:
            self._generation = self._generation or message["generation"]
            self.greeted = True
            self._keep_beating()
            if not self._peer.is_head:
                self._host.loop.call_later(4, self._load)
        elif message["phase"] != self._their_phase:
            self._their_phase = message["phase"]
            if self._their_phase == Phase.LOADING.value and self._peer.is_head:
                self._load()
                self._host.loop.call_later(LOAD_SECONDS, self._serve)
            elif self._their_phase == Phase.SERVING.value and not self._peer.is_head:
                self._serve()

    def _load(self) -> None:
        if not self._host.has("peer stuck"):
            self.enter(Phase.LOADING)

    def _serve(self) -> None:
        if not self._host.has("peer stuck"):
            self.enter(Phase.SERVING)

    def _keep_beating(self) -> None:
        if not self._closed:
            self._beat()
            self._host.loop.call_later(5, self._keep_beating)

    def _beat(self) -> None:
        if not self._closed and not self._host.has("peer silent"):
            if self._phase is Phase.SERVING and self._host.life is not None:
                self._host.life.heard_serving = True
            self._send({"generation": self._generation, "phase": self._phase.value, "cause": "its own"})

    def _send(self, message: dict[str, Any]) -> None:
        self.reader.feed_data(json.dumps(message).encode() + b"\n")


class Life:
    """One process of the agent, and what it has shown of itself."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.context = contextvars.copy_context()
        self.context.run(_life.set, self)
        self.tasks: set[asyncio.Task[Any]] = set()
        self.clients: set[Process] = set()
        self.handlers: dict[int, Callable[[], None]] = {}
        self.blame: set[str] = set(host.ills)
        self.bad_seconds = sum(host.left(fault) for fault in BAD_COMPLETIONS)
        self.began = host.now
        self.status: Status | None = None
        self.phases: list[Phase] = []
        self.container: Container | None = None
        self.heard_serving = False
        self.asked_at: float | None = None
        self.changed = asyncio.Event()
        self.is_over = False
        self.ended_at = float("inf")
        self.exit_status: int | None = None  # None: killed
        self.wedged = False
        # What systemd has heard
        self.ready_at: float | None = None
        self.fed_at = self.extended_at = host.now
        self.stopping_at: float | None = None
        self.triggered = False
        self._run = host.loop.create_task(self._live(), context=self.context)
        self._run.add_done_callback(self._ended)

    async def _live(self) -> int:
        memory = FakeMemory(self.host)
        config = configuration(self.host.rank, self.host.model)
        return await supervisor.Supervisor(config, "", [], memory, self.host.state).run()

    @property
    def reached(self) -> Phase | None:
        """The last phase before it ended."""
        ends = (Phase.STOPPING, Phase.FAILED)
        return next((phase for phase in reversed(self.phases) if phase not in ends), None)

    def signal(self) -> None:
        """Deliver SIGTERM."""
        if not self.is_over:
            self.asked_at = self.host.now if self.asked_at is None else self.asked_at
            handler = self.handlers.get(signal.SIGTERM)
            if handler is None:
                self.kill("SIGTERM")
            else:
                self.context.run(handler)

    def kill(self, cause: str) -> None:
        """End the process without its doing."""
        if not self.is_over:
            self.host.tell(f"agent dies of {cause}")
            self._leave()

    def _ended(self, run: asyncio.Task[int]) -> None:
        if self.is_over:
            return
        if (error := run.exception()) is not None:
            self.host.check(False, f"run() raised {error!r}")
        else:
            self.exit_status = run.result()
            self._judge(self.exit_status)
        self._leave()

    def _leave(self) -> None:
        self.is_over, self.ended_at = True, self.host.now
        self.changed.set()
        for task in tuple(self.tasks):
            task.cancel()
        for client in tuple(self.clients):  # systemd kills what is left in the unit's group
            client.kill()
        if self.host.peer is not None:
            self.host.peer.listener = None

    def _judge(self, status: int) -> None:
        """What must hold when the agent has ended by itself."""
        host = self.host
        host.tell(f"agent exits with {status}, blame {sorted(self.blame)}")
        check = host.check
        check(status in (0, 1, GIVEN_UP), f"exit status {status}")
        check(status != 0 or self.asked_at is not None, "ended well although nobody asked")
        check(host.docker.running is None or host.docker_was_off, "a container is left")
        served = Phase.SERVING in self.phases
        causes = {cause for fault in self.blame for cause in (fault, fault.rpartition(" ")[0])}
        if served and self.bad_seconds < (WATCHDOG.strikes - 1) * WATCHDOG.interval:
            causes -= BAD_COMPLETIONS  # too short for so many strikes
        if self.asked_at is not None:
            check(host.now - self.asked_at <= STOP_SECONDS, "the stop took too long")
            check(status != GIVEN_UP, "gave up although it was asked to stop")
        if status == 0 and self.phases[-1:] == [Phase.FAILED]:
            check(bool(self.blame & PEER_ENDS), "ended well after a failure that is not the other rank's")
        gave_up_at_once = status == GIVEN_UP and self.container is None
        if status != 0 and not gave_up_at_once:
            check(
                bool(causes & (ENDS_SERVING if served else ENDS_START)),
                f"failed without a reason: {self.blame}",
            )

    def take(self, assignments: tuple[str, ...]) -> None:
        """What the agent tells systemd."""
        if self.is_over:
            return
        check, now = self.host.check, self.host.now
        self._look()
        if "READY=1" in assignments:
            check(self._is_verified, "READY before a completion was verified")
        if "WATCHDOG=1" in assignments:
            check(not self.wedged, "the watchdog is fed although the engine is wedged")
        if "WATCHDOG=trigger" in assignments:
            self.wedged = True
        for assignment in assignments:
            check("the agent has a fault" not in assignment, assignment)
        if self.host.has("messages lost"):
            return
        if "READY=1" in assignments and self.ready_at is None:
            self.ready_at = self.fed_at = now
        if "WATCHDOG=1" in assignments:
            self.fed_at = now
        if "STOPPING=1" in assignments and self.stopping_at is None:
            self.stopping_at = now
        if any(assignment.startswith("EXTEND_TIMEOUT_USEC=") for assignment in assignments):
            self.extended_at = now
        self.triggered = self.triggered or "WATCHDOG=trigger" in assignments
        self.changed.set()

    @property
    def _is_verified(self) -> bool:
        if self.host.rank == 1:
            return self.heard_serving
        return self.container is not None and self.container.verified

    def _look(self) -> None:
        """What must hold at every moment."""
        if self.status is None:
            return
        host, check, now = self.host, self.host.check, self.host.now
        phase = self.status.stage.phase
        if not self.phases or phase is not self.phases[-1]:
            host.tell(f"agent: {self.status.line()}")
            if self.status.health()[0] == 200:
                ends = {Phase.DRAINING, Phase.STOPPING, Phase.FAILED} & set(self.phases)
                check(not ends, f"healthy after {ends}")
            self.phases.append(phase)
        if self.status.health()[0] == 200:
            check(phase is Phase.SERVING, f"healthy while {phase}")
            check(self._is_verified, "healthy before a completion was verified")
            check(self.asked_at is None or self.asked_at == now, "healthy after SIGTERM")
        if phase is not Phase.SERVING:
            waited = now - self.status.stage.entered
            check(waited <= LONGEST[phase] + 10, f"still {phase} after {waited:.0f} s")
        if phase in (Phase.STOPPING, Phase.FAILED):
            return
        container = self.container
        if container is None:
            return
        if container.gone_at is not None and not host.has("docker hangs"):
            silence = now - max(container.gone_at, host.ended("docker hangs"))
            check(silence <= LONGEST_SILENCE, f"still {phase} {silence:.0f} s after its container ended")
        if phase is Phase.SERVING and self.ready_at is not None and host.rank != 1 and host.has("wedge"):
            # Progress from before the wedge may first be read when the counters can be read again.
            read_at = max(0 if host.has(ill) else host.ended(ill) for ill in ("metrics hang", "metrics fail"))
            wedged = now - max(host.since("wedge"), self.ready_at, container.reset_at, read_at)
            check(wedged <= LONGEST_WEDGE, f"wedged for {wedged:.0f} s and still serving")


class Unit:
    """systemd, as far as vllm.service asks for it."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.state = "inactive"
        self.life: Life | None = None
        self.lives: list[Life] = []
        self._stop = asyncio.Event()
        self._in_a_row = 0

    def start(self) -> None:
        """systemctl start."""
        if self.state in ("inactive", "failed"):
            self._stop.clear()
            self._enter("activating")
            self._host.spawn(self._serve())

    def stop(self) -> None:
        """systemctl stop; a second one sends no second signal."""
        if not self.rests and not self._stop.is_set():
            self._stop.set()
            if self.life is not None:
                self.life.signal()

    @property
    def rests(self) -> bool:
        """Is there nothing that systemd would still do by itself?"""
        return self.state in ("inactive", "failed")

    def count_container(self) -> None:
        """The agent starts a container; it must not do so again and again in vain."""
        self._in_a_row += 1
        enough = self._in_a_row <= START_LIMIT.burst or "disk full" in self._host.suffered
        self._host.check(enough, f"{self._in_a_row} starts in a row in vain")

    def _forgive(self, life: Life) -> None:
        """What ends a row of vain starts."""
        served = life.ready_at is not None and self._host.now - life.ready_at >= START_LIMIT.served_seconds
        with_its_head_or_worker = life.blame & PEER_ENDS  # which was told to stop, perhaps
        if served or life.asked_at is not None or life.exit_status == GIVEN_UP or with_its_head_or_worker:
            self._in_a_row = 0

    def _enter(self, state: str) -> None:
        if state != self.state:
            self._host.tell(f"systemd: {state}")
            self.state = state

    async def _serve(self) -> None:
        """One activation after the other, as long as they fail and the agent does not give up."""
        while True:
            self._enter("activating")
            ended_well = await self._activate()
            given_up = self.lives != [] and self.lives[-1].exit_status in NO_RESTART
            if ended_well or given_up or self._stop.is_set():
                return self._enter("inactive" if ended_well else "failed")
            self._enter("auto-restart")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTART_SECONDS):
                    await self._stop.wait()
                return self._enter("inactive")

    async def _activate(self) -> bool:
        """ExecStartPre, the agent, ExecStopPost; did it end well?"""
        life = None
        if await self._remove_container(START_SECONDS) and not self._stop.is_set():
            life = self.life = Life(self._host)
            self.lives.append(life)
            await self._watch(life)
            self._forgive(life)
            self.life = None
        self._enter("deactivating")
        await self._remove_container(STOP_SECONDS)
        return life is not None and life.exit_status == 0

    async def _remove_container(self, seconds: float) -> bool:
        """Whether it ended in time; what it said does not matter, by the - before the command."""
        try:
            client = self._host.docker.client(("rm", "--force", NAME), None, None)
        except OSError:
            return True
        try:
            async with asyncio.timeout(seconds):
                await client.wait()
        except TimeoutError:
            client.kill()
            return False
        return True

    async def _watch(self, life: Life) -> None:
        """Until the agent has ended; an agent that makes systemd end it is wrong, unless its engine is wedged."""
        while not life.is_over:
            if life.triggered:
                return life.kill("SIGABRT by its own wish")
            if life.ready_at is not None and self.state == "activating":
                self._enter("active")
            stop_begun = [at for at in (life.stopping_at, life.asked_at) if at is not None]
            if stop_begun:
                until, cause = min(stop_begun) + STOP_SECONDS, "stop"
            elif life.ready_at is None:
                until, cause = max(life.began + START_SECONDS, life.extended_at + 60), "start"
            else:
                until, cause = life.fed_at + WATCHDOG_SECONDS, "watchdog"
            life.changed.clear()
            try:
                async with asyncio.timeout(until - self._host.now):
                    await life.changed.wait()
            except TimeoutError:
                allowed = cause == "watchdog" and life.wedged
                self._host.check(allowed, f"systemd had to end the agent: {cause} timeout")
                life.kill(f"{cause} timeout")


class FakeMemory(Memory):
    """The host's memory."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.folder)
        self._host = host

    def available_gib(self) -> float:
        return 10 if self._host.has("memory short") else 100

    def largest_holders(self, count: int = 3) -> list[Holder]:
        return [Holder(1, "python3", 90, "")]


class FakeNotifier:
    """The agent's end of systemd's socket."""

    watchdog_seconds = WATCHDOG_SECONDS

    def __init__(self) -> None:
        self._life = _life.get()

    def send(self, *assignments: str) -> None:
        assert self._life is not None
        self._life.take(assignments)


class FakeServer:
    """What asyncio.start_server returns, as far as it is used."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def close(self) -> None:
        self._peer.listener = None


def configuration(rank: int | None, model: Path) -> Config:
    """A replica (no rank), the head (0) or the headless rank (1) of a pair."""
    pair = None
    if rank is not None:
        pair = PairConfig(
            rank=rank,
            size=2,
            head=HEAD,
            peer=WORKER if rank == 0 else HEAD,
            heartbeat_port=9403,
            peer_wait_seconds=PEER_WAIT,
            heartbeat_timeout=15,
        )
    return Config(
        mode="replica" if rank is None else "tp",
        unit="vllm.service",
        container=NAME,
        image="vllm:1",
        model=str(model),
        served_model_name="tiny",
        command=["docker", "run", "--rm", "--name", NAME, "vllm:1"],
        environment_file="",
        api=None if rank == 1 else Api(port=8000),
        agent=Agent(port=9401),
        memory=GATE,
        timeouts=LIMITS,
        start_limit=START_LIMIT,
        watchdog=WATCHDOG,
        pair=pair,
    )


@contextlib.contextmanager
def _in_place_of_the_world(host: Host) -> Iterator[None]:
    """Whatever the agent asks for comes from `host`."""

    async def create_subprocess_exec(program: str, *arguments: str, stdout: int, **_: Any) -> Process:
        life = _life.get()
        assert program == "docker"
        assert life is not None
        if arguments[0] == "run":
            host.check(life.asked_at in (None, host.now), "a container is started after SIGTERM")
            host.unit.count_container()
        client = host.docker.client(arguments, stdout if stdout >= 0 else None, life)
        life.clients.add(client)
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:  # as asyncio does
            client.kill()
            raise
        return client

    async def open_connection(address: str, port: int) -> tuple[asyncio.StreamReader, Any]:
        if port == 9403:
            assert host.peer is not None
            link = host.peer.connect()
            return link.reader, link
        container = host.docker.running
        if container is None or not container.listens:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return container.connect()

    async def start_server(greet: Callable[[asyncio.StreamReader, Any], None], *_: Any) -> FakeServer:
        assert host.peer is not None
        host.peer.listener = greet
        return FakeServer(host.peer)

    def status_server(port: int, status: Status) -> None:
        life = _life.get()
        assert life is not None
        if host.has("agent port taken"):
            raise OSError(errno.EADDRINUSE, "Address already in use")
        life.status = status

    def fsync(_: int) -> None:
        if host.has("disk full"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def stage(phase: Phase, cause: str) -> Stage:
        return Stage(phase, cause, entered=host.now)

    class WallClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> WallClock:
            return cls.fromtimestamp(1e9 + host.now + host.wall_offset, tz or UTC)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(None):
        patch.setattr(asyncio, "create_subprocess_exec", create_subprocess_exec)
        patch.setattr(asyncio, "open_connection", open_connection)
        patch.setattr(asyncio, "start_server", start_server)
        patch.setattr(supervisor, "Notifier", FakeNotifier)
        patch.setattr(supervisor, "StatusServer", status_server)
        patch.setattr(status_module, "datetime", WallClock)
        patch.setattr(status_module, "Stage", stage)
        patch.setattr(time, "monotonic", host.loop.time)
        patch.setattr(time, "time", lambda: 1e9 + host.now + host.wall_offset)
        patch.setattr(os, "fsync", fsync)
        yield


def play(rank: int | None, story: Callable[[Host], Coroutine[Any, Any, None]]) -> Host:
    """Let `story` happen to a host that has just booted; fails with all that went wrong, and the events before."""

    async def tell(folder: Path) -> Host:
        host = Host(rank, folder)
        with _in_place_of_the_world(host):
            host.unit.start()
            await story(host)
        return host

    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=VirtualLoop) as runner,
    ):
        host = runner.run(tell(Path(folder)))
    assert not host.wrong, "\n".join([*host.wrong, "after:", *host.trace])
    return host
