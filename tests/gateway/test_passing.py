# SPDX-License-Identifier: GPL-3.0-or-later
"""What passes the gateway, what is refused, and what is added, taken away or written down on the way."""

from __future__ import annotations

import re
import socket

import pytest

from tests.gateway.conftest import PORTS
from tests.gateway.rig import CHAT, LOOPBACK, MODEL, Clients, Gateway, Worker, answers, until

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions?with=query"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/rerank"),
        ("POST", "/v1/score"),
        ("POST", "/v1/audio/transcriptions"),
        ("OPTIONS", "/v1/chat/completions"),
    ],
)
def test_passes(single: Gateway, spark_a: Worker, method: str, path: str) -> None:
    answer = single.ask(method, path, {"model": MODEL} if method == "POST" else None)
    assert answer.status == 200
    assert [(request.method, request.path) for request in spark_a.received] == [(method, path)]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "unknown_url"),
        ("GET", "/v1", 404, "unknown_url"),
        ("GET", "/metrics", 403, "metrics_not_here"),
        ("POST", "/tokenize", 404, "unknown_url"),
        ("POST", "/invocations", 404, "unknown_url"),
        ("POST", "/v1/load_lora_adapter", 404, "unknown_url"),
        ("POST", "/v1/chat/completions/", 404, "unknown_url"),
        ("POST", "//v1/chat/completions", 404, "unknown_url"),
        ("POST", "/V1/chat/completions", 404, "unknown_url"),
        ("GET", "/health/", 404, "unknown_url"),
        ("GET", "/v1/models/../../metrics", 404, "unknown_url"),
        ("GET", "/v1/models/..", 404, "unknown_url"),
        ("GET", "/v1/models/%2e%2e/%2E./metrics", 404, "unknown_url"),
        ("GET", "/v1/models/..%2f..%2fmetrics", 404, "unknown_url"),
        ("DELETE", "/v1/models/name", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
    ],
)
def test_is_refused(single: Gateway, spark_a: Worker, method: str, path: str, status: int, code: str) -> None:
    answer = single.ask(method, path)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json["error"]
    assert (error["code"], error["type"], error["param"]) == (code, "invalid_request_error", None)
    # A hint at what to do instead.
    assert {404: "/v1/chat/completions", 403: "metrics port", 405: "POST"}[status] in error["message"]
    assert spark_a.received == []


