# SPDX-License-Identifier: GPL-3.0-or-later
"""Which workers an inventory's Sparks make."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

from ansible_collections.twospark.serving.plugins.filter.gateway_workers import gateway_workers

DEFAULTS = {
    "vllm_preset": "large",
    "vllm_port": 8000,
    "vllm_replica_agent_port": 9401,
    "vllm_tp_agent_port": 9402,
    "vllm_max_requests": "",
    "vllm_tp_max_requests": "",
    "vllm_tp_hosts": "{{ a template that only its own role can read }}",
}
PRESETS: dict[str, dict[str, Any]] = {
    "large": {
        "model": {"served_name": "large-model"},
        "replica": {"max_requests": 10},
        "tp": {"max_requests": 4},
    },
    "bare": {"replica": None},
}
A = {"ansible_host": "192.0.2.11", "fabric_address": "198.51.100.11"}
B = {"ansible_host": "192.0.2.12", "fabric_address": "198.51.100.12"}
OF_A_SPARK = {
    "kind": "vllm",
    "models": ["large-model"],
    "on_demand": False,
    "weight": 1,
    "health_path": "/health",
    "keep_alive": 5,
}
COPY_A = {
    **OF_A_SPARK,
    "name": "a",
    "host": "a",
    "address": "192.0.2.11",
    "port": 8000,
    "health_port": 9401,
    "max_requests": 10,
}
COPY_B = {
    **OF_A_SPARK,
    "name": "b",
    "host": "b",
    "address": "192.0.2.12",
    "port": 8000,
    "health_port": 9401,
    "max_requests": 10,
}
HEAD_A = {
    **OF_A_SPARK,
    "name": "a-tp",
    "host": "a",
    "address": "192.0.2.11",
    "port": 8000,
    "health_port": 9402,
    "max_requests": 4,
}
HEAD_B = {**HEAD_A, "name": "b-tp", "host": "b", "address": "192.0.2.12"}


@pytest.mark.parametrize(
    ("hostvars", "expected"),
    [
        pytest.param({"a": A, "b": B}, [COPY_A, COPY_B, HEAD_A], id="a pair"),
        pytest.param({}, [], id="no Spark"),
        pytest.param({"a": A}, [COPY_A], id="one Spark has no tp"),
        pytest.param(
            {"a": A, "b": B, "c": {"ansible_host": "192.0.2.13"}},
            [COPY_A, COPY_B, {**COPY_A, "name": "c", "host": "c", "address": "192.0.2.13"}, HEAD_A],
            id="three Sparks: tp over the first two",
        ),
        pytest.param(
            {"a": {**A, "vllm_tp_hosts": ["b", "a"]}, "b": {**B, "vllm_tp_hosts": ["b", "a"]}},
            [COPY_A, COPY_B, HEAD_B],
            id="the other head",
        ),
        pytest.param(
            {"a": {**A, "vllm_tp_hosts": ["b", "a"]}, "b": B}, [COPY_A, COPY_B, HEAD_B], id="named on one"
        ),
        pytest.param({"a": {**A, "vllm_tp_hosts": []}, "b": B}, [COPY_A, COPY_B], id="tp is not wanted"),
        pytest.param(
            {"a": A, "b": {"ansible_host": "192.0.2.12"}}, [COPY_A, COPY_B], id="no direct link, no tp"
        ),
        pytest.param({"a": {}}, [{**COPY_A, "address": "a"}], id="reached by its name"),
        pytest.param(
            {
                "a": {**A, "vllm_port": "8001", "vllm_replica_agent_port": 9501, "vllm_max_requests": "3"},
                "b": B,
            },
            [
                {**COPY_A, "port": 8001, "health_port": 9501, "max_requests": 3},
                COPY_B,
                {**HEAD_A, "port": 8001},
            ],
            id="a host's own ports and cap, as text or number",
        ),
        pytest.param(
            {"a": {**A, "vllm_tp_max_requests": 2, "vllm_tp_agent_port": 9502}, "b": B},
            [COPY_A, COPY_B, {**HEAD_A, "max_requests": 2, "health_port": 9502}],
            id="the head's own cap",
        ),
        pytest.param(
            {"a": {**A, "vllm_preset": "bare"}, "b": {**B, "vllm_preset": "bare"}},
            [{**worker, "max_requests": 12, "models": []} for worker in (COPY_A, COPY_B, HEAD_A)],
            id="a preset that states neither cap nor name",
        ),
        pytest.param(
            {
                "a": {**A, "vllm_environment": {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60"}},
                "b": {**B, "vllm_environment": {"OTHER": 1}},
            },
            [{**COPY_A, "keep_alive": 60}, COPY_B, {**HEAD_A, "keep_alive": 60}],
            id="idle connections are kept longer",
        ),
        pytest.param(
            {"a": {**A, "vllm_served_model_name": "mine"}},
            [{**COPY_A, "models": ["mine"]}],
            id="a name of the owner's",
        ),
    ],
)
def test_workers(hostvars: dict[str, dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert gateway_workers(list(hostvars), hostvars, DEFAULTS, PRESETS) == expected


BOX = {"name": "box", "kind": "ollama", "address": "192.0.2.20", "port": 11434, "max_requests": 2}
WHOLE_BOX = {
    **BOX,
    "host": "box",
    "models": [],
    "on_demand": True,
    "weight": 1,
    "health_path": "/api/version",
    "keep_alive": 0,
    "health_port": 11434,
}


@pytest.mark.parametrize(
    ("further", "expected"),
    [
        pytest.param([BOX], [COPY_A, WHOLE_BOX], id="another kind"),
        pytest.param(
            [{**BOX, "on_demand": False, "health_path": "/", "weight": 3, "key": None}],
            [COPY_A, {**WHOLE_BOX, "on_demand": False, "health_path": "/", "weight": 3}],
            id="its own values",
        ),
        pytest.param(
            [{"name": "x", "address": "192.0.2.21", "port": 80, "max_requests": 1}],
            [
                COPY_A,
                {
                    **OF_A_SPARK,
                    "name": "x",
                    "host": "x",
                    "kind": "openai",
                    "keep_alive": 0,
                    "models": [],
                    "address": "192.0.2.21",
                    "port": 80,
                    "health_port": 80,
                    "max_requests": 1,
                },
            ],
            id="nothing but the needful",
        ),
        pytest.param(
            [{"name": "a", "address": "10.0.0.1", "port": None}],
            [{**COPY_A, "address": "10.0.0.1"}],
            id="a Spark's other address",
        ),
        pytest.param([BOX, BOX], [COPY_A, WHOLE_BOX, WHOLE_BOX], id="one given twice is left to be found"),
        pytest.param(
            [{"name": "a", "weight": 2}, {"name": "a", "weight": 3, "port": 1, "health_port": 2}],
            [
                {**COPY_A, "weight": 2},
                {
                    **OF_A_SPARK,
                    "name": "a",
                    "host": "a",
                    "kind": "openai",
                    "keep_alive": 0,
                    "models": [],
                    "weight": 3,
                    "port": 1,
                    "health_port": 2,
                },
            ],
            id="a Spark given twice, too",
        ),
    ],
)
def test_further_workers(further: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert gateway_workers(["a"], {"a": A}, DEFAULTS, PRESETS, further) == expected


@pytest.mark.parametrize(
    ("hostvars", "message"),
    [
        (
            {"a": {**A, "vllm_port": "web"}},
            "vllm_port of a is 'web'; allowed is a whole number. Mend it in the inventory.",
        ),
        (
            {"a": {**A, "vllm_preset": "small"}},
            "vllm_preset of a is 'small'; presets given are large, bare.",
        ),
        (
            {"a": {**A, "vllm_tp_hosts": ["a", "b"]}, "b": {**B, "vllm_tp_hosts": ["b", "a"]}},
            "vllm_tp_hosts differs (a: a, b; b: b, a). Set it once, for the group sparks.",
        ),
        (
            {"a": {**A, "vllm_tp_hosts": ["a", "z"]}, "b": B},
            "vllm_tp_hosts names z, not in group sparks; allowed are a, b. "
            "Add the host to the group, or name another.",
        ),
    ],
)
def test_what_cannot_be_used(hostvars: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(AnsibleFilterError) as error:
        gateway_workers(list(hostvars), hostvars, DEFAULTS, PRESETS)
    assert str(error.value) == message


def test_a_spark_that_is_not_there_is_named() -> None:
    with pytest.raises(AnsibleFilterError, match="gateway_sparks names z, not in the inventory"):
        gateway_workers(["a", "z"], {"a": A}, DEFAULTS, PRESETS)


SERVERS = [
    {"name": "small", "path": "/srv/small.gguf", "port": 8101, "memory_gib": 8, "model": "small-4b"},
    {
        "name": "coder",
        "path": "/srv/coder.gguf",
        "port": 8102,
        "memory_gib": 8,
        "max_requests": 2,
        "weight": 3,
    },
]
OF_A_BOX = {
    "host": "box",
    "kind": "llama_cpp",
    "on_demand": False,
    "health_path": "/health",
    "keep_alive": 0,
    "address": "192.0.2.30",
}
BOX_SMALL = {
    **OF_A_BOX,
    "name": "box-small",
    "models": ["small-4b"],
    "port": 8101,
    "health_port": 9101,
    "max_requests": 4,
    "weight": 1,
}
BOX_CODER = {
    **OF_A_BOX,
    "name": "box-coder",
    "models": ["coder"],
    "port": 8102,
    "health_port": 9102,
    "max_requests": 2,
    "weight": 3,
}


@pytest.mark.parametrize(
    ("variables", "further", "expected"),
    [
        pytest.param({}, [], [BOX_SMALL, BOX_CODER], id="as it says"),
        pytest.param(
            {"vllm_api_key": "shared"},
            [],
            [{**BOX_SMALL, "key": "shared"}, {**BOX_CODER, "key": "shared"}],
            id="with the key of all",
        ),
        pytest.param(
            {"vllm_api_key": "shared", "worker_api_key": "own"},
            [{"name": "box-small", "weight": 0}],
            [{**BOX_SMALL, "key": "own", "weight": 0}, {**BOX_CODER, "key": "own"}],
            id="with one of its own, and another weight",
        ),
        pytest.param({"worker_servers": None}, [], [], id="without a server"),
    ],
)
def test_the_servers_of_a_box(
    variables: dict[str, Any], further: list[dict[str, Any]], expected: list[dict[str, Any]]
) -> None:
    hostvars = {"box": {"ansible_host": "192.0.2.30", "worker_servers": SERVERS, **variables}}
    assert gateway_workers([], hostvars, DEFAULTS, PRESETS, further, ["box"]) == expected


def test_a_box_that_cannot_be_is_named() -> None:
    hostvars = {"box": {"worker_servers": [{**SERVERS[0], "port": 0}]}}
    with pytest.raises(AnsibleFilterError, match="of box: port is 0; allowed is a whole number"):
        gateway_workers([], hostvars, DEFAULTS, PRESETS, boxes=["box"])
