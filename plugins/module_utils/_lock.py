# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Who is changing what a Spark serves. Private to the collection.

A holder is the process that runs the playbook: when it is gone, so is its claim, and on its own machine that can be seen.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

# Cleared by a reboot, after which nobody is at work here.
PATH = "/run/vllm-switch.json"


@dataclass(frozen=True)
class Holder:
    """A run of a playbook. ``place`` tells machines (and containers on one) apart whatever they are called, and ``began`` when the
    process began, since numbers of processes come again; ``user``, ``machine``, ``purpose`` and ``since`` are for people."""

    user: str
    machine: str
    place: str
    pid: int
    began: str
    purpose: str = ""
    since: str = ""

    @classmethod
    def of(cls, told: Mapping[str, object]) -> Holder:
        """From what `told` made; raises KeyError or ValueError where that is not it."""
        return cls(
            **{name: str(told[name]) for name in ("user", "machine", "place", "began", "purpose", "since")},
            pid=int(str(told["pid"])),
        )

    def told(self) -> dict[str, object]:
        """For a file or a module's return value."""
        return asdict(self)

    def same_run(self, other: Holder) -> bool:
        """Is it the same process?"""
        return (self.place, self.pid, self.began) == (other.place, other.pid, other.began)

    def is_gone(self, here: str) -> bool:
        """Has its process ended? Told only where it ran, which is ``here``; elsewhere it counts as there."""
        return self.place == here and began(self.pid) != self.began

    def __str__(self) -> str:
        return f"{self.user} on {self.machine} (process {self.pid}, {self.purpose}, since {self.since})"


def place() -> str:
    """Where this process runs: the machine, and on Linux the container."""
    parts = [platform.node()]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def began(pid: int) -> str:
    """When a process of this machine began; empty when there is no such process."""
    if os.path.exists("/proc/self/stat"):
        # In ticks since the boot: the wall clock may step.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[19]
        return ""
    done = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return " ".join(done.stdout.split())


@contextlib.contextmanager
def alone(path: str, pretend: bool) -> Iterator[None]:
    """Wait until no other process of this host is between the same marks; to ``pretend`` leaves no file and waits for nobody."""
    if pretend:
        yield
        return
    with open(path, "w", encoding="utf-8") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        yield


def held_by() -> Holder | None:
    """Who changes what this host serves; None when nobody does."""
    try:
        with open(PATH, encoding="utf-8") as file:
            return Holder.of(json.load(file))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def hold(holder: Holder) -> None:
    """Write down who does, in one step."""
    with open(f"{PATH}.new", "w", encoding="utf-8") as file:
        json.dump(holder.told(), file)
    os.replace(f"{PATH}.new", PATH)
