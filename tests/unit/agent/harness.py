# SPDX-License-Identifier: GPL-3.0-or-later
"""One Spark for the tests: the real agent process, a fake docker in its PATH, and a systemd that listens."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[2] / "roles/vllm/files"
API_KEY = "sk-0123456789"
PATIENCE = 15.0  # seconds; generous, as a test machine may be busy
START = (
    "import sys, pathlib, vllm_agent.__main__ as m; sys.exit(m.main(sys.argv[2:], pathlib.Path(sys.argv[1])))"
)


# Each suite, and each of its parallel processes, has ports of its own; none is given twice soon.
_FIRST_PORT = 20000 + 400 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 400))


def free_port() -> int:
    """A port that nobody listens on, that the kernel gives to no connection, and that no other test process takes."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("never reached: the ports go round")


def wait_until(condition: Callable[[], Any], what: Callable[[], str], seconds: float = PATIENCE) -> Any:
    """Wait until `condition()` is true and return its value; `what()` tells what was waited for."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.02)
    return value


class Spark:
    """A host in `folder`. Change `config` and `order(...)` before or while the agent runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("bin", "docker", "state", "model", "proc"):
            (folder / name).mkdir(parents=True)
        client = folder / "bin/docker"
        client.write_text(f"#!{sys.executable} -IS\n" + (HERE / "fake_docker.py").read_text())
        client.chmod(0o755)
        self.memory(100)
        self.control = folder / "control.json"
        self.order()
        self.environment_file = folder / "engine.env"
        self.environment_file.write_text(f"# engine\nVLLM_API_KEY={API_KEY}\nA=1\n")
        self.notifications = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notifications.bind(str(folder / "notify"))
        self.notifications.settimeout(0.2)
        self.messages: list[str] = []
        self._listening = True
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.watchdog_seconds = 0.6
        self.path = f"{folder / 'bin'}:{os.environ['PATH']}"
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "journal"
        port = free_port()
        self.config: dict[str, Any] = {
            "mode": "replica",
            "unit": "vllm-replica.service",
            "container": "vllm-replica",
            "image": "vllm:test",
            "model": str(folder / "model"),
            "served_model_name": "tiny",
            "command": [
                "docker",
                "run",
                "--rm",
                "--name",
                "vllm-replica",
                "vllm:test",
                "--control",
                str(self.control),
                "--port",
                str(port),
            ],
            "environment_file": str(self.environment_file),
            "api": {"port": port},
            "agent": {"port": free_port()},
            "memory": {"budget_gib": 50, "wait_seconds": 1, "drop_page_cache": False},
            "timeouts": {
                "start": 10,
                "verify": 5,
                "drain": 10,
                "drain_notice": 0.3,
                "engine_shutdown": 0.5,
                "container_stop": 1,
            },
            "start_limit": {"burst": 3, "served_seconds": 60},
            "watchdog": {"interval": 0.2, "canary_timeout": 0.5, "strikes": 3},
            "pair": None,
        }

    def __enter__(self) -> Spark:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.journal())
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if engine := self.engine_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGKILL)
        self._listening = False
        self._listener.join()
        self.notifications.close()

    def join_pair(self, rank: int, head: Spark) -> None:
        """Become rank 0 or 1 of a pair whose head is `head`."""
        port = free_port() if rank == 0 else head.config["pair"]["heartbeat_port"]
        self.config |= {
            "mode": "tp",
            "unit": "vllm-tp.service",
            "model": str(head.folder / "model"),
            "pair": {
                "rank": rank,
                "size": 2,
                "head": "127.0.0.2",
                "peer": "127.0.0.1" if rank == 0 else "127.0.0.2",
                "heartbeat_port": port,
                "peer_wait_seconds": 10,
                "heartbeat_timeout": 2,
            },
        }
        if rank == 1:
            self.config["api"] = None

    def memory(self, available_gib: float) -> None:
        """Set what the agent takes for the host's available memory."""
        new = self.folder / "proc/new"
        new.write_text(f"MemTotal: 1 kB\nMemAvailable: {round(available_gib * 2**20)} kB\n")
        new.replace(self.folder / "proc/meminfo")

    def order(self, **orders: Any) -> None:
        """Tell the fake engine how to behave; see fake_engine.py."""
        new = self.control.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self.control)

    def start(self) -> None:
        """Start the agent as systemd would."""
        file = self.folder / "config.json"
        file.write_text(json.dumps(self.config))
        environment = {
            "PATH": self.path,
            "PYTHONPATH": str(PACKAGE),
            "NOTIFY_SOCKET": str(self.folder / "notify"),
            "WATCHDOG_USEC": str(round(self.watchdog_seconds * 1e6)),
            "STATE_DIRECTORY": str(self.folder / "state"),
            "FAKE_DOCKER_STATE": str(self.folder / "docker"),
            "FAKE_ENGINE": str(HERE / "fake_engine.py"),
            "FAKE_ENGINE_TELLS": API_KEY,
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, str(self.folder / "proc"), "--config", str(file)],
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def terminate(self) -> None:
        """Send the agent, and only it, SIGTERM as KillMode=mixed does."""
        assert self.process is not None
        self.process.terminate()

    def exit_status(self, seconds: float = PATIENCE) -> int:
        """Wait for the agent's end."""
        assert self.process is not None
        return self.process.wait(seconds)

    def _listen(self) -> None:
        while self._listening:
            with contextlib.suppress(TimeoutError):
                self.messages += self.notifications.recv(65536).decode().split("\n")

    def wait_for(self, message: str) -> None:
        """Wait until systemd is told something that begins with `message`."""

        def told() -> bool:
            return any(each.startswith(message) for each in self.messages)

        wait_until(told, lambda: f"{message}, got {self.messages[-3:]}")

    def ready(self) -> None:
        """Start the agent and wait until it is serving."""
        self.start()
        self.wait_for("READY=1")

    def ready_when_busy(self) -> None:
        """Start the agent on an engine that only becomes busy, as ordered now, once it is serving."""
        orders = self.control.read_text()
        self.order()
        self.ready()
        self.order(**json.loads(orders))

    def get(self, path: str) -> tuple[int, str]:
        """Ask the agent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.config["agent"]["port"], timeout=5)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def phase(self) -> str:
        """The agent's phase; empty while it does not answer."""
        try:
            return str(json.loads(self.get("/status")[1])["phase"])
        except OSError:
            return ""

    def wait_for_phase(self, phase: str) -> None:
        """Wait until the agent says it is in this phase."""
        wait_until(lambda: self.phase() == phase, lambda: f"phase {phase}, is {self.phase()}")

    def journal(self) -> str:
        """What the agent and its engine have logged."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def engine_pid(self) -> int | None:
        """The running container's engine."""
        try:
            return int((self.folder / "docker" / self.config["container"]).read_text())
        except (FileNotFoundError, ValueError):
            return None

    @property
    def client_pid(self) -> int:
        """The docker client that the agent runs: the parent of the engine."""
        fields = Path(f"/proc/{self.engine_pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[1])

    @property
    def docker_calls(self) -> list[str]:
        """The docker commands so far."""
        return (self.folder / "docker/calls").read_text().splitlines()

    @property
    def started_containers(self) -> list[str]:
        """Their names, one for each start."""
        return [
            call.split()[call.split().index("--name") + 1]
            for call in self.docker_calls
            if call.startswith("run")
        ]

    @property
    def history(self) -> dict[str, Any]:
        """What the agent remembers on disk."""
        text = (self.folder / "state" / f"{self.config['mode']}-history.json").read_text()
        document: dict[str, Any] = json.loads(text)
        return document
