# SPDX-License-Identifier: GPL-3.0-or-later
"""A pair under fire: both ranks go down together and come back together, and clients never hang meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from load import DECEITS, HUNG, WHOLE, Load
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]

HEAD, WORKER = 0, 1
CLIENTS = 4
DOWN_WITHIN = 15  # seconds, from the loss of one rank to the end of the other's engine
RESTART_DELAY = 3  # as molecule/faults/vars.yml has them
LOAD = 3
SLACK = 30  # a test machine may be busy, and a lost host boots
BACK = DOWN_WITHIN + RESTART_DELAY + LOAD + SLACK
# How systemd marks these messages in the journal, on every version: systemd-journal-catalog(5).
STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
STOPPED = "9d1aaa27d60140bd96365438aad20286"


@pytest.fixture(scope="module")
def pair(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("tp")


def on_both(pair: list[Spark], work: Callable[[Spark], object]) -> None:
    """Do something on both Sparks at once."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(work, pair))


@pytest.fixture(scope="module")
def switched(pair: list[Spark]) -> Iterator[list[str]]:
    """Both replicas serve; a person enables and starts the other mode, and in the end this one again.

    Gives the time on each Spark before.
    """

    def switch(mode: str, other: str) -> None:
        enable = f"systemctl --root=/ disable vllm-{other} && systemctl --root=/ enable vllm-{mode}"
        on_both(pair, lambda spark: spark.run(enable))
        on_both(pair, lambda spark: spark.run(f"systemctl start vllm-{mode}"))

    if all(spark.serves for spark in pair):
        pytest.fail("the pair is in mode tp already: converge first")
    before = [spark.run("date +%s.%N") for spark in pair]
    switch("tp", "replica")
    yield before
    switch("replica", "tp")


@pytest.fixture(autouse=True)
def mended(pair: list[Spark], switched: list[str]) -> Iterator[None]:
    """Each test begins with a pair that serves, and leaves it so."""
    on_both(pair, Spark.mend)
    yield
    on_both(pair, Spark.mend)


def test_a_start_by_hand_waits_for_the_end_of_the_other_mode(
    pair: list[Spark], switched: list[str], figure: Figure
) -> None:
    for spark, before in zip(pair, switched, strict=True):
        told = [
            json.loads(line)
            for line in spark.run(
                "journalctl --output json --no-pager _PID=1 --unit vllm-tp --unit vllm-replica "
                f"--since @{before.partition('.')[0]}"
            ).splitlines()
        ]
        moments = {
            (message.get("UNIT"), message.get("MESSAGE_ID")): int(message["__MONOTONIC_TIMESTAMP"]) / 1e6
            for message in told
        }
        gap = moments["vllm-tp.service", STARTING] - moments["vllm-replica.service", STOPPED]
        figure(f"{spark}: tp was started {gap:.3f} s after replica had stopped")
        assert gap >= 0
        events = spark.run(
            f"docker events --since {before} --until $(date +%s.%N) --filter type=container --filter event=die "
            "--filter event=start --format '{{.Action}} {{.Actor.Attributes.name}}'"
        ).splitlines()
        assert events[:2] == ["die vllm-replica", "start vllm-tp"], events
        assert len(spark.processes()) == (3 if spark is pair[HEAD] else 2)


