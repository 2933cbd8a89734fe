# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with a gateway's variables, and how it is said."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.filter.gateway_problems import gateway_problems

WORKER = {
    "name": "a",
    "host": "a",
    "address": "192.0.2.11",
    "port": 8000,
    "health_port": 9401,
    "max_requests": 12,
}
HEAD = {**WORKER, "name": "a-tp", "health_port": 9402, "max_requests": 4}
KEY = "0123456789abcdef"
HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
GOOD: dict[str, Any] = {
    "address": "0.0.0.0",
    "port": 8080,
    "metrics_address": "127.0.0.1",
    "metrics_port": 8405,
    "log": "/dev/log",
    "workers": [WORKER, HEAD],
    "api_key": "",
    "paths": ["/v1/models", "/v1/models/*"],
    "connect_timeout": 0.5,
    "tls_certificate": "",
    "tls_generate": False,
    "hold_seconds": 30,
    "clients": [],
    "queue_timeout": 300,
    "stream_timeout": 3600,
    "reload_grace": 7200,
    "retry_after": 10,
    "max_connections": 4096,
    "threads": 2,
    "critical_models": [],
    "aliases": {},
    "spill_after": 0,
    "affinity": False,
    "affinity_bound": 150,
    "max_body_mib": 4,
    "pools": 16,
    "virtual_address": "",
    "virtual_router_id": 51,
    "virtual_preempt": False,
    "virtual_interface": "",
}


