# SPDX-License-Identifier: GPL-3.0-or-later
"""Real vLLM over two Sparks: ranks that cannot rejoin are ended and started together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from load import DECEITS, HUNG
from real import LOADS_WITHIN, MODEL, clients
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]

HEAD, WORKER = 0, 1
DOWN_WITHIN = 15


@pytest.fixture(scope="module")
def pair(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("tp")


def answers(endpoint: Endpoint) -> bool:
    answer = endpoint.complete(model=MODEL)
    return answer.status == 200 and "-tp2-" in answer.body["system_fingerprint"]


def test_the_pair_answers(endpoint: Endpoint) -> None:
    assert answers(endpoint)


@pytest.mark.parametrize("rank", [WORKER, HEAD])
def test_a_rank_is_killed(endpoint: Endpoint, pair: list[Spark], figure: Figure, rank: int) -> None:
    """The head's /health stays 200 when its worker is gone, and a worker without a head stays up for ever."""
    before = [spark.engine() for spark in pair]
    usual = [spark.processes() for spark in pair]
    with clients(endpoint, 2) as load:
        time.sleep(3)
        began = time.monotonic()
        pair[rank].run("docker kill vllm-tp")
        until(lambda: all(spark.engine() not in before for spark in pair), 60, "both ranks are down")
        down = time.monotonic() - began
        for spark in pair:
            spark.wait_until_serving(LOADS_WITHIN)
        until(lambda: answers(endpoint), 30, "the pair answers through the gateway")
        back = time.monotonic() - began
    figure(f"both down after {down:.1f} s, serving after {back:.1f} s; {load}")
    assert down < DOWN_WITHIN
    # Who asked the rank that is gone is told; who asks meanwhile waits in the gateway, or is told when to come again.
    assert not any(load.kinds[kind] for kind in (*DECEITS, HUNG)), load.replies
    assert [spark.processes() for spark in pair] == usual, "an orphan is left"


def test_stop_and_start(endpoint: Endpoint, pair: list[Spark], figure: Figure) -> None:
    for spark in pair:
        spark.run(f"systemctl stop --no-block {spark.unit}")
    until(lambda: all(spark.show("ActiveState") == "inactive" for spark in pair), 60, "both stop")
    assert [(spark.engine(), spark.processes()) for spark in pair] == [("", []), ("", [])]
    began = time.monotonic()
    for spark in pair:
        spark.run(f"systemctl start --no-block {spark.unit}")
    for spark in pair:
        spark.wait_until_serving(LOADS_WITHIN)
    until(lambda: answers(endpoint), 30, "the pair answers through the gateway")
    figure(f"serving {time.monotonic() - began:.1f} s after the start")
