# SPDX-License-Identifier: GPL-3.0-or-later
"""Which worker a request reaches, by the model that it names."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.conftest import gateway_of
from tests.gateway.rig import CHAT, MODEL, Clients, Gateway, Worker, answers, until

MIB = 1 << 20
TEXT = 'It was a dark and \\ stormy night; "model": "no-model", said {she} [twice]. '


@pytest.mark.parametrize(
    ("model", "workers"),
    [
        (MODEL, {"spark-a", "spark-b"}),
        ("chat", {"spark-a", "spark-b"}),
        ("small:latest", {"box"}),
        ("small", {"box"}),
        ("embedder", {"embed"}),
        ("large:70b", {"box"}),
        ("coder", {"swap"}),
    ],
)
def test_a_request_reaches_those_that_have_its_model(farm: Gateway, model: str, workers: set[str]) -> None:
    served = [farm.chat(model=model) for _ in range(6)]
    assert {(answer.status, answer.served_by) for answer in served} == {(200, name) for name in workers}


@pytest.mark.parametrize("model", ["unknown", MODEL.upper(), f"{MODEL} ", "small:8b", "Small"])
def test_a_model_that_nobody_has_is_not_found(farm: Gateway, model: str) -> None:
    """Names are exact, but for the tag that Ollama itself leaves out."""
    answer = farm.chat(model=model)
    assert answer.status == 404
    error = answer.json["error"]
    assert (error["code"], error["type"], error["param"]) == (
        "model_not_found",
        "invalid_request_error",
        "model",
    )
    assert model in error["message"]
    assert answer.seconds < 1.5
    assert farm.figure('refused_requests_total{reason="unknown_model"}') == 1


def test_each_worker_gets_its_own_key(
    farm: Gateway, spark_a: Worker, spark_b: Worker, box: Worker, embed: Worker
) -> None:
    for model in (MODEL, MODEL, "small", "embedder"):
        farm.ask("POST", CHAT, {"model": model}, authorization="Bearer sk-the-clients-own")
    for worker, key in (
        (spark_a, "Bearer sk-the-workers-key"),
        (spark_b, "Bearer sk-the-workers-key"),
        (embed, "Bearer sk-the-embedders-own-key"),
        (box, None),
    ):
        assert worker.received
        for received in worker.received + worker.catalogue_requests:
            assert received.headers.get("authorization") == key


def test_what_is_loaded_comes_before_what_could_be(farm: Gateway, swap: Worker) -> None:
    """The llama-swap lists the copies' model too, and would have to load it."""
    assert {farm.chat().served_by for _ in range(10)} == {"spark-a", "spark-b"}
    assert swap.received == []


def test_the_last_resort_is_who_could_load_it(
    farm: Gateway, spark_a: Worker, spark_b: Worker, swap: Worker
) -> None:
    spark_a.stop()
    spark_b.stop()
    until(lambda: not farm.takes("spark-a") and not farm.takes("spark-b"))
    answer = farm.chat()
    assert (answer.status, answer.served_by) == (200, "swap")
    assert farm.figure('routed_requests_total{route="cold"}') == 1
    # Once it has the model, it is as good as the copies.
    swap.models, swap.loadable = [MODEL], ["coder"]
    spark_a.start()
    until(lambda: farm.takes("spark-a"))
    time.sleep(2.2)
    assert {farm.chat().served_by for _ in range(10)} == {"spark-a", "swap"}


