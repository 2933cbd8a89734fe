# SPDX-License-Identifier: GPL-3.0-or-later
"""From preset and inventory to what one Spark runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ansible_collections.twospark.serving.plugins.module_utils import _plan as plan

ROOT = Path(__file__).resolve().parents[4]
ROLE = ROOT / "roles/vllm"
PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROLE / "presets").glob("*.yml"))}
QWEN = PRESETS["qwen3.8-flash-next-nvfp4"]
DEFAULTS = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
SETTINGS: dict[str, Any] = {name.removeprefix("vllm_"): value for name, value in DEFAULTS.items()} | {
    "config_directory": "/etc/vllm"
}
PAIR = {"spark-a": "198.18.78.11", "spark-b": "198.18.78.12"}


def make(
    host: str = "spark-a", pair: dict[str, str] | None = None, preset: Any = QWEN, **settings: Any
) -> Any:
    return plan.engine_plan(preset, SETTINGS | settings, host, PAIR if pair is None else pair)


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("host", PAIR)
def test_every_preset_makes_a_plan(name: str, host: str) -> None:
    settings: dict[str, Any] = {}
    if name != "qwen3.8-flash-next-nvfp4":
        settings = {"device_memory_gib": 2, "memory_reserved_gib": 0.4}
    made = make(host, preset=PRESETS[name], **settings)
    assert made["problems"] == []
    for mode in plan.MODES:
        argv = made[mode]["config"]["command"]
        assert all(isinstance(word, str) for word in argv)
        assert not any("API_KEY" in word for word in argv)


def test_the_copy_of_the_pair() -> None:
    """One copy as its owner ran it: MTP 4, FP8 KV cache, the whole context, 12 requests, its own share."""
    argv = make(gpu_memory_utilization=0.74)["replica"]["config"]["command"]
    assert argv[:2] == ["docker", "run"]
    engine = argv[argv.index("eugr/spark-vllm-b12x:nightly-20261015") + 1 :]
    assert engine[:3] == ["vllm", "serve", "/srv/models/local-inference-lab/Qwen3.8-Flash-Next-NVFP4"]
    assert value_of(engine, "--gpu-memory-utilization") == "0.74"
    assert value_of(engine, "--max-num-seqs") == "12"
    assert value_of(engine, "--kv-cache-dtype") == "fp8"
    assert value_of(engine, "--max-model-len") == "262144"
    assert value_of(engine, "--speculative-config") == '{"method":"mtp","num_speculative_tokens":4}'
    assert int(value_of(engine, "--shutdown-timeout")) > 0
    assert "--no-enable-flashinfer-autotune" in engine
    assert "--restart" not in " ".join(argv)


@pytest.mark.parametrize(("share", "tokens", "requests"), [(0.74, 760_000, 2.9), (0.78, 1_080_000, 4.1)])
def test_the_memory_of_the_pair(share: float, tokens: int, requests: float) -> None:
    capacity = make(gpu_memory_utilization=share)["replica"]["capacity"]
    assert capacity["kv_tokens"] == pytest.approx(tokens, rel=0.01)
    assert capacity["full_context_requests"] == requests


@pytest.mark.parametrize(
    ("host", "rank", "peer"), [("spark-a", 0, "198.18.78.12"), ("spark-b", 1, "198.18.78.11")]
)
def test_the_ranks_of_the_pair(host: str, rank: int, peer: str) -> None:
    made = make(host, fabric_interface="enp1s0f1np1", fabric_hcas=["rocep1s0f1", "roceP2p1s0f1"])["tp"]
    config, argv = made["config"], made["config"]["command"]
    assert value_of(argv, "--node-rank") == str(rank)
    assert value_of(argv, "--master-addr") == "198.18.78.11"
    assert value_of(argv, "--tensor-parallel-size") == value_of(argv, "--nnodes") == "2"
    assert ("--headless" in argv) == (config["api"] is None) == (rank == 1)
    assert (config["pair"]["rank"], config["pair"]["peer"]) == (rank, peer)
    assert made["environment"]["VLLM_HOST_IP"] == PAIR[host]
    assert made["environment"]["NCCL_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert made["environment"]["NCCL_IB_HCA"] == "rocep1s0f1,roceP2p1s0f1"
    assert '"moe_backend":"triton"' in value_of(argv, "--speculative-config")


def test_the_modes_do_not_leak_into_each_other() -> None:
    made = make(
        replica_flags={"max-model-len": 1000}, tp_environment={"ONLY_TP": 1}, engine_flags={"seed": 7}
    )
    replica, tp = (made[mode]["config"]["command"] for mode in plan.MODES)
    assert (value_of(replica, "--max-model-len"), value_of(tp, "--max-model-len")) == ("1000", "262144")
    assert value_of(replica, "--seed") == value_of(tp, "--seed") == "7"
    assert "ONLY_TP" in made["tp"]["environment"]
    assert "ONLY_TP" not in made["replica"]["environment"]
    assert "VLLM_HOST_IP" not in made["replica"]["environment"]


def test_null_takes_a_presets_key_out_everywhere() -> None:
    made = make(
        engine_flags={"quantization": None},
        environment={"CUTE_DSL_ARCH": None},
        container_options={"device": None},
    )["replica"]
    assert "--quantization" not in made["config"]["command"]
    assert "CUTE_DSL_ARCH" not in made["environment"]
    assert not any(word.startswith("--device") for word in made["config"]["command"])


def test_own_volumes_join_the_models_and_the_caches() -> None:
    argv = make(container_options={"volume": ["/a:/a"]})["replica"]["config"]["command"]
    assert "--volume=/a:/a" in argv
    assert "--volume=/var/cache/vllm/triton:/root/.triton" in argv
    assert sum(word.startswith("--mount=type=bind,source=/srv/models/") for word in argv) == 1


def test_stop_times_nest() -> None:
    timeouts = make(shutdown_timeout=77)["replica"]["config"]["timeouts"]
    assert timeouts["engine_shutdown"] == 77 < timeouts["container_stop"]


@pytest.mark.parametrize(("tokens", "there"), [(0, False), ("", True), (2, True)])
def test_speculation_can_be_turned_off(tokens: object, there: bool) -> None:
    argv = make(speculative_tokens=tokens)["replica"]["config"]["command"]
    assert ("--speculative-config" in argv) == there


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_memory_utilization": 1.7}, ["vllm_gpu_memory_utilization", "1.7", "0.01 to 0.99"]),
        ({"gpu_memory_utilization": "lots"}, ["vllm_gpu_memory_utilization", "'lots'", "0.01 to 0.99"]),
        ({"gpu_memory_utilization": True}, ["vllm_gpu_memory_utilization", "True"]),
        ({"gpu_memory_utilization": 0.9}, ["vllm_gpu_memory_utilization is 0.9", "26", "at most 0.78"]),
        ({"tp_gpu_memory_utilization": -1}, ["vllm_tp_gpu_memory_utilization", "-1"]),
        ({"memory_reserved_gib": 121.69}, ["vllm_memory_reserved_gib", "nothing is left"]),
        ({"memory_reserved_gib": "much"}, ["vllm_memory_reserved_gib", "'much'"]),
        ({"device_memory_gib": 0}, ["vllm_device_memory_gib", "0"]),
        ({"max_requests": 0}, ["vllm_max_requests", "1 to 4096"]),
        ({"max_requests": 1.5}, ["vllm_max_requests", "whole number"]),
        ({"speculative_tokens": 99}, ["vllm_speculative_tokens", "0 to 16"]),
        ({"port": 99999}, ["vllm_port", "99999", "65535"]),
        ({"port": 9401}, ["vllm_port", "vllm_replica_agent_port", "9401"]),
        ({"drain_timeout": "soon"}, ["vllm_drain_timeout", "'soon'"]),
        ({"shutdown_timeout": 0}, ["vllm_shutdown_timeout", "1 to"]),
        ({"engine_flags": ["--seed"]}, ["vllm_engine_flags", "mapping"]),
        ({"engine_flags": {"max_num_seqs": 3}}, ["vllm_engine_flags", "max_num_seqs", "vllm_max_requests"]),
        ({"tp_flags": {"--api-key": "x"}}, ["vllm_tp_flags", "vllm_api_key"]),
        ({"container_options": {"restart": "always"}}, ["vllm_container_options", "restart"]),
        ({"container_options": {"env": ["A=1"]}}, ["vllm_container_options", "vllm_environment"]),
        ({"environment": {"A-B": 1}}, ["vllm_environment", "A-B"]),
        ({"environment": {"A": "1\n2"}}, ["vllm_environment", "line break"]),
        ({"environment": {"VLLM_API_KEY": "k"}}, ["vllm_api_key"]),
        ({"drop_page_cache": "maybe"}, ["vllm_drop_page_cache", "'maybe'", "true or false"]),
        ({"tp_heartbeat_timeout": 60}, ["vllm_tp_heartbeat_timeout", "1 to 15"]),
        ({"watchdog": {"interval": 15}}, ["vllm_watchdog.strikes", "None"]),
        ({"watchdog": {**DEFAULTS["vllm_watchdog"], "strike": 1}}, ["vllm_watchdog", "'strike'"]),
        ({"image": "a/b:latest"}, ["vllm_image", "a/b:latest", "vllm_image_allow_moving_tag"]),
        ({"image": "a/b"}, ["vllm_image", "moves"]),
        ({"image": "host:5000/a/b"}, ["vllm_image", "moves"]),
        ({"image": "a/b:nightly"}, ["vllm_image", "moves"]),
    ],
)
def test_bad_input_names_variable_value_and_what_is_allowed(
    settings: dict[str, Any], words: list[str]
) -> None:
    problems = make(**settings)["problems"]
    assert problems, "accepted"
    assert any(all(word in problem for word in words) for problem in problems), problems
    assert len(problems) == len(set(problems)), "said twice"


def test_values_from_the_command_line_are_texts_and_count_all_the_same() -> None:
    texts: dict[str, Any] = {
        name: str(SETTINGS[name]) for name in ("port", "drain_timeout", "shutdown_timeout", "start_timeout")
    }
    texts |= {"drop_page_cache": "false", "max_requests": "7", "gpu_memory_utilization": "0.7"}
    config = make(**texts)["replica"]["config"]
    meant: dict[str, Any] = {"drop_page_cache": False, "max_requests": 7, "gpu_memory_utilization": 0.7}
    assert config == make(**meant)["replica"]["config"]
    assert config["memory"]["drop_page_cache"] is False


def test_everything_that_is_wrong_is_told_at_once() -> None:
    assert len(make(port=0, gpu_memory_utilization="lots", image="x:latest")["problems"]) == 3


@pytest.mark.parametrize("image", ["a/b@sha256:00", "a/b:latest@sha256:00", "a/b:nightly-20261015", "a:1.2"])
def test_images_that_stay_what_they_are(image: str) -> None:
    assert make(image=image)["problems"] == []


def test_a_moving_tag_where_the_owner_says_so() -> None:
    assert make(image="a/b:latest", image_allow_moving_tag=True)["problems"] == []


@pytest.mark.parametrize(
    ("host", "pair", "words"),
    [
        ("spark-a", {"spark-a": "198.18.78.11"}, ["1 Spark ", "exactly two"]),
        ("spark-a", {}, ["0 Sparks", "none"]),
        ("spark-a", {"spark-a": "198.18.78.11", "spark-b": ""}, ["fabric_address", "spark-b"]),
        ("spark-c", PAIR, ["spark-c is not one of the two"]),
    ],
)
def test_why_there_is_no_tp(host: str, pair: dict[str, str], words: list[str]) -> None:
    made = make(host, pair)
    assert made["tp"] is None
    assert made["replica"] is not None
    assert made["problems"] == []
    assert all(word in made["tp_unavailable"] for word in words), made["tp_unavailable"]


SPARKS = ["spark-a", "spark-b"]
ABLE = {"tp_unavailable": ""}
UNABLE = {"tp_unavailable": "vllm_tp_hosts names 1 Spark"}


@pytest.mark.parametrize(
    ("mode", "asked", "plans", "words"),
    [
        ("replica", SPARKS, dict.fromkeys(SPARKS, ABLE), []),
        ("tp", SPARKS, dict.fromkeys(SPARKS, ABLE), []),
        ("stopped", SPARKS, dict.fromkeys(SPARKS, UNABLE), []),
        ("tp", [*SPARKS, "c"], {**dict.fromkeys(SPARKS, ABLE), "c": UNABLE}, []),
        ("foo", SPARKS, {}, ["'foo'", "replica, tp, stopped", "-e mode="]),
        ("", SPARKS, {}, ["''", "replica, tp, stopped"]),
        ("tp", SPARKS, dict.fromkeys(SPARKS, UNABLE), ["'tp'", "vllm_tp_hosts names 1 Spark"]),
        ("tp", ["spark-a"], {"spark-a": ABLE}, ["--limit", "spark-b"]),
    ],
)
def test_what_can_be_switched_to(mode: str, asked: list[str], plans: Any, words: list[str]) -> None:
    problems = plan.mode_problems(mode, SPARKS, asked, plans)
    assert bool(problems) == bool(words), problems
    assert all(word in " ".join(problems) for word in words)


@pytest.mark.parametrize(
    ("mode", "host", "its"),
    [
        ("tp", "spark-a", "tp"),
        ("tp", "c", "replica"),
        ("replica", "c", "replica"),
        ("stopped", "c", "stopped"),
    ],
)
def test_a_third_spark_keeps_its_copy(mode: str, host: str, its: str) -> None:
    assert plan.host_mode(mode, host, SPARKS) == its


@pytest.mark.parametrize(
    ("enabled", "new", "mode", "words"),
    [
        ({"spark-a": [], "spark-b": []}, True, "replica", ""),
        ({"spark-a": [], "spark-b": []}, False, "stopped", ""),
        ({"spark-a": ["tp"], "spark-b": ["tp"]}, False, "tp", ""),
        ({"spark-a": ["tp"], "spark-b": ["tp"], "c": ["replica"]}, False, "tp", ""),
        ({"spark-a": ["replica"], "spark-b": []}, False, "replica", ""),
        ({"spark-a": [], "spark-b": [], "c": ["replica"]}, False, "replica", ""),
        ({"spark-a": ["replica"], "spark-b": ["tp"]}, False, None, "split: spark-a replica, spark-b tp"),
        ({"spark-a": ["replica", "tp"], "spark-b": ["tp"]}, False, None, "spark-a has both modes enabled"),
    ],
)
def test_the_wish_is_read_from_the_enabled_units(
    enabled: Any, new: bool, mode: str | None, words: str
) -> None:
    wish = plan.wanted_mode(enabled, SPARKS, new, "replica")
    assert bool(wish["problems"]) == bool(words)
    assert words in " ".join(wish["problems"])
    if mode:
        assert wish["mode"] == mode
    else:
        assert "switch_mode.yml" in " ".join(wish["problems"])
