# SPDX-License-Identifier: GPL-3.0-or-later
"""Two copies under fire, with clients at the gateway: what is asked to stop loses nothing, what dies comes back."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from load import CUT, DECEITS, HUNG, TOLD, WHOLE, Load
from playbook import play
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]

# As molecule/faults/vars.yml has them, in seconds.
RESTART_DELAY = 3
LOAD = 3
CANARY_TIMEOUT = 3
INTERVAL = 1
STRIKES = 3
CAP = 12  # requests that a copy has at once
SLACK = 20  # a test machine may be busy
BACK = RESTART_DELAY + LOAD + SLACK


@pytest.fixture(scope="module")
def copies(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("replica")


@pytest.fixture(autouse=True)
def mended(copies: list[Spark]) -> Iterator[None]:
    """Each test begins with two copies that serve, and leaves them so."""
    mend(copies)
    yield
    mend(copies)


def mend(copies: list[Spark]) -> None:
    menders = [threading.Thread(target=copy.mend) for copy in copies]
    for mender in menders:
        mender.start()
    for mender in menders:
        mender.join()
    assert all(copy.serves for copy in copies)


class TestAskedToStop:
    """Nothing is lost, whoever asks."""

    def test_rolling_restart(self, endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
        with Load(endpoint.url, clients=24) as load:
            time.sleep(2)
            for copy in copies:
                figure(f"{copy} restarted in {copy.restart():.1f} s")
            time.sleep(2)
        figure(str(load))
        assert load.failed == 0, load.replies
        assert len(load.replies) > 48

    @pytest.mark.parametrize(
        "command",
        [
            "systemctl restart docker",
            "systemctl stop docker docker.socket; systemctl start docker vllm-replica",
        ],
    )
    def test_docker_restarts(
        self, endpoint: Endpoint, copies: list[Spark], figure: Figure, command: str
    ) -> None:
        with Load(endpoint.url, clients=12) as load:
            time.sleep(2)
            copies[0].run(command)
            figure(f"back after {copies[0].wait_until_serving():.1f} s")
        figure(str(load))
        assert load.failed == 0, load.replies

    def test_reboot(self, endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
        with Load(endpoint.url, clients=12) as load:
            time.sleep(2)
            copies[1].reboot()
            figure(f"back {copies[1].wait_until_serving():.1f} s after the shutdown")
        figure(str(load))
        assert load.failed == 0, load.replies

    def test_a_second_sigterm_hastens_it(
        self, endpoint: Endpoint, copies: list[Spark], figure: Figure
    ) -> None:
        for copy in copies:
            copy.fault("slow 20")  # the replies would last longer than the drain
        with Load(endpoint.url, clients=4, tokens=(2000, 2000)) as load:
            time.sleep(3)
            for copy in copies:
                copy.run(f"systemctl stop --no-block {copy.unit}")
            time.sleep(3)
            assert [copy.ask("/health")[0] for copy in copies] == [404, 404]
            began = time.monotonic()
            for copy in copies:
                copy.run(f"systemctl kill --kill-whom=main {copy.unit}")
            for copy in copies:
                until(lambda copy=copy: copy.show("ActiveState") == "inactive", 10, f"{copy} stops")  # type: ignore[misc]
            figure(f"stopped {time.monotonic() - began:.1f} s after the second")
            for copy in copies:
                copy.fault()
                copy.run(f"systemctl start --no-block {copy.unit}")
            load.finish()
        figure(str(load))
        assert load.kinds[CUT] + load.kinds[TOLD] >= 4
        assert not any(load.kinds[kind] for kind in (*DECEITS, HUNG)), load.replies

    def test_while_it_loads(self, copies: list[Spark], figure: Figure) -> None:
        """When a real engine does not listen to SIGTERM."""
        copy = copies[0]
        copy.run(f"systemctl stop {copy.unit}; systemctl start --no-block {copy.unit}")
        until(lambda: copy.status().get("phase") == "loading", 20, "it loads")
        time.sleep(LOAD / 3)
        began = time.monotonic()
        copy.run(f"systemctl stop {copy.unit}")
        figure(f"stopped in {time.monotonic() - began:.1f} s")
        assert time.monotonic() - began < 10
        assert copy.show("Result") == "success"
        assert (copy.engine(), copy.processes()) == ("", [])


class TestDies:
    """What is in flight on it fails visibly, everything else succeeds, and it comes back."""

    @pytest.mark.parametrize(
        ("name", "command"),
        [
            ("engine core", "pkill -9 EngineCor"),
            ("worker", "pkill -9 VLLM::Worker"),
            ("API server", "pkill -9 -x vllm"),
            ("container", "docker kill vllm-replica"),
            ("docker restart", "docker restart -t 1 vllm-replica"),
            ("docker client", "pkill -9 -f ^docker.run"),
            ("agent", "systemctl kill --kill-whom=main --signal=KILL vllm-replica"),
            ("whole unit", "systemctl kill --signal=KILL vllm-replica"),
        ],
    )
    def test_killed(
        self, endpoint: Endpoint, copies: list[Spark], figure: Figure, name: str, command: str
    ) -> None:
        victim, other = copies
        engine, restarts = victim.engine(), int(victim.show("NRestarts"))
        healthy = other.engine()
        with Load(endpoint.url, clients=16) as load:
            time.sleep(3)
            killed = time.monotonic()
            victim.run(command)
            over = time.monotonic()
            until(
                lambda: int(victim.show("NRestarts")) > restarts, RESTART_DELAY + SLACK, "systemd restarts it"
            )
            victim.wait_until_serving(BACK)
            back = time.monotonic() - killed
            time.sleep(2)
        figure(f"back after {back:.1f} s; {load}")
        assert not any(load.kinds[kind] for kind in (*DECEITS, HUNG)), load.replies
        # What was on its way when it died, and nothing after that: 2 s are for the gateway's own checks.
        assert load.failed <= 16
        assert load.since(over + 2).keys() == {WHOLE}
        # Some may be told by the gateway that their worker was lost while it said nothing yet.
        assert all(reply.worker in (victim.name, "") for reply in load.replies if reply.kind != WHOLE)
        assert back < BACK
        assert other.engine() == healthy
        assert victim.engine() not in ("", engine)
        assert len(victim.processes()) == 3, "an orphan is left"
        assert {
            reply.worker for reply in load.replies if reply.kind == WHOLE and reply.began > killed + back
        } == {
            victim.name,
            other.name,
        }

    def test_dies_while_loading_again_and_again(
        self, endpoint: Endpoint, copies: list[Spark], figure: Figure
    ) -> None:
        """Three starts, then it stays down and says why; the other copy serves on."""
        victim, other = copies[1], copies[0]
        starts = victim.status()["starts"]
        victim.fault("crash-while-loading")
        with Load(endpoint.url, clients=6) as load:
            time.sleep(1)
            victim.run(f"systemctl restart --no-block {victim.unit}")
            until(lambda: victim.show("ActiveState") == "failed", 3 * BACK, "it stays down")
            words = victim.show("StatusText")
            time.sleep(RESTART_DELAY * 2)
            assert victim.show("ActiveState") == "failed"
        figure(f"{load}; its last words: {words}")
        assert load.failed == 0, load.replies
        assert "stays down, as 3 starts in a row failed" in words
        assert "The cause: engine exited with status 1" in words
        assert "last lines: " in words
        history = json.loads(victim.run("cat /var/lib/vllm/replica-history.json"))
        assert history["starts"] - starts == 3
        assert (victim.engine(), victim.processes()) == ("", [])
        assert other.serves
        status, shown = play("status.yml")
        assert status != 0
        assert f"{victim}: vllm-replica has failed (stays down, as 3 starts in a row failed" in shown
        victim.fault()
        victim.run(f"systemctl reset-failed {victim.unit}; systemctl start {victim.unit}")  # as its words say


def canaries(copy: Spark) -> tuple[int, int]:
    """How many the agent has sent, and how many of them have failed."""
    lines = (line for line in copy.ask("/metrics")[1].splitlines() if not line.startswith("#"))
    figures = dict(line.rsplit(" ", 1) for line in lines)
    return int(figures["vllm_agent_canaries_total"]), int(figures["vllm_agent_canary_failures_total"])


class TestWatchdog:
    def test_a_wedged_engine_is_restarted(
        self, endpoint: Endpoint, copies: list[Spark], figure: Figure
    ) -> None:
        victim = copies[0]
        restarts = int(victim.show("NRestarts"))
        with Load(endpoint.url, clients=8) as load:
            time.sleep(2)
            wedged = time.monotonic()
            victim.fault("wedge")
            until(lambda: victim.ask("/health")[0] != 200, CANARY_TIMEOUT + SLACK, "it is suspected")
            out = time.monotonic()
            until(lambda: victim.ask("/health")[0] in (0, 503), 60, "it is given up")
            ended = time.monotonic() - wedged
            until(
                lambda: int(victim.show("NRestarts")) > restarts, RESTART_DELAY + SLACK, "systemd restarts it"
            )
            victim.fault()
            victim.wait_until_serving(BACK)
            back = time.monotonic() - wedged
        figure(
            f"out of the gateway after {out - wedged:.1f} s, ended after {ended:.1f} s, back after {back:.1f} s; {load}"
        )
        assert ended < STRIKES * (CANARY_TIMEOUT + INTERVAL) + SLACK / 2
        assert not any(load.kinds[kind] for kind in (*DECEITS, HUNG)), load.replies
        assert load.failed <= CAP
        # From then on nobody met the wedged one: 2 s are for the gateway's own checks.
        assert load.since(out + 2).keys() == {WHOLE}
        journal = victim.run(f"journalctl --unit {victim.unit} --no-pager --lines 400")
        assert "wedged: no progress and 3 canaries failed" in journal
        assert "Watchdog" in journal or "watchdog" in journal

    def test_a_busy_engine_is_left_alone(
        self, endpoint: Endpoint, copies: list[Spark], figure: Figure
    ) -> None:
        """A prefill far longer than all strikes together, of steps that are shorter than a canary's patience."""
        for copy in copies:
            copy.fault("slow 20")
        before = [(copy.show("MainPID"), copy.engine()) for copy in copies]
        body = {"model": "simulated", "prompt": "word " * 50_000, "max_tokens": 1}
        request = urllib.request.Request(
            f"{endpoint.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        with urllib.request.urlopen(request, timeout=240) as answer:
            assert answer.status == 200
            assert json.load(answer)["usage"]["completion_tokens"] == 1
        seconds = time.monotonic() - began
        figure(
            f"prefill of {seconds:.1f} s, and 3 strikes would be {STRIKES * (CANARY_TIMEOUT + INTERVAL)} s"
        )
        assert seconds > 1.5 * STRIKES * (CANARY_TIMEOUT + INTERVAL)
        assert [(copy.show("MainPID"), copy.engine()) for copy in copies] == before

    def test_an_idle_engine_is_left_alone(self, copies: list[Spark], figure: Figure) -> None:
        before = [(copy.show("MainPID"), copy.engine()) for copy in copies]
        counted = [canaries(copy) for copy in copies]
        time.sleep(1.5 * STRIKES * (CANARY_TIMEOUT + INTERVAL))
        assert [(copy.show("MainPID"), copy.engine()) for copy in copies] == before
        for copy, (sent_before, failed_before) in zip(copies, counted, strict=True):
            sent, failed = canaries(copy)
            figure(f"{copy}: {sent - sent_before} canaries sent, {failed - failed_before} failed")
            assert sent > sent_before
            assert failed == failed_before


class TestHost:
    def test_too_little_memory(self, copies: list[Spark], figure: Figure) -> None:
        """A hog: the start waits, names who holds the memory, fails in time, and succeeds when the hog has gone."""
        copy = copies[0]
        image = copy.run(f"docker inspect --format '{{{{.Config.Image}}}}' {copy.unit}")
        copy.run(f"systemctl stop {copy.unit}; cp /etc/vllm/replica.json /root/replica.json")
        available = int(copy.run("awk '/MemAvailable/ {print $2}' /proc/meminfo")) / 2**20
        # Not the whole machine's memory, which is not the test's: the budget is brought near to what is free.
        edit = "import json,sys; c = json.load(open('/root/replica.json')); c['memory']['budget_gib'] = {}; json.dump(c, sys.stdout)"
        copy.run(f'python3 -c "{edit.format(round(available - 1, 2))}" > /etc/vllm/replica.json')
        try:
            hog = "import time; hog = bytearray(2 << 30); time.sleep(600)"
            copy.run(f"docker run --detach --rm --name hog {image} python3 -c '{hog}'")
            time.sleep(3)
            copy.run(f"systemctl start {copy.unit} || true")
            words = copy.show("StatusText")
            figure(words)
            assert words.startswith("failed: not enough memory after 10 s: ")
            assert "python3 in container hog" in words
            assert copy.engine() == ""
            copy.run("docker kill hog")
            figure(f"without the hog it serves after {copy.wait_until_serving(BACK):.1f} s")
        finally:
            copy.run(
                f"docker rm --force hog; systemctl stop {copy.unit}; mv /root/replica.json /etc/vllm/replica.json"
            )

    def test_a_full_disk(self, endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
        """The agent's notes cannot be written; that must not take a copy away, nor keep it from starting."""
        copy = copies[0]
        copy.run(
            "mount -t tmpfs -o size=64k tmpfs /var/lib/vllm; head -c 1M /dev/zero > /var/lib/vllm/filler || true"
        )
        try:
            with Load(endpoint.url, clients=4) as load:
                copy.run(f"systemctl restart {copy.unit}")
            figure(str(load))
            assert load.failed == 0, load.replies
            assert "replica-history.json cannot be written: No space left" in copy.run(
                f"journalctl --unit {copy.unit} --no-pager --lines 200"
            )
        finally:
            copy.run(f"systemctl stop {copy.unit}; umount /var/lib/vllm")
