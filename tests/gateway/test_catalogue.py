# SPDX-License-Identifier: GPL-3.0-or-later
"""The one list of models, and how it follows what the workers have."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.gateway.conftest import MANY_PORTS, gateway_of
from tests.gateway.rig import LOOPBACK, MODEL, Clients, Gateway, Worker, answers, until

# A worker is asked so often, in seconds.
CADENCE = 2


def listed(gateway: Gateway) -> list[str]:
    return [item["id"] for item in gateway.get("/v1/models").json["data"]]


def test_it_is_the_union_each_model_once_in_a_stable_order(farm: Gateway) -> None:
    expected = ["chat", "coder", "embedder", "large:70b", MODEL, "small:latest"]
    for _ in range(3):
        answer = farm.get("/v1/models")
        assert [item["id"] for item in answer.json["data"]] == expected
        assert answer.json["object"] == "list"
    for item in answer.json["data"]:
        assert item["object"] == "model"
        assert isinstance(item["created"], int)
        assert item["owned_by"]


def test_one_model_of_it(farm: Gateway, embed: Worker) -> None:
    embed.models = ["organisation/name"]
    until(lambda: "organisation/name" in listed(farm))
    for path in ("organisation/name", "organisation%2Fname"):
        answer = farm.get(f"/v1/models/{path}")
        assert (answer.status, answer.json["id"]) == (200, "organisation/name")
    unknown = farm.get("/v1/models/unknown")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")


def test_a_head_has_no_body(farm: Gateway) -> None:
    answer = farm.ask("HEAD", "/v1/models")
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) > 100


def test_a_model_that_leaves_a_worker_leaves_list_and_routes(farm: Gateway, embed: Worker) -> None:
    """While the worker itself stays."""
    assert farm.chat(model="embedder").status == 200
    embed.models = ["reranker"]
    assert until(lambda: farm.chat(model="embedder").status == 404, 5) < CADENCE + 1
    assert "embedder" not in listed(farm)
    assert farm.chat(model="reranker").served_by == "embed"


def test_another_model_on_the_same_port_after_a_restart(farm: Gateway, embed: Worker) -> None:
    """The old name ends at once: the worker is asked before it gets its first request."""
    embed.stop()
    until(lambda: not farm.takes("embed"))
    assert "embedder" not in listed(farm)
    embed.models = ["reranker"]
    embed.start()
    until(lambda: farm.takes("embed"))
    assert farm.chat(model="embedder").status == 404
    assert farm.chat(model="reranker").status == 200
    assert [request.body["model"] for request in embed.received] == ["reranker"]


def test_models_of_a_worker_that_is_away_are_not_listed_and_shared_ones_stay(
    farm: Gateway, spark_a: Worker, embed: Worker
) -> None:
    spark_a.stop()
    embed.health = 404
    until(lambda: not farm.takes("spark-a") and not farm.takes("embed"))
    assert listed(farm) == ["chat", "coder", "large:70b", MODEL, "small:latest"]


def test_a_request_for_a_model_whose_worker_is_away_waits_for_it(
    farm: Gateway, clients: Clients, embed: Worker
) -> None:
    """It is no unknown model, though it is not listed; the other workers do not get it."""
    embed.stop()
    until(lambda: not farm.takes("embed"))
    (held,) = clients.chats(1, model="embedder")
    until(lambda: farm.held() == 1)
    embed.start()
    back = time.monotonic()
    answer = held.result(10)
    assert (answer.status, answer.served_by) == (200, "embed")
    assert time.monotonic() - back < 2
    embed.stop()
    until(lambda: not farm.takes("embed"))
    answer = farm.chat(model="embedder")
    assert (answer.status, answer.json["error"]["code"]) == (503, "service_unavailable")
    assert answer.headers["retry-after"] == "10"
    assert 1.9 < answer.seconds < 8


def test_a_start_answers_nothing_with_404_before_all_have_been_asked(
    configurations: dict[str, Path], spark_a: Worker, spark_b: Worker, embed: Worker
) -> None:
    with gateway_of(configurations["farm"]).running() as gateway:
        own = Clients(gateway)
        early = own.chats(20) + own.chats(20, model="embedder")
        assert {answer.status for answer in answers(early)} == {200}
        own.close()
        # It knows by now that the others are away.
        assert gateway.chat(model="unknown").status == 404


def test_while_the_only_worker_is_being_asked_nothing_is_said_of_its_models(
    single: Gateway, spark_a: Worker
) -> None:
    """Neither that there are none, nor that one is unknown."""
    spark_a.health = 503
    until(lambda: single.get("/v1/models").status == 503)
    spark_a.catalogue_fault, spark_a.health = "hangs", 200
    until(lambda: single.is_live("spark-a"))
    for path in ("/v1/models", f"/v1/models/{MODEL}"):
        assert single.get(path).status == 503
    spark_a.catalogue_fault = ""
    until(lambda: single.get("/v1/models").status == 200, 5)
    assert listed(single) == [MODEL]


def test_an_alias_of_an_announced_model_is_waited_for_too(
    configurations: dict[str, Path], embed: Worker
) -> None:
    """After a start that never saw its workers."""
    with gateway_of(configurations["farm"]).running() as gateway:
        until(lambda: gateway.takes("embed"))
        for model in (MODEL, "chat"):
            assert gateway.chat(model=model).status == 503
        assert gateway.chat(model="unknown").status == 404


def test_a_reload_forgets_nothing(farm: Gateway, clients: Clients) -> None:
    for _ in range(3):
        farm.reload()
        mixed = clients.chats(10) + clients.chats(10, model="embedder") + clients.chats(5, model="small")
        assert {answer.status for answer in answers(mixed)} == {200}
    assert listed(farm) == ["chat", "coder", "embedder", "large:70b", MODEL, "small:latest"]


def test_a_list_of_hundreds_comes_at_once(farm: Gateway, embed: Worker) -> None:
    embed.models = [f"organisation/model-{number:03}" for number in range(500)]
    until(lambda: len(listed(farm)) >= 500)
    with farm.kept_alive() as get:
        seconds = sorted(get("/v1/models").seconds for _ in range(50))
    assert seconds[25] < 0.05
    assert farm.chat(model="organisation/model-499").served_by == "embed"


def test_a_large_farm_is_listed_within_milliseconds(configurations: dict[str, Path]) -> None:
    """50 workers with 4 models each: what a client waits for the list, its own time included, unless others take the machine."""
    with ExitStack() as ended:
        for index, port in enumerate(MANY_PORTS):
            worker = Worker(f"worker-{index}", port, port)
            worker.models = [f"model-{index:02}-{letter}" for letter in "abcd"]
            ended.callback(worker.start().stop)
        gateway = ended.enter_context(gateway_of(configurations["large"]).running())
        until(lambda: len(listed(gateway)) == 200, 30)
        assert len(set(listed(gateway))) == 200
        with gateway.kept_alive() as get:
            seconds = sorted(get("/v1/models").seconds for _ in range(101))
        assert seconds[10] < 0.005, f"{1000 * seconds[10]:.1f} ms, median {1000 * seconds[50]:.1f} ms"
        assert gateway.chat(model="model-49-d").served_by == "worker-49"


def test_programs_can_look_at_it(farm: Gateway, spark_b: Worker, embed: Worker) -> None:
    spark_b.health = 404
    embed.catalogue_fault = "fails"
    until(lambda: not farm.takes("spark-b") and not farm.takes("embed"))
    told = json.loads(farm.metrics("/catalogue").body)["workers"]
    assert [(worker["name"], worker["state"], sorted(worker["warm"])) for worker in told] == [
        ("spark-a", "read", ["chat", MODEL]),
        ("spark-b", "down", ["chat", MODEL]),
        ("box", "read", ["small", "small:latest"]),
        ("swap", "read", []),
        ("embed", "failed", ["embedder"]),
    ]
    assert {worker["name"]: sorted(worker["cold"]) for worker in told if worker["cold"]} == {
        "box": ["large:70b"],
        "swap": ["chat", "coder", MODEL],
    }
    assert {(worker["address"], worker["weight"]) for worker in told} == {(LOOPBACK, 1)}


def test_people_can_look_at_it(farm: Gateway, spark_b: Worker, embed: Worker) -> None:
    spark_b.health = 404
    embed.catalogue_fault = "fails"
    until(lambda: not farm.takes("spark-b") and not farm.takes("embed"))
    text = farm.command("show gateway")
    for line in (
        r"  spark-a                  vllm       live",
        r"  spark-b                  vllm       does not take requests",
        r"  embed                    openai     live, does not tell its models: status 500",
        rf"  {MODEL:40} spark-a, spark-b (down); on demand: swap",
    ):
        assert line in text


def test_the_figures_of_the_workers(farm: Gateway, embed: Worker) -> None:
    assert farm.figure("models") == 6
    assert farm.figure('worker_models{worker="box"}') == 2
    assert 0 <= farm.figure('worker_models_age_seconds{worker="embed"}') < CADENCE + 1
    embed.stop()
    until(lambda: not farm.takes("embed"))
    time.sleep(CADENCE + 1)
    assert farm.figure('worker_models_age_seconds{worker="embed"}') > CADENCE


@pytest.mark.parametrize("health", [200, 503])
def test_with_no_live_worker_there_is_no_list(single: Gateway, spark_a: Worker, health: int) -> None:
    spark_a.health = health
    until(lambda: single.get("/v1/models").status == health)
    answer = single.get("/v1/models")
    if health != 200:
        assert answer.headers["retry-after"] == "7"
        assert answer.json["error"]["code"] == "service_unavailable"
