# SPDX-License-Identifier: GPL-3.0-or-later
"""Two copies of real vLLM: the habits that the stand-in imitates, met with the agent in charge."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from load import CUT, DECEITS, HUNG, TOLD, WHOLE
from real import LOADS_WITHIN, clients
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]

STOPS_WITHIN = 20
CLIENTS = 4


@pytest.fixture(scope="module")
def copies(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("replica")


def test_a_restart_loses_nothing(endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
    """Of one copy; both are replaced in turn when the model is changed (real_changes)."""
    with clients(endpoint, CLIENTS) as load:
        time.sleep(5)
        figure(f"{copies[0]} restarted in {copies[0].restart():.1f} s")
        time.sleep(2)
    figure(str(load))
    assert load.failed == 0, load.replies
    assert len(load.replies) > 4 * CLIENTS


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("engine core", "pkill -9 EngineCor"),
        ("API server", "pkill -9 -o -x vllm"),
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


def test_a_second_sigterm_hastens_it(endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
    """By itself vLLM, once told to stop, keeps clients on the line without a byte until they leave."""
    copy = copies[0]
    with clients(endpoint, 2 * CLIENTS, tokens=(3500, 3500)) as load:
        until(lambda: (copy.status().get("requests") or {}).get("running", 0) >= 2, 30, "it has requests")
        copy.run(f"systemctl stop --no-block {copy.unit}")
        until(lambda: copy.ask("/health")[0] == 404, 10, "it drains")
        began = time.monotonic()
        copy.run(f"systemctl kill --kill-whom=main {copy.unit}")
        until(lambda: copy.show("ActiveState") == "inactive", STOPS_WITHIN, f"{copy} stops")
        stopped = time.monotonic()
        load.finish()
    figure(f"stopped {stopped - began:.1f} s after the second; {load}")
    assert load.kinds[CUT] + load.kinds[TOLD] >= 2
    assert not any(load.kinds[kind] for kind in (*DECEITS, HUNG)), load.replies
    # Nobody was kept on the line by an engine that had ended.
    assert all(reply.began + reply.seconds < stopped + 5 for reply in load.replies if reply.kind != WHOLE)
    assert copy.processes() == []


@pytest.mark.parametrize("seconds", [2, 17])
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
