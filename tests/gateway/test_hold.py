# SPDX-License-Identifier: GPL-3.0-or-later
"""While no worker lives a request waits for one, for a bounded time."""

from __future__ import annotations

import time

import pytest

from tests.gateway.rig import MODEL, Clients, Gateway, Worker, answers, haproxy_version, until

HOLD = 4  # as the configuration `holding` has it


def test_the_first_answer_comes_at_once_when_a_worker_is_back(
    holding: Gateway, clients: Clients, spark_a: Worker
) -> None:
    (held,) = clients.chats(1)
    until(lambda: holding.held() == 1)
    assert not spark_a.received
    time.sleep(1)
    spark_a.health = 200
    back = time.monotonic()
    answer = held.result(10)
    assert (answer.status, answer.served_by) == (200, "spark-a")
    assert time.monotonic() - back < 1
    assert holding.held() == 0
    assert holding.figure("held_requests_total") == 1
    assert holding.figure("hold_expired_total") == 0
    assert 1 < holding.figure("held_seconds_total") < HOLD
    away = holding.figure(f'model_away_seconds_total{{model="{MODEL}"}}')
    assert 1 < away < HOLD
    time.sleep(0.3)
    assert holding.figure(f'model_away_seconds_total{{model="{MODEL}"}}') == away
    until(lambda: bool(holding.log))
    assert 1000 < int(holding.log[-1]["held_ms"]) < HOLD * 1000


@pytest.mark.parametrize("why", ["loads", "drains", "refuses"])
def test_when_the_time_is_over_it_is_refused(
    holding: Gateway, spark_a: Worker, spark_b: Worker, why: str
) -> None:
    for worker in (spark_a, spark_b):
        worker.health = 404 if why == "drains" else 503
        if why == "refuses":
            worker.stop()
    answer = holding.chat()
    assert answer.status == 503
    assert HOLD - 0.1 < answer.seconds < HOLD + 3
    assert answer.headers["retry-after"] == "10"
    assert answer.json["error"]["code"] == "service_unavailable"
    assert holding.figure("hold_expired_total") == 1


def test_many_are_held_and_none_is_lost(holding: Gateway, clients: Clients, spark_a: Worker) -> None:
    held = clients.chats(60, seconds=0.02)
    until(lambda: holding.held() == 60)
    spark_a.health = 200
    assert {answer.status for answer in answers(held)} == {200}
    assert spark_a.most_in_flight == 12


def test_a_client_that_has_left_reaches_nobody(holding: Gateway, spark_a: Worker) -> None:
    with holding.leaving():
        until(lambda: holding.held() == 1)
    time.sleep(1.5)
    # Since 3.0 HAProxy only notices when the hold is over; then the request may just have been sent.
    late = haproxy_version() >= (3, 0)
    assert holding.held() == late
    spark_a.health = 200
    until(lambda: holding.chat().status == 200)
    assert 1 <= len(spark_a.received) <= 1 + late
    until(lambda: holding.held() == 0)


def test_the_time_can_be_changed_while_it_runs(holding: Gateway, clients: Clients, spark_b: Worker) -> None:
    holding.command(f"set map {holding.directory}/hold.map seconds 1")
    assert 0.9 < holding.chat().seconds < HOLD - 0.5
    holding.command(f"set map {holding.directory}/hold.map seconds 900")
    (held,) = clients.chats(1)
    time.sleep(HOLD + 1)
    assert not held.done()
    spark_b.health = 200
    assert held.result(10).status == 200


@pytest.mark.parametrize("health", [503, 404])
def test_a_reload_keeps_what_is_held(
    holding: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker, health: int
) -> None:
    spark_a.health = spark_b.health = health
    time.sleep(1)
    held = clients.chats(5)
    until(lambda: holding.held() == 5)
    holding.reload()
    time.sleep(0.5)
    spark_a.health = 200
    assert {(answer.status, answer.served_by) for answer in answers(held)} == {(200, "spark-a")}


def test_the_list_of_models_is_not_held(holding: Gateway) -> None:
    answer = holding.get("/v1/models")
    assert answer.status == 503
    assert answer.seconds < HOLD - 0.5


def test_without_a_hold_it_is_refused_at_once(single: Gateway, spark_a: Worker) -> None:
    spark_a.health = 503
    until(single.has_nobody)
    answer = single.chat()
    assert answer.status == 503
    assert answer.seconds < 3
