# SPDX-License-Identifier: GPL-3.0-or-later
"""One Spark that also carries the gateway."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
INVENTORY = ROOT / "molecule/single_spark/inventory"

testinfra_hosts = ["ansible://spark-a"]


def test_it_serves() -> None:
    body = json.dumps({"model": "simulated", "prompt": "hello", "max_tokens": 3}).encode()
    request = urllib.request.Request(
        "http://198.18.87.11:8080/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["x-served-by"] == "spark-a"
        assert json.load(answer)["usage"]["completion_tokens"] == 3


def test_there_is_no_tp_unit(root: Callable[[str], str]) -> None:
    assert root("systemctl is-enabled vllm-replica.service") == "enabled"
    config = json.loads(root("cat /etc/vllm/replica.json"))
    assert config["pair"] is None


def test_tp_is_refused(root: Callable[[str], str]) -> None:
    before = root("docker inspect --format '{{.Id}}' vllm-replica")
    done = subprocess.run(
        ["ansible-playbook", f"--inventory={INVENTORY}", "--extra-vars=mode=tp", "playbooks/switch_mode.yml"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    told = " ".join(done.stdout.split())
    assert done.returncode != 0
    assert "mode is 'tp', which cannot be: vllm_tp_hosts names 1 Spark (spark-a)" in told
    assert root("docker inspect --format '{{.Id}}' vllm-replica") == before
