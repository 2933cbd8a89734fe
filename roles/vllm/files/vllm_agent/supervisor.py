# SPDX-License-Identifier: GPL-3.0-or-later
"""The life of one engine, from the wait for memory to the last request, told to systemd as it goes.

One task tells the story in order (`_live`). Three things interrupt it: a wish to stop (SIGTERM, or the other rank
is told to stop), trouble (the engine exits, the pair is lost), and a second SIGTERM, which hastens the stop.
However it ends, no container is left and the exit status says whether the end was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .config import Config
from .container import Container, ContainerError, describe_exit, docker, running_containers
from .engine import Engine, EngineError, NotListening
from .history import History
from .memory import Memory
from .notify import Notifier
from .pair import Pair, PairError
from .progress import capacity, loaded_fraction
from .status import Phase, Status, StatusServer
from .watchdog import Watchdog

STOPPED_AS_ASKED = 0
FAILED = 1
UNUSABLE_CONFIGURATION = 2
GIVEN_UP = 3

_POLL_SECONDS = 0.25
_PULSE_SECONDS = 5.0
_EXTENSION_SECONDS = 60  # systemd gives up on a start when no sign of life came for so long
_KEPT_LINES = 40
_TOLD_LINES = 3
_STARTING_SECONDS = 120
_LONGEST_PAUSE = 3600  # between two lives: the restart's delay, and the wait for the peer
_EXIT_SECONDS = 5  # how long after its port closes a container may take to exit

log = logging.getLogger(__name__)


class Failure(Exception):
    """The engine cannot serve, or no longer; the message is the cause."""


class PeerGone(Failure):
    """The other rank ended, so this one must end too."""


@contextlib.asynccontextmanager
async def _within(seconds: float, complaint: Callable[[], str]) -> AsyncIterator[None]:
    """Bound the block to `seconds`; when they are over, `complaint()` is the cause of the failure."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Failure(complaint()) from None


