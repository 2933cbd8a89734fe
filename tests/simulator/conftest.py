# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the stand-in engine as the program it is, and talks to it as any client does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "simulator" / "engine" / "vllm"
TEST_SECONDS = 25
DEFAULT_ENVIRONMENT = {"STANDIN_LOAD_SECONDS": "0.05", "STANDIN_SPEED": "50"}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, with an upper bound on its time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), TEST_SECONDS))
    return True


# Each suite, and each of its parallel processes, has ports of its own; none is given twice soon.
_FIRST_PORT = 24000 + 400 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 400))


def free_port() -> int:
    """A port that nobody listens on, that the kernel gives to no connection, and that no other test process takes."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("never reached: the ports go round")


class Engine:
    """One `vllm serve` that runs; its address, its processes, its log, and an HTTP client."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *flags: str,
        address: str = "127.0.0.1",
        port: int,
        **environment: str,
    ) -> None:
        self.address = address
        self.port = port
        self.log_path = log
        command = [
            sys.executable,
            str(PROGRAM),
            "serve",
            str(model),
            "--host",
            address,
            "--port",
            str(self.port),
        ]
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("STANDIN", "VLLM"))
        }
        self.started = time.monotonic()
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *flags],
                env=inherited | DEFAULT_ENVIRONMENT | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that a signal to its group does not reach the tests
            )

    @property
    def log(self) -> str:
        """All that it has printed."""
        return self.log_path.read_bytes().decode(errors="replace")

    def url(self, path: str) -> str:
        """Where a path of its API is."""
        return f"http://{self.address}:{self.port}{path}"

    def accepts_connections(self) -> bool:
        """Whether somebody listens on its port."""
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((self.address, self.port)) == 0

    async def until(self, condition: Callable[[], bool], seconds: float = 10) -> float:
        """Wait until the condition holds; returns how long that took. Fails with the log."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < seconds, f"not within {seconds} s; the log:\n{self.log}"
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def ready(self, seconds: float = 10) -> Engine:
        """Wait until it serves."""

        def listens_or_ended() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}; the log:\n{self.log}"
            return self.accepts_connections()

        await self.until(listens_or_ended, seconds)
        return self

    async def ended(self, seconds: float = 10) -> int:
        """Wait for its end; returns the exit status (negative: a signal)."""
        await self.until(lambda: self.process.poll() is not None, seconds)
        status: int = self.process.returncode
        return status

    def children(self) -> dict[str, int]:
        """Its processes below the main one: name without what differs between ranks -> process id."""
        found: dict[str, int] = {}
        parents = [self.process.pid]
        while parents:
            parent = parents.pop()
            for stat in Path("/proc").glob("[0-9]*/stat"):
                try:
                    pid, rest = stat.read_text().split(" (", 1)
                except OSError:
                    continue
                name, fields = rest.rsplit(") ", 1)
                if int(fields.split()[1]) == parent:
                    found["EngineCore" if "Engine" in name else "Worker"] = int(pid)
                    parents.append(int(pid))
        return found

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        """GET; returns status and body."""
        async with aiohttp.ClientSession() as session, session.get(self.url(path), **options) as response:
            return response.status, await response.text()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
        """POST JSON; returns status and parsed body."""
        url = self.url(path)
        async with aiohttp.ClientSession() as session, session.post(url, json=body, **options) as response:
            return response.status, json.loads(await response.text())

    async def complete(self, tokens: int = 8, **extra: Any) -> tuple[int, dict[str, Any]]:
        """A completion of exactly so many tokens."""
        body = {"prompt": "Count", "max_tokens": tokens, "ignore_eos": True}
        return await self.post("/v1/completions", body | extra)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """The events of a streaming answer, parsed; the last one of a whole answer is "[DONE]"."""
        url, body = self.url(path), body | {"stream": True}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").decode().strip()
                    yield data if data == "[DONE]" else json.loads(data)

    async def metric(self, name: str) -> float:
        """One sample of /metrics, by name and the labels as they stand there."""
        _, text = await self.get("/metrics")
        for line in text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"{name} is not among the metrics")

    async def running(self, count: int = 1) -> None:
        """Wait until so many requests are being generated."""
        name = f'vllm:num_requests_running{{engine="0",model_name="{self.model_name}"}}'
        for _ in range(200):
            if await self.metric(name) == count:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never {count} requests running; the log:\n{self.log}")

    model_name = "tiny"

    def kill(self) -> None:
        """End it and all that it has left, orphans too: they are in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, as far as the stand-in needs one."""
    folder = tmp_path_factory.mktemp("model")
    config = {"max_position_embeddings": 262144, "hidden_size": 32, "num_attention_heads": 24}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _starter(model: Path, folder: Path) -> Iterator[StartEngine]:
    engines: list[Engine] = []

    def start(*flags: str, address: str = "127.0.0.1", **environment: str) -> Engine:
        flags = ("--served-model-name", Engine.model_name, *flags)
        log = folder / f"{len(engines)}.log"
        engine = Engine(model, log, *flags, address=address, port=free_port(), **environment)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines with the given flags and environment; all of them end with the test."""
    yield from _starter(model, tmp_path)


@pytest.fixture(scope="module")
def start_shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """As `start`, for engines that the tests of a module share."""
    yield from _starter(model, tmp_path_factory.mktemp("engines"))
