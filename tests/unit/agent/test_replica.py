# SPDX-License-Identifier: GPL-3.0-or-later
"""The real agent process in mode replica, with a fake docker and a fake engine, through its life and its faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from .harness import API_KEY, Spark, wait_until


def test_from_start_to_ready_to_stop(spark: Spark) -> None:
    spark.ready()
    messages = list(spark.messages)
    phases = [
        text.removeprefix("STATUS=").partition(":")[0] for text in messages if text.startswith("STATUS=")
    ]
    assert list(dict.fromkeys(phases)) == [
        "waiting for memory",
        "starting",
        "loading",
        "verifying",
        "serving",
    ]
    before_ready = messages[: messages.index("READY=1")]
    assert "EXTEND_TIMEOUT_USEC=60000000" in before_ready
    assert "WATCHDOG=1" not in before_ready
    assert spark.get("/health") == (200, "serving\n")
    completion = json.loads((spark.folder / "completions").read_text().splitlines()[0])
    assert completion["max_tokens"] == 1
    assert completion["model"] == "tiny"
    assert completion["authorization"] == f"Bearer {API_KEY}"
    spark.wait_for("WATCHDOG=1")

    spark.terminate()
    assert spark.exit_status() == 0
    spark.wait_for("STOPPING=1")
    assert spark.engine_pid is None
    assert "stop -t 1 vllm-replica" in spark.docker_calls
    assert not any(call.startswith("kill") for call in spark.docker_calls)
    assert API_KEY not in spark.journal()
    assert "INFO the key is ***" in spark.journal()


def test_what_it_tells_while_serving(spark: Spark) -> None:
    spark.order(running=3)
    spark.ready()
    wait_until(
        lambda: json.loads(spark.get("/status")[1])["requests"], lambda: "the first look at the engine"
    )
    status = json.loads(spark.get("/status")[1])
    assert status.pop("since").endswith("+00:00")
    assert status.pop("elapsed_seconds") >= 0
    assert 0 < status["last_start_seconds"] == status.pop("expected_seconds") < 10
    assert status == {
        "mode": "replica",
        "unit": "vllm-replica.service",
        "phase": "serving",
        "cause": "",
        "progress": 1.0,
        "image": "vllm:test",
        "model": str(spark.folder / "model"),
        "served_model_name": "tiny",
        "container": "vllm-replica",
        "rank": 0,
        "generation": None,
        "pair": None,
        "memory": {"available_gib": 100.0, "budget_gib": 50},
        "requests": {"running": 3, "waiting": 0},
        "tokens_per_second": status["tokens_per_second"],
        "kv_cache_usage": 0.25,
        "capacity": {"kv_tokens": 1000, "context_tokens": 400, "full_context_requests": 2.5},
        "starts": 1,
        "failures": 0,
        "attempts": 1,
        "last_failure": "",
        "strikes": 0,
        "last_start_seconds": status["last_start_seconds"],
        "agent_version": "0.1.0",
        "settings_digest": status["settings_digest"],
    }
    metrics = dict(line.rsplit(" ", 1) for line in spark.get("/metrics")[1].splitlines() if line[0] != "#")
    assert metrics['vllm_agent_info{version="0.1.0",mode="replica",image="vllm:test"}'] == "1"
    assert metrics['vllm_agent_phase{phase="serving"}'] == "1"
    assert metrics['vllm_agent_phase{phase="draining"}'] == "0"
    assert metrics["vllm_agent_starts_total"] == "1"
    assert metrics["vllm_agent_failures_total"] == "0"
    assert metrics["vllm_agent_requests_in_flight"] == "3"
    assert metrics["vllm_agent_kv_cache_tokens"] == "1000"
    assert metrics["vllm_agent_full_context_requests"] == "2.5"
    assert metrics["vllm_agent_memory_available_bytes"] == str(100 * 2**30)
    assert float(metrics["vllm_agent_last_start_seconds"]) > 0
    assert {"vllm_agent_canaries_total", "vllm_agent_canary_failures_total"} <= metrics.keys()
    assert "vllm_agent_heartbeat_age_seconds" not in metrics
    assert spark.get("/nothing")[0] == 404


class TestHealth:
    """The gateway's check goes through to what the engine says of itself, but never waits for it."""

    def test_an_engine_that_is_dead_while_its_container_still_ends(self, spark: Spark) -> None:
        spark.ready()
        spark.order(health=503)
        assert spark.get("/health") == (503, "the engine's own health is 503\n")
        assert spark.phase() == "serving"  # the container's end is what ends this life
        spark.order()
        assert spark.get("/health") == (200, "serving\n")

    def test_an_engine_too_busy_to_answer(self, spark: Spark) -> None:
        spark.ready()
        spark.order(mute=True)
        began = time.monotonic()
        assert spark.get("/health") == (200, "serving\n")
        assert time.monotonic() - began < 2  # what the gateway waits for a check


