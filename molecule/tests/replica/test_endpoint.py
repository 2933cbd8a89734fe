# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoint in mode replica."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from testinfra.host import Host

if TYPE_CHECKING:
    from conftest import Endpoint

testinfra_hosts = ["ansible://gateways"]


def test_each_copy_answers(endpoint: Endpoint) -> None:
    answers = [endpoint.complete() for _ in range(10)]
    assert {answer.status for answer in answers} == {200}
    served = Counter(answer.served_by for answer in answers)
    assert set(served) == {"spark-a", "spark-b"}
    assert min(served.values()) >= 3, served


def test_the_answer_is_a_whole_copys(endpoint: Endpoint) -> None:
    body = endpoint.complete(max_tokens=7).body
    assert body["usage"]["completion_tokens"] == 7
    assert "-tp2-" not in body["system_fingerprint"]


def test_models_are_listed(endpoint: Endpoint) -> None:
    assert [model["id"] for model in endpoint.get("/v1/models").body["data"]] == ["simulated"]


def test_the_gateway_lets_no_more_through_than_it_should(endpoint: Endpoint) -> None:
    for path in ("/metrics", "/tokenize", "/invocations", "/docs"):
        answer = endpoint.get(path)
        assert answer.status in (403, 404), path
        assert answer.body["error"]["message"]


def test_haproxy_has_nothing_to_say_against_its_configuration(host: Host) -> None:
    with host.sudo():
        checked = host.run("haproxy -c -q -f /etc/haproxy/haproxy.cfg")
    assert (checked.rc, checked.stdout, checked.stderr) == (0, "", "")
    assert host.service("haproxy").is_running
    assert host.service("haproxy").is_enabled
