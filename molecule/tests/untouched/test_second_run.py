# SPDX-License-Identifier: GPL-3.0-or-later
"""What a second run must not have done to a serving Spark."""

from __future__ import annotations

import re
from collections.abc import Callable

testinfra_hosts = ["ansible://sparks"]


def journal(root: Callable[[str], str]) -> list[str]:
    """What systemd itself said since the host came up."""
    return root("journalctl --boot --no-pager --output=cat _PID=1").splitlines()


def test_the_unit_was_started_once(root: Callable[[str], str]) -> None:
    starts = [line for line in journal(root) if re.match(r"Starting (vllm-\S+ - )?vLLM", line)]
    assert len(starts) == 1, starts


def test_systemd_was_never_reloaded(root: Callable[[str], str]) -> None:
    """A reload can take the GPU from running containers; new units need none."""
    reloads = [line for line in journal(root) if line.startswith("Reloading")]
    assert reloads == []


def test_the_container_is_the_first(root: Callable[[str], str]) -> None:
    restarts = root("systemctl show vllm-replica.service --property=NRestarts --value")
    started = root("docker inspect --format '{{.State.StartedAt}}' vllm-replica")
    created = root(
        "docker events --since 24h --until 0s --filter event=create --filter container=vllm-replica || true"
    )
    assert restarts == "0"
    assert started
    assert len(created.splitlines()) <= 1, created
