# SPDX-License-Identifier: GPL-3.0-or-later
"""What clients' libraries are tried on: the gateway, with a stand-in engine and one of embeddings behind it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import EMBED, KEYS, PORTS, ROOT, gateway_of
from tests.gateway.rig import LOOPBACK, MODEL, Gateway, Worker, until
from tests.simulator.conftest import Engine

# What the libraries would fetch or tell elsewhere; read when they are imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

# As the configuration `sdk` has it.
API = f"http://{LOOPBACK}:{PORTS['gateway']}"
HOLD, RETRY_AFTER = 5, 1
QUESTION = "What is the weather in 'Bern'?"
# Half a minute of work for the engine.
LONG = 50_000
# Seconds after which a client that has little gives up: enough to be at the engine by then on a busy machine.
PATIENCE = 4
# More than the model's context holds, and more than the gateway lets through.
TOO_LONG, TOO_LARGE = "word " * 300_000, "x" * 5_000_000
CITY: dict[str, object] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture(scope="module", autouse=True)
def at_home() -> Iterator[None]:
    """No library looks for anybody elsewhere."""
    found, elsewhere = socket.getaddrinfo, set()

    def find(host: Any, *arguments: Any, **named: Any) -> Any:
        if host != LOOPBACK:
            elsewhere.add(host)
            raise socket.gaierror(socket.EAI_NONAME, "no test may go there")
        return found(host, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", find)
        yield
    assert not elsewhere


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The copy's engine; a server of embeddings runs beside it."""
    folder = tmp_path_factory.mktemp("engines")

    def start(name: str, key: str, port: int, *flags: str) -> Engine:
        flags = ("--served-model-name", name, "--api-key", key, *flags)
        return Engine(ROOT / "simulator/models/simulated", folder / f"{name}.log", *flags, port=port)

    chat = start(
        *(MODEL, KEYS["operator"], PORTS["a"]),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )
    chat.model_name = MODEL
    embed = start("embedder", str(EMBED["key"]), PORTS["embed"], "--runner", "pooling", "--convert", "embed")
    try:
        for one in (chat, embed):
            asyncio.run(one.ready())
        yield chat
    finally:
        chat.kill()
        embed.kill()


@pytest.fixture(scope="module")
def agent(engine: Engine) -> Iterator[Worker]:
    """What the copy's agent says of it."""
    agent = Worker("spark-a", PORTS["a"], PORTS["a-agent"])
    agent.start_agent()
    yield agent
    agent.stop_agent()


@pytest.fixture(scope="module")
def endpoint(configurations: dict[str, Path], agent: Worker) -> Iterator[Gateway]:
    with gateway_of(configurations["sdk"]).running() as gateway:
        until(lambda: gateway.takes("spark-a") and gateway.takes("embed"))
        yield gateway


@pytest.fixture
def absent(endpoint: Gateway, agent: Worker) -> Iterator[Worker]:
    """The copy loads; the test says when that is over."""
    agent.health = 503
    until(lambda: not endpoint.takes("spark-a"))
    yield agent
    agent.health = 200
    until(lambda: endpoint.takes("spark-a"))


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """For libraries that keep their connections, which belong to one loop."""
    with asyncio.Runner() as runner:
        yield runner


def options(key: str = KEYS["operator"], **other: Any) -> dict[str, Any]:
    """Where the endpoint is, as all of these libraries are told it."""
    return {"base_url": f"{API}/v1", "api_key": key, **other}


def counted(numbers: int) -> str:
    """What the stand-in engine answers, so many tokens long."""
    return "".join(f"{number % 1000:03d} " for number in range(numbers))


def server_errors(gateway: Gateway) -> float:
    """How many answers were 5xx."""
    return gateway.metric(
        "haproxy_frontend_http_responses_total", "frontend", 'proxy="gateway"', 'code="5xx"'
    )


def bridges(endpoint: Gateway, absent: Worker, ask: Callable[[], str | None], pause: float = 0) -> None:
    """While the copy is away for longer than the hold, its library asks again until it is back, after such a pause."""
    expired, failed, count = endpoint.figure("hold_expired_total"), server_errors(endpoint), 4

    def timed() -> float:
        began = time.monotonic()
        assert ask() == counted(3)
        return time.monotonic() - began

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(timed) for _ in range(count)]
        until(lambda: endpoint.figure("hold_expired_total") - expired == count, 2 * HOLD)
        until(lambda: endpoint.held() == count)
        absent.health = 200
        assert all(each.result(20) > HOLD + pause for each in asked)
    assert server_errors(endpoint) - failed == endpoint.figure("hold_expired_total") - expired == count


async def until_idle(engine: Engine) -> None:
    """Long before it would have written all that it was asked for."""
    began = time.monotonic()
    await engine.running(0)
    assert time.monotonic() - began < 10


def gives_up(engine: Engine, ask: Callable[[], object], error: type[Exception]) -> None:
    """Whose patience is over gets this error, and the engine's work ends."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        asyncio.run(engine.running(1))
        with pytest.raises(error):
            asked.result(10)
    asyncio.run(until_idle(engine))


async def leaves(engine: Engine, asking: Coroutine[Any, Any, object]) -> None:
    """A task that is cancelled ends the engine's work."""
    asked = asyncio.create_task(asking)
    await engine.running(1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until_idle(engine)
