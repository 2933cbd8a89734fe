# SPDX-License-Identifier: GPL-3.0-or-later
"""A Spark in mode replica."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from testinfra.host import Host

if TYPE_CHECKING:
    from conftest import Answer

testinfra_hosts = ["ansible://sparks"]

Run = Callable[[str], str]
Show = Callable[[str], dict[str, str]]
Fetch = Callable[[int, str], "Answer"]

MODES = ("replica", "tp")


def test_the_wish_and_the_deed(unit: Show) -> None:
    replica, tp = unit("replica"), unit("tp")
    assert (replica["enabled"], replica["ActiveState"]) == ("enabled", "active")
    assert (tp["enabled"], tp["ActiveState"]) == ("disabled", "inactive")
    # Shown only of what runs; the agent must give a sign of life this often.
    assert replica["WatchdogUSec"] == "2min"


@pytest.mark.parametrize(("mode", "other"), [("replica", "tp"), ("tp", "replica")])
def test_the_unit_as_systemd_read_it(unit: Show, root: Run, mode: str, other: str) -> None:
    shown = unit(mode)
    # Conflicts alone gives no order between the stop of one and the start of the other.
    assert f"vllm-{other}.service" in shown["Conflicts"].split()
    assert f"vllm-{other}.service" in shown["After" if mode == "tp" else "Before"].split()
    assert "docker.service" in shown["Requires"].split()
    assert "docker.service" in shown["After"].split()
    assert (shown["Type"], shown["NotifyAccess"], shown["KillMode"]) == ("notify", "main", "mixed")
    assert (shown["Restart"], shown["RestartUSec"]) == ("on-failure", "1min")
    # Starts that a person asks for must not count; the agent counts failures.
    assert shown["StartLimitIntervalUSec"] == "0"
    assert json.loads(root(f"cat /etc/vllm/{mode}.json"))["start_limit"] == {
        "burst": 3,
        "served_seconds": 1800,
    }
    assert shown["NeedDaemonReload"] == "no"


@pytest.mark.parametrize("mode", MODES)
def test_systemd_has_nothing_to_say_against_the_unit(root: Run, mode: str) -> None:
    assert root(f"systemd-analyze verify /etc/systemd/system/vllm-{mode}.service 2>&1") == ""


@pytest.mark.parametrize("mode", MODES)
def test_stop_times_nest(root: Run, mode: str) -> None:
    """Engine shutdown < docker stop < what systemd allows after the whole drain."""
    timeouts = json.loads(root(f"cat /etc/vllm/{mode}.json"))["timeouts"]
    unit = root(f"systemctl cat vllm-{mode}.service")
    allowed = int(re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[1])  # type: ignore[index]
    assert 0 < timeouts["engine_shutdown"] < timeouts["container_stop"]
    assert allowed > timeouts["drain"] + timeouts["drain_notice"] + timeouts["container_stop"]


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("/etc/vllm/replica.json", 0o644),
        ("/etc/vllm/tp.json", 0o644),
        ("/etc/vllm/replica.env", 0o600),
        ("/etc/vllm/tp.env", 0o600),
        ("/etc/systemd/system/vllm-replica.service", 0o644),
        ("/usr/local/lib/vllm-agent/vllm_agent/__main__.py", 0o644),
    ],
)
def test_files(host: Host, path: str, mode: int) -> None:
    with host.sudo():
        file = host.file(path)
        assert file.is_file
        assert (file.user, file.group, file.mode) == ("root", "root", mode)


def test_the_key_shows_nowhere(host: Host, root: Run) -> None:
    key = host.ansible.get_variables()["vllm_api_key"]
    assert key in root("cat /etc/vllm/replica.env")
    assert key not in root("ps -eo args")
    assert key not in root("cat /etc/vllm/*.json /etc/systemd/system/vllm-*.service")
    assert key not in root("journalctl --no-pager --boot")


@pytest.mark.parametrize(("port", "listens"), [(8000, True), (9401, True), (9402, False), (29501, False)])
def test_ports(host: Host, port: int, listens: bool) -> None:
    with host.sudo():
        assert host.socket(f"tcp://0.0.0.0:{port}").is_listening == listens


def test_the_agent_tells_the_same_as_systemd(fetch: Fetch, unit: Show) -> None:
    assert (fetch(9401, "/health").status, fetch(9401, "/health").body) == (200, "serving\n")
    status = fetch(9401, "/status").body
    assert (status["mode"], status["phase"], status["served_model_name"]) == (
        "replica",
        "serving",
        "simulated",
    )
    assert "serving" in unit("replica")["StatusText"]
    assert 'vllm_agent_phase{phase="serving"} 1' in fetch(9401, "/metrics").body


def test_the_engine_is_the_units_own(root: Run, containers: Callable[[], list[str]]) -> None:
    assert containers() == ["vllm-replica"]
    facts = json.loads(root("docker inspect vllm-replica"))[0]
    assert facts["HostConfig"]["RestartPolicy"]["Name"] in ("", "no")
    assert facts["HostConfig"]["AutoRemove"]
    assert facts["HostConfig"]["Init"]
    assert facts["HostConfig"]["NetworkMode"] == facts["HostConfig"]["IpcMode"] == "host"
    assert any(
        "gpu" in (kinds or [])
        for request in facts["HostConfig"]["DeviceRequests"]
        for kinds in request["Capabilities"]
    )
    assert [facts["Path"], *facts["Args"]][:2] == ["vllm", "serve"]


def test_the_engine_runs_as_the_preset_says(root: Run) -> None:
    arguments = json.loads(root("docker inspect vllm-replica"))[0]["Args"]
    values = dict(itertools.pairwise(arguments))
    assert values["--speculative-config"] == '{"method":"mtp","num_speculative_tokens":4}'
    assert values["--kv-cache-dtype"] == "fp8"
    assert values["--max-num-seqs"] == "12"
    assert float(values["--gpu-memory-utilization"]) == 0.8
    assert int(values["--shutdown-timeout"]) > 0


def test_the_engine_asks_for_its_key(fetch: Fetch) -> None:
    assert fetch(8000, "/v1/models").status == 401
