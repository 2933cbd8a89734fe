# SPDX-License-Identifier: GPL-3.0-or-later
"""Is the engine busy, idle or wedged? Pure decisions on its counters; no clock, no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from .engine import Counters

_SHARDS = re.compile(r"Loading \S+ checkpoint shards:\s+(\d{1,3})% Completed")


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
