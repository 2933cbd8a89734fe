# SPDX-License-Identifier: GPL-3.0-or-later
"""OpenAI's own client: what works, what is raised, and what it bridges."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.gateway.conftest import KEYS
from tests.gateway.rig import MODEL, Gateway, Worker
from tests.gateway.sdk.conftest import (
    CITY,
    LONG,
    PATIENCE,
    QUESTION,
    RETRY_AFTER,
    TOO_LARGE,
    bridges,
    counted,
    gives_up,
    leaves,
    options,
    until_idle,
)
from tests.simulator.conftest import Engine

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_tokens": LONG,
    "extra_body": {"ignore_eos": True},
}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": CITY},
}


@pytest.fixture
def client(endpoint: Gateway) -> Iterator[openai.OpenAI]:
    """With the client's own defaults."""
    with openai.OpenAI(**options()) as client:
        yield client


@pytest.fixture
def impatient(endpoint: Gateway) -> Iterator[openai.OpenAI]:
    """It does not try again."""
    with openai.OpenAI(**options(max_retries=0)) as client:
        yield client


def test_its_own_retries_bridge_what_is_longer_than_the_hold(
    endpoint: Gateway, client: openai.OpenAI, absent: Worker
) -> None:
    def ask() -> str | None:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
        return answer.choices[0].message.content

    bridges(endpoint, absent, ask, RETRY_AFTER)


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
    assert answer.choices[0].message.content == counted(3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 3


def test_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == counted(64)
    assert len(chunks) > 2
    assert last.usage
    assert last.usage.completion_tokens == 64


def test_a_long_stream_comes_whole(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(**{**ENDLESS, "max_tokens": 5000}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == counted(5000)


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
        async with openai.AsyncOpenAI(**options(max_retries=0)) as client:
            return await asyncio.gather(*(ask(client) for _ in range(30)))

    assert asyncio.run(all_of_them()) == [counted(20)] * 30


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
            chat(messages=[{"role": "user", "content": TOO_LARGE}]),
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
    error = raised.value
    assert (error.status_code, error.type, error.code) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert error.response.headers["retry-after"] == str(RETRY_AFTER)


def test_who_asks_too_much_at_once_is_told_to_wait(endpoint: Gateway, engine: Engine) -> None:
    with openai.OpenAI(**options(KEYS["alice"])) as alice:
        with alice.chat.completions.create(**ENDLESS, stream=True) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as raised:
                chat(max_tokens=1)(alice.with_options(max_retries=0))
        error = raised.value
        assert (error.status_code, error.type, error.code) == (429, "rate_limit_error", "too_many_requests")
        # Its own retries are enough to get in when there is room again.
        chat(max_tokens=1)(alice)


def test_a_stream_that_is_left_ends_the_engines_work(client: openai.OpenAI, engine: Engine) -> None:
    with client.chat.completions.create(**ENDLESS, stream=True) as stream:
        next(stream)
        asyncio.run(engine.running(1))
    asyncio.run(until_idle(engine))


def test_a_request_that_takes_too_long_is_given_up(impatient: openai.OpenAI, engine: Engine) -> None:
    gives_up(
        engine, lambda: chat(**ENDLESS)(impatient.with_options(timeout=PATIENCE)), openai.APITimeoutError
    )


def test_a_task_that_is_cancelled_ends_the_engines_work(endpoint: Gateway, engine: Engine) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(**options()) as client:
            await leaves(engine, client.chat.completions.create(**ENDLESS))

    asyncio.run(leave())
