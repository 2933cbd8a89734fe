# SPDX-License-Identifier: GPL-3.0-or-later
"""What clients, gateway and agent see of an engine that serves: the stand-in answers as real vLLM does."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.parity.conftest import Both
from tests.parity.engines import shape
from vllm_agent.progress import capacity

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": FUNCTION}
SHORT: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "ignore_eos": True, "temperature": 0}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

# Path, body (None: GET), status.
TABLE: dict[str, tuple[str, object, int]] = {
    "health": ("/health", None, 200),
    "ping": ("/ping", None, 200),
    "load": ("/load", None, 200),
    "version": ("/version", None, 200),
    "models": ("/v1/models", None, 200),
    "nowhere": ("/v1/nowhere", None, 404),
    "wrong method": (CHAT, None, 405),
    "chat": (CHAT, {**SHORT, "messages": HELLO}, 200),
    "chat without a model": (CHAT, {"messages": HELLO, "max_tokens": 1}, 200),
    "chat, two choices": (CHAT, {**SHORT, "messages": HELLO, "n": 2, "temperature": 1}, 200),
    "chat, two greedy choices": (CHAT, {**SHORT, "messages": HELLO, "n": 2}, 400),
    "chat in parts": (CHAT, {**SHORT, "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, 200),
    "chat stream": (CHAT, {**SHORT, "messages": HELLO, "stream": True}, 200),
    "chat stream with usage": (CHAT, {**SHORT, "messages": HELLO, **USAGE}, 200),
    "text": (TEXT, {**SHORT, "prompt": "Hello"}, 200),
    "text of tokens": (TEXT, {**SHORT, "prompt": [1, 2, 3]}, 200),
    "text, two prompts": (TEXT, {**SHORT, "prompt": ["one", "two"]}, 200),
    "text stream": (TEXT, {**SHORT, "prompt": "Hello", "stream": True}, 200),
    "text stream with usage": (TEXT, {**SHORT, "prompt": "Hello", **USAGE}, 200),
    "tokenize": ("/tokenize", {"model": "tiny", "prompt": "Hello"}, 200),
    "unknown model": (CHAT, {**SHORT, "messages": HELLO, "model": "other"}, 404),
    "unknown model of text": (TEXT, {**SHORT, "prompt": "x", "model": "other"}, 404),
    "no messages": (CHAT, {**SHORT}, 400),
    "messages that are none": (CHAT, {**SHORT, "messages": "Hello"}, 400),
    "too long": (CHAT, {**SHORT, "messages": [{"role": "user", "content": "a b " * 5000}]}, 400),
    "too many tokens wanted": (CHAT, {**SHORT, "messages": HELLO, "max_tokens": 5000}, 400),
    "no token wanted": (CHAT, {**SHORT, "messages": HELLO, "max_tokens": 0}, 400),
    "a number that is none": (CHAT, {**SHORT, "messages": HELLO, "n": "two"}, 400),
    "usage without a stream": (CHAT, {**SHORT, "messages": HELLO, "stream_options": {"include_usage": True}}, 400),
    "a tool wanted, none given": (CHAT, {**SHORT, "messages": HELLO, "tool_choice": "required"}, 400),
    "a role missing": (CHAT, {**SHORT, "messages": [{"content": "Hello"}]}, 400),
    "tools that are none": (CHAT, {**SHORT, "messages": HELLO, "tools": "x"}, 400),
    "a prompt that is none": (TEXT, {**SHORT, "prompt": 5}, 400),
    "no prompt": (TEXT, {**SHORT}, 400),
    "a list for a body": (TEXT, [1], 400),
    "half of a JSON": (CHAT, b'{"model": ', 400),
    "not an embedding model": ("/v1/embeddings", {"model": "tiny", "input": "x"}, 404),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_the_same_answer(both: Both, name: str) -> None:
    path, body, status = TABLE[name]
    answers = {which: engine.ask(path, body) for which, engine in both.items()}
    assert {which: answer.status for which, answer in answers.items()} == dict.fromkeys(both, status)
    # Of an answer without content the type does not matter.
    assert answers["standin"].kind == answers["vllm"].kind or answers["vllm"].body == ""
    assert shape(answers["standin"].body) == shape(answers["vllm"].body)


@pytest.mark.parametrize("more", [{}, USAGE], ids=["", "usage"])
@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "Hello"})])
def test_the_same_frames(both: Both, path: str, asked: dict[str, Any], more: dict[str, Any]) -> None:
    """Each chunk of a stream by itself: how it begins, goes on, tells its reason, its usage, and its end."""
    # At random, since the tiny model's likeliest words may be no text.
    body = {"max_tokens": 40, "ignore_eos": True, "seed": 1, "stream": True, **asked, **more}
    runs = {}
    for which, engine in both.items():
        events = [shape(event) if isinstance(event, dict) else event for event in engine.ask(path, body).body]
        for event in events[:-1]:
            for choice in event["choices"]:
                if choice["finish_reason"] and "delta" in choice:
                    # With or without text, as it happens.
                    choice["delta"] = {}
        # How many chunks there are is chance, too.
        runs[which] = [event for place, event in enumerate(events) if not place or event != events[place - 1]]
    assert runs["standin"] == runs["vllm"]
    assert runs["vllm"][-1] == "[DONE]"
    assert len(runs["vllm"]) > 2


KEYS: dict[str, tuple[dict[str, str], bool]] = {
    "none": ({}, False),
    "right": ({"Authorization": "Bearer parity-key"}, True),
    "wrong": ({"Authorization": "Bearer other"}, False),
    "bare": ({"Authorization": "parity-key"}, False),
    "x-api-key": ({"x-api-key": "parity-key"}, False),
}
# What the key guards, and the holes that the gateway must close.
GUARDED = {
    **dict.fromkeys(["/v1/models", "/v1/nowhere"], True),
    **dict.fromkeys(["/health", "/ping", "/load", "/version", "/metrics"], False),
}


@pytest.mark.parametrize("path", GUARDED)
@pytest.mark.parametrize("name", KEYS)
def test_the_same_guard(both: Both, path: str, name: str) -> None:
    headers, opens = KEYS[name]
    answers = {which: engine.ask(path, key=None, headers=headers) for which, engine in both.items()}
    refused = GUARDED[path] and not opens
    assert {which: answer.status == 401 for which, answer in answers.items()} == dict.fromkeys(both, refused)
    assert answers["standin"].status == answers["vllm"].status
    assert not refused or answers["standin"].body == answers["vllm"].body


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "tiny", "prompt": "x"}),
        ("/invocations", {**SHORT, "messages": HELLO}),
    ],
)
def test_the_same_holes(both: Both, path: str, body: object) -> None:
    answers = {which: engine.ask(path, body, key=None) for which, engine in both.items()}
    assert {which: answer.status for which, answer in answers.items()} == dict.fromkeys(both, 200)
    assert shape(answers["standin"].body) == shape(answers["vllm"].body)


# What agent, gateway, dashboards and benchmarks of this project read of an engine's metrics.
READ = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:generation_tokens",
    "vllm:prompt_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
]


def metrics(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Each metric of vLLM's own to its type and the labels of its series."""
    types = dict(re.findall(r"^# TYPE (vllm:\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, set[str]] = {}
    for name, inside in re.findall(r"^(vllm:[^{ ]+)\{([^}]*)\}", text, re.MULTILINE):
        family = re.sub(r"_(bucket|sum|count|created|total)$", "", name)
        labels.setdefault(family, set()).update(re.findall(r'(\w+)="', inside))
    return {
        re.sub("_total$", "", name): (
            kind,
            frozenset(labels.get(re.sub("_total$", "", name), set()) - {"le"}),
        )
        for name, kind in types.items()
        if not name.endswith("_created")
    }


def test_the_same_metrics(both: Both) -> None:
    told = {}
    for which, engine in both.items():
        assert engine.ask(CHAT, {**SHORT, "messages": HELLO}).status == 200
        told[which] = metrics(engine.ask("/metrics").body)
    assert set(READ) <= set(told["vllm"])
    assert set(READ) <= set(told["standin"])
    # It has no metric that vLLM has not, and of each the same type and labels.
    differing = {
        name: (what, told["vllm"].get(name))
        for name, what in told["standin"].items()
        if what != told["vllm"].get(name)
    }
    assert differing == {}


def test_as_many_at_once_as_were_allowed(both: Both) -> None:
    """Four run and the others wait; none is refused."""
    body = {**SHORT, "prompt": "x", "max_tokens": 1500}
    for which, engine in both.items():
        with ThreadPoolExecutor(7) as clients:
            asked = [clients.submit(engine.ask, TEXT, body) for _ in range(7)]
            seen = set()
            while not all(one.done() for one in asked):
                text = engine.ask("/metrics").body
                seen.add(
                    tuple(
                        int(float(found))
                        for name in ("running", "waiting")
                        for found in re.findall(
                            rf"^vllm:num_requests_{name}\{{.*\}} (\S+)$", text, re.MULTILINE
                        )
                    )
                )
        assert [one.result().status for one in asked] == [200] * 7, which
        assert max(running for running, _waiting in seen) == 4, which
        assert (4, 3) in seen, which


def test_the_log_tells_the_room(both: Both) -> None:
    """As the agent reads it."""
    for which, engine in both.items():
        told: dict[str, float] = {}
        for line in engine.log.splitlines():
            told |= capacity(line)
        assert told["context_tokens"] == 4096, which
        assert told["full_context_requests"] == pytest.approx(told["kv_tokens"] / 4096, abs=0.01), which