def problems(host: str = "gateway", address: str = "192.0.2.20", **changes: Any) -> list[str]:
    return gateway_problems({**GOOD, **changes}, host, address)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"port": "8080", "threads": "4"},
        {"address": "::", "metrics_address": "2001:db8::1"},
        {"log": "192.0.2.9:514"},
        {"api_key": "sk-0_A.b~c+d/e=="},
        {"paths": ["/v1/audio/transcriptions", "/*"]},
        {"workers": [{"name": "x", "address": "box.example", "port": 80, "max_requests": 1, "weight": 256}]},
        {"workers": [{**WORKER, "weight": 0}, {**HEAD, "weight": 1}]},
        {"api_key": "sk-0", "clients": [{"name": "a", "key": KEY}, {"name": "b", "key_sha256": HASH}]},
        {
            "api_key": "sk-0",
            "clients": [{"name": "a", "key": KEY, "max_requests": 4, "requests_per_minute": 60}],
        },
        {"tls_certificate": "/etc/ssl/private/gateway.pem"},
        {"tls_generate": True},
        {
            "workers": [
                {**WORKER, "kind": "ollama", "on_demand": True, "models": ["a b:c"], "health_path": "/"}
            ]
        },
        {"workers": [{**WORKER, "kind": "openai", "key": "sk-1", "on_demand": False}]},
        {"aliases": {"chat": "qwen3.8-flash-next"}, "spill_after": 3},
        {"affinity": "yes", "affinity_bound": 101},
        {"affinity": True, "affinity_bound": "1000"},
        # Another host's ports are no concern of this one.
        {"port": 8000, "metrics_port": 9401},
    ],
)
def test_good(changes: dict[str, Any]) -> None:
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"port": 0},
            "gateway_port is 0; allowed is a whole number from 1 to 65535. The TCP port for clients, like 8080.",
        ),
        (
            {"threads": 65},
            "gateway_threads is 65; allowed is a whole number from 1 to 64. Threads of the gateway; two suffice.",
        ),
        (
            {"queue_timeout": "soon"},
            "gateway_queue_timeout is 'soon'; allowed is a whole number from 1 to 86400. "
            "Seconds that a request may wait for a free worker.",
        ),
        (
            {"address": "all hosts"},
            "gateway_address is 'all hosts'; allowed is one address, like 0.0.0.0 or 192.0.2.20.",
        ),
        (
            {"log": "a b"},
            "gateway_log is 'a b'; allowed is a socket like /dev/log or an address like 192.0.2.9:514.",
        ),
        (
            {"tls_certificate": "/a.pem", "tls_generate": True},
            "gateway_tls_certificate is '/a.pem' and gateway_tls_generate is true; allowed is one of them. Take one out.",
        ),
        (
            {"tls_certificate": "gateway.pem"},
            "gateway_tls_certificate is 'gateway.pem'; allowed is the path of a file on the gateway, "
            "like /etc/ssl/private/gateway.pem.",
        ),
        (
            {"tls_generate": "perhaps"},
            "gateway_tls_generate is 'perhaps'; allowed is true or false. Set it to one of them.",
        ),
        (
            {"paths": ["v1"]},
            "gateway_paths has 'v1'; allowed is a path like /v1/completions, "
            "or the beginning of paths like /v1/audio/*.",
        ),
        (
            {"paths": ["/v1/*/speech"]},
            "gateway_paths has '/v1/*/speech'; allowed is a path like /v1/completions, "
            "or the beginning of paths like /v1/audio/*.",
        ),
        (
            {"workers": []},
            "gateway_workers is empty; allowed is one worker or more. "
            "Put a host into group sparks, or list the workers.",
        ),
        (
            {"workers": [WORKER, {**HEAD, "name": "a"}]},
            "gateway_workers (a): the name is taken; give each worker its own.",
        ),
        (
            {"workers": [{**WORKER, "name": "a b"}]},
            "gateway_workers (a b): name is 'a b'; allowed are letters, digits and _.:- in it. Rename the worker.",
        ),
        (
            {"workers": [{**WORKER, "host": "a;b"}]},
            "gateway_workers (a): host is 'a;b'; allowed are letters, digits and _.:- in it.",
        ),
        (
            {"workers": [{**WORKER, "address": ""}]},
            "gateway_workers (a): address is ''; allowed is one address or host name, like 192.0.2.11.",
        ),
        (
            {"workers": [{**WORKER, "max_requests": 0}]},
            "gateway_workers (a): max_requests is 0; allowed is a whole number from 1 to 65535. "
            "Requests that it serves at once; more wait in the gateway.",
        ),
        (
            {"workers": [{**WORKER, "weight": 257}, HEAD]},
            "gateway_workers (a): weight is 257; allowed is a whole number from 0 to 256. "
            "Its share against the others'.",
        ),
        (
            {"workers": [{**WORKER, "health_port": 70000}]},
            "gateway_workers (a): health_port is 70000; allowed is a whole number from 1 to 65535. "
            "The port that answers for its health.",
        ),
        (
            {"workers": [WORKER, {**WORKER, "name": "b"}]},
            "gateway_workers (b): address, port and health_port are those of a, "
            "so its cap would not hold. Take one out.",
        ),
        (
            {"workers": [{**WORKER, "kind": "triton"}]},
            "gateway_workers (a): kind is 'triton'; allowed are vllm, openai, llama_cpp, ollama, llama_swap. "
            "Take openai for any other that lists its models at /v1/models.",
        ),
        (
            {"workers": [{**WORKER, "kind": "vllm", "on_demand": True}]},
            "gateway_workers (a): on_demand is true; allowed is that for ollama and llama_swap, since vllm does not load a model when "
            "it is asked for it. Take it out.",
        ),
        (
            {"workers": [{**WORKER, "health_path": "health"}]},
            "gateway_workers (a): health_path is 'health'; allowed is a path like /health.",
        ),
        (
            {"workers": [{**WORKER, "models": [""]}]},
            "gateway_workers (a): models has ''; allowed is a list of models' names, as it tells them.",
        ),
        (
            {"workers": [{**WORKER, "models": 5}]},
            "gateway_workers (a): models has 5; allowed is a list of models' names, as it tells them.",
        ),
        (
            {"critical_models": ["qwen3.8-flash-next", 5]},
            "gateway_critical_models has 5; allowed are names of models, as clients ask for them. Mend it.",
        ),
        (
            {"aliases": {"chat": 5}},
            "gateway_aliases has 'chat': 5; allowed are two names of models, like chat: qwen3.8-flash-next.",
        ),
        (
            {"pools": 1},
            "gateway_pools is 1, and there are 2 workers; allowed is at least one for each, or the models of some "
            "would have none. Raise it.",
        ),
        (
            {"workers": [{**WORKER, "key": "two words"}]},
            "gateway_workers (a): key has a character that a bearer token cannot have; allowed are letters, digits and -._~+/ "
            "with = at the end.",
        ),
        (
            {"aliases": {"a": "b", "b": "c"}},
            "gateway_aliases has 'a': 'b', which is an alias too; allowed is the name of a model. Name that one.",
        ),
        (
            {"aliases": {" a": "b"}},
            "gateway_aliases has ' a': 'b'; allowed are two names of models, like chat: qwen3.8-flash-next.",
        ),
        (
            {"affinity": "sticky"},
            "gateway_affinity is 'sticky'; allowed is true or false. Set it to one of them.",
        ),
        *(
            (
                {"affinity_bound": bound},
                f"gateway_affinity_bound is {bound}; allowed is a whole number from 101 to 1000. "
                "Per cent of the average load that a copy may have before its conversations go elsewhere.",
            )
            for bound in (100, 1001)
        ),
        (
            {"max_body_mib": 65},
            "gateway_max_body_mib is 65; allowed is a whole number from 1 to 64. "
            "MiB that a request may have; each one that waits may take as much memory.",
        ),
        (
            {"workers": [{**WORKER, "weight": 0}]},
            "gateway_workers: every weight is 0, so none would get a request. Give one a weight from 1 to 256.",
        ),
        (
            {"metrics_port": 8080},
            "gateway_port is 8080, as is gateway_metrics_port; allowed is a free port. Give one of them another.",
        ),
        (
            {"host": "a", "port": "8000", "workers": [WORKER]},
            "gateway_port is 8000, as is port of worker a on this host; allowed is a free port. "
            "Give one of them another.",
        ),
        (
            {
                "address": "192.0.2.20",
                "port": 9401,
                "host": "other",
                "workers": [{**WORKER, "address": "127.0.0.1"}],
            },
            "gateway_port is 9401, as is health_port of worker a on this host; allowed is a free port. "
            "Give one of them another.",
        ),
        (
            {"metrics_port": 9402, "host": "a"},
            "gateway_metrics_port is 9402, as is health_port of worker a-tp on this host; allowed is a free port. "
            "Give one of them another.",
        ),
    ],
)
def test_each_problem_is_named(changes: dict[str, Any], expected: str) -> None:
    changes = dict(changes)
    host = changes.pop("host", "gateway")
    assert gateway_problems({**GOOD, **changes}, host, "192.0.2.20") == [expected]


