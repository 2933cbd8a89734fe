# SPDX-License-Identifier: GPL-3.0-or-later
"""What a switch takes beyond the time that the engine needs to start, by the reports of switch_mode.yml."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.document import ROOT
from benchmarks.gateway.measures import Record


def parts(report: Mapping[str, Any], run: float | None = None) -> Record:
    """Of what the time without the model is made; ``run`` is what the whole playbook took, where that is known. Seconds.

    The Sparks stop at the same time, so the slower one counts; the first that serves ends it, so the fastest start does.
    """
    if not report["succeeded"]:
        raise ValueError(f"the switch to {report['mode']} of {report['began']} failed, so it tells nothing")
    engines = [spark["engine"] for spark in report["sparks"].values() if spark.get("engine")]
    if not engines or not report["gateways"]:
        raise ValueError(f"the report of {report['began']} tells of no engine's start or of no gateway")
    away = max(gateway["away"] for gateway in report["gateways"].values())
    phases = (spark["seconds"] for spark in report["sparks"].values())
    stop = max(seconds.get("draining", 0.0) + seconds.get("stopping", 0.0) for seconds in phases)
    engine = min(engines)
    return {
        "mode": report["mode"],
        "away_seconds": away,
        "stop_seconds": stop,
        "engine_seconds": engine,
        "rest_seconds": away - stop - engine,
        "overhead_seconds": away - engine,
        "run_seconds": run,
        "around_seconds": None if run is None else run - away,
    }


def switches(inventory: Path, count: int) -> Iterator[Record]:
    """Switch the pair to and fro so many times; a switch to the mode that it is in already does not count."""
    done = 0
    for mode in itertools.cycle(("tp", "replica")):
        if done == count:
            return
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory, "report.json")
            began = time.monotonic()
            played = subprocess.run(
                [
                    *("ansible-playbook", "-i", str(inventory), str(ROOT / "playbooks/switch_mode.yml")),
                    *("-e", f"mode={mode}", "-e", f"report={path}"),
                ],
                env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.monotonic() - began
            if played.returncode:
                raise RuntimeError(
                    f"the switch to {mode} failed: {played.stdout[-2000:]}{played.stderr[-500:]}"
                )
            if path.exists():
                done += 1
                yield parts(json.loads(path.read_text()), seconds)
