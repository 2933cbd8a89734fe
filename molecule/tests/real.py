# SPDX-License-Identifier: GPL-3.0-or-later
"""What the tests of real vLLM on simulated Sparks share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import requests

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


def ask(spark: Spark, method: str, path: str, port: int = 8000, /, **headers: str) -> requests.Response:
    """Ask the Spark's engine, or its agent, as a gateway does; in names of headers an underscore stands for a hyphen."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.request(method, f"http://{spark.address}:{port}{path}", headers=named, timeout=10)


def metric(spark: Spark, name: str, port: int = 8000) -> float:
    """A figure of the Spark's engine (or of its agent, by its port), summed over its labels."""
    text = ask(spark, "GET", "/metrics", port).text
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))
