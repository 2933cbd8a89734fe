# SPDX-License-Identifier: GPL-3.0-or-later
"""The role's own templates, rendered once by Ansible, and a real HAProxy on them between fake workers and clients.

Needs the command haproxy (HAPROXY names another one); all on the loopback.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from tests.gateway.rig import LOOPBACK, MODEL, Clients, Gateway, Worker, free_port, until  # noqa: E402  (found through the line above)

# Where HAProxy gives up its rights; an ordinary user has none to give up.
RIGHTS = re.compile(r"^    (chroot|user|group) .*\n", re.MULTILINE)


@dataclass
class Ansible:
    """Runs one of this folder's playbooks from the checkout, on hosts that are all this machine."""

    directory: Path

    def run(
        self,
        playbook: str,
        gateways: dict[str, Any],
        sparks: dict[str, Any],
        *arguments: str,
        **variables: Any,
    ) -> subprocess.CompletedProcess[str]:
        inventory = {
            "all": {
                "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
                "children": {"gateways": {"hosts": gateways}, "sparks": {"hosts": sparks}},
            }
        }
        path = self.directory / "inventory.json"
        path.write_text(json.dumps(inventory))
        command = [sys.executable, "-m", "ansible", "playbook", "-i", str(path), str(HERE / playbook)]
        command += ["-e", json.dumps({"directory": str(self.directory), **variables}), *arguments]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
        )

    def check(
        self, gateways: dict[str, Any], sparks: dict[str, Any], *arguments: str
    ) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
        """Let the role check the variables of each gateway; return what it complained of by host, too."""
        for path in self.directory.glob("*.problem"):
            path.unlink()
        done = self.run("check.yml", gateways, sparks, *arguments)
        return done, {path.stem: path.read_text() for path in self.directory.glob("*.problem")}