class TestStop:
    def test_requests_in_flight_are_waited_for(self, spark: Spark) -> None:
        spark.order(running=1, busy=True)
        spark.ready_when_busy()
        spark.terminate()
        spark.wait_for_phase("draining")
        time.sleep(1)
        assert spark.get("/health") == (404, "draining\n")
        assert not any(call.startswith("stop") for call in spark.docker_calls)
        spark.order()
        assert spark.exit_status() == 0
        assert "stop -t 1 vllm-replica" in spark.docker_calls

    def test_the_gateway_gets_time_to_notice_even_when_idle(self, spark: Spark) -> None:
        spark.config["timeouts"]["drain_notice"] = 1.5
        spark.ready()
        begun = time.monotonic()
        spark.terminate()
        spark.wait_for_phase("draining")
        assert spark.exit_status() == 0
        assert time.monotonic() - begun >= 1.5

    def test_the_drain_time_is_a_bound(self, spark: Spark) -> None:
        spark.config["timeouts"]["drain"] = 1
        spark.order(running=2, busy=True)
        spark.ready_when_busy()
        spark.terminate()
        assert spark.exit_status() == 0
        assert "drain time of 1 s is over: 2 in flight" in spark.journal()
        assert spark.engine_pid is None

    def test_a_second_sigterm_hastens_it(self, spark: Spark) -> None:
        spark.config["timeouts"]["drain"] = 60
        spark.order(running=1, busy=True)
        spark.ready_when_busy()
        spark.terminate()
        spark.wait_for_phase("draining")
        spark.terminate()
        assert spark.exit_status(5) == 0
        assert "kill vllm-replica" in spark.docker_calls

    def test_a_second_sigterm_hastens_an_engine_that_takes_its_time(self, spark: Spark) -> None:
        spark.config["timeouts"]["container_stop"] = 60
        spark.order(deaf=True)
        spark.ready()
        spark.terminate()
        wait_until(lambda: "stop -t 60 vllm-replica" in spark.docker_calls, lambda: "docker stop")
        spark.terminate()
        assert spark.exit_status(5) == 0
        assert "kill vllm-replica" in spark.docker_calls

    def test_an_engine_that_ignores_sigterm_is_killed_in_time(self, spark: Spark) -> None:
        spark.order(deaf=True)
        spark.ready()
        spark.terminate()
        assert spark.exit_status() == 0
        assert spark.engine_pid is None

    def test_a_sigterm_to_the_whole_unit_hastens_it_too(self, spark: Spark) -> None:
        """As `systemctl kill` sends it: the docker client, which does not pass it on, ends at once."""
        spark.order(running=1, busy=True)
        spark.ready_when_busy()
        spark.terminate()
        os.kill(spark.client_pid, signal.SIGTERM)
        assert spark.exit_status(5) == 0
        assert spark.engine_pid is None

    def test_a_loading_engine_is_killed_not_asked(self, spark: Spark) -> None:
        spark.order(load_seconds=60)
        spark.start()
        spark.wait_for("STATUS=loading")
        assert spark.get("/health") == (503, "loading\n")
        spark.terminate()
        assert spark.exit_status(5) == 0
        assert spark.engine_pid is None
        assert not any(call.startswith("stop") for call in spark.docker_calls)

    def test_a_wait_for_memory_ends_at_once(self, spark: Spark) -> None:
        spark.config["memory"]["wait_seconds"] = 60
        spark.memory(10)
        spark.start()
        spark.wait_for_phase("waiting-for-memory")
        spark.terminate()
        assert spark.exit_status(5) == 0
        assert not spark.started_containers

    def test_a_signal_to_our_process_group_does_not_reach_the_engine(self, spark: Spark) -> None:
        spark.order(running=1, busy=True)
        spark.ready_when_busy()
        assert spark.process is not None
        os.killpg(spark.process.pid, signal.SIGTERM)
        spark.wait_for_phase("draining")
        time.sleep(0.5)
        assert spark.engine_pid is not None
        spark.order()
        assert spark.exit_status() == 0
        assert "stop -t 1 vllm-replica" in spark.docker_calls  # it was asked, by us and only now