@pytest.mark.parametrize("key", ["two words", "line\nbreak", 'quo"te', "schlüssel", "a=b"])
def test_a_bad_key_is_not_repeated(key: str) -> None:
    (problem,) = problems(api_key=key)
    assert problem.startswith("gateway_api_key (by default vllm_api_key) has a character")
    assert key not in problem


def test_all_problems_are_named_at_once() -> None:
    assert len(problems(port=0, threads=0, workers=[{**WORKER, "max_requests": 0, "weight": -1}])) >= 4


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        ([{"name": "a b", "key": KEY}], "(a b): name is 'a b'; allowed are up to 63 letters, digits and _.:- in it."),
        ([{"name": "operator", "key": KEY}], "(operator): name is taken"),
        ([{"name": "a", "key": KEY}, {"name": "a", "key_sha256": HASH}], "[1] (a): name is taken"),
        ([{"name": "a"}], "(a): neither key nor key_sha256 is set; allowed is one of them."),
        ([{"name": "a", "key": KEY, "key_sha256": HASH}], "(a): both key and key_sha256 are set"),
        ([{"name": "a", "key": "short"}], "(a): key has fewer than 16 characters"),
        ([{"name": "a", "key": KEY + " "}], "(a): key has fewer than 16 characters, or one that"),
        ([{"name": "a", "key_sha256": HASH[1:]}], "(a): key_sha256 is not 64 hexadecimal digits"),
        ([{"name": "a", "key": KEY}, {"name": "b", "key": KEY}], "[1] (b): its key is also that of a"),
        ([{"name": "a", "key_sha256": sha256(b"").hexdigest()}], "(a): its key is also that of nobody, since it is empty"),
        ([{"name": "a", "key_sha256": sha256(b"sk-0").hexdigest().upper()}], "(a): its key is also that of operator"),
        ([{"name": "a", "key": KEY, "max_requests": 0}], "(a): max_requests is 0; allowed is a whole number from 1"),
        ([{"name": "a", "key": KEY, "requests_per_minute": "x"}], "(a): requests_per_minute is 'x'; allowed is"),
    ],
)  # fmt: skip
def test_clients(clients: list[dict[str, Any]], expected: str) -> None:
    (problem,) = problems(api_key="sk-0", clients=clients)
    assert expected in problem
    assert KEY not in problem


def test_clients_need_the_workers_key() -> None:
    (problem,) = problems(clients=[{"name": "a", "key": KEY}])
    assert "neither gateway_api_key nor vllm_api_key is" in problem


VIRTUAL = "192.0.2.10"
PAIR = ["a", "b"]


def shared(
    changes: dict[str, Any] | None = None,
    of_a: dict[str, Any] | None = None,
    of_b: dict[str, Any] | None = None,
    gateways: list[str] = PAIR,
) -> list[str]:
    """What is wrong with gateway a, when both share an address, and with what each sets for itself."""
    alike = {"gateway_virtual_address": VIRTUAL}
    hostvars = {
        "a": {"ansible_host": "192.0.2.11", "fabric_address": "198.51.100.11", **alike, **(of_a or {})},
        "b": {"ansible_host": "192.0.2.12", **alike, **(of_b or {})},
        "c": {"ansible_host": "192.0.2.13"},
    }
    settings = {**GOOD, "virtual_address": VIRTUAL, **(changes or {})}
    defaults = {f"gateway_{name}": value for name, value in GOOD.items()}
    return gateway_problems(settings, "a", "192.0.2.11", gateways, hostvars, defaults)


