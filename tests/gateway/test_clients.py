# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients with keys of their own."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.conftest import KEYS
from tests.gateway.rig import CHAT, MODEL, Answer, Gateway, Worker, until


def ask(gateway: Gateway, key: str = "", path: str = CHAT, **what: object) -> Answer:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return gateway.ask("POST", path, {"model": MODEL, **what}, 15, **headers)


@pytest.mark.parametrize("name", KEYS)
def test_who_has_a_key_is_let_in_and_named_in_the_log(
    keyed: Gateway, spark_a: Worker, spark_b: Worker, name: str
) -> None:
    assert ask(keyed, KEYS[name]).status == 200
    until(lambda: bool(keyed.log))
    assert keyed.log[-1]["name"] == name
    (received,) = spark_a.received + spark_b.received
    assert received.headers["authorization"] == "Bearer sk-the-workers-key"


def test_a_browsers_question_tells_no_models(keyed: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    """It needs no key, and goes to a worker."""
    answer = keyed.ask("OPTIONS", "/v1/models")
    assert answer.json["served_by"] in ("spark-a", "spark-b")


def test_a_header_of_anthropics_clients_is_taken_too(
    keyed: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    answer = keyed.ask("POST", "/v1/messages", {"model": MODEL}, x_api_key=KEYS["alice"])
    assert answer.status == 200
    (received,) = spark_a.received + spark_b.received
    assert "x-api-key" not in received.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {KEYS['alice']}"},
        {"authorization": f"Bearer {KEYS['alice']}x"},
        {"authorization": f"Bearer {hashlib.sha256(KEYS['alice'].encode()).hexdigest()}"},
        {"authorization": "Bearer "},
        {"x_api_key": "wrong"},
        {"x_api_key": ""},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models"])
def test_all_others_are_refused(
    keyed: Gateway, spark_a: Worker, spark_b: Worker, headers: dict[str, str], path: str
) -> None:
    answer = keyed.ask("POST", path, {}, 15, **headers)
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json["error"]["code"] == "invalid_api_key"
    assert not spark_a.received
    assert not spark_b.received


def test_a_browsers_first_question_needs_no_key(keyed: Gateway) -> None:
    assert keyed.ask("OPTIONS", CHAT).status == 200


def test_health_needs_no_key(keyed: Gateway) -> None:
    assert keyed.get("/health").status == 200


def test_a_key_is_revoked_while_it_runs(keyed: Gateway) -> None:
    assert ask(keyed, KEYS["alice"]).status == 200
    keyed.command(
        f"del map {keyed.directory}/clients.map {hashlib.sha256(KEYS['alice'].encode()).hexdigest()}"
    )
    assert ask(keyed, KEYS["alice"]).status == 401
    assert ask(keyed, KEYS["bob"]).status == 200


def test_no_client_has_more_in_flight_than_it_may(keyed: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    # Of a client that it does not know yet HAProxy 3.0 may count two requests apart that come at once.
    assert ask(keyed, KEYS["alice"]).status == 200
    with ThreadPoolExecutor(8) as pool:
        two = [pool.submit(ask, keyed, KEYS["alice"], hold=True) for _ in range(2)]
        until(lambda: spark_a.in_flight + spark_b.in_flight == 2)
        third = ask(keyed, KEYS["alice"])
        assert third.status == 429
        assert third.json["error"]["code"] == "too_many_requests"
        assert third.headers["retry-after"] == "10"
        assert ask(keyed, KEYS["bob"]).status == 200
        spark_a.release(2)
        spark_b.release(2)
        assert [each.result(10).status for each in two] == [200, 200]
    until(lambda: ask(keyed, KEYS["alice"]).status == 200)


def test_no_client_asks_more_often_than_it_may(keyed: Gateway) -> None:
    statuses = [ask(keyed, KEYS["bob"]).status for _ in range(17)]
    assert statuses == [200] * 5 + [429] * 12
    # What was refused is not counted, or a client that comes again would never get in.
    assert "gpc0=5" in keyed.command("show table clients")
    assert ask(keyed, KEYS["operator"]).status == 200


def test_the_gateway_knows_no_key_of_a_client(keyed: Gateway) -> None:
    for file in keyed.directory.iterdir():
        if file.is_file():
            text = file.read_text()
            assert KEYS["alice"] not in text, file.name
            assert KEYS["bob"] not in text, file.name
