# SPDX-License-Identifier: GPL-3.0-or-later
"""OpenAI's own client behind the gateway, and stand-in engines before it: what works, what is raised, and what it bridges."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.gateway.conftest import EMBED, KEYS, PORTS, ROOT, gateway_of
from tests.gateway.rig import LOOPBACK, MODEL, Gateway, Worker, until
from tests.simulator.conftest import Engine

# As the configuration `sdk` has it.
HOLD, RETRY_AFTER = 5, 1
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in 'Bern'?"}]
# Half a minute of work for the engine.
LONG: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": 50_000,
    "extra_body": {"ignore_eos": True},
}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


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


def options(key: str, **other: Any) -> dict[str, Any]:
    return {"base_url": f"http://{LOOPBACK}:{PORTS['gateway']}/v1", "api_key": key, **other}


@pytest.fixture
def client(endpoint: Gateway) -> Iterator[openai.OpenAI]:
    """With the client's own defaults."""
    with openai.OpenAI(**options(KEYS["operator"])) as client:
        yield client


@pytest.fixture
def impatient(endpoint: Gateway) -> Iterator[openai.OpenAI]:
    """It does not try again."""
    with openai.OpenAI(**options(KEYS["operator"], max_retries=0)) as client:
        yield client


@pytest.fixture
def absent(endpoint: Gateway, agent: Worker) -> Iterator[Worker]:
    """The copy loads; the test says when that is over."""
    agent.health = 503
    until(lambda: not endpoint.takes("spark-a"))
    yield agent
    agent.health = 200
    until(lambda: endpoint.takes("spark-a"))


def refused(gateway: Gateway) -> float:
    return gateway.metric(
        "haproxy_frontend_http_responses_total", "frontend", 'proxy="gateway"', 'code="5xx"'
    )


def test_its_own_retries_bridge_what_is_longer_than_the_hold(
    endpoint: Gateway, client: openai.OpenAI, absent: Worker
) -> None:
    before, expired = refused(endpoint), endpoint.figure("hold_expired_total")
    count = 4

    def ask() -> float:
        began = time.monotonic()
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].message.content == "000 001 002 "
        return time.monotonic() - began

    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(ask) for _ in range(count)]
        until(lambda: endpoint.figure("hold_expired_total") - expired == count, HOLD + 2)
        # They come again when they are told to: a pause of the client's own choice would be over by now.
        time.sleep(0.7 * RETRY_AFTER)
        assert endpoint.held() == 0
        until(lambda: endpoint.held() == count, RETRY_AFTER)
        absent.health = 200
        assert all(each.result(10) > HOLD + RETRY_AFTER for each in asked)
    assert refused(endpoint) - before == endpoint.figure("hold_expired_total") - expired == count


def test_who_does_not_try_again_is_told_to(
    endpoint: Gateway, impatient: openai.OpenAI, absent: Worker
) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        impatient.chat.completions.create(model=MODEL, messages=MESSAGES)
    error = raised.value
    assert (error.status_code, error.type, error.code) == (503, "server_error", "service_unavailable")
    assert error.response.headers["retry-after"] == str(RETRY_AFTER)


def test_models(client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {MODEL, "embedder"}
    assert client.models.retrieve(MODEL).owned_by == "vllm"


def test_a_chat(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    assert raw.headers["x-served-by"] == "spark-a"
    answer = raw.parse()
    assert answer.choices[0].message.content == "000 001 002 "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 3


def test_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "".join(f"{number:03d} " for number in range(64))
    assert len(chunks) > 2
    assert last.usage
    assert last.usage.completion_tokens == 64


def test_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[WEATHER])
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')


def test_tools_in_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[WEATHER]) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')


def test_embeddings(client: openai.OpenAI) -> None:
    """By default the client asks for base64, and decodes it."""
    text = ["one", "two"]
    first, second = client.embeddings.create(model="embedder", input=text).data
    numbers = client.embeddings.create(model="embedder", input=text, encoding_format="float").data
    assert first.embedding == pytest.approx(numbers[0].embedding)
    assert sum(number**2 for number in second.embedding) == pytest.approx(1, abs=1e-5)
    assert first.embedding != second.embedding


