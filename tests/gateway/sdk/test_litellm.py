# SPDX-License-Identifier: GPL-3.0-or-later
"""LiteLLM, as a library and as a router, by both of its ways to such an endpoint: what works, is raised, and is bridged."""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.gateway.conftest import KEYS
from tests.gateway.rig import LOOPBACK, MODEL, Gateway, Worker, free_port
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

MESSAGES = [{"role": "user", "content": QUESTION}]
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
ENDLESS: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True}

pytestmark = [
    pytest.mark.usefixtures("endpoint"),
    # Of its own types, as it makes and reads them.
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm"),
]


@pytest.fixture(scope="module")
def litellm() -> ModuleType:
    """Imported for those who use it only, as that takes seconds."""
    return importlib.import_module("litellm")


# By OpenAI's client, or by its own.
@pytest.fixture(params=["openai", "hosted_vllm"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def chat(way: str, **other: Any) -> dict[str, Any]:
    """What a completion is asked with, and the library's own defaults."""
    what = {**options(), "model": MODEL, "messages": MESSAGES, **other}
    return {**what, "model": f"{way}/{what['model']}"}


def once(way: str, **other: Any) -> dict[str, Any]:
    """The same, and it is not tried again."""
    return chat(way, max_retries=0, **other)


@pytest.mark.parametrize(
    ("way", "retries", "pause"), [("openai", {}, RETRY_AFTER), ("hosted_vllm", {"num_retries": 2}, 0)]
)
def test_its_own_retries_bridge_what_is_longer_than_the_hold(
    litellm: ModuleType, endpoint: Gateway, absent: Worker, way: str, retries: dict[str, int], pause: float
) -> None:
    def ask() -> str | None:
        answer = litellm.completion(**chat(way, max_tokens=3, **retries))
        return str(answer.choices[0].message.content)

    bridges(endpoint, absent, ask, pause)


def router_of(litellm: ModuleType, *places: dict[str, Any], **other: Any) -> Any:
    """Of places where a model is that it calls `chat`."""
    return litellm.Router([{"model_name": "chat", "litellm_params": place} for place in places], **other)


def place(way: str, base_url: str = f"{API}/v1", **other: Any) -> dict[str, Any]:
    return {"model": f"{way}/{MODEL}", "api_base": base_url, "api_key": KEYS["operator"], **other}


def test_a_routers_retries_bridge_what_is_longer_than_the_hold(
    litellm: ModuleType, endpoint: Gateway, absent: Worker, way: str
) -> None:
    router = router_of(litellm, place(way), num_retries=2)

    def ask() -> str | None:
        answer = router.completion("chat", MESSAGES, max_tokens=3)
        return str(answer.choices[0].message.content)

    bridges(endpoint, absent, ask)


def test_a_router_goes_round_a_gateway_that_is_away(litellm: ModuleType, way: str) -> None:
    nobody = f"http://{LOOPBACK}:{free_port()}/v1"
    # As good as always it begins with the first, which it leaves alone for a while as soon as it fails.
    places = (place(way, nobody, weight=1_000_000), place(way, weight=1))

    def ask(retries: int) -> Any:
        router = router_of(litellm, *places, num_retries=retries, allowed_fails=0)
        return router.completion("chat", MESSAGES, max_tokens=3)

    with pytest.raises(litellm.InternalServerError, match=r"[Cc]onnect"):
        ask(0)
    assert ask(1).choices[0].message.content == counted(3)


def test_who_does_not_try_again_is_told_to(litellm: ModuleType, absent: Worker) -> None:
    with pytest.raises(
        litellm.ServiceUnavailableError, match="No worker that has this model is live"
    ) as raised:
        litellm.completion(**once("openai"))
    assert raised.value.status_code == 503
    assert raised.value.response.headers["retry-after"] == str(RETRY_AFTER)


def test_models(litellm: ModuleType, way: str) -> None:
    names = litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider=way,
        api_base=f"{API}/v1",
        api_key=KEYS["operator"],
    )
    assert sorted(names) == ["embedder", MODEL]


def test_a_chat(litellm: ModuleType, way: str) -> None:
    answer = litellm.completion(**chat(way, max_tokens=3))
    assert answer.choices[0].message.content == counted(3)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    assert answer._hidden_params["additional_headers"]["llm_provider-x-served-by"] == "spark-a"


def test_a_stream(litellm: ModuleType, way: str) -> None:
    stream = litellm.completion(**chat(way, stream=True, stream_options={"include_usage": True}))
    chunks = list(stream)
    answer = litellm.stream_chunk_builder(chunks)
    assert answer.choices[0].message.content == counted(64)
    assert len(chunks) > 2
    assert chunks[-1].usage.completion_tokens == 64


def test_a_long_stream_comes_whole(litellm: ModuleType, way: str) -> None:
    stream = litellm.completion(**chat(way, **{**ENDLESS, "max_tokens": 3000}, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == counted(3000)


def test_tools(litellm: ModuleType, way: str) -> None:
    answer = litellm.completion(**chat(way, tools=[WEATHER]))
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')


def test_tools_in_a_stream(litellm: ModuleType, way: str) -> None:
    chunks = list(litellm.completion(**chat(way, tools=[WEATHER], stream=True)))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Bern"}')
    assert sum(bool(chunk.choices[0].delta.tool_calls) for chunk in chunks) > 1


def test_embeddings(litellm: ModuleType, way: str) -> None:
    first, second = litellm.embedding(
        f"{way}/embedder", ["one", "two"], api_base=f"{API}/v1", api_key=KEYS["operator"]
    ).data
    assert sum(number**2 for number in second["embedding"]) == pytest.approx(1, abs=1e-5)
    assert first["embedding"] != second["embedding"]


def test_many_at_once_without_threads(litellm: ModuleType, way: str, loop: asyncio.Runner) -> None:
    async def stream() -> str:
        chunks = await litellm.acompletion(**once(way, max_tokens=20, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def whole() -> str:
        answer = await litellm.acompletion(**once(way, max_tokens=20))
        return str(answer.choices[0].message.content)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(stream() for _ in range(20)), *(whole() for _ in range(10)))

    assert loop.run(all_of_them()) == [counted(20)] * 30


def question(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("what", "kind", "status", "message"),
    [
        ({"api_key": "wrong"}, "AuthenticationError", 401, "does not know this API key"),
        ({"model": "nobody-has-it"}, "NotFoundError", 404, "There is no model nobody-has-it"),
        ({"base_url": f"{API}/v1/nowhere"}, "NotFoundError", 404, "does not pass this path"),
        # The engine's own word.
        ({"max_tokens": 0}, "BadRequestError", 400, "max_tokens must be"),
        (question(TOO_LONG), "ContextWindowExceededError", 400, "maximum context length"),
    ],
    ids=["key", "model", "path", "value", "context"],
)
def test_what_is_raised(
    litellm: ModuleType, way: str, what: dict[str, Any], kind: str, status: int, message: str
) -> None:
    with pytest.raises(getattr(litellm, kind), match=message) as raised:
        litellm.completion(**once(way, **what))
    assert raised.value.status_code == status


def test_too_large_a_request(litellm: ModuleType, way: str) -> None:
    """One of them takes it for a bad request, the other has no name for it."""
    with pytest.raises((litellm.BadRequestError, litellm.APIError), match="larger than 4 MiB") as raised:
        litellm.completion(**once(way, **question(TOO_LARGE)))
    assert raised.value.status_code == 413


def test_who_asks_too_often_is_told_to_come_again(litellm: ModuleType) -> None:
    bob = once("openai", api_key=KEYS["bob"], max_tokens=1)
    litellm.completion(**bob)
    with pytest.raises(litellm.RateLimitError, match="in the last minute"):
        litellm.completion(**bob)


def test_who_asks_too_much_at_once_is_told_to_wait(litellm: ModuleType, way: str) -> None:
    alice = {"api_key": KEYS["alice"]}
    with litellm.completion(**chat(way, **alice, **ENDLESS, stream=True)) as stream:
        next(stream)
        with pytest.raises(litellm.RateLimitError, match="in flight"):
            litellm.completion(**once(way, **alice, max_tokens=1))
    # A router's retries, which do as they are told, are enough to get in when there is room again.
    router_of(litellm, place(way, **alice), num_retries=2).completion("chat", MESSAGES, max_tokens=1)


def test_a_stream_that_is_left_ends_the_engines_work(litellm: ModuleType, way: str, engine: Engine) -> None:
    with litellm.completion(**chat(way, **ENDLESS, stream=True)) as stream:
        next(stream)
        asyncio.run(engine.running(1))
    asyncio.run(until_idle(engine))


def test_a_request_that_takes_too_long_is_given_up(litellm: ModuleType, way: str, engine: Engine) -> None:
    gives_up(engine, lambda: litellm.completion(**once(way, **ENDLESS, timeout=PATIENCE)), litellm.Timeout)


def test_a_task_that_is_cancelled_ends_the_engines_work(
    litellm: ModuleType, way: str, engine: Engine, loop: asyncio.Runner
) -> None:
    loop.run(leaves(engine, litellm.acompletion(**chat(way, **ENDLESS))))