# The API port of a Spark is the same in both modes; which mode it is, its agents' ports tell.
_OF_THE_PAIR = ("gateway", "metrics", "log", "a", "a-agent", "a-tp-agent", "b", "b-agent")
_OF_OTHERS = ("box", "box-health", "swap", "swap-health", "embed")
PORTS = {name: free_port() for name in (*_OF_THE_PAIR, *_OF_OTHERS)}
MANY_PORTS = [free_port() for _ in range(50)]
SPARK_A = {
    "keep_alive": 2,
    "name": "spark-a",
    "kind": "vllm",
    "models": [MODEL],
    "address": LOOPBACK,
    "port": PORTS["a"],
    "health_port": PORTS["a-agent"],
    "max_requests": 12,
}
SPARK_B = {
    "keep_alive": 2,
    "name": "spark-b",
    "kind": "vllm",
    "models": [MODEL],
    "address": LOOPBACK,
    "port": PORTS["b"],
    "health_port": PORTS["b-agent"],
    "max_requests": 12,
}
HEAD = {
    **SPARK_A,
    "name": "spark-a-tp",
    "host": "spark-a",
    "health_port": PORTS["a-tp-agent"],
    "max_requests": 4,
}
# Further workers: of two kinds that load on demand, and one that has a key of its own.
BOX = {
    "name": "box",
    "kind": "ollama",
    "address": LOOPBACK,
    "port": PORTS["box"],
    "health_port": PORTS["box-health"],
    "max_requests": 4,
}
SWAP = {
    **BOX,
    "name": "swap",
    "kind": "llama_swap",
    "port": PORTS["swap"],
    "health_port": PORTS["swap-health"],
}
EMBED = {
    **BOX,
    "name": "embed",
    "kind": "openai",
    "key": "sk-the-embedders-own-key",
    "port": PORTS["embed"],
}
# It answers for its health itself.
del EMBED["health_port"]
COMMON = {
    "gateway_sparks": [],
    "gateway_address": LOOPBACK,
    "gateway_port": PORTS["gateway"],
    "gateway_metrics_port": PORTS["metrics"],
    "gateway_log": f"{LOOPBACK}:{PORTS['log']}",
}
KEYS = {"alice": "alice-0123456789abcdef", "bob": "bob-0123456789abcdef", "operator": "sk-the-workers-key"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    # Two copies and the pair's head.
    "pair": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B, HEAD],
        "gateway_api_key": "sk-the-workers-key",
        "gateway_hold_seconds": 0,
    },
    # The same, and conversations return to their copy.
    "affine": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B, HEAD],
        "gateway_api_key": "sk-the-workers-key",
        "gateway_hold_seconds": 0,
        "gateway_affinity": True,
    },
    # The same as the first, for two clients that have keys.
    "keyed": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B, HEAD],
        "gateway_api_key": "sk-the-workers-key",
        "gateway_clients": [
            {"name": "alice", "key": KEYS["alice"], "max_requests": 2},
            {
                "name": "bob",
                "key_sha256": hashlib.sha256(KEYS["bob"].encode()).hexdigest(),
                "requests_per_minute": 5,
            },
        ],
    },
    # The same over TLS.
    "secured": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B],
        "gateway_tls_certificate": "{{ directory }}/secured.pem",
    },
    # The same over TLS, for a client that has a key.
    "sealed": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B],
        "gateway_tls_certificate": "{{ directory }}/secured.pem",
        "gateway_api_key": KEYS["operator"],
        "gateway_clients": [{"name": "alice", "key": KEYS["alice"]}],
    },
    # The same, and requests are held for a while when none of them lives.
    "holding": {**COMMON, "gateway_workers": [SPARK_A, SPARK_B, HEAD], "gateway_hold_seconds": 4},
    # A pair and others, one model under two names, and what waits may spill over.
    "farm": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B, BOX, SWAP, EMBED],
        "gateway_api_key": "sk-the-workers-key",
        "gateway_hold_seconds": 2,
        "gateway_aliases": {"chat": MODEL},
        "gateway_spill_after": 3,
    },
    # Fewer pools than there are sets of workers.
    "crowded": {
        **COMMON,
        "gateway_workers": [SPARK_A, SPARK_B, BOX],
        "gateway_hold_seconds": 0,
        "gateway_pools": 3,
    },
    # One copy that is to have three times as much as the other.
    "weighted": {**COMMON, "gateway_workers": [{**SPARK_A, "weight": 3}, SPARK_B]},
    # Many small workers, each with models of its own.
    "large": {
        **COMMON,
        "gateway_workers": [
            {"name": f"worker-{index}", "address": LOOPBACK, "port": port, "max_requests": 2}
            for index, port in enumerate(MANY_PORTS)
        ],
        "gateway_pools": len(MANY_PORTS),
    },
    # Two workers with one place each.
    "narrow": {
        **COMMON,
        "gateway_workers": [{**SPARK_A, "max_requests": 1}, {**SPARK_B, "max_requests": 1}],
        "gateway_hold_seconds": 10,
    },
    # Long requests.
    "long": {**COMMON, "gateway_workers": [SPARK_A], "gateway_max_body_mib": 32, "gateway_hold_seconds": 0},
    # One worker that takes one request at a time, no key, and little patience.
    "single": {
        **COMMON,
        "gateway_workers": [{**SPARK_A, "max_requests": 1}],
        "gateway_connect_timeout": 1,
        "gateway_hold_seconds": 0,
        "gateway_queue_timeout": 1,
        "gateway_stream_timeout": 3,
        "gateway_retry_after": 7,
    },
    # The same worker, which may take its time once it has a request, and one that loads what it is asked for.
    "brief": {
        **COMMON,
        "gateway_workers": [{**SPARK_A, "max_requests": 1}, SWAP],
        "gateway_hold_seconds": 0,
        "gateway_queue_timeout": 3,
    },
    # The same worker, and all the patience that is usual.
    "patient": {**COMMON, "gateway_workers": [{**SPARK_A, "max_requests": 1}]},
    # A copy and a server of embeddings, for clients with keys that shall come again soon.
    "sdk": {
        **COMMON,
        "gateway_workers": [SPARK_A, EMBED],
        "gateway_api_key": KEYS["operator"],
        "gateway_clients": [
            {"name": "alice", "key": KEYS["alice"], "max_requests": 1},
            {"name": "bob", "key": KEYS["bob"], "requests_per_minute": 1},
        ],
        "gateway_hold_seconds": 5,
        "gateway_retry_after": 1,
    },
    # Nothing but the addresses given: the workers come from the group of Sparks.
    "default": {"ansible_host": "192.0.2.20"},
}
SPARKS = {
    "spark-a": {"ansible_host": "192.0.2.11", "fabric_address": "198.51.100.11"},
    "spark-b": {"ansible_host": "192.0.2.12", "fabric_address": "198.51.100.12", "vllm_max_requests": 8},
}