@pytest.mark.parametrize(
    ("changes", "of_b"),
    [
        ({}, {}),
        ({"virtual_address": "192.0.2.10/24", "virtual_preempt": "yes", "virtual_interface": "enP7s7"}, {}),
        ({"virtual_address": "2001:db8::10/64", "address": "::"}, {}),
        # What one sets and the other has by default is alike; what clients do not see may differ.
        ({}, {"gateway_port": "8080", "gateway_clients": [], "gateway_virtual_preempt": False}),
        ({}, {"gateway_threads": 4, "gateway_virtual_interface": "eth1"}),
    ],
)
def test_a_good_virtual_address(changes: dict[str, Any], of_b: dict[str, Any]) -> None:
    assert shared(changes, of_b=of_b) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"virtual_address": "192.0.2.300"}, "gateway_virtual_address is '192.0.2.300'; allowed is a free IPv4 or IPv6 address"),
        ({"virtual_address": "gateway.example"}, "gateway_virtual_address is 'gateway.example'; allowed is a free"),
        ({"virtual_address": "127.0.0.5"}, "gateway_virtual_address is '127.0.0.5'; allowed is a free"),
        ({"virtual_address": "192.0.2.12/24"}, "gateway_virtual_address is 192.0.2.12/24, which is ansible_host of b;"),
        ({"virtual_address": "192.0.2.13"}, "gateway_virtual_address is 192.0.2.13, which is ansible_host of c;"),
        ({"virtual_address": "198.51.100.11"}, "gateway_virtual_address is 198.51.100.11, which is fabric_address of a;"),
        ({"address": "192.0.2.11"}, "gateway_address is '192.0.2.11' and gateway_virtual_address is 192.0.2.10; allowed is 0.0.0.0"),
        ({"address": VIRTUAL}, "gateway_address is '192.0.2.10' and gateway_virtual_address is 192.0.2.10; allowed is 0.0.0.0"),
        ({"virtual_address": "2001:db8::10"}, "gateway_address is '0.0.0.0' and gateway_virtual_address is 2001:db8::10; allowed is ::"),
        ({"metrics_address": VIRTUAL}, "gateway_metrics_address is 192.0.2.10, the virtual address"),
        ({"virtual_router_id": 256}, "gateway_virtual_router_id is 256; allowed is a whole number from 1 to 255."),
        ({"virtual_preempt": "first"}, "gateway_virtual_preempt is 'first'; allowed is true or false."),
        ({"virtual_interface": "a link"}, "gateway_virtual_interface is 'a link'; allowed is the name of a network interface"),
    ],
)  # fmt: skip
def test_a_bad_virtual_address(changes: dict[str, Any], expected: str) -> None:
    (problem,) = shared(changes)
    assert problem.startswith(expected)


def test_a_virtual_address_needs_two_gateways() -> None:
    (problem,) = shared(gateways=["a"])
    assert problem.startswith(
        "gateway_virtual_address is 192.0.2.10, and the group gateways has 1 host; allowed are two or more."
    )


@pytest.mark.parametrize(
    "of_b",
    [
        {"gateway_virtual_address": ""},
        {"gateway_virtual_address": "192.0.2.9"},
        {"gateway_virtual_router_id": 52},
        {"gateway_virtual_preempt": True},
        {"gateway_port": 8081},
        {"gateway_tls_certificate": "/etc/ssl/gateway.pem"},
        {"gateway_tls_generate": True},
        {"gateway_clients": [{"name": "alice", "key": KEY}]},
        {"gateway_paths": ["/v1/models"]},
    ],
)
def test_gateways_of_one_address_are_alike(of_b: dict[str, Any]) -> None:
    (variable,) = of_b
    (problem,) = shared(of_b=of_b)
    assert problem.startswith(f"{variable} of b is not that of a; allowed is one value for all gateways")
    assert KEY not in problem


def test_a_gateway_that_does_not_know_the_address_is_told_too() -> None:
    (problem,) = shared({"virtual_address": ""}, of_a={"gateway_virtual_address": ""})
    assert problem.startswith("gateway_virtual_address of b is not that of a")


def test_gateways_with_addresses_of_their_own_may_differ() -> None:
    none = {"gateway_virtual_address": ""}
    assert shared({"virtual_address": ""}, of_a=none, of_b={**none, "gateway_port": 8081}) == []