def test_many_at_once_without_threads(endpoint: Gateway) -> None:
    async def ask(client: openai.AsyncOpenAI) -> str:
        text = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=20, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(**options(KEYS["operator"], max_retries=0)) as client:
            return await asyncio.gather(*(ask(client) for _ in range(30)))

    assert asyncio.run(all_of_them()) == ["".join(f"{number:03d} " for number in range(20))] * 30


Ask = Callable[[openai.OpenAI], object]


def chat(**what: Any) -> Ask:
    """What a client does."""
    return lambda client: client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, **what})


@pytest.mark.parametrize(
    ("ask", "kind", "status", "code", "param"),
    [
        (
            lambda client: client.with_options(api_key="wrong").models.list(),
            openai.AuthenticationError,
            401,
            "invalid_api_key",
            None,
        ),
        (
            lambda client: client.get("/../metrics", cast_to=str),
            openai.PermissionDeniedError,
            403,
            "metrics_not_here",
            None,
        ),
        (chat(model="nobody-has-it"), openai.NotFoundError, 404, "model_not_found", "model"),
        (
            lambda client: client.models.retrieve("nobody-has-it"),
            openai.NotFoundError,
            404,
            "model_not_found",
            None,
        ),
        (lambda client: client.files.list(), openai.NotFoundError, 404, "unknown_url", None),
        (chat(extra_body={"model": None}), openai.BadRequestError, 400, "missing_model", "model"),
        # The engine's own word.
        (chat(max_tokens=0), openai.BadRequestError, 400, "400", "max_tokens"),
        (
            chat(messages=[{"role": "user", "content": "x" * 5_000_000}]),
            openai.APIStatusError,
            413,
            "request_too_large",
            None,
        ),
    ],
    ids=["key", "metrics", "model", "name", "path", "no model", "value", "length"],
)
def test_what_is_raised(
    impatient: openai.OpenAI,
    ask: Ask,
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        ask(impatient)
    error = raised.value
    assert type(error) is kind
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.request_id == error.response.headers["x-request-id"]


def test_who_asks_too_often_is_told_to_come_again(endpoint: Gateway) -> None:
    with openai.OpenAI(**options(KEYS["bob"], max_retries=0)) as bob:
        chat(max_tokens=1)(bob)
        with pytest.raises(openai.RateLimitError) as raised:
            chat(max_tokens=1)(bob)
    assert (raised.value.status_code, raised.value.code) == (429, "rate_limit_exceeded")
    assert raised.value.response.headers["retry-after"] == str(RETRY_AFTER)


def test_who_asks_too_much_at_once_is_told_to_wait(endpoint: Gateway, engine: Engine) -> None:
    with openai.OpenAI(**options(KEYS["alice"])) as alice:
        with alice.chat.completions.create(**LONG, stream=True) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as raised:
                chat(max_tokens=1)(alice.with_options(max_retries=0))
        assert (raised.value.status_code, raised.value.code) == (429, "too_many_requests")
        # Its own retries are enough to get in when there is room again.
        chat(max_tokens=1)(alice)


async def until_idle(engine: Engine) -> None:
    """Long before it would have written all that it was asked for."""
    began = time.monotonic()
    await engine.running(0)
    assert time.monotonic() - began < 2


def test_a_stream_that_is_left_ends_the_engines_work(client: openai.OpenAI, engine: Engine) -> None:
    with client.chat.completions.create(**LONG, stream=True) as stream:
        next(stream)
        asyncio.run(engine.running(1))
    asyncio.run(until_idle(engine))


def test_a_request_that_takes_too_long_is_given_up(impatient: openai.OpenAI, engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(chat(**LONG), impatient.with_options(timeout=1))
        asyncio.run(engine.running(1))
        with pytest.raises(openai.APITimeoutError):
            asked.result(10)
    asyncio.run(until_idle(engine))


def test_a_task_that_is_cancelled_ends_the_engines_work(endpoint: Gateway, engine: Engine) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(**options(KEYS["operator"])) as client:
            asked = asyncio.create_task(client.chat.completions.create(**LONG))
            await engine.running(1)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await until_idle(engine)

    asyncio.run(leave())