@pytest.fixture(scope="session")
def ansible(tmp_path_factory: pytest.TempPathFactory) -> Ansible:
    return Ansible(tmp_path_factory.mktemp("ansible"))


def make_certificate(path: Path) -> None:
    """A certificate for this machine's loopback address, and its key, in one file."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 2 -subj /CN=test"
    )
    names = ["-addext", f"subjectAltName=IP:{LOOPBACK}", "-keyout", str(path), "-out", str(path)]
    path.unlink(missing_ok=True)
    subprocess.run([*command.split(), *names], check=True, stderr=subprocess.DEVNULL)


def render(ansible: Ansible, gateways: dict[str, Any], sparks: dict[str, Any]) -> dict[str, Path]:
    """The folder with the rendered configuration of each gateway, ready for HAProxy. benchmarks/gateway calls it too."""
    done = ansible.run(
        "render.yml",
        gateways,
        sparks,
        __gateway_keys="{{ directory }}/{{ inventory_hostname }}/keys.map",
        __gateway_client_keys="{{ directory }}/{{ inventory_hostname }}/clients.map",
        __gateway_hold_map="{{ directory }}/{{ inventory_hostname }}/hold.map",
        __gateway_health_paths="{{ directory }}/{{ inventory_hostname }}/health.map",
        __gateway_routes="{{ directory }}/{{ inventory_hostname }}/routes.map",
        __gateway_routing="{{ directory }}/{{ inventory_hostname }}/routing.json",
        __gateway_program_folder=str(ROOT / "roles/gateway/files/lua"),
        __gateway_socket="{{ directory }}/{{ inventory_hostname }}/admin.sock",
        __gateway_vllm=str(ROOT / "roles/vllm"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folders = {name: ansible.directory / name for name in gateways}
    if os.geteuid() != 0:
        for folder in folders.values():
            path = folder / "haproxy.cfg"
            path.write_text(RIGHTS.sub("", path.read_text()).replace(" user root group haproxy", ""))
    return folders


@pytest.fixture(scope="session")
def configurations(ansible: Ansible) -> dict[str, Path]:
    """The folder of each rendered configuration."""
    folders = render(ansible, CONFIGURATIONS, SPARKS)
    make_certificate(ansible.directory / "secured.pem")
    return folders


def gateway_of(folder: Path) -> Gateway:
    return Gateway(folder, PORTS["gateway"], PORTS["metrics"], PORTS["log"])


def over_tls(folder: Path) -> Gateway:
    gateway = gateway_of(folder)
    gateway.certificate = folder.parent / "secured.pem"
    return gateway


@pytest.fixture
def spark_a() -> Iterator[Worker]:
    worker = Worker("spark-a", PORTS["a"], PORTS["a-agent"]).start()
    yield worker
    worker.stop()


@pytest.fixture
def spark_b() -> Iterator[Worker]:
    worker = Worker("spark-b", PORTS["b"], PORTS["b-agent"]).start()
    yield worker
    worker.stop()


@pytest.fixture
def gateway(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """In front of two live copies; the pair's head is not live, as in mode replica."""
    with gateway_of(configurations["pair"]).running() as gateway:
        # At its start HAProxy takes every worker for live until it has checked it.
        until(lambda: not gateway.is_live("spark-a-tp"))
        until(lambda: gateway.takes("spark-a") and gateway.takes("spark-b"))
        yield gateway


