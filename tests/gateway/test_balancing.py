# SPDX-License-Identifier: GPL-3.0-or-later
"""Who gets a request, how many at once, and in which order."""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gateway.rig import CHAT, LOOPBACK, MODEL, Clients, Gateway, Worker, answers, until


def test_idle_workers_take_turns(gateway: Gateway) -> None:
    """One request at a time reaches both copies evenly, and never the pair's head, which is not live."""
    served = Counter(gateway.chat().served_by for _ in range(40))
    assert set(served) == {"spark-a", "spark-b"}
    # Of two threads one may not have counted the request before yet.
    assert abs(served["spark-a"] - served["spark-b"]) <= 4


def test_the_cap_holds_exactly(gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker) -> None:
    waiting = clients.chats(40, hold=True)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (12, 12) and gateway.waiting() == 16)
    spark_a.release(40)
    spark_b.release(40)
    assert [answer.status for answer in answers(waiting)] == [200] * 40
    assert (spark_a.most_in_flight, spark_b.most_in_flight) == (12, 12)


def test_who_comes_back_takes_from_the_queue(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """As much as its cap allows: HAProxy by itself may send it twice as much, now and then."""
    for _ in range(6):
        spark_b.health = 503
        until(lambda: not gateway.takes("spark-b"))
        waiting = clients.chats(40, hold=True)
        until(lambda: spark_a.in_flight == 12 and gateway.waiting() == 28)
        spark_b.health = 200
        until(lambda: spark_b.in_flight == 12 and gateway.waiting() == 16)
        spark_a.release(40)
        spark_b.release(40)
        assert [answer.status for answer in answers(waiting)] == [200] * 40
        spark_a.hold_again()
        spark_b.hold_again()
    assert max(spark_a.most_in_flight, spark_b.most_in_flight) == 12


def test_the_cap_holds_under_many_short_requests(clients: Clients, spark_a: Worker, spark_b: Worker) -> None:
    done = answers(clients.chats(400, seconds=0.01))
    assert {answer.status for answer in done} == {200}
    assert len(spark_a.received) + len(spark_b.received) == 400
    assert max(spark_a.most_in_flight, spark_b.most_in_flight) <= 12


def test_the_least_loaded_worker_is_next(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """Where one copy is slow, the other does its work."""
    slow = clients.held(8)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (4, 4))
    spark_b.release(4)
    until(lambda: gateway.in_flight("spark-b") == 0)
    quick = answers(clients.chats(3, seconds=0.1))
    assert {answer.served_by for answer in quick} == {"spark-b"}
    spark_a.release(4)
    answers(slow)


def shares(gateway: Gateway) -> tuple[Counter[str], dict[str, float]]:
    """Who served how many of 2,000 requests, and how many seconds each of its answers took."""

    def ask(_number: int) -> tuple[str, float]:
        began = time.monotonic()
        answer = gateway.chat(seconds=0.02)
        assert answer.status == 200
        return str(answer.served_by), time.monotonic() - began

    # Fewer at once than either has places: full workers would get what they finish.
    with ThreadPoolExecutor(8) as clients:
        done = list(clients.map(ask, range(2000)))
    served = Counter(name for name, _seconds in done)
    took = {name: sum(seconds for one, seconds in done if one == name) / served[name] for name in served}
    return served, took


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        pytest.param("gateway", 1000, id="alike"),
        pytest.param("weighted", 1500, id="three times the weight"),
    ],
)
def test_the_shares_of_2000_requests(request: pytest.FixtureRequest, weights: str, expected: int) -> None:
    served, _took = shares(request.getfixturevalue(weights))
    assert served["spark-a"] == pytest.approx(expected, abs=100), "within 5 % of all"


def test_who_is_quicker_serves_more_of_2000_requests(gateway: Gateway, spark_b: Worker) -> None:
    """Each has as many in flight, so who takes three times as long serves a third."""
    spark_b.slowness = 3
    served, took = shares(gateway)
    # Of what they took in fact, since a busy machine slows both.
    expected = 2000 * took["spark-b"] / (took["spark-a"] + took["spark-b"])
    assert served["spark-a"] == pytest.approx(expected, abs=100), "within 5 % of all"
    assert served["spark-a"] > 2 * served["spark-b"] * 0.8


