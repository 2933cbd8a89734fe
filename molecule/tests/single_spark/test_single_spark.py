# SPDX-License-Identifier: GPL-3.0-or-later
"""One Spark that also carries the gateway."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable

import pytest
from testinfra.host import Host

from playbook import ROOT, play

INVENTORY = ROOT / "molecule/single_spark/inventory"

testinfra_hosts = ["ansible://spark-a"]


@pytest.fixture
def ask(root: Callable[[str], str]) -> Callable[[str], http.client.HTTPResponse]:
    """Ask for a completion with this key, over TLS, trusting the certificate that the role has made."""
    trusted = ssl.create_default_context(cadata=root("openssl x509 -in /etc/haproxy/generated.pem"))

    def ask(key: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPSConnection("198.18.87.11", 8080, timeout=60, context=trusted)
        body = json.dumps({"model": "simulated", "prompt": "hello", "max_tokens": 3})
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", "/v1/completions", body, headers)
        return connection.getresponse()

    return ask


def test_it_serves_who_has_a_key(
    ask: Callable[[str], http.client.HTTPResponse], root: Callable[[str], str]
) -> None:
    answer = ask("alice-of-the-simulation")
    assert answer.status == 200
    assert answer.headers["x-served-by"] == "spark-a"
    assert json.load(answer)["usage"]["completion_tokens"] == 3
    assert ask("mallory").status == 401
    assert "alice-of-the-simulation" not in root("cat /etc/haproxy/*.*")


@pytest.mark.parametrize("key", ["alice-of-the-simulation", "simulation-key"])
def test_no_key_shows_in_the_journal(root: Callable[[str], str], key: str) -> None:
    """All that a module is called with stands there."""
    assert "ansible" in root("journalctl --no-pager --boot")
    assert key not in root("journalctl --no-pager --boot")


def test_the_keys_files_are_the_owners_alone(host: Host) -> None:
    with host.sudo():
        for name in ("generated.pem", "clients.map", "keys.map"):
            file = host.file(f"/etc/haproxy/{name}")
            assert (file.user, file.mode) == ("root", 0o600), name


def test_there_is_no_tp_unit(root: Callable[[str], str]) -> None:
    assert root("systemctl is-enabled vllm-replica.service") == "enabled"
    config = json.loads(root("cat /etc/vllm/replica.json"))
    assert config["pair"] is None


def test_tp_is_refused(root: Callable[[str], str]) -> None:
    before = root("docker inspect --format '{{.Id}}' vllm-replica")
    status, told = play("switch_mode.yml", "--extra-vars=mode=tp", inventory=INVENTORY, seconds=120)
    assert status != 0
    assert "mode is 'tp', which cannot be: vllm_tp_hosts names 1 Spark (spark-a)" in told
    assert root("docker inspect --format '{{.Id}}' vllm-replica") == before
