# SPDX-License-Identifier: GPL-3.0-or-later
"""Two real agents as a tensor-parallel pair: worker first, head last, and they live and die together."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from .harness import Spark

Pair = tuple[Spark, Spark]


def serve(pair: Pair) -> None:
    """Start both and wait until both are ready."""
    for spark in pair:
        spark.start()
    for spark in pair:
        spark.wait_for("READY=1")


def started_at(spark: Spark) -> int:
    """When the engine's container was started."""
    file: Path = spark.folder / "docker" / spark.config["container"]
    return file.stat().st_mtime_ns


def in_flight(spark: Spark) -> None:
    """A request that does not end; the engine shows progress."""
    spark.order(running=1, busy=True)


def test_the_pair_forms_worker_first_head_last(pair: Pair) -> None:
    head, worker = pair
    worker.start()
    worker.wait_for("STATUS=waiting for peer: rank 0 on 127.0.0.2: ")
    assert not worker.started_containers
    head.start()
    head.wait_for("READY=1")
    worker.wait_for("READY=1")
    assert started_at(worker) < started_at(head)
    ours, theirs = (json.loads(spark.get("/status")[1]) for spark in pair)
    assert ours["generation"] == theirs["generation"] != ""
    assert (ours["rank"], theirs["rank"]) == (0, 1)
    assert ours["pair"]["peer_phase"] == theirs["pair"]["peer_phase"] == "serving"
    assert theirs["requests"] is None
    assert "\nvllm_agent_heartbeat_age_seconds 0." in worker.get("/metrics")[1]
    assert not (worker.folder / "completions").exists()


def test_the_head_waits_for_its_worker_within_a_bound(pair: Pair) -> None:
    head, _worker = pair
    head.config["pair"]["peer_wait_seconds"] = 1
    head.start()
    head.wait_for("STATUS=waiting for peer: rank 1 on 127.0.0.1")
    assert head.exit_status() == 1
    head.wait_for("STATUS=failed: no rank 1 on 127.0.0.1 within 1 s: nothing heard")
    assert not head.started_containers


def test_another_image_is_refused_by_both(pair: Pair) -> None:
    head, worker = pair
    worker.config["image"] = "vllm:other"
    for spark in pair:
        spark.start()
    for spark in pair:
        assert spark.exit_status() == 1
        assert not spark.started_containers
    head.wait_for(
        "STATUS=failed: rank 1 on 127.0.0.1 refused: its image is 'vllm:other', needed is 'vllm:test'"
    )
    worker.wait_for(
        "STATUS=failed: rank 0 on 127.0.0.2 refused: its image is 'vllm:test', needed is 'vllm:other'"
    )


class TestLoss:
    """Each time both engines end within the bound and both agents ask systemd for a restart."""

    @pytest.fixture(autouse=True)
    def serving(self, pair: Pair) -> None:
        serve(pair)

    def both_fail(self, pair: Pair, *causes: str) -> None:
        begun = time.monotonic()
        for spark, cause in zip(pair, causes, strict=True):
            assert spark.exit_status() == 1
            spark.wait_for(f"STATUS=failed: {cause}")
            assert spark.engine_pid is None
        assert time.monotonic() - begun < 10

    @pytest.mark.parametrize("victim", [0, 1])
    def test_an_engine_is_killed(self, pair: Pair, victim: int) -> None:
        engine = pair[victim].engine_pid
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        causes = ["rank 1 on 127.0.0.1 failed: engine exited", "rank 0 on 127.0.0.2 failed: engine exited"]
        causes[victim] = "engine exited with status 137"
        self.both_fail(pair, *causes)

    @pytest.mark.parametrize("victim", [0, 1])
    def test_an_agent_is_killed(self, pair: Pair, victim: int) -> None:
        process, survivor = pair[victim].process, pair[1 - victim]
        assert process is not None
        process.kill()
        assert survivor.exit_status() == 1
        survivor.wait_for(f"STATUS=failed: the connection to rank {victim} on ")
        assert any("ended while it was serving" in message for message in survivor.messages)
        assert survivor.engine_pid is None

    @pytest.mark.parametrize("victim", [0, 1])
    def test_an_agent_falls_silent(self, pair: Pair, victim: int) -> None:
        """As when the fabric is cut or the host is off: nothing arrives, not even the end of the connection."""
        process, survivor = pair[victim].process, pair[1 - victim]
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        assert survivor.exit_status() == 1
        assert any(" was silent for 2 s" in message for message in survivor.messages)
        assert survivor.engine_pid is None
        process.send_signal(signal.SIGCONT)  # back again, it finds itself alone
        assert pair[victim].exit_status() == 1
        assert pair[victim].engine_pid is None

    def test_the_pair_forms_anew_with_another_generation(self, pair: Pair) -> None:
        before = json.loads(pair[0].get("/status")[1])["generation"]
        engine = pair[1].engine_pid
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        for spark in pair:
            spark.exit_status()
            spark.messages.clear()
        serve(pair)
        assert json.loads(pair[0].get("/status")[1])["generation"] != before


