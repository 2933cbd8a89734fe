# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths, bodies, status codes and holes of the API."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from tests.simulator.conftest import Engine, StartEngine

KEYS = ("first-key", "second-key")
MESSAGES = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "minimum": 3},
                "hours": {"type": "array", "items": {"type": "number"}},
                "note": {"type": "string"},
            },
            "required": ["city", "unit", "days", "hours"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "read_clock", "parameters": {"type": "object", "properties": {}}},
}
ASKING = [{"role": "user", "content": "What is the weather in 'Bern'?"}]


@pytest.fixture(scope="module")
def engine(start_shared: StartEngine) -> Engine:
    engine = start_shared("other-name", "--max-model-len", "4096", "--enable-auto-tool-choice",
                          "--tool-call-parser", "hermes")  # fmt: skip
    asyncio.run(engine.ready())
    return engine


@pytest.fixture(scope="module")
def keyed(start_shared: StartEngine) -> Engine:
    engine = start_shared("--api-key", *KEYS, VLLM_API_KEY="not-this-one")
    asyncio.run(engine.ready())
    return engine


async def test_paths_that_need_no_body(engine: Engine) -> None:
    assert await engine.get("/health") == (200, "")
    assert await engine.get("/ping") == (200, "")
    assert await engine.get("/load") == (200, '{"server_load": 0}')
    assert await engine.get("/version") == (200, '{"version": "0.33.0+standin"}')
    assert await engine.get("/nowhere") == (404, '{"detail": "Not Found"}')
    assert (await engine.get("/v1/completions"))[0] == 405


async def test_models(engine: Engine, model: object) -> None:
    status, text = await engine.get("/v1/models")
    models = json.loads(text)["data"]
    assert status == 200
    assert [entry["id"] for entry in models] == ["tiny", "other-name"]
    assert {(entry["root"], entry["max_model_len"], entry["owned_by"]) for entry in models} == {
        (str(model), 4096, "vllm")
    }


def counted(answer: dict[str, Any]) -> dict[str, int]:
    """The counts of an answer's usage, without what is null."""
    return {name: count for name, count in answer["usage"].items() if count is not None}


async def test_a_chat_completion(engine: Engine) -> None:
    status, answer = await engine.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["message"]["content"] == "000 001 002 003 004 "
    assert answer["choices"][0]["finish_reason"] == "length"
    # "user: Hello" is 11 bytes, four to a token.
    assert counted(answer) == {"prompt_tokens": 3, "total_tokens": 8, "completion_tokens": 5}
    assert answer["system_fingerprint"].startswith("vllm-0.33.0-standin-")
    assert "tp" not in answer["system_fingerprint"].split("standin")[1]


async def test_a_reply_ends_by_itself(engine: Engine) -> None:
    _, answer = await engine.post("/v1/chat/completions", {"messages": MESSAGES})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 64
    _, answer = await engine.complete(1200)
    words = answer["choices"][0]["text"].split()
    assert words == [f"{i % 1000:03d}" for i in range(1200)]
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_stop_strings_and_minimum(engine: Engine) -> None:
    _, answer = await engine.complete(100, stop=["007", "005 0"])
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "000 001 002 003 004 ",
        "stop",
        "005 0",
    )
    _, answer = await engine.complete(100, ignore_eos=False, min_tokens=80)
    assert answer["usage"]["completion_tokens"] == 80


async def test_several_prompts_and_choices(engine: Engine) -> None:
    body = {"prompt": ["one", [1, 2, 3, 4]], "n": 2, "max_tokens": 3}
    _, answer = await engine.post("/v1/completions", body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["text"] for choice in answer["choices"]} == {"000 001 002 "}
    assert counted(answer) == {"prompt_tokens": 5, "total_tokens": 17, "completion_tokens": 12}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_tells_the_same_as_a_whole_answer(engine: Engine, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 50, "stream_options": {"include_usage": True}, "n": 2}
    body |= {"messages": MESSAGES} if "chat" in path else {"prompt": "Hello"}
    events = [event async for event in engine.stream(path, body)]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 100
    texts, reasons = ["", ""], ["", ""]
    for event in events[:-2]:
        choice = event["choices"][0]
        index = choice["index"]
        texts[index] += choice["delta"].get("content", "") if "chat" in path else choice["text"]
        reasons[index] += choice["finish_reason"] or ""
    assert texts == ["".join(f"{i:03d} " for i in range(50))] * 2
    assert reasons == ["length"] * 2
    assert len(events) > 4  # it came in pieces


