# SPDX-License-Identifier: GPL-3.0-or-later
"""Two copies of real vLLM: the habits that the stand-in imitates, met with the agent in charge."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from load import DECEITS, HUNG, WHOLE, Load
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]

# Two real engines load on the processors that also serve: minutes, where one alone takes half of one.
LOADS_WITHIN = 300
STOPS_WITHIN = 20
CLIENTS = 4


@pytest.fixture(scope="module")
def copies(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("replica")


def clients(endpoint: Endpoint, number: int) -> Load:
    """Its tokens are random words, so they are counted. Without a pause they would leave no processor to a start."""
    return Load(
        endpoint.url, number, tokens=(100, 400), patience=120, pause=2, model="tiny-random", numbered=False
    )


def test_it_is_real(endpoint: Endpoint) -> None:
    answer = endpoint.complete(model="tiny-random")
    assert answer.status == 200
    assert "standin" not in answer.body["system_fingerprint"]


def test_rolling_restart(endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
    with clients(endpoint, CLIENTS) as load:
        time.sleep(5)
        for copy in copies:
            figure(f"{copy} restarted in {copy.restart():.1f} s")
        time.sleep(2)
    figure(str(load))
    assert load.failed == 0, load.replies
    assert len(load.replies) > 4 * CLIENTS


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("engine core", "pkill -9 EngineCor"),
        ("API server", "pkill -9 -o -x vllm"),
        ("container", "docker kill vllm-replica"),
    ],
)
def test_killed(endpoint: Endpoint, copies: list[Spark], figure: Figure, name: str, command: str) -> None:
    victim, other = copies
    usual = victim.processes()
    engine, healthy = victim.engine(), other.engine()
    with clients(endpoint, CLIENTS) as load:
        time.sleep(5)
        killed = time.monotonic()
        victim.run(command)
        until(lambda: victim.engine() not in ("", engine), 60, "a new engine is started")
        victim.wait_until_serving(LOADS_WITHIN)
        back = time.monotonic() - killed
    figure(f"back after {back:.1f} s; {load}")
    assert not any(load.kinds[kind] for kind in (*DECEITS, HUNG)), load.replies
    assert load.failed <= CLIENTS, load.replies
    assert all(reply.worker in (victim.name, "") for reply in load.replies if reply.kind != WHOLE)
    assert victim.processes() == usual, "an orphan is left"
    assert other.engine() == healthy
    until(lambda: victim.status().get("attempts") == 0, 30, "its failure is forgiven")


@pytest.mark.parametrize("seconds", [2, 10, 17])
def test_stopped_while_it_starts(copies: list[Spark], figure: Figure, seconds: int) -> None:
    """It is mostly deaf to SIGTERM then; measured: 8 of 9 times, for minutes."""
    copy = copies[0]
    copy.run(f"systemctl stop {copy.unit}; systemctl start --no-block {copy.unit}")
    until(lambda: copy.status().get("phase") == "loading", 30, "it loads")
    time.sleep(seconds)
    phase = copy.status().get("phase")
    began = time.monotonic()
    copy.run(f"systemctl stop {copy.unit}")
    figure(f"{phase}, stopped in {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < STOPS_WITHIN
    assert copy.show("Result") == "success"
    assert (copy.engine(), copy.processes()) == ("", [])
