# SPDX-License-Identifier: GPL-3.0-or-later
"""The installed gateways, one with the HAProxy of each Debian, in front of one farm of workers of several kinds.

Two stand-in engines have one model; of the other workers tests/gateway pretends the kinds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import testinfra

from installed_gateway import MODEL, Installed, all_at_once
from load import DECEITS, Load
from playbook import ROOT
from spark import until
from tests.gateway.rig import CHAT, Gateway, Worker

Figure = Callable[[str], None]

FARM = "198.18.87.1"
GATEWAYS = {"spark-a": ("198.18.87.11", "2.6"), "spark-b": ("198.18.87.12", "3.0")}
KEYS = {"alice": "alice-of-the-simulation", "bob": "bob-of-the-simulation"}
WORKERS_KEY = "simulation-key"
EMBED_KEY = "embed-of-the-simulation"
# What the others have loaded, and what they could load.
OTHERS: dict[str, tuple[str, int, str, list[str], list[str]]] = {
    "box": ("ollama", 29003, "/api/version", ["small:latest"], ["big:70b"]),
    "swap": ("llama_swap", 29004, "/health", ["coder"], ["writer"]),
    "llama": ("llama_cpp", 29005, "/health", ["tiny"], []),
    "embed": ("openai", 29006, "/health", ["embedder"], []),
}
LISTED = ["big:70b", "chat", "coder", "embedder", MODEL, "small:latest", "tiny", "writer"]


class Copy:
    """A stand-in engine on this machine, and what its agent would say of its health."""

    def __init__(self, number: int, log: Path) -> None:
        self.name = f"copy-{number}"
        self._port = 29000 + number
        self._agent = Worker(self.name, self._port, 29010 + number, FARM)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it serves."""
        command = [sys.executable, str(ROOT / "simulator/engine/vllm"), "serve"]
        flags = ["--host", FARM, "--port", str(self._port), "--served-model-name", MODEL]
        environment = {
            **os.environ,
            "VLLM_API_KEY": WORKERS_KEY,
            "STANDIN_LOAD_SECONDS": "1",
            "STANDIN_SPEED": "4",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(ROOT / "simulator/models/simulated"), *flags],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, 30, f"{self.name} serves")
        self._agent.health = 200
        self._agent.start_agent()

    def _answers(self) -> bool:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{FARM}:{self._port}/health", timeout=2),
        ):
            return True
        return False

    def stop(self) -> None:
        """As an agent does: drain for three seconds, then end."""
        self._agent.health = 404
        time.sleep(3)
        assert self._process
        self._process.terminate()
        self._process.wait(40)
        self._agent.stop_agent()
        self._process = None

    def kill(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(40)
            self._agent.stop_agent()
            self._process = None


def key_of(client: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[client]}", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def others() -> Iterator[dict[str, Worker]]:
    """The workers that are not vLLM."""
    workers = {}
    for name, (kind, port, health_path, models, loadable) in OTHERS.items():
        worker = Worker(name, port, port, FARM)
        worker.kind, worker.health_path, worker.models, worker.loadable = kind, health_path, models, loadable
        workers[name] = worker.start()
    yield workers
    for worker in workers.values():
        worker.stop()


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Copy]]:
    folder = tmp_path_factory.mktemp("copies")
    found = [Copy(number, folder / f"{number}.log") for number in (1, 2)]
    for copy in found:
        copy.start()
    yield found
    for copy in found:
        copy.kill()


@pytest.fixture(scope="module", params=GATEWAYS)
def installed(request: pytest.FixtureRequest, pytestconfig: pytest.Config) -> Installed:
    inventory = pytestconfig.getoption("ansible_inventory")
    host = testinfra.get_host(f"ansible://{request.param}", ansible_inventory=inventory)
    return Installed(GATEWAYS[request.param][0], host, key_of("alice"))


@pytest.fixture
def gateway(installed: Installed, copies: list[Copy], others: dict[str, Worker]) -> Installed:
    """With every worker live."""
    for name in (*(copy.name for copy in copies), *others):
        until(lambda: installed.lives(name), 30, f"{name} lives")  # noqa: B023  (called at once)
    return installed


def test_it_is_the_haproxy_of_its_debian(gateway: Installed) -> None:
    release = dict(GATEWAYS.values())[gateway.address]
    assert f"HAProxy version {release}." in gateway.run("haproxy -v")
    assert gateway.run("haproxy -c -q -f /etc/haproxy/haproxy.cfg 2>&1") == ""


def test_one_list_of_all_models(gateway: Installed) -> None:
    models = gateway.get("/v1/models").json["data"]
    assert [model["id"] for model in models] == LISTED
    assert gateway.get("/v1/models/small:latest").json["id"] == "small:latest"
    assert gateway.get("/v1/models/none").status == 404