def test_who_cannot_tell_comes_after_who_has_it(
    farm: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """A worker that answers 404 at once has the fewest requests, and would draw all others to it."""
    spark_a.catalogue_fault = "fails"
    until(lambda: not farm.takes("spark-a"))
    served = answers(clients.chats(12, seconds=0.02))
    assert {answer.served_by for answer in served} == {"spark-b"}
    spark_b.health = 503
    until(lambda: not farm.takes("spark-b"))
    assert farm.chat().served_by == "spark-a"
    assert farm.figure('routed_requests_total{route="possibly"}') == 1
    # For a model of which it never said anything it is not asked.
    assert farm.chat(model="embedder").served_by == "embed"
    assert farm.chat(model="something-else").status == 404


@pytest.mark.parametrize("fault", ["fails", "is no list", "is empty", "hangs"])
def test_one_slip_in_telling_is_forgiven(farm: Gateway, embed: Worker, fault: str) -> None:
    embed.catalogue_fault = fault
    until(lambda: not farm.takes("embed"), 15)
    assert farm.chat(model="embedder").served_by == "embed"  # possibly
    embed.catalogue_fault = ""
    until(lambda: farm.takes("embed"))
    assert farm.chat(model="embedder").served_by == "embed"
    assert farm.figure("task_failures_total") == 0, farm.command("show gateway")


def test_two_models_share_the_cap_of_their_worker(farm: Gateway, clients: Clients, embed: Worker) -> None:
    """Models that the same worker has share its places."""
    embed.models = ["embedder", "reranker"]
    until(lambda: farm.get("/v1/models/reranker").status == 200)
    held = [
        future
        for _ in range(6)
        for model in ("embedder", "reranker")
        for future in clients.chats(1, model=model, seconds=0.1)
    ]
    assert {answer.status for answer in answers(held)} == {200}
    assert embed.most_in_flight == 4


def test_two_sets_share_the_cap_of_their_common_worker(
    farm: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """One model on both copies, another on one of them: that one never gets more than its cap."""
    spark_b.models = [MODEL, "model-b"]
    until(lambda: farm.get("/v1/models/model-b").status == 200)
    mixed = clients.chats(30, seconds=0.2) + clients.chats(30, model="model-b", seconds=0.2)
    assert {answer.status for answer in answers(mixed)} == {200}
    assert spark_b.most_in_flight <= 12
    # Neither starved: each model had a part of it while both waited.
    asked = Counter(request.body["model"] for request in spark_b.received)
    assert asked["model-b"] == 30
    # What one model leaves, the other may take.
    spark_b.most_in_flight = 0
    answers(clients.chats(24, model="model-b", seconds=0.3))
    assert 10 <= spark_b.most_in_flight <= 12


def test_who_changes_models_keeps_to_its_cap(farm: Gateway, clients: Clients, embed: Worker) -> None:
    """What it still answers with the former model counts, and new requests wait for it longer than for a live worker."""
    former = clients.chats(4, model="embedder", hold=True)
    until(lambda: embed.in_flight == 4)
    embed.models = ["reranker"]
    until(lambda: farm.get("/v1/models/reranker").status == 200)
    new = clients.chats(3, model="reranker", hold=True)
    until(lambda: farm.held() == 3)
    time.sleep(2.5)
    assert (len(embed.received), farm.held()) == (4, 3)
    embed.release(2)
    until(lambda: len(embed.received) == 6)
    embed.release(5)
    assert {answer.status for answer in answers(former + new)} == {200}
    assert embed.most_in_flight == 4


def test_who_has_waited_for_a_place_is_held_when_its_worker_goes(
    farm: Gateway, clients: Clients, embed: Worker
) -> None:
    """As long as any other: the time before does not count."""
    former = clients.chats(4, model="embedder", hold=True)
    until(lambda: embed.in_flight == 4)
    embed.models = ["reranker"]
    until(lambda: farm.get("/v1/models/reranker").status == 200)
    new = clients.chats(1, model="reranker")
    time.sleep(2.5)
    embed.health = 503
    until(lambda: not farm.takes("embed"))
    time.sleep(0.5)
    embed.release(4)
    embed.health = 200
    assert {answer.status for answer in answers(former + new)} == {200}


def test_a_place_is_waited_for_as_long_as_in_a_queue(
    brief: Gateway, clients: Clients, spark_a: Worker
) -> None:
    """Also where nobody is held for a live worker."""
    former = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    spark_a.models = ["model-b"]
    until(lambda: brief.get("/v1/models/model-b").status == 200)
    refused = brief.chat(model="model-b")
    assert (refused.status, refused.headers["retry-after"]) == (503, "10")
    assert "busy with other models" in refused.json["error"]["message"]
    assert 2.9 < refused.seconds < 9
    assert brief.figure('refused_requests_total{reason="no_place"}') == 1
    waiting = clients.chats(1, model="model-b")
    until(lambda: brief.held() == 1)
    spark_a.release()
    assert [answer.status for answer in answers(former + waiting)] == [200, 200]
    assert spark_a.most_in_flight == 1


def test_nobody_loads_what_a_full_worker_has(
    brief: Gateway, clients: Clients, spark_a: Worker, swap: Worker
) -> None:
    """A worker that has it but no place is waited for, unless requests may spill over."""
    swap.loadable.append("model-b")
    former = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    spark_a.models = ["model-b"]
    until(lambda: brief.get("/v1/models/model-b").status == 200)
    # The swap server's answer may be the one that the list comes from.
    until(
        lambda: (
            ["model-b"]
            in [worker["warm"] for worker in json.loads(brief.metrics("/catalogue").body)["workers"]]
        )
    )
    waiting = clients.chats(1, model="model-b")
    until(lambda: brief.held() == 1)
    spark_a.release()
    assert {answer.served_by for answer in answers(former + waiting)} == {"spark-a"}
    assert swap.received == []


def test_a_waiting_request_spills_over(
    farm: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker, swap: Worker
) -> None:
    full = clients.chats(24, hold=True)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (12, 12))
    waiting = []
    for number in range(3):
        waiting += clients.chats(1, hold=True)
        until(lambda: farm.waiting() == number + 1)  # noqa: B023  (called at once)
    assert farm.chat().served_by == "swap"
    assert farm.figure('routed_requests_total{route="spill"}') == 1
    for worker in (spark_a, spark_b):
        worker.release(30)
    assert {answer.served_by for answer in answers(full + waiting)} == {"spark-a", "spark-b"}


def test_with_too_few_pools_every_model_keeps_a_worker(
    configurations: dict[str, Path], spark_a: Worker, spark_b: Worker, box: Worker
) -> None:
    spark_a.models, spark_b.models = ["one", "both"], ["two", "both"]
    with gateway_of(configurations["crowded"]).running() as gateway:
        until(lambda: gateway.takes("spark-a") and gateway.takes("spark-b") and gateway.takes("box"))
        until(lambda: gateway.chat(model="small").status == 200)
        for model in ("one", "two", "both"):
            assert gateway.chat(model=model).status == 200


def test_what_waits_is_never_sent_to_who_lacks_its_model(
    gateway: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """Both have a model, one has another besides, and that one alone keeps the first while requests wait for it."""
    spark_b.models = [MODEL, "another"]
    until(lambda: gateway.get("/v1/models/another").status == 200)
    full = clients.chats(24, hold=True)
    until(lambda: spark_a.in_flight == 12)
    until(lambda: spark_a.in_flight + spark_b.in_flight + gateway.waiting() == 24)
    waiting = clients.chats(2)
    until(lambda: spark_a.in_flight + spark_b.in_flight + gateway.waiting() == 26)
    spark_a.models = ["something-else"]
    until(lambda: gateway.get("/v1/models/something-else").status == 200)
    before = len(spark_a.received)
    spark_a.release(12)
    time.sleep(1)
    assert len(spark_a.received) == before
    spark_b.release(24)
    assert {answer.status for answer in answers(full + waiting)} == {200}
    assert {answer.served_by for answer in answers(waiting)} == {"spark-b"}


def test_what_waits_for_a_busy_worker_that_cannot_tell_is_served(
    single: Gateway, clients: Clients, spark_a: Worker
) -> None:
    """An engine with much to do may not answer for its models either."""
    until(lambda: single.takes("spark-a"))
    (first,) = clients.chats(1, hold=True)
    until(lambda: spark_a.in_flight == 1)
    spark_a.catalogue_fault = "fails"
    until(lambda: not single.takes("spark-a"))
    (second,) = clients.chats(1)
    until(lambda: single.waiting() == 1)
    spark_a.release()
    assert (first.result(5).status, second.result(5).status) == (200, 200)


def test_a_worker_with_one_place_serves_all_its_models(
    configurations: dict[str, Path], spark_a: Worker, spark_b: Worker
) -> None:
    """Of which it shares one with another worker."""
    spark_a.models, spark_b.models = ["shared", "own"], ["shared"]
    with gateway_of(configurations["narrow"]).running() as gateway:
        until(lambda: gateway.takes("spark-a") and gateway.takes("spark-b"))
        own = Clients(gateway)
        for model in ("own", "shared", "own"):
            done = answers(own.chats(4, model=model, seconds=0.05))
            assert {answer.status for answer in done} == {200}
        mixed = own.chats(6, model="own", seconds=0.05) + own.chats(12, model="shared", seconds=0.05)
        assert {answer.status for answer in answers(mixed)} == {200}
        assert spark_a.most_in_flight == 1
        own.close()


def test_a_set_that_changes_keeps_what_waits_for_it(
    farm: Gateway, clients: Clients, spark_a: Worker, spark_b: Worker
) -> None:
    """A worker that is busy for the others loads another model beside the common one."""
    full = clients.chats(24, hold=True)
    until(lambda: (spark_a.in_flight, spark_b.in_flight) == (12, 12))
    waiting = clients.chats(3)
    until(lambda: farm.waiting() == 3)
    spark_b.models = ["another"]
    until(lambda: farm.get("/v1/models/another").status == 200)
    spark_a.release(12)
    assert {answer.served_by for answer in answers(waiting)} == {"spark-a"}
    spark_b.release(12)
    assert {answer.status for answer in answers(full)} == {200}


# ---------------------------------------------------------------- where the model stands in a request


def body_with(place: str, size: int, model: str = MODEL) -> bytes:
    """A chat of about so many bytes with the model at a place."""
    many = size // len(json.dumps(TEXT)) // (2 if place == "in the middle" else 1)
    message = json.dumps({"role": "user", "content": TEXT * many, "model": "not-this"})
    tools = json.dumps([{"type": "function", "function": {"name": "f", "model": {"model": "nor-this"}}}])
    name = json.dumps(model)
    parts = {
        "first": f'"model": {name}, "messages": [{message}], "tools": {tools}',
        "last": f'"messages": [{message}], "tools": {tools}, "stream": false, "model":{name}',
        "near the end": f'"messages": [{message}], "model" :\n {name}, "tools": {tools}, "stream": false',
        "in the middle": f'"messages": [{message}], "model": {name}, "more": [{message}]',
        "after a bracket in a text": f'"messages": [{message}], "user": "you ] and \\"model\\":\\"no\\" ]", "model": {name}',
        "after others' in nested objects": f'"x": {{"y": [{message}], "model": "not-this"}}, "model": {name}',
        "before others' in nested objects": f'"model": {name}, "x": {{"y": [{message}], "model": "not-this"}}',
        "without a bracket": f'"prompt": {json.dumps(TEXT.replace("]", "") * many)}, "model": {name}',
        "before a text": f'"model": {name}, "prompt": {json.dumps(TEXT * many)}',
        "over several lines": f'\n  "messages": [{message}],\n  "model": {name},\n  "max_tokens": 3\n',
        "escaped": f'"messages": [{message}], "mod\\u0065l": {name}',
    }
    return f" {{{parts[place]}}}\n".encode()


@pytest.mark.parametrize("size", [0, 20_000, 2_000_000])
@pytest.mark.parametrize(
    "place",
    [
        "first",
        "last",
        "near the end",
        "in the middle",
        "after a bracket in a text",
        "after others' in nested objects",
        "before others' in nested objects",
        "without a bracket",
        "before a text",
        "over several lines",
        "escaped",
    ],
)
def test_the_model_stands_anywhere(gateway: Gateway, place: str, size: int) -> None:
    body = body_with(place, size)
    answer = gateway.post(CHAT, body)
    assert (answer.status, answer.served_by in ("spark-a", "spark-b")) == (200, True)
    unknown = gateway.post(CHAT, body_with(place, size, "un/known"))
    assert (unknown.status, "un/known" in unknown.json["error"]["message"]) == (404, True)


@pytest.mark.parametrize("end", ["", ', "n": [1, "]"]', ', "x": {"model": "not-this"}'])
@pytest.mark.parametrize("length", [32_768, 39_936, 1_048_576])
def test_the_length_makes_no_difference(gateway: Gateway, length: int, end: str) -> None:
    """Around each length from which on more of the beginning is left out when the end is looked at (haproxy.cfg)."""
    head, tail = b'{"prompt": "', f'\\"model\\": \\"no\\"", "model": "{MODEL}"{end}}}'.encode()
    for more in range(-4, 5):
        body = head + b"x" * (length + more - len(head) - len(tail)) + tail
        assert gateway.post(CHAT, body).status == 200, more


@pytest.mark.parametrize("chunk", [1000, 100_000])
def test_a_body_in_chunks_is_read_too(gateway: Gateway, chunk: int) -> None:
    body = body_with("last", MIB)

    def pieces() -> Iterator[bytes]:
        yield from (body[start : start + chunk] for start in range(0, len(body), chunk))

    assert gateway.post(CHAT, pieces()).status == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"model"', b"[{}]", b'{"models"', b"not json", b"\xff\xfe"],
)
def test_what_cannot_be_read_is_refused(
    gateway: Gateway, spark_a: Worker, spark_b: Worker, body: bytes
) -> None:
    """Where the model can be found all the same, the worker judges the rest."""
    answer = gateway.post(CHAT, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_body")
    assert spark_a.received + spark_b.received == []


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"model": ""}',
        b'{"model": null}',
        b'{"model": 3}',
        b'{"models": "model-a"}',
        b'{"x": {"model": "model-a"}}',
    ],
)
def test_who_names_no_model_is_told(gateway: Gateway, body: bytes) -> None:
    answer = gateway.post(CHAT, body)
    assert (answer.status, answer.json["error"]["code"]) == (400, "missing_model")
    assert answer.json["error"]["param"] == "model"