class TestFailure:
    def test_an_engine_that_ends_with_0_has_failed(self, spark: Spark) -> None:
        spark.ready()
        spark.order(exit=0)
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: engine exited with status 0 while serving; last lines: ")
        assert spark.history["failures"] == 1
        assert "vllm-agent: the engine's last lines were:" in spark.journal()

    def test_an_engine_that_dies_while_loading_tells_why(self, spark: Spark) -> None:
        spark.order(die_loading=1)
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: engine exited with status 1 while ")
        assert "ValueError: no room for the KV cache" in spark.messages[-1]
        assert "READY=1" not in spark.messages
        assert API_KEY not in spark.messages[-1]

    def test_a_container_killed_from_outside(self, spark: Spark) -> None:
        spark.ready()
        assert spark.engine_pid is not None
        os.kill(spark.engine_pid, signal.SIGKILL)
        assert spark.exit_status() == 1
        spark.wait_for(
            "STATUS=failed: engine exited with status 137 (SIGKILL: out of memory, or killed by hand)"
        )

    def test_a_killed_docker_client_leaves_no_container(self, spark: Spark) -> None:
        spark.ready()
        engine = spark.engine_pid
        assert engine is not None
        os.kill(spark.client_pid, signal.SIGKILL)
        assert spark.exit_status() == 1
        spark.wait_for(
            "STATUS=failed: engine exited with status -9 (the docker client was killed by SIGKILL)"
        )
        wait_until(lambda: not os.path.exists(f"/proc/{engine}"), lambda: "the engine's end")

    def test_too_little_memory_is_told_with_figures_and_holders(self, spark: Spark) -> None:
        spark.memory(20)
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for(
            "STATUS=failed: not enough memory after 1 s: 50.0 GiB needed, 20.0 GiB available; largest proc"
        )
        assert "running containers: other-container" in spark.messages[-1]
        assert not spark.started_containers

    def test_memory_that_comes_in_time_is_enough(self, spark: Spark) -> None:
        spark.config["memory"]["wait_seconds"] = 30
        spark.memory(20)
        spark.start()
        spark.wait_for("STATUS=waiting for memory: 50.0 GiB needed, 20.0 GiB available")
        spark.memory(50)
        spark.wait_for("READY=1")

    def test_an_engine_that_dies_while_it_drains_has_failed(self, spark: Spark) -> None:
        spark.order(running=1, busy=True)
        spark.ready_when_busy()
        spark.terminate()
        spark.wait_for_phase("draining")
        spark.order(exit=0)
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: engine exited with status 0 while draining")

    def test_a_start_that_takes_too_long(self, spark: Spark) -> None:
        spark.config["timeouts"]["start"] = 1
        spark.order(load_seconds=60)
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: the engine was not healthy within 1 s; last lines: ")
        assert spark.engine_pid is None

    @pytest.mark.parametrize(
        ("refuse", "cause"),
        [(401, "the engine refuses to serve: a completion was answered 401"),
         (500, "the engine is healthy but gave no completion within 1 s; a completion was answered 500")],
    )  # fmt: skip
    def test_no_completion_no_ready(self, spark: Spark, refuse: int, cause: str) -> None:
        spark.config["timeouts"]["verify"] = 1
        spark.order(refuse=refuse)
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for(f"STATUS=failed: {cause}")
        assert "READY=1" not in spark.messages
        assert spark.engine_pid is None

    def test_healthy_but_silent_is_not_ready(self, spark: Spark) -> None:
        spark.config["timeouts"]["verify"] = 1
        spark.order(stuck=True)
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: the engine is healthy but gave no completion within 1 s; no answer")
        assert "READY=1" not in spark.messages

    @pytest.mark.parametrize("whose", ["api", "agent"])
    def test_a_port_of_another_process(self, spark: Spark, whose: str) -> None:
        with socket.create_server(("0.0.0.0", spark.config[whose]["port"])):
            spark.start()
            assert spark.exit_status() == 1
        port = spark.config[whose]["port"]
        spark.wait_for(f"STATUS=failed: port {port} is taken by another process" if whose == "api"
                       else f"STATUS=failed: the agent cannot listen on port {port}: Address already in use")  # fmt: skip
        assert not spark.started_containers

    def test_a_model_that_is_not_there(self, spark: Spark) -> None:
        spark.config["model"] = "/nowhere/model"
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: the model folder /nowhere/model does not exist")

    def test_no_docker(self, spark: Spark) -> None:
        (spark.folder / "bin/docker").unlink()
        spark.path = str(spark.folder / "bin")
        spark.start()
        assert spark.exit_status() == 1
        spark.wait_for("STATUS=failed: the Docker engine does not answer: docker cannot be run: No such file")

    def test_starts_and_failures_are_counted_over_restarts(self, spark: Spark) -> None:
        spark.order(die_loading=1)
        spark.start()
        assert spark.exit_status() == 1
        spark.order()
        spark.ready()
        metrics = spark.get("/metrics")[1]
        assert "\nvllm_agent_starts_total 2\n" in metrics
        assert "\nvllm_agent_failures_total 1\n" in metrics


