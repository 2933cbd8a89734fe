# SPDX-License-Identifier: GPL-3.0-or-later
"""A mixed farm behind one gateway: who gets which request, and how its llama.cpp servers are kept.

A Spark, a box with two chat models and one for embeddings are the scenario's hosts. An Ollama that loads what it is asked for, and a
server that does not tell its models, are played by tests/gateway on this machine.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host
from testinfra.utils.ansible_runner import AnsibleRunner

from installed_gateway import Installed, all_at_once
from playbook import ROOT, play
from spark import until
from tests.gateway.rig import Answer, Worker

Figure = Callable[[str], None]

KEY = "simulation-key"
# Each model with the workers that have it loaded.
WARM = {
    "simulated": {"spark-a"},
    "small": {"box-small", "ollama"},
    "small:latest": {"ollama"},
    "coder": {"box-coder"},
    "embedder": {"cpu-box-minilm"},
}
ON_DEMAND = "coder:latest"


class Box:
    """A host of the group workers."""

    def __init__(self, host: Host, address: str) -> None:
        self._host, self.address = host, address

    def run(self, command: str) -> str:
        with self._host.sudo():
            return str(self._host.check_output(command)).strip()

    def ask(self, port: int, path: str, key: str = "") -> tuple[int, str]:
        """Past the gateway; status 0 when there is no answer."""
        request = urllib.request.Request(f"http://{self.address}:{port}{path}")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def kill(self, server: str) -> None:
        self.run(f"systemctl kill --signal=KILL llama-worker-{server}")


@pytest.fixture(scope="module")
def inventory(pytestconfig: pytest.Config) -> Path:
    return ROOT / str(pytestconfig.getoption("ansible_inventory"))


@pytest.fixture(scope="module")
def installed(inventory: Path) -> Installed:
    address = AnsibleRunner(str(inventory)).get_variables("spark-a")["ansible_host"]
    host = testinfra.get_host("ansible://spark-a", ansible_inventory=str(inventory))
    return Installed(address, host, {"Content-Type": "application/json"})


def box_of(inventory: Path, name: str) -> Box:
    address = AnsibleRunner(str(inventory)).get_variables(name)["ansible_host"]
    return Box(testinfra.get_host(f"ansible://{name}", ansible_inventory=str(inventory)), address)


@pytest.fixture(scope="module")
def box(inventory: Path) -> Box:
    return box_of(inventory, "box")


@pytest.fixture(scope="module")
def cpu_box(inventory: Path) -> Box:
    return box_of(inventory, "cpu-box")


@pytest.fixture
def played(inventory: Path) -> Iterator[dict[str, Worker]]:
    """The Ollama and the one that does not tell, as the inventory lists them."""
    found = {}
    for said in AnsibleRunner(str(inventory)).get_variables("spark-a")["gateway_workers"]:
        worker = Worker(said["name"], said["port"], said["port"], said["address"])
        worker.kind = said["kind"]
        found[said["name"]] = worker
    ollama, mute = found["ollama"], found["mute"]
    ollama.health_path, ollama.loads = "/api/version", True
    ollama.models, ollama.loadable = ["small:latest"], [ON_DEMAND]
    mute.models, mute.catalogue_fault = [], "fails"
    for worker in found.values():
        worker.start()
    yield found
    for worker in found.values():
        worker.stop()


@pytest.fixture
def gateway(installed: Installed, played: dict[str, Worker]) -> Installed:
    """With every worker live."""
    wanted = {**dict.fromkeys(set().union(*WARM.values()), "read"), "mute": "failed"}
    until(lambda: states(installed) == wanted, 40, "all live, and one does not tell its models")
    until(lambda: ON_DEMAND in catalogue(installed)["ollama"]["cold"], 5, "the test before is forgotten")
    return installed


def catalogue(gateway: Installed) -> dict[str, dict[str, Any]]:
    """What the gateway knows of each worker."""
    return {worker["name"]: worker for worker in json.loads(gateway.figures("/catalogue"))["workers"]}


def states(gateway: Installed) -> dict[str, str]:
    return {name: worker["state"] for name, worker in catalogue(gateway).items()}


def ask(gateway: Installed, model: str) -> Answer:
    if model == "embedder":
        return gateway.ask("POST", "/v1/embeddings", {"model": model, "input": "hello"}, 60)
    return gateway.complete(model)


def workers_of(gateway: Installed, answers: list[Answer]) -> Counter[tuple[object, object]]:
    """The worker and the route of each answer, from the access log."""
    lines = gateway.lines()
    found = (lines[answer.headers["x-request-id"]] for answer in answers)
    return Counter((line["worker"], line["route"]) for line in found)


@pytest.mark.parametrize("model", WARM)
def test_each_model_reaches_only_workers_that_have_it(gateway: Installed, model: str) -> None:
    answers = all_at_once([lambda: ask(gateway, model)] * 8)
    assert {answer.status for answer in answers} == {200}
    assert set(workers_of(gateway, answers)) == {(worker, "warm") for worker in WARM[model]}


def test_a_mixed_load(gateway: Installed, played: dict[str, Worker], cpu_box: Box, figure: Figure) -> None:
    """Embeddings go to the box for them, chat never does, and who does not tell its models is asked for nothing."""
    models = list(WARM) * 60
    with ThreadPoolExecutor(24) as clients:
        answers = list(clients.map(lambda model: ask(gateway, model), models))
    served = Counter(zip(models, (answer.served_by for answer in answers), strict=True))
    figure(", ".join(f"{model} on {host} {count}" for (model, host), count in sorted(served.items())))
    assert {answer.status for answer in answers} == {200}
    hosts = {
        worker: worker.removesuffix("-small").removesuffix("-coder").removesuffix("-minilm")
        for worker in states(gateway)
    }
    assert set(served) == {(model, hosts[worker]) for model, workers in WARM.items() for worker in workers}
    assert served["embedder", "cpu-box"] == 60
    assert "llamacpp:tokens_predicted_total 0\n" in cpu_box.ask(8101, "/metrics", KEY)[1]
    assert played["mute"].received == []


def test_one_list_with_each_model_once(gateway: Installed) -> None:
    listed = [model["id"] for model in gateway.get("/v1/models").json["data"]]
    assert listed == sorted({*WARM, ON_DEMAND})


def test_who_would_have_to_load_it_is_the_last_resort(
    gateway: Installed, played: dict[str, Worker], box: Box, figure: Figure
) -> None:
    ollama, mute = played["ollama"], played["mute"]
    mute.stop()
    until(lambda: states(gateway)["mute"] == "down", 10, "nobody is left who does not tell")
    assert set(workers_of(gateway, [ask(gateway, "coder") for _ in range(8)])) == {("box-coder", "warm")}
    box.kill("coder")
    until(lambda: states(gateway)["box-coder"] == "down", 5, "the only one that has it is dead")
    answers = [ask(gateway, "coder") for _ in range(8)]
    assert {answer.status for answer in answers} == {200}
    served = workers_of(gateway, answers)
    assert {worker for worker, _ in served} == {"ollama"}
    assert workers_of(gateway, answers[:1]) == {("ollama", "cold"): 1}
    assert ollama.models == ["small:latest", ON_DEMAND]
    # It is started again by itself, and shares the work with who has it now, too.
    seconds = until(lambda: gateway.lives("box-coder"), 30, "the dead one is back")
    figure(f"killed: {dict(served)}; back by itself after {seconds:.0f} s")
    assert set(workers_of(gateway, [ask(gateway, "coder") for _ in range(12)])) == {
        ("box-coder", "warm"),
        ("ollama", "warm"),
    }


def test_who_does_not_tell_comes_after_who_is_known(
    gateway: Installed, played: dict[str, Worker], box: Box
) -> None:
    mute = played["mute"]
    assert {worker for worker, _ in workers_of(gateway, [ask(gateway, "coder") for _ in range(8)])} == {
        "box-coder"
    }
    assert mute.received == []
    box.kill("coder")
    until(lambda: states(gateway)["box-coder"] == "down", 5, "the one that is known is dead")
    served = workers_of(gateway, [ask(gateway, "coder") for _ in range(4)])
    assert served == {("mute", "possibly"): 4}
    assert [request.body["model"] for request in mute.received] == ["coder"] * 4
    until(lambda: gateway.lives("box-coder"), 30, "the dead one is back")


def test_a_stop_finishes_what_is_in_flight(gateway: Installed, box: Box) -> None:
    """And tells gateways meanwhile that nothing new shall come."""
    with ThreadPoolExecutor(1) as client:
        long = client.submit(gateway.complete, "coder", max_tokens=900, ignore_eos=True, prompt="hello " * 10)
        until(lambda: "requests_processing 1\n" in box.ask(8102, "/metrics", KEY)[1], 5, "it is being served")
        box.run("systemctl restart --no-block llama-worker-coder")
        until(lambda: box.ask(9102, "/health") == (404, "draining\n"), 5, "it drains")
        answer = long.result()
    assert (answer.status, answer.served_by) == (200, "box")
    assert answer.json["usage"]["completion_tokens"] == 900
    until(lambda: box.ask(9102, "/health") == (200, "serving\n"), 30, "it serves")
    until(lambda: gateway.lives("box-coder"), 30, "it is back")


def test_servers_are_kept_apart_from_all_else(box: Box, cpu_box: Box, figure: Figure) -> None:
    for host, server in ((box, "small"), (box, "coder"), (cpu_box, "minilm")):
        unit = f"llama-worker-{server}"
        shown = dict(
            line.split("=", 1)
            for line in host.run(
                f"systemctl show {unit} -p User,MemoryMax,Restart,ActiveState,UnitFileState,StatusText,MainPID"
            ).splitlines()
        )
        pid = shown.pop("MainPID")
        assert shown == {
            "User": "llama-worker",
            "MemoryMax": str(2**29),
            "Restart": "on-failure",
            "ActiveState": "active",
            "UnitFileState": "enabled",
            "StatusText": f"serving {'embedder' if server == 'minilm' else server}",
        }
        assert host.run(f"stat --format %U /proc/{pid}") == "llama-worker"
        exposure = host.run(f"systemd-analyze security {unit} | tail -n 1")
        assert float(exposure.split(": ")[1].split()[0]) < 2, exposure
        memory = host.run(f"grep VmRSS /proc/{pid}/status")
        figure(f"{unit}: {' '.join(memory.split()[1:])}; {exposure.split(': ')[1]}")
        everything = f"systemctl cat {unit}; journalctl --boot --no-pager --identifier {unit}; ps -eo args; cat /etc/llama-worker/*.json"
        assert KEY not in host.run(everything)
    assert box.run("stat --format %a:%U:%G /etc/llama-worker/api_key") == "640:root:llama-worker"


def test_nobody_comes_past_the_gateway(box: Box) -> None:
    assert box.ask(8101, "/v1/models")[0] == 401
    assert box.ask(8101, "/v1/models", "wrong")[0] == 401
    assert box.ask(8101, "/metrics")[0] == 401
    assert box.ask(8101, "/v1/models", KEY)[0] == 200


def test_a_new_key_reaches_every_server(box: Box, inventory: Path) -> None:
    def both(key: str) -> list[int]:
        return [box.ask(port, "/v1/models", key)[0] for port in (8101, 8102)]

    status, told = play("site.yml", "--limit=box", "-e", "worker_api_key=another-key", inventory=inventory)
    assert status == 0, told
    assert (both("another-key"), both(KEY)) == ([200, 200], [401, 401])
    status, told = play("site.yml", "--limit=box", inventory=inventory)
    assert status == 0, told
    assert (both("another-key"), both(KEY)) == ([401, 401], [200, 200])
    pids = box.run("systemctl show llama-worker-small llama-worker-coder -p MainPID --value")
    status, told = play("site.yml", "--limit=box", inventory=inventory)
    assert (status, "changed=0" in told.rpartition("box :")[2]) == (0, True), told
    assert box.run("systemctl show llama-worker-small llama-worker-coder -p MainPID --value") == pids


def test_a_server_that_cannot_be_is_told_and_one_that_is_not_listed_goes(
    gateway: Installed, inventory: Path, cpu_box: Box
) -> None:
    def site(*servers: dict[str, object]) -> tuple[int, str]:
        said = json.dumps({"worker_servers": servers})
        return play("site.yml", "--limit=cpu-box", f"--extra-vars={said}", inventory=inventory)

    server: dict[str, object] = {
        "name": "minilm",
        "path": "/srv/gguf/embedder.gguf",
        "port": 8101,
        "memory_gib": 0.5,
    }
    status, told = site({**server, "port": 80000})
    assert status != 0
    assert "port is 80000; allowed is a whole number from 1 to 65535" in told
    status, told = site(
        {**server, "options": {"n_cpu": 3}}, {**server, "name": "second", "port": 8102, "embeddings": True}
    )
    assert status != 0
    # One that fails keeps none from serving that comes after it.
    assert cpu_box.run("systemctl is-active llama-worker-second") == "active"
    assert "llama-worker-minilm.service on cpu-box does not serve" in told
    assert "llama.cpp has no parameter 'n_cpu'; mend the options of this server in worker_servers" in told
    assert cpu_box.run("systemctl show llama-worker-minilm -p NRestarts --value") == "0"
    status, told = site()
    assert status == 0, told
    assert cpu_box.run("ls /etc/systemd/system | grep llama-worker || true") == ""
    until(lambda: states(gateway)["cpu-box-minilm"] == "down", 10, "the gateway has seen it")


def test_a_fail_over_that_would_be_felt_is_warned_of(
    installed: Installed, inventory: Path, played: dict[str, Worker]
) -> None:
    """By both playbooks, and it fails neither. What the test before took away comes back."""
    coder = (
        "The model coder (gateway_critical_models) is loaded on box-coder alone; should that be lost, requests wait until ollama has "
        "loaded it (a cold load). To have it on two: ask ollama for it once and let it stay loaded there"
    )
    status, told = play("site.yml", inventory=inventory)
    assert status == 0, told
    # What is as it was is left alone.
    assert re.search(r" box : ok=\d+ changed=0 .* spark-a : ok=\d+ changed=0 ", told), told
    assert coder in told
    assert "The model small" not in told
    played["ollama"].load(ON_DEMAND)
    until(
        lambda: ON_DEMAND in catalogue(installed)["ollama"]["warm"],
        10,
        "it is loaded there",
    )
    status, told = play("status.yml", inventory=inventory)
    assert status == 0, told
    assert "gateway_critical_models" not in told
    played["ollama"].stop()
    until(lambda: states(installed)["ollama"] == "down", 10, "it is gone")
    status, told = play("status.yml", inventory=inventory)
    assert status == 0, told
    assert "The model small (gateway_critical_models) is loaded on box-small alone" in told
    assert "bring back ollama, which had it or shall have it" in told
