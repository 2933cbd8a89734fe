# SPDX-License-Identifier: GPL-3.0-or-later
"""What the gateway's tests are made of: workers that do as they are told, a real HAProxy, a client."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import os
import re
import select
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
HAPROXY = os.environ.get("HAPROXY", "haproxy")
CHAT = "/v1/chat/completions"
# What a worker has where a test says nothing else.
MODEL = "model-a"


# Each suite, and each of its parallel processes, has ports of its own; none is given twice soon.
_FIRST_PORT = 28800 + 400 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_PORTS = itertools.cycle(range(_FIRST_PORT, _FIRST_PORT + 400))


@functools.cache
def haproxy_version() -> tuple[int, ...]:
    """Its first two numbers."""
    said = subprocess.run([HAPROXY, "-v"], capture_output=True, text=True, check=True).stdout
    return tuple(int(number) for number in said.split()[2].split(".")[:2])


def free_port() -> int:
    """A port that nobody listens on, that the kernel gives to no connection, and that no other test process takes."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("never reached: the ports go round")


def until(condition: Callable[[], object], seconds: float = 10.0) -> float:
    """Wait until the condition holds, at most so long; return how long it took, in seconds."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise AssertionError(f"did not come true within {seconds} s")
        time.sleep(0.005)
    return time.monotonic() - started


@dataclass
class Received:
    """A request as it reached a worker."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is part of many tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Each chunk leaves at once, as an engine's does.
    wbufsize = 0
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def client_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class Worker:
    """A fake engine (API) with its agent (health), each on a port of its own.

    What a request's JSON body says is what happens: ``hold`` waits for `release`, ``seconds`` waits so long, ``status``
    answers with it, ``close`` ends the connection without an answer, ``chunks`` streams so many events ``interval``
    seconds apart, ``die_after`` breaks the connection after so many of them. A worker that `fails` answers all with 500
    at once.
    """

    def __init__(self, name: str, port: int, health_port: int, address: str = LOOPBACK) -> None:
        self.name, self.port, self.health_port, self.address = name, port, health_port, address
        self.health = 200
        self.kind, self.health_path = "vllm", "/health"
        self.health_delay = 0.0
        # How many times as long as it is told it takes.
        self.slowness = 1.0
        self.fails = False
        # What it has loaded and what it could load, told in the form of its kind; how it fails to tell; who asked.
        self.models, self.loadable = [MODEL], list[str]()
        # Whether it really loads what it is asked for, and then has it.
        self.loads = False
        self.catalogue_fault = ""
        self.catalogue_requests: list[Received] = []
        # Seconds after which it closes an idle connection, and how many connections it has had.
        self.keep_alive: float | None = None
        self.connections = 0
        self.received: list[Received] = []
        self.in_flight = self.most_in_flight = self.aborted = 0
        self._lock = threading.Lock()
        self._released = threading.Semaphore(0)
        self._api: _Server | None = None
        self._agent: _Server | None = None

    def start(self) -> Worker:
        self.start_api()
        self.start_agent()
        return self

    def stop(self) -> None:
        self.stop_api()
        self.stop_agent()

    def start_api(self) -> None:
        self._api = self._serve(self.port, self._api_handler())

    def stop_api(self) -> None:
        self._api = self._end(self._api)

    def start_agent(self) -> None:
        """Nothing to do for a worker that answers for itself."""
        if self.health_port != self.port:
            self._agent = self._serve(self.health_port, self._agent_handler())

    def stop_agent(self) -> None:
        self._agent = self._end(self._agent)

    def release(self, requests: int = 1) -> None:
        """Let so many of the requests that wait for it (``hold``) be answered."""
        self._released.release(requests)

    def hold_again(self) -> None:
        """After more were let go than there were."""
        while self._released.acquire(blocking=False):
            pass

    def _serve(self, port: int, handler: type[_Handler]) -> _Server:
        server = _Server((self.address, port), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    @staticmethod
    def _end(server: _Server | None) -> None:
        if server:
            server.shutdown()
            server.server_close()

    def load(self, name: str) -> None:
        """As Ollama does, for which a tag may be left out."""
        for model in [model for model in self.loadable if name in (model, model.removesuffix(":latest"))]:
            self.loadable.remove(model)
            self.models.append(model)

    def tell_health(self, handler: _Handler) -> None:
        time.sleep(self.health_delay)
        handler.answer(
            self.health if handler.path == self.health_path else 404, b"phase\n", connection="close"
        )

    def _agent_handler(self) -> type[_Handler]:
        worker = self

        class Agent(_Handler):
            def do_GET(self) -> None:
                worker.tell_health(self)

        return Agent

    def _api_handler(self) -> type[_Handler]:
        worker = self

        class Engine(_Handler):
            def setup(self) -> None:
                worker.connections += 1
                super().setup()
                self.connection.settimeout(worker.keep_alive)

            def do_GET(self) -> None:
                self.serve()

            do_POST = do_OPTIONS = do_DELETE = do_HEAD = do_GET

            def serve(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                if self.command == "GET" and self.path == worker.health_path:
                    return worker.tell_health(self)
                if self.command == "GET" and self.path in CATALOGUES:
                    worker.catalogue_requests.append(Received(self.command, self.path, headers, {}))
                    return self.tell_models()
                raw = self.read_body()
                try:
                    body = json.loads(raw) if raw else {}
                except ValueError:
                    body = {"raw": raw}
                with worker._lock:
                    worker.received.append(Received(self.command, self.path, headers, body))
                    worker.in_flight += 1
                    worker.most_in_flight = max(worker.most_in_flight, worker.in_flight)
                left = threading.Event()

                def leave() -> None:
                    # Before the last byte: the gateway sends the next request as soon as it has that.
                    if not left.is_set():
                        left.set()
                        with worker._lock:
                            worker.in_flight -= 1

                try:
                    self.act(body, leave)
                except OSError:
                    with worker._lock:
                        worker.aborted += 1
                finally:
                    leave()

            def read_body(self) -> bytes:
                """Of a known length, or in chunks."""
                if "chunked" not in self.headers.get("transfer-encoding", ""):
                    return self.rfile.read(int(self.headers.get("content-length", 0)))
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body

            def tell_models(self) -> None:
                fault = worker.catalogue_fault
                if fault == "hangs":
                    while worker.catalogue_fault == fault and not self.client_left():
                        time.sleep(0.05)
                answers = {
                    "fails": (500, b"{}"),
                    "is no list": (200, b"<html></html>"),
                    "is empty": (200, b""),
                }
                status, text = answers.get(fault, (200, b""))
                if not fault or fault == "hangs":
                    text = json.dumps(CATALOGUES[self.path](worker)).encode()
                self.answer(status, text, content_type="application/json")

            def act(self, body: dict[str, Any], leave: Callable[[], None]) -> None:
                if worker.fails:
                    leave()
                    return self.answer(500, b"{}")
                if worker.loads:
                    worker.load(body.get("model", ""))
                self.wait(body)
                if body.get("close"):
                    self.close_connection = True
                elif "chunks" in body:
                    self.stream(body, leave)
                else:
                    leave()
                    answer = {"served_by": worker.name, "path": self.path, **body.get("reply", {})}
                    self.answer(
                        body.get("status", 200),
                        json.dumps(answer).encode(),
                        content_type="application/json",
                        x_served_by="the worker's own word",
                        x_request_id="the worker's own ID",
                    )

            def wait(self, body: dict[str, Any]) -> None:
                deadline = time.monotonic() + body.get("seconds", 0) * worker.slowness
                while time.monotonic() < deadline or (
                    body.get("hold") and not worker._released.acquire(blocking=False)
                ):
                    if self.client_left():
                        raise ConnectionAbortedError
                    time.sleep(0.005)

            def stream(self, body: dict[str, Any], leave: Callable[[], None]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for number in range(body["chunks"]):
                    if number == body.get("die_after"):
                        self.close_connection = True
                        return
                    if self.client_left():
                        raise ConnectionAbortedError
                    event = f"data: {json.dumps({'number': number, 'sent': time.time()})}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                    time.sleep(body.get("interval", 0))
                leave()
                self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

        return Engine


# Where each kind of worker tells its models, and in which form.
CATALOGUES: dict[str, Callable[[Worker], Any]] = {
    "/v1/models": lambda worker: {
        "object": "list",
        "data": [
            {"id": name, "object": "model", "created": 1764500000, "owned_by": worker.name, "permission": []}
            for name in worker.models + (worker.loadable if worker.kind == "llama_swap" else [])
        ],
    },
    "/api/ps": lambda worker: {"models": [{"name": name, "model": name} for name in worker.models]},
    "/api/tags": lambda worker: {"models": [{"name": name} for name in worker.models + worker.loadable]},
    "/running": lambda worker: {"running": [{"model": name, "state": "ready"} for name in worker.models]},
}


@dataclass
class Answer:
    """An answer as it reached the client; ``seconds`` is the time it took."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def served_by(self) -> str | None:
        return self.headers.get("x-served-by")


def environment_of(folder: Path) -> dict[str, str]:
    """What HAProxy's unit would give it, of a folder with a rendered configuration."""
    environment = json.loads((folder / "environment.json").read_text())
    return {name: str(value) for name, value in environment.items()}


@dataclass
class Gateway:
    """HAProxy with one of the rendered configurations, run as its unit runs it: a master with a worker process."""

    directory: Path
    port: int
    metrics_port: int
    log_port: int
    log: list[dict[str, Any]] = field(default_factory=list)
    certificate: Path | None = None
    address: str = LOOPBACK
    # What each request has besides its own.
    headers: dict[str, str] = field(default_factory=dict)

    def check(self) -> subprocess.CompletedProcess[str]:
        """Let HAProxy judge the configuration; a warning is an error."""
        command = [HAPROXY, "-c", "-dW", "-f", str(self.directory / "haproxy.cfg")]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    @contextlib.contextmanager
    def running(self) -> Iterator[Gateway]:
        with self._log_server(), (self.directory / "haproxy.log").open("w") as output:
            command = [HAPROXY, "-W", "-db", "-f", str(self.directory / "haproxy.cfg")]
            environment = {**os.environ, **environment_of(self.directory)}
            self.process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            try:
                until(self._is_up)
                yield self
            finally:
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(10)

    def _is_up(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError((self.directory / "haproxy.log").read_text())
        with contextlib.suppress(OSError):
            return self._said("Loading success") > 0 and self.get("/health").status in (200, 503)
        return False

    @contextlib.contextmanager
    def _log_server(self) -> Iterator[None]:
        gateway = self

        class Line(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                text = self.request[0].decode()
                if "{" in text:
                    gateway.log.append(json.loads(text[text.index("{") :]))

        with socketserver.UDPServer((LOOPBACK, self.log_port), Line) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield
            server.shutdown()

    def reload(self) -> None:
        """What `systemctl reload haproxy` does; returns when the new process serves."""
        reloads, loads = self._said("Reloading HAProxy"), self._said("Loading success")
        # A master that has only just started does not hear the signal yet.
        for _ in range(10):
            self.process.send_signal(signal.SIGUSR2)
            with contextlib.suppress(AssertionError):
                until(lambda: self._said("Reloading HAProxy") > reloads, 1)
                break
        until(lambda: self._said("Loading success") > loads)

    def _said(self, text: str) -> int:
        return (self.directory / "haproxy.log").read_text().count(text)

    def connect(self, timeout: float = 15) -> http.client.HTTPConnection:
        """A client's connection, over TLS where the gateway has a certificate."""
        if self.certificate is None:
            return http.client.HTTPConnection(self.address, self.port, timeout=timeout)
        context = ssl.create_default_context(cafile=str(self.certificate))
        return http.client.HTTPSConnection(self.address, self.port, timeout=timeout, context=context)

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 15, **headers: str) -> Answer:
        """Send one request on a connection of its own and read the whole answer."""
        started = time.monotonic()
        connection = self.connect(timeout)
        with contextlib.closing(connection):
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {**self.headers, **_names(headers)})
            response = connection.getresponse()
            content = response.read()
        return Answer(response.status, _lower(response), content, time.monotonic() - started)

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, 15, **headers)

    def chat(self, timeout: float = 15, **what: Any) -> Answer:
        return self.ask("POST", CHAT, {"model": MODEL, **what}, timeout)

    def post(
        self, path: str, body: bytes | Iterator[bytes], content_type: str = "application/json"
    ) -> Answer:
        """Send a body as it is; one that comes in pieces is sent in chunks."""
        started = time.monotonic()
        with contextlib.closing(self.connect()) as connection:
            # A request that is refused while it is being sent has an answer, too.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request("POST", path, body, {**self.headers, "content-type": content_type})
            response = connection.getresponse()
            content = response.read()
        return Answer(response.status, _lower(response), content, time.monotonic() - started)

    @contextlib.contextmanager
    def stream(self, **what: Any) -> Iterator[http.client.HTTPResponse]:
        """A streamed chat whose answer is still being read."""
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request("POST", CHAT, json.dumps({"model": MODEL, **what}), self.headers)
            yield connection.getresponse()

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[Callable[[str], Answer]]:
        """A client that asks again and again on one connection, as long as that lasts."""
        connection = self.connect()

        def ask(path: str) -> Answer:
            started = time.monotonic()
            asks = path.endswith("completions")
            connection.request(
                "POST" if asks else "GET", path, json.dumps({"model": MODEL}) if asks else None
            )
            response = connection.getresponse()
            content = response.read()
            return Answer(response.status, _lower(response), content, time.monotonic() - started)

        with contextlib.closing(connection):
            yield ask

    @contextlib.contextmanager
    def leaving(self, **what: Any) -> Iterator[None]:
        """A client that asks and, at the end, leaves without its answer."""
        connection = self.connect()
        with contextlib.closing(connection):
            connection.request("POST", CHAT, json.dumps({"model": MODEL, **what}), self.headers)
            yield

    def metrics(self, path: str = "/metrics") -> Answer:
        started = time.monotonic()
        connection = http.client.HTTPConnection(LOOPBACK, self.metrics_port, timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            content = response.read()
        return Answer(response.status, _lower(response), content, time.monotonic() - started)

    def metric(self, name: str, scope: str, *labels: str, missing: float | None = None) -> float:
        """One figure of /metrics, picked by its name and the labels given, like 'server="spark-a"'."""
        for line in self.metrics(f"/metrics?scope={scope}").body.decode().splitlines():
            head, _, value = line.rpartition(" ")
            if head.partition("{")[0] == name and all(label in head for label in labels):
                return float(value)
        assert missing is not None, f"no {name} with {labels}"
        return missing

    def is_live(self, worker: str, backend: str = "workers") -> bool:
        return self.is_in_state("UP", worker, backend)

    def is_in_state(self, state: str, worker: str, backend: str = "workers") -> bool:
        """Whether a worker is UP, DOWN or, when it drains, NOLB."""
        labels = (f'proxy="{backend}"', f'server="{worker}"', f'state="{state}"')
        return self.metric("haproxy_server_status", "server", *labels) == 1

    def sends_to(self, worker: str) -> bool:
        """Whether the worker still gets requests, or has some: each backend notices by itself that it drains."""
        lines = self.metrics("/metrics?scope=server").body.decode().splitlines()
        found = {
            line.rpartition(" ")[0]
            for line in lines
            if f'server="{worker}"' in line and not line.endswith(" 0")
        }
        # A pool that the worker does not belong to leaves it UP, without a weight.
        weighted = [
            figure.partition("{")[2] for figure in found if figure.startswith("haproxy_server_weight{")
        ]
        live = {
            figure
            for figure in found
            if figure.startswith("haproxy_server_status{") and 'state="UP"' in figure
        }
        busy = any(figure.startswith("haproxy_server_current_sessions{") for figure in found)
        return busy or any(labels[:-1] in figure for figure in live for labels in weighted)

    def takes(self, worker: str) -> bool:
        """Whether the worker gets requests for its models."""
        return self.figure(f'worker_models_read{{worker="{worker}"}}') == 1

    def has_nobody(self) -> bool:
        """Whether no worker is live, and the program that routes requests has seen that too."""
        if self.get("/health").status != 503:
            return False
        figures = self.metrics("/metrics/gateway").body.decode()
        return not re.search(r"gateway_worker_models_read\S+ 1\n", figures)

    def figure(self, name: str) -> float:
        """One figure of /metrics/gateway, by its name without its prefix and with its labels."""
        lines = self.metrics("/metrics/gateway").body.decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"gateway_{name} "))

    def held(self) -> float:
        return self.figure("held_requests")

    def command(self, text: str) -> str:
        """Say something to HAProxy's socket, as an operator does."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.directory / "admin.sock"))
            connection.sendall(text.encode() + b"\n")
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def in_flight(self, worker: str = "") -> float:
        """How many requests HAProxy counts at a worker, or at all: some time after the worker and its client do."""
        lines = self.metrics("/metrics?scope=server").body.decode().splitlines()
        label = f'server="{worker}"' if worker else "server="
        sessions = (line for line in lines if line.startswith("haproxy_server_current_sessions{"))
        return sum(float(line.split()[1]) for line in sessions if label in line)

    def waiting(self) -> float:
        lines = self.metrics("/metrics?scope=backend&scope=server").body.decode().splitlines()
        # Of two threads that take a worker's last place at once, one's request waits for that worker.
        names = ("haproxy_backend_current_queue{", "haproxy_server_current_queue{")
        queues = (line for line in lines if line.startswith(names))
        return sum(float(line.split()[1]) for line in queues)


def _names(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


def _lower(response: http.client.HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


class Clients:
    """Clients that ask at the same time."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._pool = ThreadPoolExecutor(64)

    def chats(self, count: int, /, **what: Any) -> list[Future[Answer]]:
        return [self._pool.submit(self.gateway.chat, **what) for _ in range(count)]

    def held(self, count: int) -> list[Future[Answer]]:
        """Such as wait for `release`, each sent when the one before is counted: of threads that choose at once two may
        choose the same worker."""
        held = []
        before = self.gateway.in_flight()
        for number in range(1, count + 1):
            held += self.chats(1, hold=True)
            until(lambda: self.gateway.in_flight() == before + number)  # noqa: B023  (called at once)
        return held

    def close(self) -> None:
        self._pool.shutdown()


def answers(futures: list[Future[Answer]]) -> list[Answer]:
    return [future.result(20) for future in futures]
