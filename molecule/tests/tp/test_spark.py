# SPDX-License-Identifier: GPL-3.0-or-later
"""A Spark in mode tp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from testinfra.host import Host

if TYPE_CHECKING:
    from conftest import Answer

testinfra_hosts = ["ansible://sparks"]

Show = Callable[[str], dict[str, str]]
Fetch = Callable[[int, str], "Answer"]


def test_the_wish_and_the_deed(unit: Show) -> None:
    replica, tp = unit("replica"), unit("tp")
    assert (tp["enabled"], tp["ActiveState"]) == ("enabled", "active")
    assert (replica["enabled"], replica["ActiveState"]) == ("disabled", "inactive")


def test_only_the_head_serves_an_api(host: Host) -> None:
    head = host.ansible.get_variables()["inventory_hostname"] == "spark-a"
    with host.sudo():
        assert host.socket("tcp://0.0.0.0:8000").is_listening == head
        assert host.socket("tcp://0.0.0.0:9402").is_listening
        assert not host.socket("tcp://0.0.0.0:9401").is_listening


def test_the_ranks_know_each_other(host: Host, fetch: Fetch) -> None:
    status = fetch(9402, "/status").body
    assert (status["mode"], status["phase"]) == ("tp", "serving")
    assert status["rank"] == (0 if host.ansible.get_variables()["inventory_hostname"] == "spark-a" else 1)
    assert status["pair"]


def test_nothing_of_the_other_mode_is_left(containers: Callable[[], list[str]]) -> None:
    assert containers() == ["vllm-tp"]