class TestStop:
    @pytest.fixture(autouse=True)
    def serving(self, pair: Pair) -> None:
        serve(pair)

    @pytest.mark.parametrize("first", [0, 1])
    def test_both_are_told_while_a_request_runs(self, pair: Pair, first: int) -> None:
        """The switch: the worker keeps its engine until the head has drained; both end as asked."""
        head, worker = pair
        in_flight(head)
        pair[first].terminate()
        time.sleep(0.3)
        pair[1 - first].terminate()
        head.wait_for_phase("draining")
        assert head.get("/health") == (404, "draining\n")
        time.sleep(1)
        assert worker.engine_pid is not None
        head.order()
        assert [spark.exit_status() for spark in pair] == [0, 0]
        assert [spark.history["failures"] for spark in pair] == [0, 0]
        assert "stop -t 1 vllm-replica" in head.docker_calls
        assert "kill vllm-replica" in worker.docker_calls
        assert not any(call.startswith("stop") for call in worker.docker_calls)

    def test_only_the_worker_is_told(self, pair: Pair) -> None:
        head, worker = pair
        in_flight(head)
        worker.terminate()
        head.wait_for_phase("draining")
        time.sleep(0.5)
        assert worker.engine_pid is not None
        head.order()
        assert worker.exit_status() == 0
        assert head.exit_status() == 1
        assert "the other rank was told to stop" in head.journal()
        assert head.engine_pid is None

    def test_only_the_head_is_told(self, pair: Pair) -> None:
        head, worker = pair
        head.terminate()
        assert head.exit_status() == 0
        assert worker.exit_status() == 1
        worker.wait_for("STATUS=failed: the connection to rank 0 on 127.0.0.2 ended while it was stopping")
        assert worker.engine_pid is None

    def test_a_second_sigterm_hastens_the_worker(self, pair: Pair) -> None:
        head, worker = pair
        in_flight(head)
        worker.terminate()
        worker.wait_for_phase("draining")
        worker.terminate()
        assert worker.exit_status(5) == 0
        assert head.exit_status(5) == 1
        assert head.engine_pid is None


def test_a_stop_while_loading_ends_both_at_once(pair: Pair) -> None:
    head, _worker = pair
    head.order(load_seconds=60)
    for spark in pair:
        spark.start()
    head.wait_for("STATUS=loading")
    for spark in pair:
        spark.terminate()
    assert [spark.exit_status(8) for spark in pair] == [0, 0]
    assert [spark.engine_pid for spark in pair] == [None, None]


def test_a_worker_that_cannot_start_lets_the_head_fail_before_it_starts(pair: Pair) -> None:
    head, worker = pair
    worker.memory(1)
    for spark in pair:
        spark.start()
    for spark in pair:
        assert spark.exit_status() == 1
    head.wait_for("STATUS=failed: rank 1 on 127.0.0.1 failed: not enough memory after 1 s: 50.0 GiB needed")
    assert not head.started_containers
    assert Path(worker.folder / "docker/calls").exists()


@pytest.mark.parametrize("told", [0, 1])
def test_a_rank_is_not_worn_out_by_the_others_restarts(pair: Pair, told: int) -> None:
    """It ends and starts with the other, by no fault of its own, so it never stays down for that."""
    for _ in range(4):
        for spark in pair:
            spark.messages.clear()
        serve(pair)
        pair[told].terminate()
        assert pair[told].exit_status() == 0
        assert pair[1 - told].exit_status() == 1
    assert pair[1 - told].history["attempts"]["count"] == 0
