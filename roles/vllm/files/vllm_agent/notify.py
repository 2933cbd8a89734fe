# SPDX-License-Identifier: GPL-3.0-or-later
"""Messages to systemd (sd_notify), which do nothing when no service manager listens."""

from __future__ import annotations

import contextlib
import os
import socket

_SEND_SECONDS = 1.0


class Notifier:
    """Sends assignments such as READY=1 to the socket that systemd names in NOTIFY_SOCKET."""

    def __init__(self) -> None:
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        if self._address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.settimeout(_SEND_SECONDS)

    @property
    def watchdog_seconds(self) -> float | None:
        """How long systemd waits between two WATCHDOG=1, in seconds; None when it does not watch us."""
        microseconds = os.environ.get("WATCHDOG_USEC", "")
        for_us = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return int(microseconds) / 1e6 if self._socket and microseconds.isdigit() and for_us else None

    def send(self, *assignments: str) -> None:
        """Send one message. What systemd does not take in time is lost, so say again what must be known."""
        if self._socket is None:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(assignment.replace("\n", " ") for assignment in assignments)
        with contextlib.suppress(OSError):
            self._socket.sendto(message.encode(), address)