def form(size: int, *, model_first: bool, model: str = MODEL) -> bytes:
    """A recording of so many bytes and a model, as a browser sends them."""
    field = f'--xyz\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n'.encode()
    noise = b'name="model"\r\n\r\nno-model\r\n--xy ' * (size // 32)
    recording = (
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n'
        b"Content-Type: audio/wav\r\n\r\n" + noise + b"\r\n"
    )
    return b"".join((field, recording) if model_first else (recording, field)) + b"--xyz--\r\n"


@pytest.mark.parametrize("model_first", [True, False])
def test_a_form_is_read_too(gateway: Gateway, model_first: bool) -> None:
    for model, status in ((MODEL, 200), ("unknown", 404)):
        body = form(3 * MIB, model_first=model_first, model=model)
        answer = gateway.post("/v1/audio/transcriptions", body, "multipart/form-data; boundary=xyz")
        assert answer.status == status


def test_a_form_without_a_model_is_refused(gateway: Gateway) -> None:
    for body, code in ((form(0, model_first=True, model=""), "missing_model"), (b"--xyz", "invalid_body")):
        answer = gateway.post("/v1/audio/transcriptions", body, 'multipart/form-data; boundary="xyz"')
        assert (answer.status, answer.json["error"]["code"]) == (400, code)


@pytest.mark.parametrize("chunked", [False, True])
def test_too_long_a_request_is_refused(
    gateway: Gateway, spark_a: Worker, spark_b: Worker, chunked: bool
) -> None:
    body = body_with("last", MIB) + b" " * (3 * MIB + 100_000)
    answer = gateway.post(CHAT, iter([body]) if chunked else body)
    assert (answer.status, answer.json["error"]["code"]) == (413, "request_too_large")
    assert "4 MiB" in answer.json["error"]["message"]
    assert spark_a.received + spark_b.received == []


def test_a_request_of_32_mib_passes(long: Gateway, spark_a: Worker) -> None:
    body = body_with("last", 32 * MIB - 100_000)
    assert long.post(CHAT, body).status == 200
    recording = form(32 * MIB - 100_000, model_first=False)
    answer = long.post("/v1/audio/transcriptions", recording, "multipart/form-data; boundary=xyz")
    assert answer.status == 200
    assert len(spark_a.received) == 2


def test_the_access_log_tells_model_and_route(farm: Gateway) -> None:
    farm.chat(model='odd"name\\')
    farm.chat(model="small")
    until(lambda: len(farm.log) == 2)
    assert [(entry["model"], entry["route"], entry["worker"]) for entry in farm.log] == [
        ('odd"name\\', "-", "<NOSRV>"),
        ("small", "warm", "box"),
    ]
