# SPDX-License-Identifier: GPL-3.0-or-later
"""LangChain's models: what works, what is raised, and what they bridge."""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Any

import openai
import pytest
from langchain_core.exceptions import (
    ModelAPIError,
    ModelAuthenticationError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelRateLimitError,
    ModelTimeoutError,
)
from langchain_core.messages import AIMessageChunk
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.gateway.conftest import KEYS
from tests.gateway.rig import MODEL, Gateway, Worker
from tests.gateway.sdk.conftest import (
    API,
    CITY,
    LONG,
    PATIENCE,
    QUESTION,
    RETRY_AFTER,
    TOO_LARGE,
    TOO_LONG,
    bridges,
    counted,
    gives_up,
    leaves,
    options,
    until_idle,
)
from tests.simulator.conftest import Engine

WEATHER = {"title": "get_weather", "description": "The weather.", **CITY}
ENDLESS: dict[str, Any] = {"max_tokens": LONG, "extra_body": {"ignore_eos": True}}

pytestmark = pytest.mark.usefixtures("endpoint")


def model(**other: Any) -> ChatOpenAI:
    """With the library's own defaults, but for what is given."""
    return ChatOpenAI(**{**options(), "model": MODEL, **other})


def impatient(**other: Any) -> ChatOpenAI:
    """It does not try again."""
    return model(max_retries=0, **other)


def test_its_own_retries_bridge_what_is_longer_than_the_hold(endpoint: Gateway, absent: Worker) -> None:
    bridges(endpoint, absent, lambda: model(max_tokens=3).invoke(QUESTION).text, RETRY_AFTER)


def test_who_does_not_try_again_is_told_to(absent: Worker) -> None:
    with pytest.raises(ModelAPIError) as raised:
        impatient().invoke(QUESTION)
    error = raised.value
    assert isinstance(error, openai.InternalServerError)
    assert (error.status_code, error.code) == (503, "service_unavailable")
    assert error.response.headers["retry-after"] == str(RETRY_AFTER)


def test_a_chat() -> None:
    answer = model(max_tokens=3, include_response_headers=True).invoke(QUESTION)
    assert answer.text == counted(3)
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["headers"]["x-served-by"] == "spark-a"
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == 3


def whole(chunks: list[Any]) -> AIMessageChunk:
    """What the chunks of a stream are together."""
    first, *others = chunks
    answer: AIMessageChunk = first + others
    return answer


def test_a_stream() -> None:
    chunks = list(model(stream_usage=True).stream(QUESTION))
    answer = whole(chunks)
    assert answer.text == counted(64)
    assert len(chunks) > 2
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == 64


def test_a_long_stream_comes_whole() -> None:
    chunks = model(**{**ENDLESS, "max_tokens": 5000}).stream(QUESTION)
    assert "".join(chunk.text for chunk in chunks) == counted(5000)


def test_tools() -> None:
    (call,) = model().bind_tools([WEATHER]).invoke(QUESTION).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bern"})


def test_tools_in_a_stream() -> None:
    chunks: list[Any] = list(model().bind_tools([WEATHER]).stream(QUESTION))
    (call,) = whole(chunks).tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bern"})
    assert sum(bool(chunk.tool_call_chunks) for chunk in chunks) > 1


def test_embeddings() -> None:
    """As texts: by default the library would count tokens, for which it fetches OpenAI's own vocabulary."""
    embedder = OpenAIEmbeddings(**options(model="embedder", check_embedding_ctx_length=False))
    first, second = embedder.embed_documents(["one", "two"])
    assert embedder.embed_query("one") == pytest.approx(first)
    assert sum(number**2 for number in second) == pytest.approx(1, abs=1e-5)
    assert first != second


def test_many_at_once_without_threads(loop: asyncio.Runner) -> None:
    async def stream(one: ChatOpenAI) -> str:
        return "".join([chunk.text async for chunk in one.astream(QUESTION)])

    async def all_of_them() -> list[str]:
        one = impatient(max_tokens=20)
        whole = (one.ainvoke(QUESTION) for _ in range(10))
        return [
            *await asyncio.gather(*(stream(one) for _ in range(20))),
            *(answer.text for answer in await asyncio.gather(*whole)),
        ]

    assert loop.run(all_of_them()) == [counted(20)] * 30


@pytest.mark.parametrize(
    ("what", "question", "kind", "status", "code"),
    [
        ({"api_key": "wrong"}, QUESTION, ModelAuthenticationError, 401, "invalid_api_key"),
        ({"model": "nobody-has-it"}, QUESTION, ModelNotFoundError, 404, "model_not_found"),
        ({"base_url": f"{API}/v1/nowhere"}, QUESTION, ModelNotFoundError, 404, "unknown_url"),
        ({"extra_body": {"model": None}}, QUESTION, ModelInvalidRequestError, 400, "missing_model"),
        # The engine's own word.
        ({"max_tokens": 0}, QUESTION, ModelInvalidRequestError, 400, "400"),
        ({}, TOO_LONG, ModelInvalidRequestError, 400, "400"),
        ({}, TOO_LARGE, openai.APIStatusError, 413, "request_too_large"),
    ],
    ids=["key", "model", "path", "no model", "value", "context", "length"],
)
def test_what_is_raised(
    what: dict[str, Any], question: str, kind: type[Exception], status: int, code: str
) -> None:
    with pytest.raises(kind) as raised:
        impatient(**what).invoke(question)
    error = raised.value
    assert isinstance(error, openai.APIStatusError)
    assert (error.status_code, error.code) == (status, code)
    assert error.request_id == error.response.headers["x-request-id"]


def test_who_asks_too_often_is_told_to_come_again() -> None:
    bob = impatient(api_key=KEYS["bob"], max_tokens=1)
    bob.invoke(QUESTION)
    with pytest.raises(ModelRateLimitError, match="in the last minute"):
        bob.invoke(QUESTION)


def test_who_asks_too_much_at_once_is_told_to_wait() -> None:
    alice = {"api_key": KEYS["alice"]}
    stream: Any = model(**alice, **ENDLESS).stream(QUESTION)
    with closing(stream):
        next(stream)
        with pytest.raises(ModelRateLimitError, match="in flight"):
            impatient(**alice, max_tokens=1).invoke(QUESTION)
    # Its own retries are enough to get in when there is room again.
    model(**alice, max_tokens=1).invoke(QUESTION)


def test_a_stream_that_is_left_ends_the_engines_work(engine: Engine) -> None:
    stream: Any = model(**ENDLESS).stream(QUESTION)
    with closing(stream):
        next(stream)
        asyncio.run(engine.running(1))
    asyncio.run(until_idle(engine))


def test_a_request_that_takes_too_long_is_given_up(engine: Engine) -> None:
    gives_up(engine, lambda: impatient(timeout=PATIENCE, **ENDLESS).invoke(QUESTION), ModelTimeoutError)


def test_a_task_that_is_cancelled_ends_the_engines_work(engine: Engine, loop: asyncio.Runner) -> None:
    loop.run(leaves(engine, model(**ENDLESS).ainvoke(QUESTION)))