async def test_no_usage_in_a_stream_unless_asked(engine: Engine) -> None:
    events = [event async for event in engine.stream("/v1/completions", {"prompt": "x"})]
    assert not any("usage" in event for event in events[:-1])


@pytest.mark.parametrize(
    ("choice", "messages", "finish_reason"),
    [
        ("auto", ASKING, "tool_calls"),
        ("required", MESSAGES, "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, MESSAGES, "stop"),
    ],
    ids=["asked for", "required", "named"],
)
async def test_a_tool_is_called(engine: Engine, choice: Any, messages: Any, finish_reason: str) -> None:
    body = {"messages": messages, "tools": [WEATHER, CLOCK], "tool_choice": choice}
    _, answer = await engine.post("/v1/chat/completions", body)
    first = answer["choices"][0]
    [call] = first["message"]["tool_calls"]
    assert (first["finish_reason"], first["message"]["content"]) == (finish_reason, None)
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    city = "Bern" if messages is ASKING else "city"
    arguments = {"city": city, "unit": "celsius", "days": 3, "hours": [1]}
    assert json.loads(call["function"]["arguments"]) == arguments


async def test_tool_calls_stream(engine: Engine) -> None:
    content = "Weather in 'Bern', and read_clock please"
    body = {"messages": [{"role": "user", "content": content}], "tools": [WEATHER, CLOCK]}
    calls: dict[int, dict[str, str]] = {}
    reason = None
    async for event in engine.stream("/v1/chat/completions", body):
        for choice in event["choices"] if event != "[DONE]" else []:
            reason = choice["finish_reason"] or reason
            for part in choice["delta"].get("tool_calls", []):
                call = calls.setdefault(part["index"], {"name": "", "arguments": "", "id": ""})
                call["id"] += part.get("id", "")
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"].get("arguments", "")
    assert reason == "tool_calls"
    assert [call["name"] for call in calls.values()] == ["get_weather", "read_clock"]
    assert json.loads(calls[0]["arguments"])["city"] == "Bern"
    assert json.loads(calls[1]["arguments"]) == {}
    assert len({call["id"] for call in calls.values()}) == 2


async def test_no_tool_is_called_without_reason(engine: Engine) -> None:
    told = [*ASKING, {"role": "assistant", "content": ""}, {"role": "tool", "content": "weather: 20"}]
    for body in ({"messages": MESSAGES}, {"messages": told}, {"messages": ASKING, "tool_choice": "none"}):
        _, answer = await engine.post("/v1/chat/completions", body | {"tools": [WEATHER]})
        assert answer["choices"][0]["message"]["content"].startswith("000 "), body


async def test_auto_tool_choice_needs_its_flag(keyed: Engine) -> None:
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    body = {"messages": ASKING, "tools": [WEATHER]}
    status, answer = await keyed.post("/v1/chat/completions", body, headers=headers)
    assert (status, "--enable-auto-tool-choice" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "unknown", "messages": MESSAGES}, 404, "NotFoundError"),
        ({"messages": []}, 400, "BadRequestError"),
        ({"messages": "Hello"}, 400, "Bad Request"),
        ({"messages": [{"content": "Hello"}]}, 400, "Bad Request"),
        ({"messages": MESSAGES, "max_tokens": 0}, 400, "BadRequestError"),
        ({"messages": MESSAGES, "max_tokens": 4095}, 400, "BadRequestError"),
        ({"messages": [{"role": "user", "content": "long" * 5000}]}, 400, "BadRequestError"),
        ({"messages": MESSAGES, "n": "two"}, 400, "Bad Request"),
        ({"messages": MESSAGES, "n": 2, "temperature": 0}, 400, "BadRequestError"),
        ({"messages": MESSAGES, "stop": 5}, 400, "Bad Request"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, 400, "BadRequestError"),
        ({"messages": MESSAGES, "tool_choice": "required"}, 400, "BadRequestError"),
        ({"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "maybe"}, 400, "BadRequestError"),
    ],
)
async def test_errors_have_openai_s_form(
    engine: Engine, body: dict[str, Any], status: int, kind: str
) -> None:
    got, answer = await engine.post("/v1/chat/completions", body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert (answer["error"]["type"], answer["error"]["code"]) == (kind, status)


async def test_bodies_must_be_json_and_not_too_large(engine: Engine) -> None:
    async with aiohttp.ClientSession() as session:
        url = engine.url("/v1/completions")
        for data, content_type, status in (
            (b"{", "application/json", 400),
            (b"[]", "application/json", 400),
            (b"{}", "text/plain", 400),
            (b" " * (32 * 2**20 + 1), "application/json", 413),
        ):
            async with session.post(url, data=data, headers={"Content-Type": content_type}) as response:
                assert response.status == status


async def test_tokenize_and_back(engine: Engine) -> None:
    text = "Grüezi, world"
    _, answer = await engine.post("/tokenize", {"prompt": text})
    assert (answer["count"], answer["max_model_len"]) == (4, 4096)
    assert await engine.post("/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": text})
    _, chat = await engine.post("/tokenize", {"messages": MESSAGES})
    assert chat["count"] == 3
    assert (await engine.post("/detokenize", {"tokens": ["x"]}))[0] == 400


