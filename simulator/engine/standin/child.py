# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine's child processes, EngineCore and Worker: as small as Python gets, and real to kill.

Each model step is a byte that goes API server -> EngineCore -> Worker and back, so a stopped child
holds the batch and a dead one ends the engine, as with real vLLM. Run as a script:

    child.py ROLE TITLE [MEMORY_DIRECTORY DEVICE_GIB WANTED_GIB]

ROLE is `engine-core`, which starts a worker of its own, or `worker`.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys

WORKER_TERMINATION_SECONDS = 2.5  # measured: how long a worker lives on after SIGTERM


def _set_title(title: str) -> None:
    """Name the process as `ps` shows it; the kernel keeps 15 characters."""
    with open("/proc/self/comm", "w") as comm:
        comm.write(title)


def claim_memory(directory: str, device_gib: float, wanted_gib: float) -> float | None:
    """Take a share of the device that all engines with this directory share.

    Returns the free GiB when they are fewer than wanted, else None. The claim is a locked file that
    stays open: the kernel lets go of it with the process, however that ends.
    """
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "lock"), "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        free = device_gib
        for name in os.listdir(directory):
            if not name.endswith(".gib"):
                continue
            path = os.path.join(directory, name)
            with open(path) as other:
                try:
                    fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    os.unlink(path)
                except BlockingIOError:
                    free -= float(other.read())
        if free < wanted_gib:
            return free
        path = os.path.join(directory, f"{os.urandom(8).hex()}.gib")
        claim = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        os.write(claim, str(wanted_gib).encode())
        fcntl.flock(claim, fcntl.LOCK_EX)
        return None


def _end_in(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)


def worker(memory: list[str]) -> None:
    """Answer each step; end when the parent's end of the pipe closes."""
    # The timer's signal ends the process.
    signal.signal(signal.SIGTERM, lambda *_: _end_in(WORKER_TERMINATION_SECONDS))
    if memory and (free := claim_memory(memory[0], float(memory[1]), float(memory[2]))) is not None:
        os.write(1, f"{free:.2f}\n".encode())
        sys.exit(1)
    os.write(1, b"ready\n")
    while step := os.read(0, 64):
        os.write(1, step)


def engine_core(title: str, memory: list[str]) -> None:
    """Pass steps between the API server and the worker; die with the worker, but outlive the API server."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-I", "-S", __file__, "worker", title, *memory]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin
    assert child.stdout
    to_worker, from_worker = child.stdin.fileno(), child.stdout.fileno()
    sources = [0, from_worker]
    while True:
        for source in select.select(sources, [], [])[0]:
            data = os.read(source, 64)
            if source == from_worker:
                if not data:
                    sys.exit(1)
                os.write(1, data)
            elif data:
                os.write(to_worker, data)
            else:
                sources.remove(0)  # the API server is gone; real ones are orphaned, too


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    role, worker_title, claim = sys.argv[1], sys.argv[2], sys.argv[3:]
    if role == "engine-core":
        _set_title("VLLM::EngineCore")
        engine_core(worker_title, claim)
    else:
        _set_title(worker_title)
        worker(claim)
