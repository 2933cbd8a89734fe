# SPDX-License-Identifier: GPL-3.0-or-later
"""What a worker's host serves, and what is said of an inventory that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.module_utils._worker import worker_servers

SMALL = {"name": "small", "path": "/srv/models/small.gguf", "port": 8101, "memory_gib": 8}


def test_what_is_not_said_is_completed() -> None:
    plan = worker_servers([SMALL], "box")
    assert plan["problems"] == []
    assert plan["servers"] == [
        {
            **SMALL,
            "model": "small",
            "health_port": 9101,
            "embeddings": False,
            "max_requests": 4,
            "context": 4096,
            "weight": 1,
            "parameters": {
                "model.path": "/srv/models/small.gguf",
                "model_alias": ["small"],
                "n_parallel": 4,
                "n_ctx": 4 * 4096,
                "embedding": False,
                "ui": False,
                "cache_ram_mib": 0,
                "verbosity": 2,
            },
        }
    ]


@pytest.mark.parametrize(
    ("said", "parameters"),
    [
        ({"model": "Qwen/Qwen3-4B:q4"}, {"model_alias": ["Qwen/Qwen3-4B:q4"]}),
        ({"max_requests": "2", "context": "100"}, {"n_parallel": 2, "n_ctx": 200}),
        ({"embeddings": True, "context": 512}, {"embedding": True, "n_batch": 512, "n_ubatch": 512}),
        ({"embeddings": "yes", "options": {"n_ubatch": 64}}, {"embedding": True, "n_ubatch": 64}),
        ({"options": {"cpuparams.n_threads": 3}}, {"cpuparams.n_threads": 3}),
        # As the role's argument_specs leave what is not given.
        ({"model": None, "health_port": None}, {"model_alias": ["small"]}),
    ],
)
def test_what_llama_cpp_is_told(said: dict[str, Any], parameters: dict[str, Any]) -> None:
    plan = worker_servers([{**SMALL, **said}], "box")
    assert plan["problems"] == []
    assert parameters.items() <= plan["servers"][0]["parameters"].items()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"name": "a/b"}, "worker_servers[0] (a/b) of box: name is 'a/b'; allowed are up to 32 letters"),
        (
            {"model": ""},
            "worker_servers[0] (small) of box: model is ''; allowed is the name that clients ask for.",
        ),
        ({"path": "small.gguf"}, "path is 'small.gguf'; allowed is the full path of a GGUF file on box"),
        ({"port": 0}, "port is 0; allowed is a whole number from 1 to 65535. Give a free TCP port."),
        ({"port": 65000}, "health_port is 66000; allowed is a whole number from 1 to 65535."),
        (
            {"memory_gib": None},
            "memory_gib is None; allowed is a number from 0.0625 to 4096. GiB that it may have",
        ),
        ({"max_requests": 1.5}, "max_requests is 1.5; allowed is a whole number from 1 to 256."),
        ({"context": 8}, "context is 8; allowed is a whole number from 16 to"),
        ({"weight": 257}, "weight is 257; allowed is a whole number from 0 to 256."),
        ({"embeddings": "often"}, "embeddings is 'often'; allowed is true or false."),
        ({"options": ["n_batch"]}, "options is ['n_batch']; allowed is a mapping"),
        ({"options": {"n-batch": 1}}, "options has 'n-batch'; allowed are names of llama.cpp's parameters"),
        ({"options": {"n_ctx": 1}}, "options has 'n_ctx'; that is what context says. Take it out."),
        ({"options": {"model.url": "x"}}, "options has 'model.url'; that is what path says. Take it out."),
        ({"health_port": 8101}, "the port 8101 is taken 2 times, as port or health_port"),
    ],
)
def test_what_cannot_be_is_named(said: dict[str, Any], problem: str) -> None:
    (found,) = worker_servers([{**SMALL, **said}], "box")["problems"]
    assert problem in found


def test_servers_of_one_host_do_not_share_names_and_ports() -> None:
    problems = worker_servers([SMALL, {**SMALL, "path": "/other.gguf"}], "box")["problems"]
    assert [problem.split(";")[0] for problem in problems] == [
        "worker_servers of box: 2 have the name 'small'",
        "worker_servers of box: the port 8101 is taken 2 times, as port or health_port (by default port + 1000)",
        "worker_servers of box: the port 9101 is taken 2 times, as port or health_port (by default port + 1000)",
    ]
