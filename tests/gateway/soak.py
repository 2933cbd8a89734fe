# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers of all kinds that break at random under a mixed load: is anything left over in the end?

usage: python -m tests.gateway.soak [--minutes M] [--seed S]

Prints what clients saw and HAProxy's memory over time; ends with status 1 where a request is still counted as in flight,
memory has grown by more than a tenth since the first quarter, the gateway's program has failed, or a stream was whole in
appearance only.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gateway.conftest import CONFIGURATIONS, PORTS, SPARKS, Ansible, gateway_of, render
from tests.gateway.rig import MODEL, Gateway, Worker, until

CLIENTS = 24
# Name of each worker to what it is.
WORKERS: dict[str, dict[str, Any]] = {
    "a": {"name": "spark-a", "health_port": PORTS["a-agent"]},
    "b": {"name": "spark-b", "health_port": PORTS["b-agent"]},
    "box": {
        "kind": "ollama",
        "health_path": "/api/version",
        "models": ["small:latest"],
        "loadable": ["large:70b"],
    },
    "swap": {"kind": "llama_swap", "models": [], "loadable": ["coder", MODEL]},
    "embed": {"kind": "openai", "models": ["embedder"], "health_port": PORTS["embed"]},
}
MODELS = [MODEL] * 6 + ["chat", "small", "large:70b", "coder", "embedder", "unknown"]


def make_workers() -> list[Worker]:
    workers = []
    for port, values in WORKERS.items():
        health_port = values.get("health_port", PORTS.get(f"{port}-health", PORTS[port]))
        worker = Worker(values.get("name", port), PORTS[port], health_port)
        for name, value in values.items():
            if name not in ("name", "health_port"):
                setattr(worker, name, value)
        workers.append(worker.start())
    return workers


class Load:
    """Clients that ask for this and that, and judge what they get."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.ended = gateway, threading.Event()
        self.seen: Counter[str] = Counter()
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]

    def _ask(self, seed: int) -> None:
        chosen = random.Random(seed)
        while not self.ended.is_set():
            try:
                self.seen[self._once(chosen)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.seen[f"broken: {type(error).__name__}"] += 1
            time.sleep(chosen.uniform(0, 0.3))

    def _once(self, chosen: random.Random) -> str:
        what: dict[str, Any] = {"model": chosen.choice(MODELS)}
        kind = chosen.randrange(10)
        if kind == 0:
            with self.gateway.leaving(**what, seconds=1):
                time.sleep(chosen.uniform(0, 0.2))
            return "left"
        if kind == 1:
            return f"list: {self.gateway.get('/v1/models').status}"
        if kind < 6:
            what["note"] = "x" * chosen.choice([0, 1000, 100_000, 1_000_000])
            return f"reply: {self.gateway.chat(**what, seconds=chosen.uniform(0, 0.2)).status}"
        count = chosen.randrange(1, 40)
        with self.gateway.stream(**what, chunks=count, interval=0.01) as answer:
            body = answer.read()
            if answer.status != 200:
                return f"stream: {answer.status}"
            whole = body.count(b'data: {"number"') == count and body.endswith(b"data: [DONE]\n\n")
            return "stream: whole" if whole else "stream: FALSELY WHOLE"

    @contextlib.contextmanager
    def running(self) -> Any:
        for thread in self.threads:
            thread.start()
        yield self
        self.ended.set()
        for thread in self.threads:
            thread.join()


def break_something(chosen: random.Random, workers: list[Worker], gateway: Gateway) -> str:
    worker = chosen.choice(workers)
    fault = chosen.choice(["stop", "health", "catalogue", "fails", "models", "reload", "nothing"])
    if fault == "stop":
        worker.stop()
        time.sleep(chosen.uniform(0, 2))
        worker.start()
    elif fault == "health":
        worker.health = chosen.choice([404, 503])
        time.sleep(chosen.uniform(0, 2))
        worker.health = 200
    elif fault == "catalogue":
        worker.catalogue_fault = chosen.choice(["fails", "is no list", "is empty", "hangs"])
        time.sleep(chosen.uniform(0, 5))
        worker.catalogue_fault = ""
    elif fault == "fails":
        worker.fails = True
        time.sleep(0.5)
        worker.fails = False
    elif fault == "models":
        before, worker.models = worker.models, [*worker.models, f"more-{chosen.randrange(5)}"]
        time.sleep(chosen.uniform(0, 5))
        worker.models = before
    elif fault == "reload":
        gateway.reload()
    time.sleep(chosen.uniform(0, 1))
    return fault


def memory(gateway: Gateway) -> float:
    """MB of the process that serves now."""
    line = next(line for line in gateway.command("show info").splitlines() if line.startswith("Pid:"))
    status = Path(f"/proc/{line.split()[1]}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        ansible = Ansible(Path(folder))
        folders = render(ansible, {"farm": CONFIGURATIONS["farm"]}, SPARKS)
        workers = make_workers()
        with gateway_of(folders["farm"]).running() as gateway:
            until(lambda: all(gateway.takes(worker.name) for worker in workers))
            faults: Counter[str] = Counter()
            samples: list[float] = []
            ends = time.monotonic() + 60 * options.minutes
            told = 0.0
            with Load(gateway).running() as load:
                while time.monotonic() < ends:
                    faults[break_something(chosen, workers, gateway)] += 1
                    samples.append(memory(gateway))
                    if time.monotonic() - told > 60:
                        told = time.monotonic()
                        print(f"{sum(load.seen.values())} requests, {samples[-1]:.0f} MB", flush=True)
            with contextlib.suppress(AssertionError):
                until(lambda: gateway.in_flight() + gateway.waiting() == 0, 10)
            left = gateway.in_flight() + gateway.waiting()
            failures = gateway.figure("task_failures_total")
            held = gateway.held()
            served = gateway.chat().status
        for worker in workers:
            worker.stop()
    quarter = max(1, len(samples) // 4)
    first, last = max(samples[:quarter]), max(samples[-quarter:])
    print("clients:", dict(sorted(load.seen.items())))
    print("faults:", dict(faults))
    print(f"in flight {left:g}, held {held:g}, failures of the program {failures:g}, then served: {served}")
    print(f"memory: at most {first:.0f} MB in the first quarter, {last:.0f} MB in the last")
    good = (
        left == held == failures == 0
        and served == 200
        and last <= 1.1 * first
        and not load.seen["stream: FALSELY WHOLE"]
    )
    print("all is well" if good else "SOMETHING IS WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