def test_what_is_not_http_is_refused(single: Gateway, spark_a: Worker) -> None:
    """In HAProxy's own words, which cannot be changed there."""
    assert raw(b"GET /v1/mod els HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    assert spark_a.received == []


def raw(request: bytes) -> bytes:
    with socket.create_connection((LOOPBACK, PORTS["gateway"]), timeout=5) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


def test_the_health_of_the_gateway(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    assert (gateway.get("/health").status, gateway.get("/health").body) == (200, b"serving\n")
    spark_a.health = 503
    until(lambda: not gateway.is_live("spark-a"))
    assert gateway.get("/health").status == 200
    spark_b.health = 404
    until(gateway.has_nobody)
    assert gateway.get("/health").body == b"no worker is live\n"


CREDENTIALS = {"authorization": "Bearer sk-the-clients-own", "x_api_key": "sk-the-clients-own"}


def test_the_workers_key_replaces_the_clients(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    for path in (CHAT, "/v1/completions"):
        assert gateway.ask("POST", path, {"model": MODEL}, 15, **CREDENTIALS).status == 200
    for received in (
        spark_a.received + spark_b.received + spark_a.catalogue_requests + spark_b.catalogue_requests
    ):
        assert received.headers["authorization"] == "Bearer sk-the-workers-key"
        assert "sk-the-clients-own" not in str(received.headers)


def test_without_a_key_none_is_sent(single: Gateway, spark_a: Worker) -> None:
    assert single.ask("POST", CHAT, {"model": MODEL}, 15, **CREDENTIALS).status == 200
    for received in spark_a.received + spark_a.catalogue_requests:
        assert {"authorization", "x-api-key"} & set(received.headers) == set()


def test_the_answer_names_the_spark(gateway: Gateway) -> None:
    """The worker's own word for itself does not count."""
    answer = gateway.chat()
    assert answer.served_by == answer.json["served_by"]
    assert gateway.get("/v1/models").served_by is None


@pytest.mark.parametrize("chosen", ["mine", "a.b_c:d-1", "x" * 128])
def test_a_request_keeps_its_id(single: Gateway, spark_a: Worker, chosen: str) -> None:
    answer = single.ask("POST", CHAT, {"model": MODEL}, x_request_id=chosen)
    assert answer.headers["x-request-id"] == spark_a.received[0].headers["x-request-id"] == chosen


@pytest.mark.parametrize("chosen", [None, "", "x" * 129, 'quo"te', "two words", "<script>"])
def test_a_request_gets_an_id(single: Gateway, spark_a: Worker, chosen: str | None) -> None:
    """Where it has none, or one that could do harm in a log."""
    headers = {} if chosen is None else {"x_request_id": chosen}
    answer = single.ask("POST", CHAT, {"model": MODEL}, 15, **headers)
    assert UUID.fullmatch(answer.headers["x-request-id"])
    assert answer.headers["x-request-id"] == spark_a.received[0].headers["x-request-id"]


def test_a_refusal_has_an_id_too(single: Gateway) -> None:
    assert single.get("/elsewhere", x_request_id="mine").headers["x-request-id"] == "mine"


def test_the_access_log(single: Gateway) -> None:
    """One JSON object a request, with the worker and the times; none for the gateway's own health."""
    single.get("/health")
    answer = single.chat(seconds=0.1)
    until(lambda: single.log)
    (entry,) = single.log
    assert entry["request_id"] == answer.headers["x-request-id"]
    assert (entry["client"], entry["method"], entry["path"]) == (LOOPBACK, "POST", CHAT)
    assert (entry["status"], entry["worker"], entry["retries"], entry["end"]) == (200, "spark-a", "0", "--")
    assert entry["queue_ms"] == 0
    assert 100 <= entry["first_byte_ms"] <= entry["total_ms"] < 1000
    assert entry["bytes_out"] > len(answer.body)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 7, "completion_tokens": 3}, ("7", "3")),
        ({"input_tokens": 70, "output_tokens": 0}, ("70", "0")),
        ({}, ("-", "-")),
    ],
)
def test_the_access_log_tells_the_tokens(
    single: Gateway, usage: dict[str, int], tokens: tuple[str, str]
) -> None:
    assert single.chat(reply={"choices": ["usage"], "usage": usage}).json["usage"] == usage
    until(lambda: single.log)
    assert (single.log[0]["tokens_in"], single.log[0]["tokens_out"]) == tokens


def test_the_access_log_of_what_waited(single: Gateway, clients: Clients, spark_a: Worker) -> None:
    held = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    waiting = clients.chats(1)
    until(lambda: single.waiting() == 1)
    refused = answers(waiting)
    spark_a.release()
    answers(held)
    until(lambda: len(single.log) == 2)
    entry = single.log[0]
    assert (entry["status"], entry["worker"], entry["end"]) == (refused[0].status, "<NOSRV>", "sQ")
    assert 900 <= entry["queue_ms"] < 2000


def test_the_access_log_takes_any_path(single: Gateway) -> None:
    path = '/"}{\\'
    single.get(path, x_request_id="odd")
    until(lambda: len(single.log) == 1)
    raw(b"\x00\xff\r\n\r\n")
    until(lambda: len(single.log) == 2)
    assert (single.log[0]["path"], single.log[0]["status"]) == (path, 404)
    assert (single.log[1]["path"], single.log[1]["status"]) == ("-", 400)


def test_monitors_have_their_own_port(single: Gateway) -> None:
    metrics = single.metrics()
    assert metrics.status == 200
    for name in ("haproxy_backend_current_queue", "haproxy_server_current_sessions", "haproxy_server_status"):
        assert f"\n{name}{{" in metrics.body.decode()
    assert b"spark-a" in single.metrics("/stats").body
    assert single.metrics("/").status == 404
    assert single.get("/stats").status == 404
    until(lambda: single.log)
    assert [entry["path"] for entry in single.log] == ["/stats"]
