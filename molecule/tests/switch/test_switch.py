# SPDX-License-Identifier: GPL-3.0-or-later
"""A switch with clients at the gateway: they wait, and none is refused or cut. One that fails comes back, two do not interleave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
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
    """Both, serving a copy before and after."""
    both = sparks("replica")
    for spark in both:
        spark.wait_until_serving()
    yield both
    for spark in both:
        spark.fault()
    if not all(spark.serves for spark in both):
        status, said = play("switch_mode.yml", "-e", "mode=replica")
        assert status == 0, said


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
                assert spark["seconds"]["draining"] > 0
                assert 0 < spark["engine"] < sum(spark["seconds"].values())
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


SPOILT = r"""
cp /etc/vllm/tp.json /root/
sed --in-place 's:/srv/models/simulated:/srv/models/gone:; s:--max-model-len:--max-modell-len:' /etc/vllm/tp.json
sed --in-place --regexp-extended 's/("budget_gib": )[0-9.]+/\15000/' /etc/vllm/tp.json
docker run --detach --rm --name=trainer --gpus=all --entrypoint=sleep twospark/engine-standin:1 600
"""
SPOILT_OTHERWISE = """
docker inspect --format={{.Id}} twospark/engine-standin:1 > /root/image
docker create --name=other twospark/engine-standin:1
docker commit --change='LABEL other=1' other twospark/engine-standin:1
docker rm other
systemd-run --unit=stranger python3 -m http.server 9402
ip link set eth1 down
"""
MENDED = "mv /root/tp.json /etc/vllm/tp.json; docker stop --time=0 trainer"
MENDED_OTHERWISE = """
docker rmi twospark/engine-standin:1
docker tag $(cat /root/image) twospark/engine-standin:1
systemctl stop stranger
ip link set eth1 up
"""


def test_all_that_is_missing_is_told_at_once_and_nothing_stopped(
    endpoint: Endpoint, pair: list[Spark]
) -> None:
    engines = [spark.engine() for spark in pair]
    try:
        pair[0].run(f"set -e; {SPOILT}")
        pair[1].run(f"set -e; {SPOILT_OTHERWISE}")
        with Load(endpoint.url, clients=4) as load:
            status, said = play("switch_mode.yml", "-e", "mode=tp", "-e", "vllm_disk_reserved_gib=9000")
            assert status != 0
            pair[1].shut()
            status, said_of_one = play("switch_mode.yml", "-e", "mode=tp")
            pair[1].open()
    finally:
        pair[1].open()
        pair[0].run(MENDED)
        pair[1].run(MENDED_OTHERWISE)
    for words in (
        "spark-a: model folder /srv/models/gone (vllm_model_path) does not exist",
        "spark-a: flag --max-modell-len is not known to the engine in twospark/engine-standin:1. Did you mean --max-model-len",
        "spark-a: the engine is given 5000 GiB",
        "spark-a: the container of twospark/engine-standin:1 trainer uses the GPU",
        "spark-a: /etc/vllm/tp.json on this host is not what the inventory says now",
        "spark-a: /var/cache/vllm has",
        "spark-b: port 9402 (vllm_tp_agent_port) is taken by python3",
        "Stop that: systemctl disable --now stranger.service",
        "spark-b: the way to 198.18.88.11 (fabric_address of the other Spark) leads over the router",
        "spark-a: 198.18.88.12 (fabric_address of the other Spark) does not answer on eth1",
        "the image is not the same on all Sparks",
        "Nothing was stopped.",
    ):
        assert words in said, words
    assert status != 0
    assert "spark-a: model folder /srv/models/gone (vllm_model_path) does not exist" in said_of_one
    assert "spark-b is not reached: " in said_of_one
    assert load.failed == 0
    assert [spark.engine() for spark in pair] == engines
    status, said = play("preflight.yml", "-e", "mode=tp")
    assert status == 0, said


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


def test_of_two_switches_at_the_same_moment_one_is_refused(pair: list[Spark]) -> None:
    runs = {mode: start("switch_mode.yml", "-e", f"mode={mode}") for mode in ("tp", "stopped")}
    said = {mode: " ".join(run.communicate(timeout=300)[0].split()) for mode, run in runs.items()}
    failed = [mode for mode, run in runs.items() if run.returncode != 0]
    assert len(failed) == 1, said
    (won,) = set(runs) - set(failed)
    assert re.search(
        rf"Another run changes what this Spark serves: \S+ on \S+ \(process \d+, switch to {won}",
        said[failed[0]],
    ), said[failed[0]]
    for spark in pair:
        assert spark.run("systemctl is-enabled vllm-replica vllm-tp || true").split().count("enabled") == (
            won == "tp"
        )


# What the playbook prints at the points where it is killed, one run after the other, and what is wanted then.
POINTS = [
    ("tp", r"TASK \[Let requests wait for the whole switch", "replica"),
    ("tp", r"spark-\w \d+:\d\d draining", "tp"),
    ("replica", r"spark-\w \d+:\d\d loading", "replica"),
    ("replica", r"PLAY \[Answer\]", "replica"),
    ("replica", r"PLAY \[Tell how it went\]", "replica"),
]


def kill_at(run: subprocess.Popen[str], point: str) -> None:
    """Kill a playbook, and all that it has begun on this machine, when it prints this."""
    assert run.stdout
    said = []
    for line in run.stdout:
        said.append(line)
        if re.match(point, line):
            break
    else:
        pytest.fail("".join(said))
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()


def test_a_switch_that_is_killed_is_made_good_by_the_same_command(
    endpoint: Endpoint, pair: list[Spark], figure: Figure
) -> None:
    with Load(endpoint.url, clients=4) as load:
        for mode, point, wanted in POINTS:
            kill_at(start("switch_mode.yml", "-e", f"mode={mode}"), point)
            _status, told = play("status.yml")
            assert re.search(rf"spark-a {wanted} .* spark-b {wanted} ", told), told
            if wanted == "tp":
                status, told = play("switch_mode.yml", "-e", "mode=tp")
                assert status == 0, told
                status, told = play("rolling_restart.yml")
                assert (status != 0, "a rank cannot rejoin a running pair" in told) == (True, True)
        status, told = play("switch_mode.yml", "-e", "mode=replica")
        assert status == 0, told
    figure(str(load))
    assert load.failed == 0, [reply for reply in load.replies if reply.kind != "whole"]
    assert play("status.yml")[0] == 0


def test_a_network_that_blinks_undoes_nothing(pair: list[Spark]) -> None:
    run = start("switch_mode.yml", "-e", "mode=tp")
    assert run.stdout
    said = []
    try:
        for line in run.stdout:
            said.append(line)
            if re.match(r"spark-b \d+:\d\d loading", line):
                pair[1].hang_up()
                pair[1].shut()
            if "spark-b is not reached, which is tried for" in line:
                pair[1].open()
    finally:
        pair[1].open()
    assert run.wait(300) == 0, "".join(said)
    assert any("spark-b is not reached, which is tried for" in line for line in said), "nothing blinked"


@pytest.fixture
def changed(tmp_path: Path, pair: list[Spark]) -> Iterator[Callable[..., str]]:
    """Makes the argument that gives hosts another variable, as a person who edits the inventory; as before in the end."""

    def change(*hosts: str, **variables: object) -> str:
        path = tmp_path / "changed.yml"
        path.write_text(json.dumps({"all": {"hosts": dict.fromkeys(hosts, variables)}}))
        return f"--inventory={path}"

    yield change
    for spark in pair:
        spark.fault()
    status, said = play("site.yml")
    assert status == 0, said


def test_a_changed_setting_restarts_only_what_has_it(
    endpoint: Endpoint, pair: list[Spark], changed: Callable[..., str], figure: Figure
) -> None:
    before = [spark.engine() for spark in pair]
    one = changed("spark-a", vllm_gpu_memory_utilization=0.74)
    with Load(endpoint.url, clients=16) as load:
        status, said = play("switch_mode.yml", one, "-e", "mode=replica")
        assert (status != 0, "/etc/vllm/replica.json" in said) == (True, True), said
        status, said = play("site.yml", one)
        assert status == 0, said
        now = [spark.engine() for spark in pair]
        assert [a == b for a, b in zip(before, now, strict=True)] == [False, True]
        # What only tp uses is installed, and restarts nothing.
        status, said = play("site.yml", one, "-e", "vllm_tp_max_requests=3")
        assert status == 0, said
        assert pair[0].run("grep -A1 max-num-seqs /etc/vllm/tp.json").endswith('"3",')
        assert [spark.engine() for spark in pair] == now
    figure(str(load))
    assert load.failed == 0, [reply for reply in load.replies if reply.kind != "whole"]


def test_a_setting_that_does_not_come_up_stays_with_one_copy(
    endpoint: Endpoint, pair: list[Spark], changed: Callable[..., str]
) -> None:
    before = [spark.engine() for spark in pair]
    for spark in pair:
        spark.fault("crash-while-loading")
    status, said = play("site.yml", changed("spark-a", "spark-b", vllm_gpu_memory_utilization=0.74))
    assert status != 0
    assert "vllm-replica.service failed" in said
    # Whichever came first.
    untouched = [spark.name for spark, engine in zip(pair, before, strict=True) if spark.engine() == engine]
    assert len(untouched) == 1
    assert endpoint.complete().served_by == untouched[0]


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