class TestStartLimit:
    """Also where a load takes longer than the time over which systemd counts starts."""

    def test_after_so_many_failures_in_a_row_it_stays_down(self, spark: Spark) -> None:
        spark.order(die_loading=1)
        statuses = []
        for _ in range(3):
            spark.start()
            statuses.append(spark.exit_status())
        assert statuses == [1, 1, 3]
        assert "stays down, as 3 starts in a row failed without serving for 60 s" in spark.messages[-1]
        assert (
            "systemctl reset-failed vllm-replica.service; systemctl start vllm-replica" in spark.messages[-1]
        )
        assert "The cause: engine exited with status 1" in spark.messages[-1]
        spark.start()  # as only a person does now
        assert spark.exit_status() == 1

    def test_an_agent_that_is_killed_counts_too(self, spark: Spark) -> None:
        spark.order(load_seconds=60)
        for _ in range(3):
            spark.start()
            spark.wait_for_phase("loading")
            assert spark.process is not None
            spark.process.kill()
            spark.exit_status()
        starts = len(spark.started_containers)
        spark.start()
        assert spark.exit_status() == 3
        assert len(spark.started_containers) == starts
        assert "killed before it could tell why" in spark.messages[-1]

    def test_a_copy_that_has_served_for_long_begins_anew(self, spark: Spark) -> None:
        spark.config["start_limit"] = {"burst": 2, "served_seconds": 0}
        for _ in range(3):
            spark.messages.clear()
            spark.order()
            spark.ready()
            wait_until(lambda: spark.history["attempts"]["count"] == 0, lambda: str(spark.history))
            spark.order(exit=0)
            assert spark.exit_status() == 1

    def test_a_stop_is_no_failure(self, spark: Spark) -> None:
        for _ in range(4):
            spark.messages.clear()
            spark.ready()
            spark.terminate()
            assert spark.exit_status() == 0


class TestConfiguration:
    def test_a_wrong_one_has_its_own_exit_status(self, spark: Spark) -> None:
        spark.config["timeouts"]["drain"] = "long"
        spark.start()
        assert spark.exit_status() == 2
        assert 'config.json: timeouts.drain is "long"; allowed: a number of at least 0' in spark.journal()

    def test_an_environment_file_that_is_not_there(self, spark: Spark) -> None:
        spark.environment_file.unlink()
        spark.start()
        assert spark.exit_status() == 2
        assert 'engine.env" cannot be read' in spark.journal()


class TestWatchdog:
    def test_a_wedged_engine_ends_the_watchdog_messages(self, spark: Spark) -> None:
        spark.ready()
        spark.order(stuck=True, running=1)
        spark.wait_for("WATCHDOG=trigger")
        assert spark.get("/health")[1].startswith("failed: wedged: no progress and 3 canaries failed")
        assert spark.exit_status() == 1  # this systemd does not act, so the agent does
        assert "WATCHDOG=1" not in spark.messages[spark.messages.index("WATCHDOG=trigger") :]
        assert spark.engine_pid is None
        assert spark.history["failures"] == 1

    def test_a_suspect_gets_nothing_new(self, spark: Spark) -> None:
        """After the first strike the gateway must not send it more; when it moves again, it is as before."""
        spark.config["watchdog"]["strikes"] = 100
        spark.ready()
        spark.order(stuck=True, running=1)
        wait_until(lambda: spark.get("/health")[0] == 404, lambda: str(spark.get("/health")))
        assert spark.get("/health")[1].startswith("suspect: no progress, strike ")
        assert spark.phase() == "serving"
        spark.order(busy=True, running=1)
        wait_until(lambda: spark.get("/health") == (200, "serving\n"), lambda: str(spark.get("/health")))

    def test_a_wedged_idle_engine_is_found_too(self, spark: Spark) -> None:
        spark.ready()
        spark.order(stuck=True)
        spark.wait_for("STATUS=failed: wedged")

    def test_a_busy_engine_is_left_alone(self, spark: Spark) -> None:
        spark.ready()
        spark.order(busy=True, running=4)
        time.sleep(2.5)  # longer than three canaries would take
        assert spark.phase() == "serving"
        assert "\nvllm_agent_canary_failures_total 0\n" in spark.get("/metrics")[1]
        assert "strike" not in spark.journal()

    def test_an_idle_engine_is_left_alone_and_asked_now_and_then(self, spark: Spark) -> None:
        spark.ready()
        time.sleep(2)
        assert spark.phase() == "serving"
        metrics = spark.get("/metrics")[1]
        assert "\nvllm_agent_canary_failures_total 0\n" in metrics
        assert "\nvllm_agent_canaries_total 0\n" not in metrics
