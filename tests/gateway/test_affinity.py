# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversations return to the copy that knows them, and nobody waits for that."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gateway.conversations import CASES, LEASTCONN, Case, Copy, compare
from tests.gateway.conftest import gateway_of
from tests.gateway.rig import CHAT, MODEL, Answer, Clients, Gateway, Worker, answers, until

# The promises of plain balancing, kept for requests that all belong to one conversation: what is hardest for them.
from tests.gateway.test_balancing import (  # noqa: F401  (run here again)
    test_a_client_that_leaves_ends_its_workers_work,
    test_a_waiting_request_goes_to_whoever_is_free_first,
    test_the_cap_holds_exactly,
    test_the_cap_holds_under_many_short_requests,
)
from tests.gateway.test_lua import lua, part  # noqa: F401  (a fixture)
from tests.gateway.test_stops import (  # noqa: F401  (run here again)
    test_a_reload_cuts_nothing,
    test_a_restart_of_each_worker_in_turn_loses_nothing,
    test_a_worker_that_fails_fast_draws_nobody,
    test_no_live_worker_is_told_at_once,
    test_the_first_live_worker_serves_at_once,
    test_what_was_delivered_is_never_sent_again,
    test_what_was_not_delivered_is_sent_to_another_worker,
    test_what_was_not_delivered_waits_when_the_others_are_full,
)

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COMPLETIONS = "/v1/completions"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def digest(text: str) -> int:
    """In the place of HAProxy's own."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def key(lua: Any, path: str, body: Any, session: str | None = None, model: str = MODEL) -> str | None:  # noqa: F811
    raw = body if isinstance(body, str) else json.dumps(body)
    found: str | None = part(lua, "affinity").key(path, session, model, raw, digest)
    return found


ANSWER = {"role": "assistant", "content": "b"}
TURN = {"messages": [system("s"), user("a")]}


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        # A conversation goes on.
        (CHAT, TURN, {"messages": [system("s"), user("a"), ANSWER, user("c")], "temperature": 1}),
        (CHAT, {"messages": [user("a")]}, {"messages": [user([text("a")]), ANSWER, user([text("z")])]}),
        (CHAT, {"messages": [user([text("a"), image("data:xx")])]}, {"messages": [user([text("a"), image("data:yy")])]}),
        (CHAT, TURN, {"messages": [{"role": "developer", "content": "s"}, user("a"), system("late")]}),
        (MESSAGES, {"system": "s", **TURN}, {"system": [text("s")], "messages": [*TURN["messages"], ANSWER]}),
        (RESPONSES, {"input": "a"}, {"input": [user("a"), ANSWER, user("c")]}),
        (RESPONSES, {"instructions": "s", "input": "a"}, {"input": "a", "instructions": "s", "stream": True}),
        (COMPLETIONS, {"prompt": "x" * 512}, {"prompt": "x" * 512 + "and more"}),
        (COMPLETIONS, {"prompt": "x"}, {"prompt": ["x", "y"]}),
        # Its client names it.
        (CHAT, {"prompt_cache_key": "k", **TURN}, {"prompt_cache_key": "k", "messages": [user("other")]}),
    ],
)  # fmt: skip
def test_what_belongs_together(lua: Any, path: str, one: Any, other: Any) -> None:  # noqa: F811
    assert key(lua, path, one) == key(lua, path, other) is not None


@pytest.mark.parametrize(
    ("path", "one", "other"),
    [
        (CHAT, TURN, {"messages": [system("t"), user("a")]}),
        (CHAT, TURN, {"messages": [system("s"), user("b")]}),
        (CHAT, TURN, {"messages": [user("s"), user("a")]}),
        (CHAT, {"messages": [user([text("a"), text("b")])]}, {"messages": [user([text("ab")])]}),
        (CHAT, {"messages": [user([image("data:x")])]}, {"messages": [user([image("data:xx")])]}),
        (CHAT, {"prompt_cache_key": "k", **TURN}, {"prompt_cache_key": "l", **TURN}),
        (CHAT, {"prompt_cache_key": "", **TURN}, {"prompt_cache_key": "l", **TURN}),
        (MESSAGES, {"system": "s", **TURN}, {"system": "t", **TURN}),
        (RESPONSES, {"instructions": "s", "input": "a"}, {"instructions": "t", "input": "a"}),
        (COMPLETIONS, {"prompt": "x" * 511 + "y"}, {"prompt": "x" * 511 + "z"}),
    ],
)  # fmt: skip
def test_what_does_not_belong_together(lua: Any, path: str, one: Any, other: Any) -> None:  # noqa: F811
    assert key(lua, path, one) != key(lua, path, other)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a"}),
        (CHAT, {}),
        (CHAT, "broken"),
        (CHAT, "[]"),
        (CHAT, '"text"'),
        (CHAT, {"messages": [system("s")]}),
        (CHAT, {"messages": "a"}),
        (CHAT, {"messages": ["a", None, 7]}),
        (RESPONSES, {"previous_response_id": "r"}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (COMPLETIONS, {"prompt": ""}),
    ],
)
def test_what_belongs_to_nothing(lua: Any, path: str, body: Any) -> None:  # noqa: F811
    assert key(lua, path, body) is None


def test_models_and_sessions_tell_conversations_apart(lua: Any) -> None:  # noqa: F811
    assert key(lua, CHAT, TURN) != key(lua, CHAT, TURN, model="another")
    assert key(lua, CHAT, TURN, "s" * 256) == key(lua, "/v1/embeddings", "", "s" * 256) is not None
    # Too long, or empty: as without.
    assert key(lua, CHAT, TURN, "s" * 257) == key(lua, CHAT, TURN, "") == key(lua, CHAT, TURN)


def home(
    lua: Any,  # noqa: F811
    name: str,
    loads: dict[str, tuple[int, int]],
    bound: int = 150,
    weight: int = 1,
) -> str | None:
    """Of copies with so many requests in flight and free places each; the first of them has the weight."""
    copies = [
        {"name": copy, "weight": weight if copy == "a" else 1, "in_flight": in_flight, "free": free}
        for copy, (in_flight, free) in loads.items()
    ]
    table = lua.table_from([lua.table_from(copy) for copy in copies])
    found: str | None = part(lua, "affinity").home(name, table, float(bound), digest)
    return found


def test_keys_spread_and_stay_where_they_are_when_a_copy_goes(lua: Any) -> None:  # noqa: F811
    three = {"a": (0, 12), "b": (0, 12), "c": (0, 12)}
    two = {"a": (0, 12), "b": (0, 12)}
    before = {str(number): home(lua, str(number), three) for number in range(600)}
    assert all(150 < count < 250 for count in Counter(before.values()).values())
    assert all(home(lua, name, two) == copy for name, copy in before.items() if copy != "c")


@pytest.mark.parametrize(
    ("loads", "bound", "weight", "expected"),
    [
        # The key's own copy is b.
        ({"a": (0, 12), "b": (0, 12)}, 150, 1, "b"),
        ({"a": (0, 12), "b": (2, 10)}, 150, 1, "b"),
        ({"a": (0, 12), "b": (3, 9)}, 150, 1, "a"),
        ({"a": (0, 12), "b": (3, 9)}, 300, 1, "b"),
        ({"a": (4, 8), "b": (9, 3)}, 150, 1, "b"),
        ({"a": (4, 8), "b": (11, 1)}, 150, 1, "b"),
        ({"a": (4, 8), "b": (12, 0)}, 1000, 1, "a"),
        ({"a": (12, 0), "b": (12, 0)}, 150, 1, None),
        ({"a": (0, 0), "b": (5, 7)}, 101, 1, None),
        ({"a": (0, 12), "b": (1, 11)}, 150, 3, "a"),
        ({}, 150, 1, None),
    ],
)  # fmt: skip
def test_a_copy_that_has_much_to_do_is_left_alone(
    lua: Any,  # noqa: F811
    loads: dict[str, tuple[int, int]],
    bound: int,
    weight: int,
    expected: str | None,
) -> None:
    name = next(
        str(number) for number in range(99) if home(lua, str(number), {"a": (0, 1), "b": (0, 1)}) == "b"
    )
    assert home(lua, name, loads, bound, weight) == expected


# ---------------------------------------------------------------- with HAProxy


class OneConversation(Gateway):
    """All that its clients ask belongs together, unless they say otherwise."""

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 15, **headers: str) -> Answer:
        if isinstance(body, dict):
            body = {"prompt_cache_key": "one", **body}
        return super().ask(method, path, body, timeout, **headers)


@pytest.fixture
def gateway(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    plain = gateway_of(configurations["affine"])
    with OneConversation(
        plain.directory, plain.port, plain.metrics_port, plain.log_port
    ).running() as gateway:
        until(
            lambda: (
                not gateway.is_live("spark-a-tp") and gateway.takes("spark-a") and gateway.takes("spark-b")
            )
        )
        yield gateway


def test_a_conversation_returns_to_its_copy(affine: Gateway) -> None:
    copies: list[str | None] = []
    for number in range(16):
        messages = [system("s"), user(f"conversation {number}")]
        served = set()
        for _ in range(5):
            answer = affine.chat(messages=messages)
            served.add(answer.served_by)
            messages += [ANSWER, user("more")]
        assert len(served) == 1
        copies += served
    assert set(copies) == {"spark-a", "spark-b"}


def test_a_session_is_what_its_client_calls_one(affine: Gateway) -> None:
    for session in "abcd":
        served = {
            affine.ask("POST", path, {"model": MODEL, "input": str(number)}, x_session_id=session).served_by
            for number, path in enumerate([CHAT, RESPONSES, "/v1/embeddings"] * 2)
        }
        assert len(served) == 1


def test_what_belongs_to_nothing_goes_to_the_least_loaded(affine: Gateway) -> None:
    served = Counter(affine.chat().served_by for _ in range(20))
    # Now and then an answer is at its client before the gateway counts it as done.
    assert min(served["spark-a"], served["spark-b"]) >= 7


def in_flight(*workers: Worker) -> list[int]:
    return sorted(worker.in_flight for worker in workers)


def test_nobody_waits_for_a_full_copy_while_another_is_free(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """Neither a request that comes when its copy is full, nor one that has been waiting before the other had places."""
    first = clients.chats(16, hold=True)
    until(lambda: spark_a.in_flight + spark_b.in_flight == 16)
    # One place of each copy, at least, is left to least connections.
    assert in_flight(spark_a, spark_b) in ([4, 12], [5, 11])
    home, other = sorted((spark_a, spark_b), key=lambda worker: -worker.in_flight)
    later = clients.chats(14, hold=True)
    until(lambda: in_flight(spark_a, spark_b) == [12, 12] and gateway.waiting() == 6)
    other.release(6)
    until(lambda: len(other.received) == 18 and gateway.waiting() == 0)
    assert (home.in_flight, other.in_flight, len(home.received)) == (12, 12, 12)
    other.release(12)
    until(lambda: other.in_flight == 0)
    # Its own copy is still full, the other idle.
    assert gateway.chat().served_by == other.name
    home.release(12)
    assert {answer.status for answer in answers(first + later)} == {200}
    until(lambda: gateway.in_flight() == 0)
    assert gateway.chat().served_by == home.name


def test_a_conversation_goes_on_elsewhere_and_comes_back(
    gateway: Gateway, spark_a: Worker, spark_b: Worker
) -> None:
    (home,) = {gateway.chat().served_by for _ in range(5)}
    worker, other = (spark_a, spark_b) if home == "spark-a" else (spark_b, spark_a)
    worker.health = 404
    until(lambda: not gateway.takes(worker.name))
    assert {gateway.chat().served_by for _ in range(5)} == {other.name}
    worker.health = 200
    until(lambda: gateway.takes(worker.name))
    assert {gateway.chat().served_by for _ in range(5)} == {home}


def test_a_burst_leaves_nobody_behind(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """Many requests of one conversation at the same moment: the caps hold, and no place stays free while one waits."""
    started = time.monotonic()
    done = answers(clients.chats(240, seconds=0.1))
    assert {answer.status for answer in done} == {200}
    assert max(spark_a.most_in_flight, spark_b.most_in_flight) <= 12
    assert min(len(spark_a.received), len(spark_b.received)) >= 60
    # A second by the caps, and what a busy machine adds.
    assert time.monotonic() - started < 4


def test_a_pretended_copy_forgets_what_was_not_used_for_longest() -> None:
    copy = Copy(Case(cache=64))
    one, other = ([f"{name}{number}" for number in range(40)] for name in "ab")
    assert [copy.look_up(one) for _ in range(2)] == [0, 32]
    assert copy.look_up(other) == 0
    assert copy.look_up([*one, *"123456789"]) == 32
    # The end of the other one had to give way.
    assert copy.look_up(other) == 16


def test_affinity_finds_more_in_the_caches_and_keeps_the_balance(tmp_path: Path) -> None:
    """A short run, in which conversations have come to fewer turns than in the benchmark, so the caches are smaller."""
    case = replace(CASES["tight"], cache=20_000)
    outcomes = compare(case, [175], tmp_path, warm_up=2.5, seconds=3)
    plain, affine = outcomes[LEASTCONN], outcomes["affinity 175"]
    assert affine.hit_rate > 1.1 * plain.hit_rate
    assert affine.returned > 0.7 > 0.65 > plain.returned
    assert affine.larger_share < 0.7
