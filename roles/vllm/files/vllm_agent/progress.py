# SPDX-License-Identifier: GPL-3.0-or-later
"""What an engine is at: busy, idle or wedged by its counters, and how far by its log. Pure: no clock, no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from .engine import Counters

_SHARDS = re.compile(r"Loading \S+ checkpoint shards:\s+(\d{1,3})% Completed")
# One line since vLLM 0.32, two before.
_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")
_LONGEST = re.compile(r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x")


class Verdict(Enum):
    """What one look at the engine says."""

    BUSY = "its counters advance"
    IDLE = "nothing to do"
    SUSPECT = "worth a canary"


@dataclass
class Watch:
    """Judges a serving engine from looks at its counters and from the canaries that the verdicts ask for.

    strikes_allowed: failed canaries in a row that mean wedged. quiet_seconds: how long an idle engine may
    show no progress before a canary proves that it still can. Times are monotonic seconds.
    """

    strikes_allowed: int
    quiet_seconds: float
    strikes: int = 0
    _before: Counters | None = None
    _last_progress: float = 0.0

    @property
    def wedged(self) -> bool:
        """So many canaries have failed in a row that nothing else explains it."""
        return self.strikes >= self.strikes_allowed

    def look(self, now: float, counters: Counters | None) -> Verdict:
        """Judge the counters read at `now`; None means that they could not be read, which is not idleness."""
        if counters is None:
            return Verdict.SUSPECT
        before, self._before = self._before, counters
        if before is None or counters.work < before.work:  # first look, or the counters began anew
            self._last_progress = now
            return Verdict.IDLE
        if counters.progressed_since(before):
            self._last_progress = now
            self.strikes = 0
            return Verdict.BUSY
        quiet = now - self._last_progress >= self.quiet_seconds
        return Verdict.SUSPECT if counters.in_flight or quiet else Verdict.IDLE

    def canary_passed(self, now: float) -> None:
        """A canary was answered."""
        self.strikes = 0
        self._last_progress = now

    def canary_failed(self) -> None:
        """A canary was refused or timed out although no progress was seen meanwhile."""
        self.strikes += 1


def loaded_fraction(line: str) -> float | None:
    """The share of the weights that is loaded (0 to 1) if this line of the engine's log tells it."""
    found = _SHARDS.search(line)
    return min(int(found.group(1)), 100) / 100 if found else None


def capacity(line: str) -> dict[str, float]:
    """What this line of the engine's log tells of its room: ``kv_tokens`` that its KV cache holds, ``context_tokens`` of
    the longest request, and how many such requests it holds (``full_context_requests``).

    Only the engine can tell: of hybrid models the room cannot be computed from their configuration.
    """
    found: dict[str, float] = {}
    if size := _CACHE.search(line):
        found["kv_tokens"] = _number(size.group(1))
    if longest := _LONGEST.search(line):
        found["context_tokens"] = _number(longest.group(1))
        found["full_context_requests"] = float(longest.group(2))
    return found


def _number(text: str) -> int:
    return int(text.replace(",", ""))