async def _poll(question: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again until the answer is yes; the caller sets the bound."""
    while True:
        if await question():
            return
        await asyncio.sleep(_POLL_SECONDS)


class Supervisor:
    """Takes one engine through its life; `run` returns the exit status of the agent."""

    def __init__(
        self,
        config: Config,
        api_key: str,
        secrets: Sequence[str],
        memory: Memory,
        state: Path,
        digest: str = "",
    ) -> None:
        self._config = config
        self._secrets = secrets
        self._memory = memory
        self._history = History(state / f"{config.mode}-history.json", memory.boot_id())
        self._status = Status(config, memory, self._history, digest)
        self._notifier = Notifier()
        self._container = Container(config.container, config.command, self._take_line)
        self._engine = Engine(config.api.port, config.served_model_name, api_key) if config.api else None
        self._watchdog = Watchdog(self._engine, config.watchdog, self._status) if self._engine else None
        self._pair: Pair | None = None
        if config.pair is not None:
            self._pair = Pair(config, config.pair, self._take_peer_phase, self._take_loss)
            self._status.describe_pair = self._pair.describe
        self._now = asyncio.get_running_loop().time  # monotonic
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._ready = False
        self._wedged = False
        self._asked = False  # SIGTERM came
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._head_gone = asyncio.Event()
        self._trouble: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Live until a stop or a failure, clean up, and return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._take_signal)
        self._keep(self._pulse())
        failure: Failure | None = None
        graceful = False
        try:
            await self._until(self._stop, self._live())
            graceful = self._status.stage.phase is Phase.SERVING
            if graceful:
                self._enter(Phase.DRAINING)
                await self._until(self._hurry, self._drain())
        except Failure as error:
            failure = error
        except Exception as error:
            log.exception("the agent has a fault")
            failure = Failure(f"the agent has a fault: {error!r}")
        await self._end(failure, graceful and failure is None)
        if failure is None or self._asked:
            self._history.forgive()
        if self._asked and (failure is None or isinstance(failure, PeerGone)):
            return STOPPED_AS_ASKED
        if isinstance(failure, PeerGone):
            self._history.take_back_attempt()
        elif self._history.is_last_attempt(self._config.start_limit.burst):
            self._give_up()
            return GIVEN_UP
        return FAILED

    # The story

    async def _live(self) -> None:
        """From the first check to serving; ends only by an exception."""
        self._check_ourselves()
        await self._check_docker()
        if self._pair is not None:
            await self._meet_peer(self._pair)
        self._count_attempt()
        await self._wait_for_memory()
        if self._pair is not None and self._pair.is_head:
            await self._wait_for_worker(self._pair)
        started = self._now()
        await self._start()
        if self._engine is not None:
            await self._load(self._engine)
            await self._verify(self._engine)
        elif self._pair is not None:
            await self._wait_for_head(self._pair)
        self._history.remember_start(self._config.image, self._now() - started)
        self._enter(Phase.SERVING)
        self._ready = True
        self._notifier.send("READY=1", self._status_line())
        self._keep(self._forgive_in_time())
        if self._watchdog is not None:
            await self._watch(self._watchdog)
        else:
            await asyncio.Event().wait()  # the head watches for both ranks

    def _check_ourselves(self) -> None:
        """Take the agent's port and look for the model."""
        config = self._config
        try:
            StatusServer(config.agent.port, self._status)
        except OSError as error:
            raise Failure(f"the agent cannot listen on port {config.agent.port}: {error.strerror}") from error
        if not Path(config.model).is_dir():
            raise Failure(f"the model folder {config.model} does not exist")

    async def _check_docker(self) -> None:
        """Find what would make the start fail later and with a worse message; leave no old container."""
        status, output = await docker("version", "--format", "{{.Server.Version}}")
        if status != 0:
            raise Failure(f"the Docker engine does not answer: {output}")
        await self._container.remove()
        if self._engine is not None and await self._engine.port_is_open():
            raise Failure(f"port {self._engine.port} is taken by another process")

    async def _meet_peer(self, pair: Pair) -> None:
        def report(reason: str) -> None:
            self._status.detail = f"{pair.peer}: {reason}"

        report("nothing heard")
        try:
            await pair.form(report)
        except PairError as error:
            raise Failure(str(error)) from error

    def _count_attempt(self) -> None:
        """Not before the peer is met: waiting for it costs nothing, and may take for as long as it is away."""
        limits, gate, start_limit = self._config.timeouts, self._config.memory, self._config.start_limit
        longest_life = gate.wait_seconds + limits.start + limits.verify + start_limit.served_seconds
        if not self._history.begin_attempt(start_limit.burst, longest_life + _LONGEST_PAUSE):
            raise Failure(self._history.last_failure or "killed before it could tell why")

    async def _forgive_in_time(self) -> None:
        await asyncio.sleep(self._config.start_limit.served_seconds)
        self._history.forgive()

    async def _wait_for_memory(self) -> None:
        gate = self._config.memory
        self._enter(Phase.WAITING_FOR_MEMORY)
        if gate.drop_page_cache:
            try:
                await self._memory.drop_page_cache()
            except OSError as error:
                log.warning("the page cache cannot be dropped: %s", error)
        if self._memory.available_gib() >= gate.budget_gib:
            return
        holders = await self._describe_holders()
        complaint = f"not enough memory after {gate.wait_seconds:g} s: "
        async with _within(gate.wait_seconds, lambda: complaint + self._status.detail):
            while (available := self._memory.available_gib()) < gate.budget_gib:
                figures = f"{gate.budget_gib:.1f} GiB needed, {available:.1f} GiB available"
                self._status.detail = f"{figures}; {holders}"
                await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_worker(self, pair: Pair) -> None:
        """Worker first, head last: its engine must be up before ours looks for it."""
        self._enter(Phase.WAITING_FOR_PEER)
        self._status.detail = f"engine of {pair.peer}"
        bound = self._config.memory.wait_seconds + 60
        async with _within(bound, lambda: f"the engine of {pair.peer} was not started within {bound:g} s"):
            await pair.wait_for_peer(Phase.LOADING)

    async def _start(self) -> None:
        self._enter(Phase.STARTING)
        self._history.count_start()
        try:
            await self._container.start()
        except ContainerError as error:
            raise Failure(str(error)) from error
        self._keep(self._await_exit())
        complaint = f"docker did not start the container within {_STARTING_SECONDS} s"
        async with _within(_STARTING_SECONDS, lambda: complaint):
            await _poll(self._container.is_running)
        self._enter(Phase.LOADING)

    async def _load(self, engine: Engine) -> None:
        bound = self._config.timeouts.start
        async with _within(bound, lambda: f"the engine was not healthy within {bound:g} s{self._told()}"):
            await _poll(engine.healthy)

    async def _verify(self, engine: Engine) -> None:
        """One real completion; a server that listens is not yet an engine that generates."""
        self._enter(Phase.VERIFYING)
        bound = self._config.timeouts.verify
        complaint = f"the engine is healthy but gave no completion within {bound:g} s"
        async with _within(bound, lambda: f"{complaint}; {self._status.detail or 'no answer'}"):
            while True:
                try:
                    return await engine.complete_one_token(bound)
                except EngineError as error:
                    if error.final:
                        raise Failure(f"the engine refuses to serve: {error}") from error
                    self._status.detail = str(error)
                await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_head(self, pair: Pair) -> None:
        """A headless rank has no API to ask; it is ready when the head is."""
        limits = self._config.timeouts
        bound = self._config.memory.wait_seconds + limits.start + limits.verify
        async with _within(bound, lambda: f"{pair.peer} was not serving within {bound:g} s"):
            await pair.wait_for_peer(Phase.SERVING)

    async def _watch(self, watchdog: Watchdog) -> None:
        """Serve until the engine is wedged; then let systemd's watchdog end us, or else end by ourselves."""
        try:
            cause = await watchdog.watch()
        except NotListening as error:
            await self._explain(error)
        self._fail(cause)
        self._wedged = True
        self._notifier.send("WATCHDOG=trigger")
        await asyncio.sleep((self._notifier.watchdog_seconds or 0) + 1)
        raise Failure(cause)

    async def _explain(self, error: NotListening) -> NoReturn:
        """The engine ended, and its exit status, soon to come, tells more than that; or it was restarted."""
        self._status.lost = str(error)
        await asyncio.sleep(_EXIT_SECONDS)
        raise Failure(f"{error} although the container runs; was it restarted from outside?")

    async def _drain(self) -> None:
        """Let the requests in flight finish; the health check says draining meanwhile."""
        limits = self._config.timeouts
        if self._watchdog is None:  # the head drains; our half of the model must outlive that
            bound = limits.drain_notice + limits.drain + limits.container_stop + 15
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(bound):
                    await self._head_gone.wait()
            return
        await asyncio.sleep(limits.drain_notice)
        idle_looks = 0
        try:
            async with asyncio.timeout(limits.drain):
                while idle_looks < 2:  # a request on its way into the engine is not counted for a moment
                    counters = await self._watchdog.scrape()
                    idle_looks = idle_looks + 1 if counters is not None and counters.in_flight == 0 else 0
                    self._status.detail = f"{counters.in_flight if counters else '?'} in flight"
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            log.warning("drain time of %g s is over: %s", limits.drain, self._status.detail)
        except NotListening as error:
            await self._explain(error)

    async def _end(self, failure: Failure | None, graceful: bool) -> None:
        """End the engine, leave nothing behind, tell why."""
        if failure is None:
            if not self._asked:
                log.info("the other rank was told to stop; this one stops with it and starts afresh")
            self._enter(Phase.STOPPING)
        elif self._status.stage.phase is not Phase.FAILED:
            self._fail(str(failure))
        self._notifier.send("STOPPING=1", self._status_line())
        grace = self._config.timeouts.container_stop if graceful and self._engine is not None else None
        await self._container.end(grace, self._hurry)
        if self._pair is not None:
            await self._pair.close()
        for task in tuple(self._background):
            task.cancel()

    def _give_up(self) -> None:
        """Nobody will start this unit again but a person, so tell what to do."""
        self._history.forgive()
        limit, unit = self._config.start_limit, self._config.unit
        self._enter(
            Phase.FAILED,
            f"stays down, as {limit.burst} starts in a row failed without serving for {limit.served_seconds:g} s; "
            f"mend the cause, then: systemctl reset-failed {unit}; systemctl start {unit}. "
            f"The cause: {self._status.stage.cause}",
        )

    # What interrupts it

    async def _until(self, interrupt: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` until it is done or `interrupt` is set; raises the Failure that comes first."""
        working = asyncio.create_task(work)
        waiting = asyncio.create_task(interrupt.wait())
        try:
            firsts: set[asyncio.Future[Any]] = {working, waiting, self._trouble}
            await asyncio.wait(firsts, return_when=asyncio.FIRST_COMPLETED)
            if self._trouble.done():
                raise self._trouble.result()
            if working.done():
                working.result()
        finally:
            for task in (working, waiting):
                task.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)

    def _interrupt(self, failure: Failure) -> None:
        if not self._trouble.done():
            self._trouble.set_result(failure)

    def _take_signal(self) -> None:
        if self._asked:
            self._hurry.set()
        self._asked = True
        self._stop.set()

    def _take_peer_phase(self, phase: Phase, cause: str) -> None:
        assert self._pair is not None
        if phase is Phase.FAILED:
            self._interrupt(PeerGone(f"{self._pair.peer} failed: {cause}"))
        elif self._pair.is_head and phase is Phase.DRAINING:
            self._stop.set()
        elif self._pair.is_head and phase is Phase.STOPPING:
            self._interrupt(PeerGone(f"{self._pair.peer} is stopping"))

    def _take_loss(self, error: PairError) -> None:
        assert self._pair is not None
        if self._stop.is_set() and not self._pair.is_head:
            self._head_gone.set()  # it has drained and ended, as we wait for it to
        else:
            self._interrupt(PeerGone(str(error)))

    async def _await_exit(self) -> None:
        status = await self._container.wait()
        if status == -signal.SIGTERM:
            await asyncio.sleep(_POLL_SECONDS)  # `systemctl kill` gives it to us and to the docker client
            if self._asked:
                self._hurry.set()
                return
        phase = self._status.stage.phase
        self._interrupt(Failure(f"engine exited with {describe_exit(status)} while {phase}{self._told()}"))

    # What it tells

    async def _pulse(self) -> None:
        """Show systemd that this loop turns: by asking for more time to start, then by its watchdog.

        Says again what was said before, as a message may be lost while systemd is busy.
        """
        period = min(_PULSE_SECONDS, (self._notifier.watchdog_seconds or _PULSE_SECONDS * 3) / 3)
        while True:
            if not self._ready:
                self._notifier.send(f"EXTEND_TIMEOUT_USEC={_EXTENSION_SECONDS * 10**6}", self._status_line())
            elif self._status.stage.phase is Phase.SERVING:
                self._notifier.send("READY=1", "WATCHDOG=1", self._status_line())
            elif not self._wedged:
                self._notifier.send("WATCHDOG=1", self._status_line())
            await asyncio.sleep(period)

    def _status_line(self) -> str:
        return f"STATUS={self._status.line()}"

    def _enter(self, phase: Phase, cause: str = "") -> None:
        self._status.enter(phase, cause)
        if self._pair is not None:
            self._pair.tell(phase, cause)
        self._notifier.send(self._status_line())
        level = logging.ERROR if phase is Phase.FAILED else logging.INFO
        log.log(level, "%s%s", phase, cause and f": {cause}")

    def _fail(self, cause: str) -> None:
        self._history.count_failure(cause)
        if self._last_lines:
            log.error("the engine's last lines were:\n%s", "\n".join(self._last_lines))
        self._enter(Phase.FAILED, cause)

    def _take_line(self, line: str) -> None:
        """One line of the engine's log: to the journal, and what it tells to the status."""
        for secret in self._secrets:
            line = line.replace(secret, "***")
        with contextlib.suppress(OSError):  # an engine must not stall because its log cannot be written
            print(line, flush=True)
        self._last_lines.append(line)
        if (fraction := loaded_fraction(line)) is not None:
            self._status.loaded_fraction = fraction
        if told := capacity(line):
            self._status.capacity = {**self._status.capacity, **told}

    def _told(self) -> str:
        lines = list(self._last_lines)[-_TOLD_LINES:]
        return f"; last lines: {' | '.join(lines)[-400:]}" if lines else ""

    async def _describe_holders(self) -> str:
        """Who may hold the memory: the largest processes and the running containers."""
        names = await running_containers()
        processes = []
        for holder in self._memory.largest_holders():
            inside = names.get(holder.container_id, holder.container_id[:12])
            where = f" in container {inside}" if inside else ""
            processes.append(f"{holder.name}{where} (pid {holder.pid}, {holder.gib:.1f} GiB)")
        containers = ", ".join(sorted(names.values())) or "none"
        return f"largest processes: {', '.join(processes)}; running containers: {containers}"

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` beside the story; an exception in it is a failure and not silence."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._interrupt(Failure(f"the agent has a fault: {error!r}"))
