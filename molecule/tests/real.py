# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of real vLLM on simulated Sparks share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from load import Load
from spark import Spark

if TYPE_CHECKING:
    from conftest import Endpoint

MODEL = "tiny-random"
KEY = "simulation-key"
# Two real engines load on the processors that also serve: minutes, where one alone takes half of one.
LOADS_WITHIN = 300


def clients(endpoint: Endpoint, number: int, tokens: tuple[int, int] = (100, 400)) -> Load:
    """Its tokens are random words, so they are counted. Without a pause they would leave no processor to a start."""
    return Load(endpoint.url, number, tokens=tokens, patience=120, pause=2, model=MODEL, numbered=False)


def metric(spark: Spark, name: str, port: int = 8000) -> float:
    """A figure of the Spark's engine (or of its agent, by its port), summed over its labels."""
    text = spark.run(f"curl --silent --fail localhost:{port}/metrics")
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