async def test_a_chat_model_does_not_embed(engine: Engine) -> None:
    assert await engine.post("/v1/embeddings", {"input": "x"}) == (404, {"detail": "Not Found"})


async def test_an_embedding_model(start: StartEngine) -> None:
    engine = await start("--runner", "pooling", "--convert", "embed").ready()
    status, answer = await engine.post("/v1/embeddings", {"input": ["one", "two", "one"]})
    one, two, again = (entry["embedding"] for entry in answer["data"])
    assert (status, len(one), one == again, one == two) == (200, 32, True, False)
    assert sum(x * x for x in one) == pytest.approx(1)
    assert answer["usage"]["total_tokens"] == 3
    _, short = await engine.post(
        "/invocations", {"input": "one", "dimensions": 4, "encoding_format": "base64"}
    )
    assert len(short["data"][0]["embedding"]) == 24  # 16 bytes in base64
    body = {"messages": MESSAGES}
    assert await engine.post("/v1/chat/completions", body) == (404, {"detail": "Not Found"})


@pytest.mark.parametrize("key", KEYS)
async def test_each_key_opens(keyed: Engine, key: str) -> None:
    assert (await keyed.get("/v1/models", headers={"Authorization": f"Bearer {key}"}))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer not-this-one"},
        {"Authorization": KEYS[0]},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"x-api-key": KEYS[0]},
    ],
    ids=["none", "the environment's, which the flag outdoes", "bare", "Basic", "x-api-key"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/nowhere", "/v2/embed", "/inference/x", "/cohere/x"])
async def test_guarded_paths(keyed: Engine, path: str, headers: dict[str, str]) -> None:
    assert await keyed.get(path, headers=headers) == (401, '{"error": "Unauthorized"}')


async def test_the_holes_stay_open(keyed: Engine) -> None:
    for path in ("/health", "/ping", "/load", "/version", "/metrics"):
        assert (await keyed.get(path))[0] == 200, path
    assert (await keyed.post("/tokenize", {"prompt": "x"}))[0] == 200
    _, answer = await keyed.post("/invocations", {"messages": MESSAGES, "max_tokens": 2})
    assert answer["choices"][0]["message"]["content"] == "000 001 "


async def test_the_key_of_the_environment(start: StartEngine) -> None:
    engine = await start(VLLM_API_KEY="secret-key").ready()
    assert (await engine.complete())[0] == 401
    assert (await engine.complete(headers={}))[0] == 401
    status, _ = await engine.post(
        "/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer secret-key"}
    )
    assert status == 200
    assert "secret-key" not in engine.log


async def test_the_log_does_not_tell_keys(keyed: Engine) -> None:
    assert "***" in keyed.log
    assert not any(key in keyed.log for key in KEYS)
