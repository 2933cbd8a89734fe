# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers that drain, stop, break or come back, and reloads of the gateway: what a client sees of it."""

from __future__ import annotations

import http.client
import threading
import time

import pytest

from tests.gateway.conftest import PORTS
from tests.gateway.rig import Clients, Gateway, Worker, answers, free_port, until


def test_a_draining_worker_finishes_and_gets_nothing_new(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    held = clients.held(4)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (2, 2))
    spark_a.health = 404
    until(lambda: gateway.is_in_state("NOLB", "spark-a") and not gateway.takes("spark-a"))
    assert {gateway.chat().served_by for _ in range(10)} == {"spark-b"}
    spark_a.release(2)
    spark_b.release(2)
    assert sorted(str(answer.served_by) for answer in answers(held)) == ["spark-a"] * 2 + ["spark-b"] * 2
    spark_a.health = 200
    until(lambda: gateway.takes("spark-a"))
    assert {gateway.chat().served_by for _ in range(4)} == {"spark-a", "spark-b"}


def test_a_restart_of_each_worker_in_turn_loses_nothing(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """As the agents do it: drain, stop, start; some requests come straight through, others wait."""
    requests = clients.chats(30, seconds=0.05)
    for worker in (spark_a, spark_b):
        worker.health = 404
        requests += clients.chats(30, seconds=0.05)
        # An agent, too, ends its engine only some time after it began to say so.
        until(lambda: not gateway.sends_to(worker.name))  # noqa: B023  (called at once)
        worker.stop()
        requests += clients.chats(30, seconds=0.05)
        worker.health = 200
        worker.start()
        # The next follows when this one has told its models, too: without a hold nobody waits for that.
        until(lambda: gateway.is_live(worker.name) and gateway.takes(worker.name))  # noqa: B023
    assert {answer.status for answer in answers(requests)} == {200}
    assert len(spark_a.received) + len(spark_b.received) == len(requests)


@pytest.mark.parametrize("fault", ["refuses", "loads", "drains"])
def test_no_live_worker_is_told_at_once(
    gateway: Gateway, spark_a: Worker, spark_b: Worker, fault: str
) -> None:
    for worker in (spark_a, spark_b):
        if fault == "refuses":
            worker.stop()
        else:
            worker.health = {"loads": 503, "drains": 404}[fault]
    until(gateway.has_nobody)
    until(lambda: not gateway.takes("spark-a") and not gateway.takes("spark-b"))
    for answer in (gateway.chat(), gateway.get("/v1/models")):
        assert answer.status == 503
        assert answer.seconds < 3
        assert answer.headers["retry-after"] == "10"
        assert answer.headers["content-type"] == "application/json"
        assert answer.json["error"]["type"] == "server_error"
        assert answer.served_by is None
    assert len(spark_a.received) + len(spark_b.received) == 0


def test_a_worker_that_has_just_come_back_is_waited_for(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """Even without a hold: it is live, and only has to tell its models yet."""
    # Just after its start the gateway waits for each worker anyway.
    time.sleep(3.2)
    spark_a.stop()
    spark_b.stop()
    until(gateway.has_nobody)
    spark_b.catalogue_fault = "hangs"
    spark_b.catalogue_requests.clear()
    spark_b.start()
    until(lambda: spark_b.catalogue_requests)
    requests = clients.chats(4)
    time.sleep(0.3)
    spark_b.catalogue_fault = ""
    assert {answer.status for answer in answers(requests)} == {200}


def test_the_first_live_worker_serves_at_once(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    spark_a.stop()
    spark_b.stop()
    until(gateway.has_nobody)
    spark_b.start()
    assert until(lambda: gateway.chat().status == 200) < 2
    until(lambda: gateway.get("/health").status == 200)


def test_a_mode_switch_needs_no_change(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    """Both copies go, the pair's head comes on the same API port, and is told apart by its agent."""
    spark_a.stop()
    spark_b.stop()
    until(gateway.has_nobody)
    head = Worker("spark-a-tp", PORTS["a"], PORTS["a-tp-agent"]).start()
    try:
        assert until(lambda: gateway.chat().status == 200) < 2
        # Clients are told the Spark, not the worker's name.
        assert gateway.chat().served_by == "spark-a"
        assert gateway.chat().json["served_by"] == "spark-a-tp"
    finally:
        head.stop()


def test_what_was_not_delivered_is_sent_to_another_worker(
    gateway: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    """The engine is gone, and its agent has not noticed yet."""
    spark_a.stop_api()
    done = [gateway.chat() for _ in range(6)]
    assert {(answer.status, answer.served_by) for answer in done} == {(200, "spark-b")}
    assert max(answer.seconds for answer in done) < 1


def test_what_was_not_delivered_waits_when_the_others_are_full(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    full = clients.chats(24, hold=True)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (12, 12))
    spark_a.release(12)
    until(lambda: spark_a.in_flight == 0)
    spark_a.stop_api()
    late = clients.chats(12)
    time.sleep(0.3)
    spark_b.release(12)
    assert {answer.status for answer in answers(full + late)} == {200}
    assert {answer.served_by for answer in answers(late)} == {"spark-b"}


@pytest.mark.parametrize(
    ("fault", "status"),
    [({"close": True}, 502), ({"status": 500}, 500), ({"status": 503}, 503), ({"status": 429}, 429)],
    ids=["breaks off", "fails", "is overloaded", "refuses"],
)
def test_what_was_delivered_is_never_sent_again(
    gateway: Gateway, spark_a: Worker, spark_b: Worker, fault: dict[str, int], status: int
) -> None:
    answer = gateway.chat(**fault)
    assert answer.status == status
    assert len(spark_a.received) + len(spark_b.received) == 1
    if status == 502:
        assert answer.json["error"]["code"] == "bad_gateway"
    else:
        # The worker's own answer.
        assert answer.json["path"] == "/v1/chat/completions"


def test_a_worker_that_fails_fast_draws_nobody(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """It has the fewest requests; its agent knows as soon as it is asked."""
    spark_a.fails, spark_a.health = True, 503
    done = answers(clients.chats(40, seconds=0.1))
    assert 1 <= sum(answer.status == 500 for answer in done) <= 12  # those that were under way with the first
    assert {answer.status for answer in answers(clients.chats(40, seconds=0.1))} == {200}


def test_a_worker_that_fails_and_is_healthy_comes_back_at_once(
    gateway: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    """It may have been that one request's fault."""
    spark_b.stop_api()
    assert gateway.chat(status=500).status == 500
    until(lambda: gateway.chat().status == 200, 3)


def test_connections_to_a_worker_are_used_again(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    with gateway.kept_alive() as ask:
        before = spark_a.connections + spark_b.connections
        for _ in range(20):
            assert ask("/v1/completions").status == 200
        made = spark_a.connections + spark_b.connections - before
    # Among them those that ask for the models.
    assert made <= 8


def test_no_request_is_sent_on_a_connection_that_is_being_closed(
    gateway: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    """Whatever the pause between two requests: the gateway closes an idle connection before the worker does."""
    spark_a.keep_alive = spark_b.keep_alive = 2
    with gateway.kept_alive() as ask:
        statuses = []
        for number in range(24):
            statuses += [ask("/v1/completions").status for _ in range(2)]
            time.sleep(0.2 * (number % 12) + 0.01)
    assert set(statuses) == {200}


def test_a_stream_cut_short_ends_visibly(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    with gateway.stream(chunks=10, die_after=3) as answer, pytest.raises(http.client.IncompleteRead) as error:
        answer.read()
    assert error.value.partial.count(b"data: {") == 3
    assert b"[DONE]" not in error.value.partial
    assert len(spark_a.received) + len(spark_b.received) == 1


def test_a_reload_cuts_nothing(gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker) -> None:
    """Streams go on, what waits is served, and new requests find the new process."""
    ended = threading.Event()
    statuses: list[int] = []

    def ask() -> None:
        with gateway.kept_alive() as get:
            while not ended.is_set():
                statuses.append(gateway.chat(seconds=0.01).status)
                statuses.append(get("/v1/completions").status)

    load = [threading.Thread(target=ask) for _ in range(4)]
    with gateway.stream(chunks=100, interval=0.01) as answer:
        for thread in load:
            thread.start()
        for _ in range(2):
            gateway.reload()
            time.sleep(0.1)
        ended.set()
        for thread in load:
            thread.join()
        events = answer.read().count(b"data: {")
    assert events == 100
    assert len(statuses) > 20
    assert set(statuses) == {200}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health"])
def test_a_reload_does_not_cut_an_idle_client_off(gateway: Gateway, path: str) -> None:
    """Its request may be on its way: the old process answers it, and asks it to connect anew."""
    with gateway.kept_alive() as get:
        assert "connection" not in get(path).headers
        gateway.reload()
        late = [get(path)]
        # The old process may not know yet that it is the old one.
        while "connection" not in late[-1].headers and len(late) < 100:
            time.sleep(0.02)
            late.append(get(path))
        late.append(get(path))
    assert {answer.status for answer in late} == {200}
    assert late[-2].headers["connection"] == "close"


def test_who_is_too_busy_to_tell_its_health_stays(farm: Gateway, clients: Clients, embed: Worker) -> None:
    """It is the only one that has the model."""
    embed.health_delay = 4
    held = clients.chats(2, model="embedder", seconds=7)
    time.sleep(6)
    assert farm.takes("embed")
    assert farm.chat(model="embedder").status == 200
    assert {answer.status for answer in answers(held)} == {200}


def test_a_worker_that_flaps_is_counted_right(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    """It leaves and returns while it serves."""

    def in_flight() -> list[float]:
        pools = (f'proxy="pool{number}"' for number in range(1, 17))
        name = "haproxy_server_current_sessions"
        return [gateway.metric(name, "server", pool, 'server="spark-a"') for pool in pools]

    with (
        gateway.stream(chunks=150, interval=0.02) as first,
        gateway.stream(chunks=150, interval=0.02) as second,
    ):
        for health in (503, 200) * 3:
            spark_a.health = health
            until(lambda: gateway.takes("spark-a") == (spark_a.health == 200), 3)
            assert min(in_flight()) >= 0
        for answer in (first, second):
            assert answer.read().count(b"data: {") == 150
    assert until(lambda: set(in_flight()) == {0}) < 5
    # And gets its share again.
    assert {gateway.chat().served_by for _ in range(4)} == {"spark-a", "spark-b"}


def test_what_changes_elsewhere_leaves_the_balance_alone(farm: Gateway, embed: Worker) -> None:
    served = []
    for number in range(20):
        embed.models = [f"embedder-{number}"]
        served.append(farm.chat().served_by)
        time.sleep(0.25)
    assert set(served) == {"spark-a", "spark-b"}
    assert abs(served.count("spark-a") - served.count("spark-b")) <= 4


def test_a_worker_that_moved_is_not_looked_for_where_it_was(
    gateway: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    moved = Worker("spark-b", free_port(), PORTS["b-agent"])
    configuration = gateway.directory / "haproxy.cfg"
    before = configuration.read_text()
    try:
        configuration.write_text(before.replace(f":{spark_b.port} ", f":{moved.port} "))
        moved.start_api()
        gateway.reload()
        until(lambda: gateway.takes("spark-b"))
        time.sleep(0.2)  # for the last requests of the process before
        spark_b.received.clear()
        spark_b.catalogue_requests.clear()
        assert {gateway.chat().status for _ in range(10)} == {200}
        # On a busy machine they do not quite take turns.
        assert len(moved.received) >= 3
        assert spark_b.received == spark_b.catalogue_requests == []
    finally:
        configuration.write_text(before)
        moved.stop_api()


def test_a_reload_takes_a_new_key(gateway: Gateway, spark_a: Worker, spark_b: Worker) -> None:
    keys = gateway.directory / "keys.map"
    before = keys.read_text()
    try:
        keys.write_text("workers sk-another-key\n")
        assert _key_of(gateway, spark_a, spark_b) == "Bearer sk-the-workers-key"
        gateway.reload()
        until(lambda: _key_of(gateway, spark_a, spark_b) == "Bearer sk-another-key")
    finally:
        keys.write_text(before)


def _key_of(gateway: Gateway, *workers: Worker) -> str:
    for worker in workers:
        worker.received.clear()
    gateway.chat()
    (received,) = (request for worker in workers for request in worker.received)
    return received.headers["authorization"]
