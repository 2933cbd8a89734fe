# SPDX-License-Identifier: GPL-3.0-or-later
"""The program that runs a llama.cpp server, without llama.cpp: its settings, its proof, its drain."""

from __future__ import annotations

import enum
import importlib.util
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "roles/worker/files/llama_worker.py"


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_worker", PROGRAM)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = program()


class Cache(enum.Enum):
    F16 = 1
    Q8 = 8


class Server:
    """Says what it was told, and how many requests it has."""

    def __init__(self, parameters: Any = None) -> None:
        self.parameters = parameters
        self.left: list[int] = []

    def handle_metrics(self) -> str:
        count = self.left.pop(0) if self.left else 0
        return f"# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing {count}\nllamacpp:requests_deferred 0\n"

    def handle_completions(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"choices": []} if request["max_tokens"] == 1 else {}

    def handle_embeddings(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"error": {"message": "This server does not support embeddings."}}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of a server whose model and key are there, and a llama.cpp that can be told four things."""
    for name in ("model.gguf", "api_key"):
        (tmp_path / name).write_text("secret")
    parameters = SimpleNamespace(
        api_keys=[],
        cpuparams=SimpleNamespace(n_threads=-1),
        endpoint_metrics=False,
        hostnames=[],
        model=SimpleNamespace(path=""),
        port=0,
        type_k=Cache.F16,
    )
    llama = SimpleNamespace(CommonParams=lambda: parameters, Server=Server)
    monkeypatch.setitem(sys.modules, "xllamacpp", llama)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return {
        "host": "127.0.0.1",
        "port": 8101,
        "health_port": port,
        "key_file": str(tmp_path / "api_key"),
        "embeddings": False,
        "drain_notice": 0,
        "drain_timeout": 5,
        "parameters": {"model.path": str(tmp_path / "model.gguf")},
    }


def test_llama_cpp_is_told_all(settings: dict[str, Any]) -> None:
    settings["parameters"] |= {"cpuparams.n_threads": 3, "type_k": "Q8"}
    told = worker.load(settings).parameters
    assert (told.hostnames, told.port, told.endpoint_metrics, told.api_keys) == (
        ["127.0.0.1"],
        8101,
        True,
        ["secret"],
    )
    assert (told.cpuparams.n_threads, told.type_k) == (3, Cache.Q8)


def test_without_a_key_none_is_asked_for(settings: dict[str, Any]) -> None:
    assert worker.load({**settings, "key_file": ""}).parameters.api_keys == []


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"n_cpu": 3}, "llama.cpp has no parameter 'n_cpu'; mend the options"),
        ({"cpuparams.threads.n": 3}, "llama.cpp has no parameter 'cpuparams.threads.n'; mend the options"),
        ({"type_k": "Q9"}, "llama.cpp's parameter 'type_k' cannot be 'Q9', it is <Cache.F16: 1> by default"),
        (
            {"model.path": "/not/there.gguf"},
            "/not/there.gguf cannot be read (No such file or directory); put it there",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(
    settings: dict[str, Any], said: dict[str, Any], problem: str
) -> None:
    settings["parameters"] |= said
    with pytest.raises(worker.SettingsError) as error:
        worker.load(settings)
    assert problem in str(error.value)


def test_it_does_not_serve_without_its_key(settings: dict[str, Any]) -> None:
    """A key that should be there and is not must never mean that everybody is let in."""
    Path(settings["key_file"]).unlink()
    with pytest.raises(worker.SettingsError, match=r"api_key cannot be read \(No such file"):
        worker.load(settings)


def test_a_model_that_does_not_answer_is_no_start(settings: dict[str, Any]) -> None:
    worker.prove(Server(), settings)
    with pytest.raises(RuntimeError, match="does not support embeddings"):
        worker.prove(Server(), {**settings, "embeddings": True})


@pytest.mark.parametrize(
    ("metrics", "count"),
    [
        ("", 0),
        ("llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n", 3),
        ("# HELP llamacpp:requests_processing 7\nllamacpp:requests_processing_total 9\n", 0),
    ],
)
def test_what_is_in_flight(metrics: str, count: int) -> None:
    assert worker.in_flight(metrics) == count


def test_a_drain_waits_for_what_is_in_flight_but_not_for_ever(settings: dict[str, Any]) -> None:
    server = Server()
    server.left = [2, 1]
    began = time.monotonic()
    worker.drain(server, settings)
    assert server.left == []
    assert time.monotonic() - began >= 2 * worker.LOOK_SECONDS
    server.left = [1] * 1000
    worker.drain(server, {**settings, "drain_timeout": 0.1})
    assert len(server.left) > 990


def test_gateways_are_told(settings: dict[str, Any]) -> None:
    draining = threading.Event()
    worker.serve_health(settings, draining.is_set)
    url = f"http://127.0.0.1:{settings['health_port']}/health"
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert (answer.status, answer.read()) == (200, b"serving\n")
    draining.set()
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(url, timeout=5)
    with error.value as answer:
        assert (answer.code, answer.read()) == (404, b"draining\n")