@pytest.fixture
def weighted(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """In front of two live copies, the first of which has three times the weight."""
    with gateway_of(configurations["weighted"]).running() as gateway:
        until(lambda: gateway.takes("spark-a") and gateway.takes("spark-b"))
        yield gateway


@pytest.fixture
def affine(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """In front of two live copies that conversations return to."""
    with gateway_of(configurations["affine"]).running() as gateway:
        until(
            lambda: (
                not gateway.is_live("spark-a-tp") and gateway.takes("spark-a") and gateway.takes("spark-b")
            )
        )
        yield gateway


@pytest.fixture
def keyed(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """In front of two live copies, for clients with keys only."""
    with gateway_of(configurations["keyed"]).running() as gateway:
        until(lambda: not gateway.is_live("spark-a-tp"))
        yield gateway


@pytest.fixture
def secured(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """In front of two live copies, for clients that speak HTTPS."""
    with over_tls(configurations["secured"]).running() as gateway:
        yield gateway


@pytest.fixture
def sealed(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """The same, for a client with a key."""
    with over_tls(configurations["sealed"]).running() as gateway:
        until(lambda: gateway.takes("spark-a") and gateway.takes("spark-b"))
        yield gateway


def worker_of(name: str, **attributes: Any) -> Iterator[Worker]:
    """One of the further workers, with what is said of it."""
    worker = Worker(name, PORTS[name], PORTS.get(f"{name}-health", PORTS[name]))
    for attribute, value in attributes.items():
        setattr(worker, attribute, value)
    yield worker.start()
    worker.stop()


@pytest.fixture
def box() -> Iterator[Worker]:
    """An Ollama with one model loaded and one that it could load."""
    yield from worker_of(
        "box", kind="ollama", health_path="/api/version", models=["small:latest"], loadable=["large:70b"]
    )


@pytest.fixture
def swap() -> Iterator[Worker]:
    """A llama-swap that has nothing loaded."""
    yield from worker_of("swap", kind="llama_swap", models=[], loadable=["coder", MODEL])


@pytest.fixture
def embed() -> Iterator[Worker]:
    """A server of embeddings."""
    yield from worker_of("embed", kind="openai", models=["embedder"])


@pytest.fixture
def farm(
    configurations: dict[str, Path],
    spark_a: Worker,
    spark_b: Worker,
    box: Worker,
    swap: Worker,
    embed: Worker,
) -> Iterator[Gateway]:
    """In front of workers of all kinds."""
    with gateway_of(configurations["farm"]).running() as gateway:
        until(lambda: all(gateway.takes(name) for name in ("spark-a", "spark-b", "box", "swap", "embed")))
        yield gateway


@pytest.fixture
def long(configurations: dict[str, Path], spark_a: Worker) -> Iterator[Gateway]:
    """In front of one worker, for requests of up to 32 MiB."""
    with gateway_of(configurations["long"]).running() as gateway:
        until(lambda: gateway.takes("spark-a"))
        yield gateway


@pytest.fixture
def holding(configurations: dict[str, Path], spark_a: Worker, spark_b: Worker) -> Iterator[Gateway]:
    """In front of two copies that load, and with a wait for that."""
    spark_a.health = spark_b.health = 503
    with gateway_of(configurations["holding"]).running() as gateway:
        until(gateway.has_nobody)
        yield gateway


@pytest.fixture
def brief(configurations: dict[str, Path], spark_a: Worker, swap: Worker) -> Iterator[Gateway]:
    """In front of a worker that takes one request at a time, for which nobody waits long, and one that could load its model."""
    with gateway_of(configurations["brief"]).running() as gateway:
        until(lambda: gateway.takes("spark-a") and gateway.takes("swap"))
        yield gateway


@pytest.fixture
def single(configurations: dict[str, Path], spark_a: Worker) -> Iterator[Gateway]:
    """In front of one live worker that takes one request at a time; impatient."""
    with gateway_of(configurations["single"]).running() as gateway:
        yield gateway


@pytest.fixture
def patient(configurations: dict[str, Path], spark_a: Worker) -> Iterator[Gateway]:
    """The same, with the patience of the role's defaults."""
    with gateway_of(configurations["patient"]).running() as gateway:
        yield gateway


@pytest.fixture
def clients(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """Of the gateway that the test uses."""
    (name,) = {
        "affine",
        "farm",
        "gateway",
        "holding",
        "keyed",
        "secured",
        "single",
        "brief",
        "patient",
    } & set(request.fixturenames) or {"gateway"}
    clients = Clients(request.getfixturevalue(name))
    yield clients
    clients.close()
