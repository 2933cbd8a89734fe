# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line: what to measure, where to put it, and the printed tables."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway.command import alone, keep, machine
from benchmarks.gateway.gateways import install
from benchmarks.switch.absence import FULL, GATEWAYS, QUICK, absences
from benchmarks.switch.tables import tables


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/switch/run",
        description="Measure what clients see of a switch, through the gateway and through nginx.",
    )
    parser.add_argument("--quick", action="store_true", help="two rounds, and short ones")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"machine": machine(), "quick": options.quick, "away": []}
    started = time.monotonic()
    with alone(), tempfile.TemporaryDirectory() as directory:
        result["versions"], left_out = install(GATEWAYS)
        if left_out:
            raise OSError("; ".join(f"{name}: {why}" for name, why in left_out.items()))
        for record in absences(QUICK if options.quick else FULL, Path(directory)):
            result["away"].append(record)
            print(
                f"{time.monotonic() - started:6.0f} s  away for {record['outage_seconds']:.0f} s: {record['gateway']}",
                file=sys.stderr,
                flush=True,
            )
    result["machine"]["load_average_at_end"] = os.getloadavg()[0]
    result["seconds"] = round(time.monotonic() - started)
    return result


def main() -> int:
    options = arguments()
    try:
        result = measure(options)
    except (OSError, RuntimeError, subprocess.SubprocessError) as problem:
        print(f"benchmarks/switch/run: {problem}", file=sys.stderr)
        return 1
    keep(result, options.json)
    print(tables(result))
    return 0
