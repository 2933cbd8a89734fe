# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients that speak HTTPS."""

from __future__ import annotations

import http.client
import socket
import ssl
import warnings
from pathlib import Path

import pytest

from tests.gateway.conftest import make_certificate
from tests.gateway.rig import LOOPBACK, Clients, Gateway, Worker, answers, until


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


def test_http_2_is_not_offered(secured: Gateway) -> None:
    context = ssl.create_default_context(cafile=str(secured.certificate))
    context.set_alpn_protocols(["h2", "http/1.1"])
    with handshake(secured, context) as connection:
        assert connection.selected_alpn_protocol() == "http/1.1"


def test_a_reload_keeps_what_is_held(
    secured: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """The process before hands it to its successor, by the same door."""
    spark_a.health = spark_b.health = 503
    until(lambda: secured.get("/health").status == 503)
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
