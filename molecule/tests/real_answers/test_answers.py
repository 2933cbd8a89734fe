# SPDX-License-Identifier: GPL-3.0-or-later
"""What clients get from two copies of real vLLM through the gateway, and what the agents tell of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from real import KEY, MODEL, ask, metric
from spark import Spark, until

if TYPE_CHECKING:
    from conftest import Answer, Endpoint

Figure = Callable[[str], None]

ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Bern?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bern", "Basel"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def copies(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("replica")


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    """The gateway of these scenarios asks nobody for a key; the engines' own it adds itself."""
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", timeout=120) as client:
        yield client


def test_it_is_real(endpoint: Endpoint) -> None:
    answer = endpoint.complete(model=MODEL)
    assert answer.status == 200
    assert "standin" not in answer.body["system_fingerprint"]


def test_the_catalogue(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=7, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.completion_tokens == 7


def test_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 50}
    chunks = list(
        client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, extra_body={"ignore_eos": True}, **asked
        )
    )
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 50
    assert len(chunks) > 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    """Random weights choose nothing by themselves: the tool is named, and a strict one's grammar leaves them no other words."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": ASKED,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 1000,
    }
    if stream:
        deltas = [
            call.function
            for chunk in client.chat.completions.create(stream=True, **asked)
            for choice in chunk.choices
            for call in choice.delta.tool_calls or []
        ]
        name = "".join(delta.name or "" for delta in deltas)
        arguments = "".join(delta.arguments or "" for delta in deltas)
    else:
        (call,) = client.chat.completions.create(**asked).choices[0].message.tool_calls or []
        name, arguments = call.function.name, call.function.arguments
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Bern", "Basel")


def test_the_copies_figures_add_up(client: openai.OpenAI, copies: list[Spark], figure: Figure) -> None:
    """Each copy tells its own; together they are what clients got, and the tokens of the watchdogs' canaries."""

    def generated() -> list[float]:
        return [metric(copy, "vllm:generation_tokens_total") for copy in copies]

    def canaries() -> float:
        return sum(metric(copy, "vllm_agent_canaries_total", 9401) for copy in copies)

    before, canaries_before = generated(), canaries()
    got = 0
    for number in range(20):
        answer = client.completions.create(
            model=MODEL, prompt=f"{number}", max_tokens=10 + number, extra_body={"ignore_eos": True}
        )
        assert answer.usage
        got += answer.usage.completion_tokens
    assert got == sum(range(10, 30))
    until(
        lambda: sum(generated()) - sum(before) == got + canaries() - canaries_before,
        20,
        "the copies' sums are what was got",
    )
    shares = [now - then for now, then in zip(generated(), before, strict=True)]
    figure(f"{got} tokens got; the copies say {shares}")
    assert min(shares) > got / 5


def test_what_the_engine_tells_of_its_room(copies: list[Spark], figure: Figure) -> None:
    """Read from its log; its own gauge, which only new releases have, says the same."""
    for copy in copies:
        capacity = copy.status()["capacity"]
        figure(f"{copy}: {capacity}")
        gauge = ask(copy, "GET", "/metrics").text
        (tokens,) = re.findall(r'^vllm:cache_config_info.*kv_cache_size_tokens="(\d+)"', gauge, re.MULTILINE)
        assert capacity["kv_tokens"] == int(tokens) > 0
        assert capacity["context_tokens"] == 4096
        assert capacity["full_context_requests"] == pytest.approx(int(tokens) / 4096, abs=0.01)


# Beside /v1 vLLM guards nothing: with a key set, /invocations gives a whole completion to anyone.
GUARDED = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
OPEN = ("/metrics", "/load", "/version", "/docs", "/openapi.json", "/tokenize", "/invocations")


@pytest.mark.parametrize("path", GUARDED)
def test_the_engine_asks_for_its_key(copies: list[Spark], path: str) -> None:
    method = "GET" if path == "/v1/models" else "POST"

    def status(**headers: str) -> int:
        return ask(copies[0], method, path, **headers).status_code

    assert status() == 401
    assert status(authorization="Bearer other") == 401
    assert status(x_api_key=KEY) == 401
    assert status(authorization=f"Bearer {KEY}") != 401


@pytest.mark.parametrize("path", OPEN)
def test_what_the_engine_leaves_open_does_not_pass_the_gateway(endpoint: Endpoint, path: str) -> None:
    answer: Answer = endpoint.get(path)
    assert answer.status in (403, 404)
    assert answer.served_by == ""
    assert answer.body["error"]["message"]
