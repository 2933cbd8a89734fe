# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients that speak HTTPS."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gateway.conftest import KEYS, make_certificate
from tests.gateway.rig import CHAT, LOOPBACK, MODEL, Clients, Gateway, Worker, answers, haproxy_version, until


def handshake(gateway: Gateway, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(
        socket.create_connection((LOOPBACK, gateway.port), 5), server_hostname=LOOPBACK
    )


def test_an_answer_and_a_stream(secured: Gateway) -> None:
    assert secured.chat().status == 200
    with secured.stream(chunks=5) as answer:
        assert answer.read().count(b"data: {") == 5


def test_plain_http_is_refused(secured: Gateway) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, secured.port, timeout=5)
    connection.request("GET", "/health")
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.getresponse()


def test_old_protocols_are_refused(secured: Gateway) -> None:
    context = ssl.create_default_context(cafile=str(secured.certificate))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        handshake(secured, context)


def by_http_2(gateway: Gateway, path: str, *options: str) -> tuple[str, str]:
    """The answer's body, and the version of HTTP with the status, of a client that would rather speak HTTP/2."""
    command = ["curl", "--silent", "--show-error", "--max-time", "15", "--http2", "--no-buffer"]
    command += ["--cacert", str(gateway.certificate), "--write-out", "\n%{http_version} %{http_code}"]
    command += [*options, f"https://{LOOPBACK}:{gateway.port}{path}"]
    body, _, result = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rpartition(
        "\n"
    )
    return body, result


def http_2() -> str:
    """Before 3.0 HAProxy broke the stream of a client that it refused while it was still sending."""
    return "2" if haproxy_version() >= (3, 0) else "1.1"


def with_key(content: str) -> list[str]:
    return ["--header", f"authorization: Bearer {KEYS['alice']}", "--data-binary", content]


def test_http_2_where_haproxy_does_it_right(sealed: Gateway) -> None:
    body, result = by_http_2(sealed, CHAT, *with_key(json.dumps({"model": MODEL})))
    assert result == f"{http_2()} 200"
    assert json.loads(body)["path"] == CHAT


@pytest.mark.parametrize(("key", "status"), [(False, 401), (True, 413)])
@pytest.mark.parametrize("length", ["told", "not told"])
def test_who_is_refused_while_sending_is_told(
    sealed: Gateway, tmp_path: Path, key: bool, status: int, length: str
) -> None:
    content = tmp_path / "request.json"
    content.write_bytes(b" " * 8 * 2**20)
    options = with_key(f"@{content}") if key else ["--data-binary", f"@{content}"]
    if length == "not told":
        options += ["--header", "transfer-encoding: chunked"]
    body, result = by_http_2(sealed, CHAT, *options)
    assert result == f"{http_2()} {status}"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_long_request_by_http_2(sealed: Gateway, tmp_path: Path) -> None:
    content = tmp_path / "request.json"
    content.write_text(json.dumps({"text": "x" * 3 * 2**20, "model": MODEL}))
    assert by_http_2(sealed, CHAT, *with_key(f"@{content}"))[1] == f"{http_2()} 200"


def test_a_reload_does_not_cut_a_stream_by_http_2(sealed: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    stream = with_key(json.dumps({"model": MODEL, "chunks": 30, "interval": 0.1}))
    with ThreadPoolExecutor(1) as pool:
        streamed = pool.submit(by_http_2, sealed, CHAT, *stream)
        until(lambda: spark_a.in_flight + spark_b.in_flight == 1)
        sealed.reload()
        body, result = streamed.result()
    assert result == f"{http_2()} 200"
    assert body.count("data: {") == 30
    assert "[DONE]" in body


def test_a_reload_keeps_what_is_held(
    secured: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """The process before hands it to its successor, by the same door."""
    spark_a.health = spark_b.health = 503
    until(secured.has_nobody)
    held = clients.chats(3)
    until(lambda: secured.held() == 3)
    secured.reload()
    spark_a.health = 200
    assert {answer.status for answer in answers(held)} == {200}


def test_a_renewed_certificate_is_taken_by_a_reload(secured: Gateway) -> None:
    assert isinstance(secured.certificate, Path)
    before = secured.certificate.read_text()
    make_certificate(secured.certificate)
    assert secured.certificate.read_text() != before
    with pytest.raises(ssl.SSLCertVerificationError):
        secured.chat()
    secured.reload()
    assert secured.chat().status == 200
