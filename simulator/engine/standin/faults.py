# SPDX-License-Identifier: GPL-3.0-or-later
"""Faults on demand: words in an environment variable or in a file that is read while the engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from standin.config import Settings

POLL_SECONDS = 0.1
_WITHOUT_NUMBER = ("crash", "crash-while-loading", "wedge", "refuse", "deaf")
_WITH_NUMBER = ("slow", "exit")


class Faults:
    """The faults in force. One fault per line or `;`; `log` gets what cannot be understood."""

    def __init__(self, settings: Settings, log: Callable[[str], None]) -> None:
        self._settings = settings
        self._log = log
        self._text: str | None = None
        self._active: dict[str, float] = {}
        self.ready = False
        self.unwedged = asyncio.Event()  # not set while health says 200 and nothing moves
        self.read()

    def read(self) -> None:
        """Take up what environment and control file say now."""
        texts = [self._settings.fault_at_start, self._control_text()]
        if self.ready:
            texts.append(self._settings.fault_when_ready)
        text = ";".join(texts).replace("\n", ";")
        if text != self._text:
            self._text = text
            self._active = {}
            for words in filter(None, (part.split() for part in text.split(";"))):
                self._take(words)
        if "wedge" in self._active:
            self.unwedged.clear()
        else:
            self.unwedged.set()

    async def watch(self, changed: Callable[[], None]) -> None:
        """Keep reading; call `changed` after each reading."""
        while True:
            self.read()
            changed()
            await asyncio.sleep(POLL_SECONDS)

    def number(self, fault: str) -> float | None:
        """The fault's number (0 for one without), or None when it is not in force."""
        return self._active.get(fault)

    @property
    def slowdown(self) -> float:
        """By how much everything is slower."""
        return max(1.0, self._active.get("slow", 1.0))

    def _take(self, words: list[str]) -> None:
        try:
            if words[0] in _WITHOUT_NUMBER and len(words) == 1:
                self._active[words[0]] = 0
                return
            if words[0] in _WITH_NUMBER and len(words) == 2:
                self._active[words[0]] = float(words[1])
                return
        except ValueError:
            pass
        known = ", ".join([*_WITHOUT_NUMBER, *(f"{word} NUMBER" for word in _WITH_NUMBER)])
        self._log(f"WARNING: the fault {' '.join(words)!r} is not known; known are: {known}")

    def _control_text(self) -> str:
        control = self._settings.control
        if control is None:
            return ""
        try:
            return (control / "fault" if control.is_dir() else control).read_text()
        except (OSError, UnicodeDecodeError):
            return ""