@pytest.mark.parametrize(
    ("model", "workers", "route"),
    [
        (MODEL, {"copy-1", "copy-2"}, "warm"),
        ("small", {"box"}, "warm"),
        ("small:latest", {"box"}, "warm"),
        ("big:70b", {"box"}, "cold"),
        ("coder", {"swap"}, "warm"),
        ("writer", {"swap"}, "cold"),
        ("tiny", {"llama"}, "warm"),
        ("embedder", {"embed"}, "warm"),
    ],
)
def test_each_model_is_served_by_those_that_have_it(
    gateway: Installed, model: str, workers: set[str], route: str
) -> None:
    answers = all_at_once([lambda: gateway.complete(model)] * 16)
    assert {answer.status for answer in answers} == {200}
    assert {answer.served_by for answer in answers} == workers
    line = gateway.line(answers[0].headers["x-request-id"])
    assert (line["name"], line["model"], line["route"], line["worker"] in workers) == (
        "alice",
        model,
        route,
        True,
    )


def test_the_model_stands_anywhere(gateway: Installed) -> None:
    text = json.dumps('a ] or a } and "model": "none" ' * 40_000)
    bodies = {
        "first": f'{{"model": "tiny", "prompt": {text}}}',
        "last": f'{{"messages": [{text}], "model": "tiny"}}',
        "in the middle": f'{{"prompt": {text}, "model": "tiny", "suffix": {text}}}',
    }
    for place, body in bodies.items():
        assert gateway.post("/v1/completions", body.encode()).served_by == "llama", place
        pieces = (body[at : at + 60_000].encode() for at in range(0, len(body), 60_000))
        assert gateway.post("/v1/completions", pieces).served_by == "llama", f"{place}, in chunks"
    form = b'--x\r\ncontent-disposition: form-data; name="model"\r\n\r\ntiny\r\n--x--\r\n'
    answer = gateway.post("/v1/audio/transcriptions", form, "multipart/form-data; boundary=x")
    assert (answer.status, answer.served_by) == (200, "llama")


def test_a_model_leaves_and_comes_with_its_worker(gateway: Installed, others: dict[str, Worker]) -> None:
    others["box"].models, others["box"].loadable = ["medium:latest"], []
    until(lambda: gateway.complete("small").status == 404, 5, "the model has left")
    assert "small:latest" not in [model["id"] for model in gateway.get("/v1/models").json["data"]]
    assert gateway.complete("medium").served_by == "box"
    others["box"].models, others["box"].loadable = ["small:latest"], ["big:70b"]
    until(lambda: gateway.complete("small").status == 200, 5, "the model is back")


def test_every_worker_gets_its_own_key_and_never_a_clients(
    gateway: Installed, others: dict[str, Worker]
) -> None:
    for model, worker, key in (("embedder", "embed", f"Bearer {EMBED_KEY}"), ("tiny", "llama", None)):
        gateway.complete(model)
        assert others[worker].received[-1].headers.get("authorization") == key
    shown = gateway.run(
        "cat /etc/haproxy/haproxy.cfg; ps -eo args; journalctl --no-pager --boot --identifier haproxy"
    )
    for secret in (*KEYS.values(), WORKERS_KEY, EMBED_KEY):
        assert secret not in shown
    assert gateway.run("stat --format %a:%U /etc/haproxy/keys.map").strip() == "600:root"


def test_who_has_no_key_is_refused_and_a_limit_holds(gateway: Installed) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer none"}):
        answer = gateway.ask("GET", "/v1/models", None, 15, **headers)
        assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True}
    bobs = all_at_once([lambda: gateway.ask("POST", "/v1/completions", body, 60, **key_of("bob"))] * 3)
    assert Counter(answer.status for answer in bobs) == {200: 1, 429: 2}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", CHAT, "{", 400, "invalid_body"),
        ("POST", CHAT, "{}", 400, "missing_model"),
        ("GET", "/metrics", "", 403, "metrics_not_here"),
        ("POST", CHAT, '{"model": "none"}', 404, "model_not_found"),
        ("POST", "/tokenize", "{}", 404, "unknown_url"),
        ("DELETE", "/v1/models/tiny", "", 405, "method_not_allowed"),
        ("POST", CHAT, " " * (4 * 2**20 + 1), 413, "request_too_large"),
    ],
)
def test_what_is_refused_is_told_as_openai_does(
    gateway: Installed, method: str, path: str, body: str, status: int, code: str
) -> None:
    answer = gateway.post(path, body.encode()) if method == "POST" else gateway.ask(method, path)
    assert (answer.status, answer.json["error"]["code"], answer.served_by) == (status, code, None)


def test_a_client_that_leaves_stops_the_work(gateway: Installed, others: dict[str, Worker]) -> None:
    llama = others["llama"]
    before = llama.aborted
    with gateway.leaving(model="tiny", hold=True):
        until(lambda: llama.in_flight == 1, 5, "the worker has it")
    until(lambda: llama.in_flight == 0 and llama.aborted == before + 1, 2, "the worker stops")


