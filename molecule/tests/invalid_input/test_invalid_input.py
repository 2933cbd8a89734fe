# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong is told by name and value, with what is allowed and what to do, and nothing has been stopped by then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import testinfra

from playbook import INVENTORY, play

SPARKS = ("spark-a", "spark-b")
ELSEWHERE = {"all": {"children": {"sparks": {"hosts": {"spark-b": {"ansible_host": "198.18.87.99"}}}}}}
ALONE = {"vllm_tp_hosts": ["spark-a"]}
TAKEN = 8123


def running() -> dict[str, str]:
    """Each Spark to the container that serves there and the moment of its start."""
    found = {}
    for spark in SPARKS:
        host = testinfra.get_host(f"ansible://{spark}", ansible_inventory=str(INVENTORY))
        with host.sudo():
            found[spark] = host.check_output(
                "docker inspect --format '{{.Id}} {{.State.StartedAt}}' vllm-replica"
            )
    return found


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port of spark-b that another process listens on."""
    host = testinfra.get_host("ansible://spark-b", ansible_inventory=str(INVENTORY))
    with host.sudo():
        host.check_output(
            f"systemd-run --collect --unit=taken-port python3 -m http.server --bind 0.0.0.0 {TAKEN}"
        )
        yield TAKEN
        host.check_output("systemctl stop taken-port")


@pytest.mark.parametrize(
    ("playbook", "variables", "words"),
    [
        ("switch_mode.yml", {"mode": "foo"}, ["mode is 'foo'", "replica, tp, stopped", "-e mode=replica"]),
        ("switch_mode.yml", {}, ["mode is ''", "replica, tp, stopped"]),
        ("switch_mode.yml", {"mode": "tp", **ALONE}, ["mode is 'tp'", "exactly two", "sparks"]),
        (
            "site.yml",
            {"vllm_gpu_memory_utilization": 1.7},
            ["vllm_gpu_memory_utilization is 1.7", "0.01 to 0.99"],
        ),
        (
            "site.yml",
            {"vllm_gpu_memory_utilization": "lots"},
            ["vllm_gpu_memory_utilization is 'lots'", "0.01 to 0.99"],
        ),
        (
            "switch_mode.yml",
            {"mode": "tp", "vllm_gpu_memory_utilization": 0.9},
            ["vllm_gpu_memory_utilization is 0.9", "vllm_memory_reserved_gib", "at most 0.8"],
        ),
        (
            "site.yml",
            {"vllm_model_path": "/srv/models/none"},
            ["/srv/models/none", "vllm_model_path", "does not exist"],
        ),
        (
            "site.yml",
            {"vllm_engine_flags": {"max-modle-len": 4096}},
            ["--max-modle-len", "Did you mean --max-model-len", "vllm_engine_flags"],
        ),
        ("site.yml", {"vllm_engine_flags": {"port": 1}}, ["'port'", "vllm_port"]),
        ("site.yml", {"vllm_preset": "no-such"}, ["no-such.yml"]),
        ("site.yml", {"vllm_image": "twospark/engine-standin:latest"}, ["vllm_image", "latest", "moves"]),
        (
            "site.yml",
            {"vllm_image": "twospark/other:1"},
            ["vllm_image_archive", "holds no image named twospark/other:1"],
        ),
        ("site.yml", {"gateway_port": 8405}, ["gateway_port", "gateway_metrics_port", "8405"]),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_refused_with_a_clear_error(playbook: str, variables: dict[str, object], words: list[str]) -> None:
    before = running()
    status, told = play(playbook, "--extra-vars", json.dumps(variables))
    assert status != 0
    assert [word for word in words if word not in told] == [], told
    assert running() == before


def test_a_port_that_is_taken(taken_port: int) -> None:
    before = running()
    status, told = play("site.yml", "--extra-vars", json.dumps({"vllm_port": taken_port}))
    assert status != 0
    assert f"port {taken_port} (vllm_port) is taken by python3" in told
    assert running() == before


@pytest.mark.parametrize(
    ("playbook", "words"),
    [
        ("switch_mode.yml", ["Nothing was stopped.", "spark-b is not reached: "]),
        ("site.yml", ["Not reached: spark-b. Nothing was stopped."]),
    ],
)
def test_a_spark_that_cannot_be_reached(tmp_path: Path, playbook: str, words: list[str]) -> None:
    before = running()
    (tmp_path / "elsewhere.yml").write_text(json.dumps(ELSEWHERE))
    status, told = play(playbook, f"--inventory={tmp_path / 'elsewhere.yml'}", "--extra-vars", "mode=tp")
    assert status != 0
    assert [word for word in words if word not in told] == [], told
    assert running() == before


def test_a_limit_would_split_the_sparks() -> None:
    before = running()
    status, told = play("switch_mode.yml", "--extra-vars", "mode=tp", "--limit", "spark-a")
    assert status != 0
    assert "--limit leaves out spark-b" in told
    assert running() == before
