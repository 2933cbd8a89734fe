# SPDX-License-Identifier: GPL-3.0-or-later
"""Watches a serving engine: looks at its counters, and asks for a token only when they do not tell enough."""

from __future__ import annotations

import asyncio
import logging

from .config import WatchdogConfig
from .engine import Counters, Engine, EngineError, NotListening
from .progress import Verdict, Watch
from .status import Status

log = logging.getLogger(__name__)


class Watchdog:
    """The watchdog inside the unit; what it sees goes into `status`."""

    def __init__(self, engine: Engine, settings: WatchdogConfig, status: Status) -> None:
        self._engine = engine
        self._settings = settings
        self._status = status

    async def scrape(self) -> Counters | None:
        """Read the engine's counters; None when they cannot be read. Raises NotListening."""
        try:
            counters = await self._engine.counters()
        except NotListening:
            raise
        except EngineError as error:
            log.warning("%s", error)
            return None
        self._status.take_counters(counters)
        return counters

    async def watch(self) -> str:
        """Look at the engine at each interval; returns the cause when it is wedged. Raises NotListening."""
        watch = Watch(self._settings.strikes, self._settings.canary_timeout)
        now = asyncio.get_running_loop().time
        canary: asyncio.Task[str] | None = None
        try:
            while True:
                verdict = watch.look(now(), await self.scrape())
                if canary is not None and verdict is Verdict.BUSY:
                    canary.cancel()  # it has its answer
                    canary = None
                elif canary is not None and canary.done():
                    self._judge(canary.result(), watch, now())
                    canary = None
                self._status.strikes = watch.strikes
                if watch.wedged:
                    return f"wedged: no progress and {watch.strikes} canaries failed"
                if canary is None and verdict is Verdict.SUSPECT:
                    canary = asyncio.create_task(self._send_canary())
                await asyncio.sleep(self._settings.interval)
        finally:
            if canary is not None:
                canary.cancel()

    async def _send_canary(self) -> str:
        """Ask for one token; returns what went wrong, empty when it came."""
        self._status.canaries += 1
        try:
            await self._engine.complete_one_token(self._settings.canary_timeout)
        except EngineError as error:
            return str(error)
        return ""

    def _judge(self, complaint: str, watch: Watch, now: float) -> None:
        if not complaint:
            watch.canary_passed(now)
            return
        self._status.canary_failures += 1
        watch.canary_failed()
        log.warning("strike %d of %d: no progress, and %s", watch.strikes, watch.strikes_allowed, complaint)