class TestLost:
    @pytest.mark.parametrize("rank", [WORKER, HEAD])
    @pytest.mark.parametrize(
        "command",
        [
            "docker kill vllm-tp",
            "systemctl kill --kill-whom=main --signal=KILL vllm-tp",
            "systemctl restart vllm-tp",
        ],
    )
    def test_a_rank(
        self, endpoint: Endpoint, pair: list[Spark], figure: Figure, rank: int, command: str
    ) -> None:
        asked = "restart" in command
        self.check(endpoint, pair, figure, lambda: pair[rank].run(command), lambda: None, asked=asked)

    def test_the_fabric(self, endpoint: Endpoint, pair: list[Spark], figure: Figure) -> None:
        """Silence: nobody is told that the connection is gone."""
        rules = [f"iptables {{}} {chain} --jump DROP" for chain in ("INPUT -i eth1", "OUTPUT -o eth1")]

        def cut() -> None:
            pair[WORKER].run(" && ".join(rule.format("--insert") for rule in rules))

        def heal() -> None:
            pair[WORKER].run(" && ".join(rule.format("--delete") for rule in rules))

        self.check(endpoint, pair, figure, cut, heal)

    @pytest.mark.parametrize("rank", [WORKER, HEAD])
    def test_the_power(self, endpoint: Endpoint, pair: list[Spark], figure: Figure, rank: int) -> None:
        lost = pair[rank]
        self.check(endpoint, pair, figure, lost.power_off, lost.power_on, [pair[1 - rank]])

    def check(
        self,
        endpoint: Endpoint,
        pair: list[Spark],
        figure: Figure,
        lose: Callable[[], object],
        find: Callable[[], object],
        left: list[Spark] | None = None,
        asked: bool = False,
    ) -> None:
        """Lose a part of the pair; `left` are the Sparks that can still be looked at. `find` gives the part back.

        asked: it is a stop, which drains.
        """
        left = left or pair
        before = {spark: spark.engine() for spark in left}
        with Load(endpoint.url, CLIENTS, patience=120) as load:
            time.sleep(2)
            began = time.monotonic()
            # By hand a stop waits for the drain; the bound is for what is lost.
            lose()
            lost = time.monotonic() if left is pair else began
            until(lambda: all(spark.engine() != before[spark] for spark in left), 30, "both ranks are down")
            down = time.monotonic() - lost
            find()
            found = time.monotonic()
            on_both(pair, lambda spark: spark.wait_until_serving(BACK))
            until(lambda: endpoint.complete().status == 200, 10, "the gateway reaches the pair")
            back = time.monotonic() - found
            again = time.monotonic()
            time.sleep(2)
        figure(f"both down after {down:.1f} s, serving {back:.1f} s later; {load}")
        assert down < DOWN_WITHIN
        assert back < BACK
        assert load.kinds[HUNG] == 0, load.replies
        assert not any(load.kinds[kind] for kind in DECEITS), load.replies
        # What was in flight is lost, unless it was a stop; what comes while it is down waits in the gateway.
        assert load.failed <= (0 if asked else 2 * CLIENTS)
        assert any(reply.seconds > 3 for reply in load.replies if reply.kind == WHOLE)
        assert load.since(again).keys() == {WHOLE}
        answer = endpoint.complete()
        assert "-tp2-" in answer.body["system_fingerprint"]
        generations = {spark.status()["generation"] for spark in pair}
        assert len(generations) == 1
        assert [len(spark.processes()) for spark in pair] == [3, 2], "an orphan is left"


class TestReboot:
    @pytest.mark.parametrize(
        ("order", "pause"), [((HEAD, WORKER), 4), ((WORKER, HEAD), 4), ((HEAD, WORKER), 0)]
    )
    def test_the_pair_forms(
        self, endpoint: Endpoint, pair: list[Spark], figure: Figure, order: tuple[int, int], pause: float
    ) -> None:
        before = [spark.engine() for spark in pair]

        def reboot(rank: int) -> None:
            time.sleep(pause * order.index(rank))
            pair[rank].reboot()

        with ThreadPoolExecutor() as pool:
            list(pool.map(reboot, order))
        began = time.monotonic()
        on_both(pair, lambda spark: spark.wait_until_serving(BACK))
        figure(f"serving {time.monotonic() - began:.1f} s after the last boot")
        assert {spark.engine() for spark in pair}.isdisjoint(before)
        until(lambda: endpoint.complete().status == 200, 10, "the gateway reaches the pair")
        assert "-tp2-" in endpoint.complete().body["system_fingerprint"]
