# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent reads from an engine's HTTP answers, also from bad ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from vllm_agent.engine import Engine, EngineError, parse_metrics

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 2.0
vllm:num_requests_running{engine="1",model_name="a } b"} 1.0
vllm:num_requests_waiting{engine="0",model_name="a"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.5
vllm:prompt_tokens_total{engine="0",model_name="a"} 1.5e+06 1796005986000
vllm:prompt_tokens_created{engine="0",model_name="a"} 1.796e+09
vllm:generation_tokens_total{engine="0",model_name="a"} 10.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="a"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="a"} 7.0
http_requests_total{handler="/metrics"} NaN
"""


def test_metrics_are_summed_over_label_sets() -> None:
    counters = parse_metrics(METRICS)
    assert (counters.running, counters.waiting, counters.in_flight) == (3, 4, 7)
    assert counters.work == 1.5e6 + 10 + 7
    assert counters.kv_cache_usage == 0.5


@pytest.mark.parametrize(
    "text", ["", "vllm:num_requests_running 1\n", METRICS + "vllm:odd{\n", METRICS + "vllm:odd x\n"]
)
def test_other_metrics_are_an_error(text: str) -> None:
    with pytest.raises(EngineError, match="/metrics"):
        parse_metrics(text)


def ask(answer: bytes | None, question: Callable[[Engine], Awaitable[object]]) -> bytes:
    """Put the question to an engine that gives this answer (None: never answers); returns what it was sent."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        requests.append(head + await reader.readexactly(length))
        if answer is None:
            await reader.read()  # until the client leaves
        else:
            writer.write(answer)
        writer.close()

    async def session() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await question(Engine(server.sockets[0].getsockname()[1], "tiny", "sk-secret"))

    asyncio.run(session())
    return requests[0]


def complete(engine: Engine) -> Awaitable[object]:
    return engine.complete_one_token(0.3)


def response(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_a_completion_carries_model_key_and_one_token() -> None:
    request = ask(response("200 OK", '{"choices": [{"text": ""}]}'), complete).decode()
    assert request.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "\r\nAuthorization: Bearer sk-secret\r\n" in request
    assert request.endswith('{"model": "tiny", "prompt": "Hello", "max_tokens": 1, "temperature": 0}')


def test_a_chunked_answer_is_read() -> None:
    ask(
        b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n11\r\n{"choices": [{}]}\r\n0\r\n\r\n', complete
    )


@pytest.mark.parametrize(
    ("answer", "message", "final"),
    [
        (response("401 Unauthorized", '{"error":"Unauthorized"}'), "answered 401: .*Unauthorized", True),
        (response("404 Not Found", "no such model"), "answered 404: no such model", True),
        (response("429 Too Many Requests", ""), "answered 429", False),
        (response("500 Internal Server Error", "x" * 9999), "answered 500: x{300}$", False),
        (response("200 OK", '{"choices": []}'), "without a choice", False),
        (response("200 OK", '"busy"'), "answered with", False),
        (response("200 OK", "{"), "answered with", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", "failed", False),
        (b"SSH-2.0-OpenSSH\r\n", "failed", False),
        (b"", "failed", False),
        (None, "did not answer within 0.3 s", False),
    ],
)
def test_a_bad_completion_is_an_error(answer: bytes | None, message: str, final: bool) -> None:
    with pytest.raises(EngineError, match=message) as caught:
        ask(answer, complete)
    assert caught.value.final is final


def test_a_cancelled_completion_closes_its_connection_at_once() -> None:
    async def cancel(engine: Engine) -> None:
        task = asyncio.create_task(engine.complete_one_token(60))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait({task})

    begun = time.monotonic()
    ask(None, cancel)  # returns only when the server has seen the end of the connection
    assert time.monotonic() - begun < 5


def test_nobody_on_the_port_is_not_healthy() -> None:
    async def probe() -> tuple[bool, bool]:
        engine = Engine(1, "tiny")
        return await engine.healthy(), await engine.port_is_open()

    assert asyncio.run(probe()) == (False, False)