def test_a_waiting_request_goes_to_whoever_is_free_first(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    first = clients.chats(24, hold=True)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (12, 12))
    late = clients.chats(1)
    until(lambda: gateway.waiting() == 1)
    spark_b.release(1)
    assert answers(late)[0].served_by == "spark-b"
    spark_a.release(12)
    spark_b.release(11)
    answers(first)


def test_the_queue_keeps_its_order(single: Gateway, clients: Clients, spark_a: Worker) -> None:
    requests = []
    for number in range(6):
        requests += clients.chats(1, number=number, hold=True)
        until(lambda: single.waiting() == number and spark_a.in_flight == 1)  # noqa: B023  (called at once)
    spark_a.release(6)
    answers(requests)
    assert [request.body["number"] for request in spark_a.received] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [10, 500_000])
def test_a_client_that_leaves_gives_up_its_place(
    patient: Gateway, clients: Clients, spark_a: Worker, size: int
) -> None:
    held = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    for _ in range(3):
        with patient.leaving(note="x" * size):
            until(lambda: patient.waiting() == 1)
        until(lambda: patient.waiting() == 0)
    spark_a.release()
    answers(held)
    assert [request.body.get("note") for request in spark_a.received] == [None]


def test_a_client_that_leaves_ends_its_workers_work(
    gateway: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    """Before the first token as well as in the middle of a stream."""
    with gateway.leaving(hold=True):
        until(lambda: spark_a.in_flight + spark_b.in_flight == 1)
    with gateway.stream(chunks=1000, interval=0.01) as answer:
        answer.readline()
    assert until(lambda: spark_a.aborted + spark_b.aborted == 2) < 5
    assert spark_a.in_flight + spark_b.in_flight == 0


def test_a_slow_sender_takes_nobodys_place(patient: Gateway, spark_a: Worker) -> None:
    body = b'{"seconds": 0, "model": "model-a"}'
    with socket.create_connection((LOOPBACK, patient.port), timeout=5) as slow:
        slow.sendall(
            b"POST %s HTTP/1.0\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body[:5])
        )
        for _ in range(3):
            assert patient.chat().status == 200
        assert len(spark_a.received) == 3
        slow.sendall(body[5:])
        assert slow.makefile("rb").readline() == b"HTTP/1.1 200 OK\r\n"


def test_the_list_of_models_does_not_wait(single: Gateway, clients: Clients, spark_a: Worker) -> None:
    held = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        answer = single.get(path)
        assert answer.status == 200
        assert answer.seconds < 0.9
    spark_a.release()
    answers(held)


def test_patience_is_bounded(single: Gateway, clients: Clients, spark_a: Worker) -> None:
    """What waits too long is refused as a client of the OpenAI API expects it, and reaches no worker."""
    held = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    refused = single.chat()
    assert refused.status == 503
    assert 0.9 < refused.seconds < 5
    assert refused.headers["retry-after"] == "7"
    assert refused.json["error"]["code"] == "service_unavailable"
    assert len(spark_a.received) == 1
    spark_a.release()
    answers(held)


def test_thinking_for_long_is_not_waiting(single: Gateway, spark_a: Worker) -> None:
    """A worker that is silent for longer than connecting or queueing may take is left alone."""
    answer = single.chat(seconds=2)
    assert (answer.status, len(spark_a.received)) == (200, 1)


def test_silence_is_bounded(single: Gateway, spark_a: Worker) -> None:
    answer = single.chat(hold=True)
    assert (answer.status, answer.json["error"]["code"]) == (504, "gateway_timeout")
    assert 2.9 < answer.seconds < 10
    assert len(spark_a.received) == 1


def test_tokens_pass_at_once(gateway: Gateway) -> None:
    delays = []
    with gateway.stream(chunks=20, interval=0.05) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        while line := answer.readline():
            if line.startswith(b"data: {"):
                delays.append(time.time() - json.loads(line[6:])["sent"])
    assert len(delays) == 20
    assert statistics.median(delays) < 0.1
    assert max(delays) < 0.9
