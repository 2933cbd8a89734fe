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
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from .config import Config
from .container import Container, ContainerError, describe_exit, docker, running_containers
from .engine import Counters, Engine, EngineError
from .history import History
from .memory import Memory
from .notify import Notifier
from .pair import Pair, PairError
from .progress import Verdict, Watch, loaded_fraction
from .status import Phase, Status, StatusServer

STOPPED_AS_ASKED = 0
FAILED = 1
UNUSABLE_CONFIGURATION = 2

_POLL_SECONDS = 0.25
_PULSE_SECONDS = 5.0
_EXTENSION_SECONDS = 60  # systemd gives up on a start when no sign of life came for so long
_KEPT_LINES = 40
_TOLD_LINES = 3

log = logging.getLogger(__name__)


class Failure(Exception):
    """The engine cannot serve, or no longer; the message is the cause."""


class PeerGone(Failure):
    """The other rank ended, so this one must end too."""


class Supervisor:
    """Takes one engine through its life; `run` returns the exit status of the agent."""

    def __init__(
        self, config: Config, api_key: str, secrets: Sequence[str], memory: Memory, state: Path
    ) -> None:
        self._config = config
        self._secrets = secrets
        self._memory = memory
        self._history = History(state / f"{config.mode}-history.json")
        self._status = Status(config, memory, self._history)
        self._notifier = Notifier()
        self._container = Container(config.container, config.command, self._take_line)
        self._engine = Engine(config.api.port, config.served_model_name, api_key) if config.api else None
        self._pair: Pair | None = None
        if config.pair is not None:
            self._pair = Pair(config, config.pair, self._take_peer_phase, self._take_loss)
            self._status.describe_pair = self._pair.describe
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
        if self._asked and (failure is None or isinstance(failure, PeerGone)):
            return STOPPED_AS_ASKED
        return FAILED

    # The story

    async def _live(self) -> None:
        """From the first check to serving; ends only by an exception."""
        self._check_ourselves()
        await self._check_docker()
        if self._pair is not None:
            await self._meet_peer(self._pair)
        await self._wait_for_memory()
        if self._pair is not None and self._pair.is_head:
            await self._wait_for_worker(self._pair)
        started = await self._start()
        if self._engine is None:
            assert self._pair is not None
            await self._wait_for_head(self._pair)
        else:
            await self._load(self._engine)
            await self._verify(self._engine)
        self._history.remember_start(self._config.image, time.monotonic() - started)
        self._enter(Phase.SERVING)
        self._ready = True
        self._notifier.send("READY=1", self._status_line())
        if self._engine is None:
            await asyncio.Event().wait()  # the head watches for both ranks
        else:
            await self._watch(self._engine)

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
        self._status.detail = pair.peer

        def report(reason: str) -> None:
            self._status.detail = f"{pair.peer}: {reason}"

        try:
            await pair.form(report)
        except PairError as error:
            raise Failure(str(error)) from error

    async def _wait_for_memory(self) -> None:
        gate = self._config.memory
        self._enter(Phase.WAITING_FOR_MEMORY)
        if gate.drop_page_cache:
            try:
                await self._memory.drop_page_cache()
            except OSError as error:
                log.warning("the page cache cannot be dropped: %s", error)
        deadline = time.monotonic() + gate.wait_seconds
        while (available := self._memory.available_gib()) < gate.budget_gib:
            missing = f"{gate.budget_gib:.1f} GiB needed, {available:.1f} GiB available"
            if time.monotonic() >= deadline:
                raise Failure(
                    f"not enough memory after {gate.wait_seconds:g} s: {missing}; "
                    f"{await self._describe_holders()}"
                )
            if not self._status.detail:
                log.info("%s; %s", missing, await self._describe_holders())
            self._status.detail = missing
            await asyncio.sleep(_POLL_SECONDS)

    async def _wait_for_worker(self, pair: Pair) -> None:
        """Worker first, head last: its engine must be up before ours looks for it."""
        self._enter(Phase.WAITING_FOR_PEER)
        self._status.detail = f"engine of {pair.peer}"
        wait = self._config.memory.wait_seconds + 60
        try:
            async with asyncio.timeout(wait):
                await pair.wait_for_peer(Phase.STARTING, Phase.LOADING)
        except TimeoutError:
            raise Failure(f"the engine of {pair.peer} was not started within {wait:g} s") from None

    async def _start(self) -> float:
        """Start the container; returns the monotonic time of the start."""
        self._enter(Phase.STARTING)
        self._history.count_start()
        try:
            await self._container.start()
        except ContainerError as error:
            raise Failure(str(error)) from error
        self._keep(self._await_exit())
        return time.monotonic()

    async def _load(self, engine: Engine) -> None:
        bound = self._config.timeouts.start
        try:
            async with asyncio.timeout(bound):
                while True:
                    if await engine.healthy():
                        return
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise Failure(f"the engine did not get healthy within {bound:g} s{self._told()}") from None

    async def _verify(self, engine: Engine) -> None:
        """One real completion; a server that listens is not yet an engine that generates."""
        self._enter(Phase.VERIFYING)
        bound = self._config.timeouts.verify
        reason = ""
        try:
            async with asyncio.timeout(bound):
                while True:
                    try:
                        return await engine.complete_one_token(bound)
                    except EngineError as error:
                        if error.final:
                            raise Failure(f"the engine refuses to serve: {error}") from error
                        reason = f": {error}"
                        self._status.detail = str(error)
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise Failure(f"healthy, but no completion within {bound:g} s{reason}") from None

    async def _wait_for_head(self, pair: Pair) -> None:
        """A headless rank has no API to ask; it is ready when the head is."""
        limits = self._config.timeouts
        bound = self._config.memory.wait_seconds + limits.start + limits.verify
        try:
            async with asyncio.timeout(bound):
                await pair.wait_for_peer(Phase.SERVING)
        except TimeoutError:
            raise Failure(f"the head was not serving within {bound:g} s") from None

    async def _watch(self, engine: Engine) -> None:
        """Look at the engine at each interval; ends only when it is wedged."""
        settings = self._config.watchdog
        watch = Watch(settings.strikes, settings.canary_timeout)
        canary: asyncio.Task[str] | None = None
        try:
            while True:
                verdict = watch.look(time.monotonic(), await self._scrape(engine))
                if canary is not None and verdict is Verdict.BUSY:
                    canary.cancel()  # it has its answer
                    canary = None
                elif canary is not None and canary.done():
                    self._judge(canary.result(), watch)
                    canary = None
                if watch.wedged:
                    await self._give_up_wedged(watch.strikes)
                if canary is None and verdict is Verdict.SUSPECT:
                    canary = asyncio.create_task(self._send_canary(engine, settings.canary_timeout))
                await asyncio.sleep(settings.interval)
        finally:
            if canary is not None:
                canary.cancel()

    async def _send_canary(self, engine: Engine, seconds: float) -> str:
        """Ask for one token; returns what went wrong, empty when it came."""
        self._status.canaries += 1
        try:
            await engine.complete_one_token(seconds)
        except EngineError as error:
            return str(error)
        return ""

    def _judge(self, complaint: str, watch: Watch) -> None:
        if not complaint:
            watch.canary_passed(time.monotonic())
            return
        self._status.canary_failures += 1
        watch.canary_failed()
        log.warning("strike %d of %d: no progress, and %s", watch.strikes, watch.strikes_allowed, complaint)

    async def _scrape(self, engine: Engine) -> Counters | None:
        """Read the engine's counters into the status; None when they cannot be read."""
        try:
            counters = await engine.counters()
        except EngineError as error:
            log.warning("%s", error)
            return None
        self._status.take_counters(counters)
        return counters

    async def _give_up_wedged(self, strikes: int) -> None:
        """Let systemd's watchdog end us; when nothing does, end by ourselves."""
        cause = f"wedged: no progress and {strikes} canaries failed"
        self._fail(cause)
        self._wedged = True
        self._notifier.send("WATCHDOG=trigger")
        await asyncio.sleep((self._notifier.watchdog_seconds or 0) + 1)
        raise Failure(cause)

    async def _drain(self) -> None:
        """Let the requests in flight finish; the health check says draining meanwhile."""
        limits = self._config.timeouts
        if self._engine is None:  # the head drains; our half of the model must outlive that
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
                    counters = await self._scrape(self._engine)
                    idle_looks = idle_looks + 1 if counters is not None and counters.in_flight == 0 else 0
                    self._status.detail = f"{counters.in_flight if counters else '?'} in flight"
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            log.warning("drain time of %g s is over: %s", limits.drain, self._status.detail)

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
        self._interrupt(
            Failure(
                f"engine exited with {describe_exit(status)} while {self._status.stage.phase}{self._told()}"
            )
        )

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
        self._history.count_failure()
        self._enter(Phase.FAILED, cause)
        if self._last_lines:
            log.error("the engine's last lines were:\n%s", "\n".join(self._last_lines))

    def _take_line(self, line: str) -> None:
        """One line of the engine's log: to the journal, and what it tells to the status."""
        for secret in self._secrets:
            line = line.replace(secret, "***")
        with contextlib.suppress(OSError):  # an engine must not stall because its log cannot be written
            print(line, flush=True)
        self._last_lines.append(line)
        if (fraction := loaded_fraction(line)) is not None:
            self._status.loaded_fraction = fraction
        if self._status.stage.phase is Phase.STARTING:
            self._enter(Phase.LOADING)

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
