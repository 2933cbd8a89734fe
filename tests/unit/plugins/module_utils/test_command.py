# SPDX-License-Identifier: GPL-3.0-or-later
"""Mappings become argument lists without anything being joined and split again."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _command as command


@pytest.mark.parametrize(
    ("flags", "argv"),
    [
        ({}, []),
        ({"enable-prefix-caching": True}, ["--enable-prefix-caching"]),
        ({"enable-flashinfer-autotune": False}, ["--no-enable-flashinfer-autotune"]),
        ({"max-model-len": 262144}, ["--max-model-len", "262144"]),
        ({"--max_model_len": "256k"}, ["--max-model-len", "256k"]),
        ({"served-model-name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        (
            {"speculative-config": {"method": "mtp", "num_speculative_tokens": 4}},
            ["--speculative-config", '{"method":"mtp","num_speculative_tokens":4}'],
        ),
        ({"speculative_config.num_tokens": 4}, ["--speculative-config.num_tokens", "4"]),
        ({"chat-template": 'it\'s {{ a "b" }} é\n'}, ["--chat-template", 'it\'s {{ a "b" }} é\n']),
        ({"x": "-1"}, ["--x=-1"]),
        ({"x": -1}, ["--x=-1"]),
        ({"x": ""}, ["--x", ""]),
        ({"x": {"on": True, "off": None}}, ["--x", '{"on":true,"off":null}']),
        ({"x": [True, {"a": 1}]}, ["--x", "true", '{"a":1}']),
    ],
)
def test_engine_flags(flags: dict[str, Any], argv: list[str]) -> None:
    assert command.engine_flags(flags) == argv


@pytest.mark.parametrize(
    ("options", "argv"),
    [
        ({"gpus": "all"}, ["--gpus=all"]),
        ({"privileged": True}, ["--privileged"]),
        ({"oom-kill-disable": False}, ["--oom-kill-disable=false"]),
        ({"ulimit": ["memlock=-1", "stack=67108864"]}, ["--ulimit=memlock=-1", "--ulimit=stack=67108864"]),
        ({"label": "a b=c d"}, ["--label=a b=c d"]),
        ({"ulimit": []}, []),
    ],
)
def test_docker_options(options: dict[str, Any], argv: list[str]) -> None:
    assert command.docker_options(options) == argv


@pytest.mark.parametrize(
    ("layers", "result"),
    [
        ([], {}),
        ([{"a": 1}, None, {}], {"a": 1}),
        ([{"max-model-len": 1}, {"max_model_len": 2}], {"max-model-len": 2}),
        ([{"a": 1, "b": 2}, {"a": None}], {"b": 2}),
        ([{"a": 1}, {"a": None}, {"a": 3}], {"a": 3}),
        ([{"a": 0}, {"a": False}], {"a": False}),
        ([{}, {"never-there": None}], {}),
    ],
)
def test_merged(layers: list[dict[str, Any] | None], result: dict[str, Any]) -> None:
    assert command.merged(*layers) == result


def test_merged_leaves_its_layers_alone() -> None:
    preset = {"a": 1}
    command.merged(preset, {"a": None})
    assert preset == {"a": 1}


def test_merged_environment_keeps_names_and_makes_text() -> None:
    layers = ({"A_B": 1, "GONE": "x"}, {"A_B": True, "GONE": None, "J": {"a": 1}})
    assert command.merged_environment(*layers) == {"A_B": "true", "J": '{"a":1}'}


def test_flag_names() -> None:
    argv = ["--a", "1", "--b=--c", "-tp", "2", "--no-d"]
    assert command.flag_names(argv) == ["--a", "--b", "--no-d"]
