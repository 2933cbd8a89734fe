# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line: what to measure, where to put it, and the printed tables."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gateway.gateways import ALL, CACHE, install, need_command
from benchmarks.gateway.measures import Bench, full, quick
from benchmarks.gateway.tables import tables

MEASURES = ("throughput", "streaming", "memory", "growth")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gateway/run",
        description="Measure the gateway and its peers side by side on this machine.",
    )
    parser.add_argument(
        "--only", default=",".join(ALL), help=f"gateways, with commas between them, of: {' '.join(ALL)}"
    )
    parser.add_argument(
        "--measure",
        default=",".join(MEASURES),
        help=f"measurements, with commas between them, of: {' '.join(MEASURES)} "
        "(streaming includes the return of workers, memory includes the death of one)",
    )
    parser.add_argument("--quick", action="store_true", help="few cases and one round")
    parser.add_argument(
        "--outage", type=float, help="seconds without a worker (default: 10 with --quick, else 60)"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    options.only = options.only.split(",")
    options.measure = options.measure.split(",")
    for name in options.only:
        if name not in ALL:
            parser.error(f"--only: there is no gateway {name}")
    for name in options.measure:
        if name not in MEASURES:
            parser.error(f"--measure: there is no measurement {name}")
    return options


def machine() -> dict[str, Any]:
    """What it was measured on; nothing that names the machine."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9),
        "kernel": platform.release(),
        "system": platform.freedesktop_os_release()["PRETTY_NAME"],
        "python": platform.python_version(),
        "load_average_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Have what many connections need, and be the only benchmark: two would measure each other, and take each other's ports."""
    # End what was started when this is ended, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A thousand streams have two ends in this process's children and in the gateways.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # Where Debian keeps servers is not on every user's path.
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError("another benchmark runs on this machine") from None
        yield


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": machine(), "quick": options.quick}
    for command, package in (("wrk", "wrk"), ("nginx", "nginx-light")):
        need_command(command, package)
    versions, left_out = install(options.only)
    plan = (quick if options.quick else full)(options.outage or (10 if options.quick else 60))
    result |= {"versions": versions, "left_out": left_out, "problems": {}, "plan": plan.__dict__}
    kinds: dict[str, list[dict[str, Any]]] = {
        name: []
        for name in ("throughput", "streaming", "return", "memory", "held", "stop", "rolling", "growth")
    }
    result |= kinds
    started = time.monotonic()

    def add(kind: str, record: dict[str, Any]) -> None:
        kinds[kind].append(record)
        seconds = time.monotonic() - started
        print(
            f"{seconds:6.0f} s  {kind} {record['gateway']} round {record.get('round', 0) + 1}",
            file=sys.stderr,
            flush=True,
        )

    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(plan, list(versions), Path(directory), left_out)
        measurements = {
            "throughput": bench.throughput,
            "streaming": bench.streaming_and_return,
            "memory": bench.memory_and_stop,
            "growth": bench.growth,
        }
        for name in options.measure:
            # One that breaks does not take the others' figures with it.
            try:
                for kind, record in measurements[name]():
                    add(kind, record)
            except (AssertionError, OSError, RuntimeError, subprocess.SubprocessError) as problem:
                result["problems"][name] = str(problem)
    result["machine"]["load_average_at_end"] = os.getloadavg()[0]
    result["seconds"] = round(time.monotonic() - started)
    return result


def keep(result: dict[str, Any], path: Path | None) -> None:
    """Write all figures to a file, where one was named."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    options = arguments()
    try:
        with alone():
            result = measure(options)
    except (OSError, subprocess.SubprocessError) as problem:
        print(f"benchmarks/gateway/run: {problem}", file=sys.stderr)
        return 1
    keep(result, options.json)
    print(tables(result))
    return 1 if result["problems"] else 0
