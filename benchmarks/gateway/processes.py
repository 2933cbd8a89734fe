# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs that the benchmark runs, with all processes that they start, and what those use."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Below the range that the kernel takes for outgoing connections, and away from the tests' own ports.
_PORTS = iter(range(24000, 28000))


def free_port() -> int:
    """A port that nobody listens on; none is given twice."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            return port
    raise RuntimeError("all ports are used up")


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition came true within so many seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Program:
    """A running program; ``log`` is where its output goes."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-2:])[-300:]

    def family(self) -> list[int]:
        """The program's process and all that descend from it."""
        children: dict[int, list[int]] = {}
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            # Processes end while they are looked at.
            with contextlib.suppress(OSError):
                parent = int(_fields(Path("/proc", pid, "stat"))[1])
                children.setdefault(parent, []).append(int(pid))
        found = [self.process.pid]
        for process in found:
            found += children.get(process, [])
        return found

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        ticks = 0
        for pid in self.family():
            with contextlib.suppress(OSError):
                fields = _fields(Path(f"/proc/{pid}/stat"))
                ticks += int(fields[11]) + int(fields[12])
        return ticks / _TICKS_PER_SECOND

    def resident_mb(self) -> float:
        """Resident memory of all its processes, in MB; what they share counts once for each."""
        pages = 0
        for pid in self.family():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * _PAGE_BYTES / 1e6


def _fields(stat: Path) -> list[str]:
    """What follows the name in /proc/PID/stat: the name may hold blanks."""
    return stat.read_text().rpartition(")")[2].split()


@contextlib.contextmanager
def running(command: list[str], directory: Path, environment: dict[str, str]) -> Iterator[Program]:
    """Run a program in a process group of its own; in the end none of the group is left."""
    log = directory / "output.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield Program(process, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
