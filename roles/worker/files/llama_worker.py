# SPDX-License-Identifier: GPL-3.0-or-later
"""One llama.cpp server under systemd: loads its model, tells gateways its health, and finishes what it has begun before it ends.

usage: llama_worker.py SETTINGS    (JSON, see the role worker)

GET on the health port: 200 "serving", 404 "draining" (a gateway then sends nothing new); no answer while the model loads.
"""

from __future__ import annotations

import contextlib
import enum
import getpass
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

# What another start would meet again; systemd does not try it.
WRONG_SETTINGS = 2
LOOK_SECONDS = 0.5


class SettingsError(Exception):
    """What is wrong with the settings, and what to do."""


def tell(*assignments: str) -> None:
    """Send assignments such as READY=1 to systemd; nothing when it does not listen."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(
                "\n".join(assignments).encode(), "\0" + address[1:] if address[0] == "@" else address
            )


def readable(path: str) -> Path:
    """The file, if this server can read it."""
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise SettingsError(
            f"{path} cannot be read ({error.strerror}); put it there, readable for the user {getpass.getuser()}"
        ) from None
    return Path(path)


def set_parameter(parameters: Any, name: str, value: Any) -> None:
    """Set one of llama.cpp's parameters, which may be part of another: `cpuparams.n_threads`."""
    *parents, last = name.split(".")
    owner = parameters
    for parent in parents:
        owner = getattr(owner, parent, None)
    if not hasattr(owner, last):
        raise SettingsError(
            f"llama.cpp has no parameter {name!r}; mend the options of this server in worker_servers"
        )
    present = getattr(owner, last)
    try:
        if isinstance(present, enum.Enum):
            value = type(present)[str(value)]
        setattr(owner, last, value)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SettingsError(
            f"llama.cpp's parameter {name!r} cannot be {value!r}, it is {present!r} by default ({error}); mend the options of this "
            "server in worker_servers"
        ) from None


def load(settings: Mapping[str, Any]) -> Any:
    """llama.cpp's server, listening, with its model loaded."""
    # It stands in the worker's own environment.
    import xllamacpp

    # llama.cpp itself does not say why it cannot.
    readable(settings["parameters"]["model.path"])
    parameters = xllamacpp.CommonParams()
    owned = {"hostnames": [settings["host"]], "port": settings["port"], "endpoint_metrics": True}
    for name, value in {**owned, **settings["parameters"]}.items():
        set_parameter(parameters, name, value)
    if settings["key_file"]:
        parameters.api_keys = [readable(settings["key_file"]).read_text()]
    return xllamacpp.Server(parameters)


def prove(server: Any, settings: Mapping[str, Any]) -> None:
    """Have it compute something: a server that listens has proven little."""
    ask = server.handle_embeddings if settings["embeddings"] else server.handle_completions
    answer = ask({"input": "hello"} if settings["embeddings"] else {"prompt": "hello", "max_tokens": 1})
    if "error" in answer:
        raise RuntimeError(f"the model does not answer: {answer['error']}")


def in_flight(metrics: str) -> int:
    """Requests that it works on or that wait in it, from its own metrics."""
    return sum(
        int(float(count))
        for count in re.findall(r"^llamacpp:requests_(?:processing|deferred) (\S+)$", metrics, re.M)
    )


def serve_health(settings: Mapping[str, Any], is_draining: Callable[[], bool]) -> None:
    """Answer gateways from now on."""

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            draining = is_draining()
            text = b"draining\n" if draining else b"serving\n"
            self.send_response(404 if draining else 200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            """Twice a second from each gateway is too much for a log."""

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in settings["host"] else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A gateway hangs up once it has the status."""

    health = Listener((settings["host"], settings["health_port"]), Health)
    threading.Thread(target=health.serve_forever, daemon=True).start()


def drain(server: Any, settings: Mapping[str, Any]) -> None:
    """Wait until every gateway has seen that nothing new shall come, and then for what is in flight."""
    time.sleep(settings["drain_notice"])
    deadline = time.monotonic() + settings["drain_timeout"]
    while (count := in_flight(server.handle_metrics())) and time.monotonic() < deadline:
        tell(f"STATUS=draining: {count} requests in flight")
        time.sleep(LOOK_SECONDS)
    # The last words of an answer leave a moment after it counts as done.
    time.sleep(LOOK_SECONDS)


def main(settings: Mapping[str, Any]) -> None:
    tell(f"STATUS=loading {settings['model']}")
    server = load(settings)
    prove(server, settings)
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    # Until here a signal ends it at once: a server that loads has nothing to finish.
    signal.signal(signal.SIGTERM, stop)
    serve_health(settings, stopping.is_set)
    tell("READY=1", f"STATUS=serving {settings['model']}")
    # The signal may reach one of the server's own threads; this one must come round to notice.
    while not stopping.is_set():
        # Comes back when the server's own loop does.
        server.handle_metrics()
        tell("WATCHDOG=1")
        stopping.wait(LOOK_SECONDS)
    tell("STOPPING=1", "STATUS=draining")
    drain(server, settings)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: llama_worker.py SETTINGS")
    try:
        main(json.loads(Path(sys.argv[1]).read_text()))
    except (SettingsError, ImportError, RuntimeError, OSError) as problem:
        tell(f"STATUS=failed: {problem}")
        print(problem, file=sys.stderr, flush=True)
        sys.exit(WRONG_SETTINGS if isinstance(problem, SettingsError) else 1)
