# SPDX-License-Identifier: GPL-3.0-or-later
"""The watchdog on a scripted engine: what it asks, and when it gives up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_agent.config import WatchdogConfig
from vllm_agent.engine import Counters, Engine, EngineError, NotListening
from vllm_agent.status import Status
from vllm_agent.watchdog import Watchdog

BUSY, STILL = "busy", "still"
INTERVAL = 0.02


class ScriptedEngine:
    """Answers each scrape as the script says, the last line for ever; canaries fail or hang."""

    def __init__(self, script: list[str | Exception], hangs: bool = False) -> None:
        self._script = script
        self._hangs = hangs
        self._work = 0.0
        self.hanging = 0

    async def counters(self) -> Counters:
        line = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if isinstance(line, Exception):
            raise line
        self._work += line == BUSY
        return Counters(1, 0, self._work, 0, 0, None)

    async def complete_one_token(self, seconds: float) -> None:
        if self._hangs:
            self.hanging += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.hanging -= 1
        raise EngineError("no token")


def watch(engine: ScriptedEngine, seconds: float = 2) -> tuple[str, Any]:
    """Run the watchdog; returns its cause (empty: none within `seconds`) and what it counted."""
    status: Any = SimpleNamespace(canaries=0, canary_failures=0, take_counters=lambda counters: None)
    settings = WatchdogConfig(interval=INTERVAL, canary_timeout=60, strikes=3)

    async def session() -> str:
        try:
            async with asyncio.timeout(seconds):
                return await Watchdog(cast(Engine, engine), settings, cast(Status, status)).watch()
        except TimeoutError:
            return ""

    return asyncio.run(session()), status


def test_three_canaries_that_fail_are_enough() -> None:
    cause, status = watch(ScriptedEngine([STILL]))
    assert cause == "wedged: no progress and 3 canaries failed"
    assert (status.canaries, status.canary_failures) == (3, 3)


def test_a_busy_engine_gets_no_canary() -> None:
    cause, status = watch(ScriptedEngine([BUSY]), seconds=0.3)
    assert (cause, status.canaries) == ("", 0)


def test_progress_answers_a_canary_that_waits_behind_a_long_prefill() -> None:
    engine = ScriptedEngine([STILL, STILL, BUSY, BUSY, STILL], hangs=True)
    cause, status = watch(engine, seconds=0.4)
    assert (cause, status.canary_failures) == ("", 0)
    assert status.canaries == 2  # a second one, as the first had its answer
    assert engine.hanging == 0


def test_a_scrape_that_fails_brings_a_canary_too() -> None:
    cause, status = watch(ScriptedEngine([EngineError("/metrics did not answer")]))
    assert cause.startswith("wedged")
    assert status.canaries == 3


def test_a_port_without_a_listener_is_no_case_for_canaries() -> None:
    with pytest.raises(NotListening):
        watch(ScriptedEngine([BUSY, NotListening("nobody listens on port 1")]))
