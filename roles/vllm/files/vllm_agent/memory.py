# SPDX-License-Identifier: GPL-3.0-or-later
"""The memory of the host. CPU and GPU share it on a Spark: what is available here is what the engine can get."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")
_PAGE_GIB = os.sysconf("SC_PAGE_SIZE") / 2**30


@dataclass(frozen=True)
class Holder:
    """A process and its resident memory in GiB; container_id is empty outside containers."""

    pid: int
    name: str
    gib: float
    container_id: str


class Memory:
    """Reads the proc file system at `proc`; another path than /proc is for tests."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def boot_id(self) -> str:
        """Another text after each boot; empty where the kernel does not tell."""
        try:
            return (self._proc / "sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def available_gib(self) -> float:
        """MemAvailable in GiB; it counts page cache that can be given up."""
        for line in (self._proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
        raise OSError(f"{self._proc}/meminfo has no MemAvailable")

    def largest_holders(self, count: int = 3) -> list[Holder]:
        """The processes with the most resident memory, largest first.

        What the GPU driver holds for a process is not in its resident memory, so this names suspects only.
        """
        holders = []
        for folder in self._proc.glob("[0-9]*"):
            try:
                pages = int((folder / "statm").read_text().split()[1])
                name = (folder / "comm").read_text().strip()
                found = _CONTAINER_ID.search((folder / "cgroup").read_text())
            except (OSError, IndexError, ValueError):
                continue  # the process has ended meanwhile
            holders.append(Holder(int(folder.name), name, pages * _PAGE_GIB, found.group() if found else ""))
        return sorted(holders, key=lambda holder: holder.gib, reverse=True)[:count]

    async def drop_page_cache(self, sync_timeout: float = 60) -> None:
        """Write dirty pages out (for at most `sync_timeout` seconds), drop the caches; raises OSError."""
        sync = await asyncio.create_subprocess_exec("sync", start_new_session=True)
        try:
            async with asyncio.timeout(sync_timeout):
                await sync.wait()
        except TimeoutError:
            sync.kill()  # pages that are still dirty stay cached; that is no reason not to start
        await asyncio.to_thread((self._proc / "sys/vm/drop_caches").write_text, "3\n")