def test_a_conversation_returns_to_its_copy(gateway: Installed) -> None:
    served: dict[str, set[str | None]] = {}
    for turn in range(4):
        for subject in ("bees", "boats", "bread", "bridges", "bells", "birds"):
            messages = [{"role": "user", "content": f"Tell me about {subject}"}] + [
                {"role": "user", "content": f"More, {number}"} for number in range(turn)
            ]
            answer = gateway.ask("POST", CHAT, {"model": MODEL, "messages": messages, "max_tokens": 1}, 60)
            served.setdefault(subject, set()).add(answer.served_by)
    assert {len(copies) for copies in served.values()} == {1}


def test_requests_wait_for_the_first_copy_that_is_back(
    gateway: Installed, copies: list[Copy], figure: Figure
) -> None:
    for copy in copies:
        copy.stop()
    until(lambda: not any(gateway.lives(copy.name) for copy in copies), 5, "no copy lives")
    with ThreadPoolExecutor(20) as clients:
        waiting = [clients.submit(gateway.complete) for _ in range(20)]
        until(lambda: "gateway_held_requests 20\n" in gateway.figures(), 5, "all wait")
        # Others' models are served meanwhile, and all this is seen.
        assert gateway.complete("tiny").status == 200
        assert "held: 20" in gateway.command("show gateway")
        copies[1].start()
        began = time.monotonic()
        answers = [future.result() for future in waiting]
    figure(f"the last of 20 answered {time.monotonic() - began:.2f} s after the copy served")
    assert Counter((answer.status, answer.served_by) for answer in answers) == {(200, "copy-2"): 20}
    assert time.monotonic() - began < 3
    copies[0].start()


def test_nobody_waits_longer_than_asked(gateway: Installed, copies: list[Copy]) -> None:
    for copy in copies:
        copy.stop()
    until(lambda: not any(gateway.lives(copy.name) for copy in copies), 5, "no copy lives")
    gateway.command("set map /etc/haproxy/hold.map seconds 1")
    answer = gateway.complete()
    assert (answer.status, answer.headers["retry-after"]) == (503, "10")
    assert 0.9 < answer.seconds < 5
    gateway.command("set map /etc/haproxy/hold.map seconds 30")
    for copy in copies:
        copy.start()


def test_a_rolling_restart_and_reloads_lose_nothing(
    gateway: Installed, copies: list[Copy], figure: Figure
) -> None:
    url = f"http://{gateway.address}:8080"
    with Load(url, clients=16, tokens=(40, 160), key=KEYS["alice"]) as load:
        time.sleep(2)
        for copy in copies:
            gateway.run("systemctl reload haproxy")
            copy.stop()
            gateway.run("systemctl reload haproxy")
            copy.start()
            until(lambda: gateway.lives(copy.name), 30, f"{copy.name} is back")  # noqa: B023  (called at once)
            time.sleep(1)
    figure(str(load))
    assert load.failed == 0
    assert {reply.worker for reply in load.replies} == {"copy-1", "copy-2"}


def test_a_death_is_never_taken_for_an_answer(gateway: Installed, copies: list[Copy], figure: Figure) -> None:
    with Load(f"http://{gateway.address}:8080", clients=16, tokens=(40, 160), key=KEYS["alice"]) as load:
        time.sleep(2)
        copies[0].kill()
        died = time.monotonic()
        time.sleep(2)
        copies[0].start()
        until(lambda: gateway.lives("copy-1"), 30, "it is back")
        time.sleep(1)
    figure(str(load))
    assert not set(load.kinds) & set(DECEITS)
    # At most what the dead one had in hand; nothing that came half a second later.
    assert load.failed <= 12
    assert set(load.since(died + 0.5)) == {"whole"}
    assert {reply.worker for reply in load.replies if reply.kind != "whole"} <= {"copy-1", ""}


def test_a_worker_that_hangs_on_connecting_costs_little(gateway: Installed) -> None:
    """The host of copy-1 swallows all packets: clients are served by the other one after the connect timeout."""
    rule = f"OUTPUT --destination {FARM} --protocol tcp --dport 29001 --jump DROP"
    with ExitStack() as mended:
        gateway.run(f"iptables --append {rule}")
        mended.callback(gateway.run, f"iptables --delete {rule}")
        answers = all_at_once([gateway.complete] * 12)
        assert {answer.status for answer in answers} == {200}
        assert max(answer.seconds for answer in answers) < 3


def test_only_the_host_reads_metrics(gateway: Installed) -> None:
    with pytest.raises(OSError, match="refused"):
        Gateway(Path(), 8405, 8405, 0, address=gateway.address).get("/metrics")
    gateway.post(CHAT, b"{}")
    counts = gateway.figures()
    assert 'gateway_refused_requests_total{reason="no_model"} 0\n' not in counts
    assert 'gateway_worker_models{worker="copy-1"} 1\n' in counts
    assert "gateway_task_failures_total 0\n" in counts, gateway.command("show gateway")
    assert 'haproxy_server_status{proxy="workers",server="copy-1",state="UP"} 1' in gateway.figures(
        "/metrics?scope=server"
    )
