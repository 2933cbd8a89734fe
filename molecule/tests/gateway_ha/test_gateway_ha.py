# SPDX-License-Identifier: GPL-3.0-or-later
"""Two gateways with one address: whatever becomes of the one that holds it, clients are served again within three seconds."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import aiohttp
import pytest
from conftest import Endpoint

from load import WHOLE, Load
from playbook import ROOT, play
from spark import Spark, until

Figure = Callable[[str], None]

INVENTORY = ROOT / "molecule/gateway_ha/inventory"
ADDRESS = "198.18.87.30"
SPARKS = {"spark-a": "198.18.87.11", "spark-b": "198.18.87.12"}

# All in seconds.
BOUND = 3.0  # without the address, at most
UNNOTICED = (
    0.7  # a gap that is no interruption: the requests' own spacing, on a test machine that may be busy
)
BETWEEN = 0.1  # from one request of the watch to the next
CONNECT = 0.3  # a request's patience for its connection
PATIENCE = 5  # a request's patience for its answer


class Watch:
    """Asks for a completion at the virtual address ten times a second, each on a connection of its own."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        # When each request began (seconds, monotonic), and the Spark that answered; empty when it failed.
        self.requests: list[tuple[float, str]] = []

    def __enter__(self) -> Watch:
        self._thread.start()
        time.sleep(5 * BETWEEN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def away(self, since: float = 0, until: float = float("inf")) -> float:
        """The longest time without a request that was answered, among those that began between two moments."""
        whole = sorted(began for began, worker in self.requests if worker and since <= began <= until)
        return max((later - earlier for earlier, later in pairwise(whole)), default=float("inf"))

    @property
    def failed(self) -> int:
        """How many requests were not answered."""
        return sum(not worker for _began, worker in self.requests)

    def answered(self, since: float) -> set[str]:
        """The Sparks that answered what began after this moment."""
        return {worker for began, worker in self.requests if worker and began > since}

    async def _run(self) -> None:
        limits = aiohttp.ClientTimeout(total=PATIENCE, sock_connect=CONNECT)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=limits, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while not self._over.is_set():
                tasks.create_task(self._ask(session))
                await asyncio.sleep(BETWEEN)

    async def _ask(self, session: aiohttp.ClientSession) -> None:
        began, worker = time.monotonic(), ""
        body = {"model": "simulated", "prompt": "hello", "max_tokens": 1}
        try:
            async with session.post(f"http://{ADDRESS}:8080/v1/completions", json=body) as answer:
                if answer.status == 200 and (await answer.json())["usage"]["completion_tokens"] == 1:
                    worker = answer.headers["x-served-by"]
        except (aiohttp.ClientError, OSError):
            pass
        self.requests.append((began, worker))


class Link:
    """A simulated host's link, in the hands of someone who does not need it."""

    def __init__(self, name: str) -> None:
        self._container = f"twospark-test-{name}"
        self._route = ""

    def cut(self) -> None:
        self._route = self._ip("route show default")
        self._ip("link set eth0 down")

    def mend(self) -> None:
        self._ip("link set eth0 up")
        self._ip(f"route replace {self._route}")

    def _ip(self, words: str) -> str:
        command = ["docker", "exec", self._container, "ip", *words.split()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def gateways(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("replica")


@pytest.fixture(autouse=True)
def well(gateways: list[Spark]) -> None:
    """Each test begins with two gateways that are well, and two copies that serve."""
    for gateway in gateways:
        gateway.wait_until_serving()
        become_well(gateway)
    until(lambda: len(holders(gateways)) == 1, 20, "one holds the address")


def own(gateway: Spark) -> Endpoint:
    """The gateway at its own address."""
    return Endpoint(SPARKS[gateway.name])


def is_well(gateway: Spark) -> bool:
    """Does it answer at its own address, with a copy to send to?"""
    try:
        return own(gateway).get("/health").status == 200
    except OSError:
        return False


def become_well(gateway: Spark) -> None:
    until(lambda: is_well(gateway), 60, f"{gateway} is well")


def holders(gateways: list[Spark]) -> list[Spark]:
    return [gateway for gateway in gateways if gateway.run(f"ip -brief address show to {ADDRESS}")]


def roles(gateways: list[Spark]) -> tuple[Spark, Spark]:
    """Who holds the address, and who stands by."""
    (active,) = holders(gateways)
    (standby,) = [gateway for gateway in gateways if gateway is not active]
    return active, standby


def moves(gateway: Spark) -> int:
    """How often keepalived has changed its mind."""
    return gateway.run("journalctl --unit keepalived --no-pager --output cat").count("Entering")


def test_one_holds_it_and_both_copies_answer_there(gateways: list[Spark]) -> None:
    assert len(holders(gateways)) == 1
    answers = [Endpoint(ADDRESS).complete() for _ in range(8)]
    assert {answer.status for answer in answers} == {200}
    assert {answer.served_by for answer in answers} == set(SPARKS)


def test_a_reload_does_not_move_it(gateways: list[Spark], figure: Figure) -> None:
    active, _ = roles(gateways)
    before = [moves(gateway) for gateway in gateways]
    with Watch() as watch:
        for unit in ("haproxy", "haproxy", "haproxy", "keepalived"):
            for gateway in gateways:
                gateway.run(f"systemctl reload {unit}")
            time.sleep(1)
        time.sleep(1)
    figure(f"longest gap {watch.away():.2f} s, {watch.failed} of {len(watch.requests)} requests failed")
    assert watch.failed == 0
    assert holders(gateways) == [active]
    # keepalived says its state anew when it reads its configuration; it must not have left it.
    after = [moves(gateway) for gateway in gateways]
    assert [now - then for now, then in zip(after, before, strict=True)] in ([0, 0], [1, 1], [0, 1], [1, 0])


LINKS = {name: Link(name) for name in SPARKS}

FAULTS: dict[str, tuple[Callable[[Spark], object], Callable[[Spark], object]]] = {
    "haproxy killed": (
        lambda spark: spark.run("systemctl kill --signal=KILL haproxy; systemctl stop haproxy"),
        lambda spark: spark.run("systemctl start haproxy"),
    ),
    "haproxy hung": (
        lambda spark: spark.run("systemctl kill --signal=STOP haproxy"),
        lambda spark: spark.run("systemctl kill --signal=CONT haproxy"),
    ),
    "keepalived killed": (
        lambda spark: spark.run("systemctl kill --signal=KILL keepalived"),
        lambda spark: spark.run("systemctl start keepalived"),
    ),
    "link cut": (
        lambda spark: LINKS[spark.name].cut(),
        lambda spark: LINKS[spark.name].mend(),
    ),
    "power off": (Spark.power_off, Spark.power_on),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_another_takes_over(gateways: list[Spark], figure: Figure, fault: str) -> None:
    active, standby = roles(gateways)
    strike, mend = FAULTS[fault]
    with Watch() as watch, Load(own(standby).url, clients=4, tokens=(40, 80), patience=3) as load:
        time.sleep(1)
        strike(active)
        over = time.monotonic()
        time.sleep(BOUND + 1)
        served = time.monotonic()
        mend(active)
        become_well(active)
        time.sleep(3)
    figure(f"away for {watch.away():.2f} s; at {standby}'s own address: {load}")
    assert watch.away() < BOUND
    assert standby.name in {worker for began, worker in watch.requests if over + BOUND < began < served}
    # It stays where it is when the other is back, and nobody notices that.
    assert holders(gateways) == [standby]
    assert watch.away(since=served) < UNNOTICED
    # Who asks the other gateway loses at most what the lost Spark's copy had in hand.
    lost = [reply for reply in load.replies if reply.kind != WHOLE]
    assert [reply for reply in lost if reply.worker == standby.name] == []
    if "link" not in fault and "power" not in fault:
        assert lost == []


def test_a_gateway_that_is_full_keeps_it(gateways: list[Spark]) -> None:
    active, _ = roles(gateways)
    with ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(socket.create_connection((ADDRESS, 8080), timeout=10))
        time.sleep(4)
        assert holders(gateways) == [active]
    become_well(active)


def test_gateways_that_do_not_hear_each_other(gateways: list[Spark], figure: Figure) -> None:
    """Both have the address then, and whichever a client finds serves it. Afterwards the first of the group keeps it."""
    rules = [f"iptables {{}} {chain} --protocol 112 --jump DROP" for chain in ("INPUT", "OUTPUT")]
    with Watch() as watch:
        for rule in rules:
            gateways[0].run(rule.format("--append"))
        until(lambda: len(holders(gateways)) == 2, 10, "both hold it")
        time.sleep(6)  # keepalived tells the network a second time after five seconds
        for rule in rules:
            gateways[0].run(rule.format("--delete"))
        until(lambda: len(holders(gateways)) == 1, 10, "one gives it up")
        time.sleep(2)
    figure(f"longest gap {watch.away():.2f} s, {watch.failed} of {len(watch.requests)} requests failed")
    assert holders(gateways) == [gateways[0]]
    assert watch.away() < UNNOTICED


def test_gateways_that_differ_are_refused(gateways: list[Spark], tmp_path: Path) -> None:
    clients = [{"name": "alice", "key": "alice-of-the-simulation"}]
    differing = {"all": {"children": {"gateways": {"hosts": {"spark-b": {"gateway_clients": clients}}}}}}
    (tmp_path / "differing.yml").write_text(json.dumps(differing))
    status, told = play("site.yml", f"--inventory={tmp_path / 'differing.yml'}", inventory=INVENTORY)
    assert status != 0
    assert "Nothing was changed." in told
    assert "gateway_clients of spark-b is not that of spark-a" in told
    assert "alice-of-the-simulation" not in told
    assert Endpoint(ADDRESS).complete().status == 200
