# SPDX-License-Identifier: GPL-3.0-or-later
"""What is remembered from one run of the agent to the next, in one small JSON file per mode."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

_MOST_IMAGES = 16

log = logging.getLogger(__name__)


def _since_boot() -> float:
    """Seconds, sleep included; the wall clock may step."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class History:
    """Counts starts and failures and remembers how long the engine took to become ready, per image.

    The file is `<state folder>/<mode>-history.json`:
    {"starts": 3, "failures": 1, "last_failure": "engine exited ...", "last_start_seconds": 412.0,
     "start_seconds": {"<image>": 412.0}, "attempts": {"boot": "<boot id>", "at": 4711.0, "count": 1}}
    An attempt is a life of the agent that has neither served for long nor been asked to stop. It is counted when
    it begins, since an agent that is killed cannot count; those of an earlier boot do not count, since then the
    power may have failed, nor those of long ago (`at` is in seconds since the boot).
    """

    def __init__(self, path: Path, boot: str = "") -> None:
        self._path = path
        self._boot = boot
        self.attempts = 0
        self._attempted_at = 0.0
        self._is_counted = False
        self.last_failure = ""
        self.starts = 0
        self.failures = 0
        self.last_start_seconds: float | None = None
        self._start_seconds: dict[str, float] = {}
        try:
            self._read()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be used (%s); counting from zero again", path, error)

    def expected_seconds(self, image: str) -> float | None:
        """How long the last start with this image took, in seconds."""
        return self._start_seconds.get(image)

    def count_start(self) -> None:
        """An engine container is being started."""
        self.starts += 1
        self._write()

    def count_failure(self, cause: str) -> None:
        """The engine or the agent ended in a way that nobody asked for."""
        self.failures += 1
        self.last_failure = cause
        self._write()

    def begin_attempt(self, most: int, memory_seconds: float) -> bool:
        """Count this life; False when `most` in a row have failed already, and so it must not begin.

        After `memory_seconds` without a word it was a person who started it, and nothing before counts.
        """
        if _since_boot() - self._attempted_at > memory_seconds:
            self.attempts = 0
        if self.attempts >= most:
            return False
        self.attempts += 1
        self._is_counted = True
        self._write()
        return True

    def take_back_attempt(self) -> None:
        """This life ended by no fault of its own."""
        if self._is_counted:
            self._is_counted = False
            self.attempts -= 1
            self._write()

    def is_last_attempt(self, most: int) -> bool:
        """Was this life, should it fail, the last of `most` in a row?"""
        return self.attempts >= most

    def forgive(self) -> None:
        """It has served for long, was asked to stop, or stays down: the next failure is the first in a row."""
        if self.attempts:
            self.attempts = 0
            self._write()

    def remember_start(self, image: str, seconds: float) -> None:
        """The engine became ready `seconds` after its container was started."""
        self.last_start_seconds = round(seconds, 1)
        self._start_seconds.pop(image, None)
        self._start_seconds[image] = self.last_start_seconds
        while len(self._start_seconds) > _MOST_IMAGES:
            del self._start_seconds[next(iter(self._start_seconds))]
        self._write()

    def _read(self) -> None:
        document = json.loads(self._path.read_text(encoding="utf-8"))
        last = document["last_start_seconds"]
        durations = {str(image): float(seconds) for image, seconds in document["start_seconds"].items()}
        self.starts, self.failures = int(document["starts"]), int(document["failures"])
        self.last_start_seconds = None if last is None else float(last)
        self._start_seconds = durations
        self.last_failure = str(document.get("last_failure", ""))
        attempts = document.get("attempts", {})
        if attempts.get("boot") == self._boot:
            self.attempts, self._attempted_at = int(attempts["count"]), float(attempts["at"])

    def _write(self) -> None:
        document = {
            "starts": self.starts,
            "failures": self.failures,
            "last_failure": self.last_failure,
            "last_start_seconds": self.last_start_seconds,
            "start_seconds": self._start_seconds,
            "attempts": {"boot": self._boot, "at": round(_since_boot(), 1), "count": self.attempts},
        }
        temporary = self._path.with_suffix(".new")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
        except OSError as error:  # a full disk must not end a serving engine
            log.warning("%s cannot be written: %s", self._path, error.strerror)
