# SPDX-License-Identifier: GPL-3.0-or-later
"""A switch with clients at the gateway: they wait, and none is refused or cut. One that fails comes back, two do not interleave."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from load import RETRY, WHOLE, Load
from playbook import play, start
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]


@pytest.fixture
def pair(sparks: Callable[[str], list[Spark]]) -> Iterator[list[Spark]]:
    """Both serving a copy, before and after."""
    both = sparks("replica")
    for spark in both:
        spark.wait_until_serving()
    yield both
    for spark in both:
        spark.fault()


def test_there_and_back(endpoint: Endpoint, figure: Figure, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    with Load(endpoint.url, clients=16) as load:
        for mode in ("tp", "replica"):
            began = time.monotonic()
            status, said = play("switch_mode.yml", "-e", f"mode={mode}", "-e", f"report={report}")
            assert status == 0, said
            assert f"to {mode}" in said
            record = json.loads(report.read_text())
            assert (record["mode"], record["succeeded"], set(record["sparks"])) == (
                mode,
                True,
                {"spark-a", "spark-b"},
            )
            for spark in record["sparks"].values():
                assert 0 < spark["seconds"]["engine"] <= spark["seconds"]["ready"]
            clients = record["gateways"]["gateway"]
            # Some of them wait for the new mode, and their requests are answered then.
            assert clients["held"] > 0
            assert (clients["given up"], clients["failed"]) == (0, 0)
            assert 0 < clients["away"] < time.monotonic() - began
            figure(
                f"to {mode} in {time.monotonic() - began:.1f} s, the model was away for {clients['away']} s"
            )
            time.sleep(2)
    figure(str(load))
    assert load.failed == 0, [reply for reply in load.replies if reply.kind != "whole"]
    assert {reply.worker for reply in load.replies} == {"spark-a", "spark-b"}


def test_all_that_is_missing_is_told_at_once_and_nothing_stopped(
    endpoint: Endpoint, pair: list[Spark]
) -> None:
    engines = [spark.engine() for spark in pair]
    pair[0].run(
        "cp /etc/vllm/tp.json /root/ && sed --in-place s:/srv/models/simulated:/srv/models/gone: /etc/vllm/tp.json"
    )
    pair[1].run("ip link set eth1 down")
    try:
        with Load(endpoint.url, clients=4) as load:
            status, said = play("switch_mode.yml", "-e", "mode=tp")
    finally:
        pair[0].run("mv /root/tp.json /etc/vllm/tp.json")
        pair[1].run("ip link set eth1 up")
    assert status != 0
    for words in (
        "model folder /srv/models/gone (vllm_model_path) does not exist",
        "198.18.88.12 (fabric_address of the other Spark) does not answer on eth1",
        "so it is not the direct link",
        "Nothing was stopped.",
    ):
        assert words in said
    assert load.failed == 0
    assert [spark.engine() for spark in pair] == engines
    assert play("preflight.yml", "-e", "mode=tp")[0] == 0


def test_a_mode_that_cannot_start_gives_way_to_the_former(
    endpoint: Endpoint, pair: list[Spark], figure: Figure
) -> None:
    pair[1].fault("crash-while-loading")
    with Load(endpoint.url, clients=4) as load:
        # The fault is for the rank: what comes back after it finds none.
        switch = start("switch_mode.yml", "-e", "mode=tp")
        until(lambda: "loading" in pair[1].show("StatusText", "tp"), 90, "the rank loads")
        until(
            lambda: (
                pair[1].show("ActiveState", "tp") != "activating"
                or "loading" not in pair[1].show("StatusText", "tp")
            ),
            90,
            "it fails",
        )
        pair[1].fault()
        said = " ".join(switch.communicate(timeout=300)[0].split())
    figure(str(load))
    assert switch.returncode != 0
    assert "The switch to tp failed. replica serves again on spark-a, spark-b." in said, said[-3000:]
    assert "vllm-tp.service failed" in said.rpartition("The cause:")[2]
    assert load.failed == 0, [reply for reply in load.replies if reply.kind != "whole"]
    for spark in pair:
        assert spark.serves
        assert spark.run("systemctl is-enabled vllm-replica vllm-tp || true").split() == [
            "enabled",
            "disabled",
        ]


def test_who_shall_not_wait_is_told_when_to_come_again(
    endpoint: Endpoint, pair: list[Spark], figure: Figure
) -> None:
    with Load(endpoint.url, clients=8) as load:
        status, said = play("switch_mode.yml", "-e", "mode=tp", "-e", "hold=1")
        assert status == 0, said
    figure(str(load))
    assert set(load.kinds) == {WHOLE, RETRY}
    status, said = play("switch_mode.yml", "-e", "mode=replica")
    assert status == 0, said


def test_of_two_switches_at_the_same_moment_one_is_refused(pair: list[Spark]) -> None:
    runs = {mode: start("switch_mode.yml", "-e", f"mode={mode}") for mode in ("tp", "stopped")}
    said = {mode: " ".join(run.communicate(timeout=300)[0].split()) for mode, run in runs.items()}
    failed = [mode for mode, run in runs.items() if run.returncode != 0]
    assert len(failed) == 1, said
    (won,) = set(runs) - set(failed)
    assert re.search(
        rf"Another run changes what this Spark serves: \S+ on \S+ \(process \d+, switch to {won}",
        said[failed[0]],
    )
    for spark in pair:
        assert spark.run("systemctl is-enabled vllm-replica vllm-tp || true").split().count("enabled") == (
            won == "tp"
        )
    status, told = play("switch_mode.yml", "-e", "mode=replica")
    assert status == 0, told


def test_a_switch_that_is_killed_is_made_good_by_the_same_command(pair: list[Spark]) -> None:
    run = start("switch_mode.yml", "-e", "mode=tp")
    assert run.stdout
    for line in run.stdout:
        if line.startswith("TASK") and "Bring the Spark to the mode" in line:
            break
    # One stops what it served then, or waits for what starts.
    time.sleep(2)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    status, told = play("status.yml")
    assert "tp" in told
    status, told = play("switch_mode.yml", "-e", "mode=tp")
    assert status == 0, told
    assert play("status.yml")[0] == 0
    status, told = play("rolling_restart.yml")
    assert (status != 0, "a rank cannot rejoin a running pair" in told) == (True, True)
    status, told = play("switch_mode.yml", "-e", "mode=replica")
    assert status == 0, told


def test_a_rolling_restart_loses_nothing(endpoint: Endpoint, pair: list[Spark], figure: Figure) -> None:
    before = [spark.engine() for spark in pair]
    with Load(endpoint.url, clients=16) as load:
        status, said = play("rolling_restart.yml")
    assert status == 0, said
    figure(str(load))
    assert load.failed == 0, [reply for reply in load.replies if reply.kind != "whole"]
    now = [spark.engine() for spark in pair]
    assert [one != other for one, other in zip(before, now, strict=True)] == [True, True]
    assert play("rolling_restart.yml", "--limit", "spark-b")[0] == 0
    assert [one == spark.engine() for one, spark in zip(now, pair, strict=True)] == [True, False]


def test_a_rolling_restart_ends_with_the_first_copy_that_fails(endpoint: Endpoint, pair: list[Spark]) -> None:
    other = pair[1].engine()
    pair[0].fault("crash-while-loading")
    status, said = play("rolling_restart.yml")
    assert status != 0
    assert "The restart ends here, the other copies are as they were." in said
    assert pair[1].engine() == other
    assert endpoint.complete().served_by == "spark-b"
    pair[0].fault()
    pair[0].run("systemctl reset-failed vllm-replica || true; systemctl restart --no-block vllm-replica")
    pair[0].wait_until_serving()
