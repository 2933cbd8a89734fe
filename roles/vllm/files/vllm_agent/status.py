# SPDX-License-Identifier: GPL-3.0-or-later
"""What the agent tells about itself: the phase, and the HTTP server for gateway, operator and Prometheus."""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Thread
from typing import Any

from . import __version__
from .config import Config
from .engine import Counters
from .history import History
from .memory import Memory

_ENGINE_SECONDS = 0.5  # less than a gateway waits for its check

log = logging.getLogger(__name__)


class Phase(Enum):
    """Where an engine is in its life."""

    WAITING_FOR_PEER = "waiting-for-peer"
    WAITING_FOR_MEMORY = "waiting-for-memory"
    STARTING = "starting"
    LOADING = "loading"
    VERIFYING = "verifying"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value.replace("-", " ")


@dataclass(frozen=True)
class Stage:
    """A phase, why it is so (empty: nothing to say), and since when."""

    phase: Phase
    cause: str
    since: datetime = field(default_factory=lambda: datetime.now(UTC))
    entered: float = field(default_factory=time.monotonic)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds in this phase, whatever the wall clock did meanwhile."""
        return time.monotonic() - self.entered


class Status:
    """The state that the supervisor writes and the HTTP server reads from its own threads.

    Every attribute is replaced as a whole, so a reader sees the old or the new value and needs no lock.
    """

    def __init__(self, config: Config, memory: Memory, history: History, digest: str = "") -> None:
        self._config = config
        self._memory = memory
        self._history = history
        self._digest = digest
        self.stage = Stage(Phase.WAITING_FOR_MEMORY if config.pair is None else Phase.WAITING_FOR_PEER, "")
        self.detail = ""
        self.loaded_fraction: float | None = None
        self.capacity: dict[str, float] = {}
        self.counters: Counters | None = None
        self._counted = 0.0
        self.tokens_per_second: float | None = None
        self.lost = ""  # what was seen of an engine that has ended, or begun anew without us
        self.strikes = 0  # failed canaries in a row
        self.canaries = 0
        self.canary_failures = 0
        self.describe_pair: Callable[[], dict[str, Any] | None] = lambda: None

    def enter(self, phase: Phase, cause: str = "") -> None:
        """Begin a phase."""
        self.detail = ""
        if phase is Phase.STARTING:
            self.loaded_fraction, self.capacity = None, {}
        if phase not in (Phase.SERVING, Phase.DRAINING):
            self.counters = self.tokens_per_second = None
        self.stage = Stage(phase, cause)

    def take_counters(self, counters: Counters) -> None:
        """Keep the newest figures of the engine, and the speed since the ones before."""
        before, self.counters = self.counters, counters
        then, self._counted = self._counted, time.monotonic()
        if before is not None and counters.generation_tokens >= before.generation_tokens:
            tokens = counters.generation_tokens - before.generation_tokens
            self.tokens_per_second = round(tokens / max(self._counted - then, 0.001), 1)

    def line(self) -> str:
        """One line for `systemctl status`."""
        stage = self.stage
        if stage.cause:
            return f"{stage.phase}: {stage.cause}"
        if stage.phase is Phase.SERVING and self.counters is not None:
            speed = "" if self.tokens_per_second is None else f", {self.tokens_per_second:.0f} tokens/s"
            doubt = f"strike {self.strikes} of {self._config.watchdog.strikes}, " if self.strikes else ""
            return f"serving: {doubt}{self.counters.running} running, {self.counters.waiting} waiting{speed}"
        parts = [self.detail] if self.detail else []
        if stage.phase is Phase.LOADING and self.loaded_fraction is not None:
            parts.append(f"weights {self.loaded_fraction:.0%}")
        parts.append(f"{stage.elapsed_seconds:.0f} s")
        expected = self._history.expected_seconds(self._config.image)
        if stage.phase is Phase.LOADING and expected is not None:
            parts[-1] += f" of usually {expected:.0f} s"
        return f"{stage.phase}: {', '.join(parts)}"

    def health(self) -> tuple[int, str]:
        """HTTP status and text for the gateway: 200 serving, 404 nothing new please, 503 anything else.

        404 while draining, and while the engine is suspected to be wedged: what it has may yet be answered, but
        further requests would only wait in it.
        """
        stage = self.stage
        if stage.phase is Phase.SERVING and self.lost:
            return 503, self.lost
        if stage.phase is Phase.SERVING and self.strikes:
            return 404, f"suspect: no progress, strike {self.strikes} of {self._config.watchdog.strikes}"
        code = {Phase.SERVING: 200, Phase.DRAINING: 404}.get(stage.phase, 503)
        return code, f"failed: {stage.cause}" if stage.phase is Phase.FAILED else str(stage.phase)

    def health_now(self) -> tuple[int, str]:
        """As `health`, after a look at the engine: one that says itself that it is dead does not serve.

        For the second that its container takes to end, it would answer every request with an error.
        """
        code, text = self.health()
        words = _objection(self._config.api.port) if code == 200 and self._config.api else ""
        return (503, words) if words else (code, text)

    def progress(self) -> float | None:
        """How far the start is (0 to 1): by the weights loaded as the engine tells, else by the last start."""
        stage = self.stage
        if stage.phase is Phase.LOADING and self.loaded_fraction is not None and self.loaded_fraction < 1:
            return self.loaded_fraction
        expected = self._history.expected_seconds(self._config.image)
        if stage.phase in (Phase.STARTING, Phase.LOADING) and expected:
            return min(stage.elapsed_seconds / expected, 0.99)
        return 1.0 if stage.phase is Phase.SERVING else None

    def document(self) -> dict[str, Any]:
        """The answer of GET /status."""
        config, stage, counters = self._config, self.stage, self.counters
        pair = self.describe_pair()
        return {
            "mode": config.mode,
            "unit": config.unit,
            "phase": stage.phase.value,
            "cause": stage.cause or self.detail,
            "since": stage.since.isoformat(timespec="seconds"),
            "elapsed_seconds": round(stage.elapsed_seconds, 1),
            "progress": self.progress(),
            "expected_seconds": self._history.expected_seconds(config.image),
            "image": config.image,
            "model": config.model,
            "served_model_name": config.served_model_name,
            "container": config.container,
            "rank": config.pair.rank if config.pair else 0,
            "generation": pair["generation"] if pair else None,
            "pair": pair,
            "memory": {
                "available_gib": round(self._memory.available_gib(), 2),
                "budget_gib": config.memory.budget_gib,
            },
            "requests": {"running": counters.running, "waiting": counters.waiting} if counters else None,
            "tokens_per_second": self.tokens_per_second,
            "kv_cache_usage": counters.kv_cache_usage if counters else None,
            "capacity": self.capacity or None,
            "strikes": self.strikes,
            "starts": self._history.starts,
            "attempts": self._history.attempts,
            "failures": self._history.failures,
            "last_failure": self._history.last_failure,
            "last_start_seconds": self._history.last_start_seconds,
            "agent_version": __version__,
            "settings_digest": self._digest,
        }

    def metrics(self) -> str:
        """The answer of GET /metrics, in Prometheus text format."""
        info = {"version": __version__, "mode": self._config.mode, "image": self._config.image}
        labels = ",".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in info.items())
        pair = self.describe_pair()
        current = self.stage.phase
        families: list[tuple[str, str, str, dict[str, float | None]]] = [
            ("info", "gauge", "The agent and what it runs.", {f"{{{labels}}}": 1}),
            (
                "phase",
                "gauge",
                "1 for the phase the engine is in, else 0.",
                {f'{{phase="{phase.value}"}}': int(phase is current) for phase in Phase},
            ),
            (
                "starts_total",
                "counter",
                "Engine containers started on this host in this mode.",
                {"": self._history.starts},
            ),
            ("failures_total", "counter", "Ends that nobody asked for.", {"": self._history.failures}),
            (
                "last_start_seconds",
                "gauge",
                "Time from container start to ready of the last good start.",
                {"": self._history.last_start_seconds},
            ),
            ("strikes", "gauge", "Failed canaries in a row, without progress.", {"": self.strikes}),
            ("canaries_total", "counter", "One-token requests sent by the watchdog.", {"": self.canaries}),
            ("canary_failures_total", "counter", "Those of them that failed.", {"": self.canary_failures}),
            (
                "requests_in_flight",
                "gauge",
                "Requests the engine is running or has queued.",
                {"": self.counters.in_flight if self.counters else None},
            ),
            (
                "kv_cache_tokens",
                "gauge",
                "Tokens that the engine's KV cache holds, as its log tells.",
                {"": self.capacity.get("kv_tokens")},
            ),
            (
                "full_context_requests",
                "gauge",
                "Requests of the full context length that it holds at once, as its log tells.",
                {"": self.capacity.get("full_context_requests")},
            ),
            (
                "memory_available_bytes",
                "gauge",
                "MemAvailable of the host.",
                {"": round(self._memory.available_gib() * 2**30)},
            ),
            (
                "heartbeat_age_seconds",
                "gauge",
                "Time since the last sign of life of the other rank.",
                {"": pair["heartbeat_age_seconds"] if pair else None},
            ),
        ]
        lines = []
        for name, kind, meaning, samples in families:
            lines += [f"# HELP vllm_agent_{name} {meaning}", f"# TYPE vllm_agent_{name} {kind}"]
            lines += [
                f"vllm_agent_{name}{label} {value}" for label, value in samples.items() if value is not None
            ]
        return "\n".join(lines) + "\n"


def _objection(port: int) -> str:
    """What the engine itself says against its health; empty also when it says nothing, as a busy one may."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ENGINE_SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except ConnectionRefusedError:
        return f"the engine does not listen on port {port}"
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
    return "" if status == 200 else f"the engine's own health is {status}"


class StatusServer(ThreadingHTTPServer):
    """Serves /health, /status and /metrics on every address; raises OSError when the port is taken."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, status: Status) -> None:
        super().__init__(("", port), _Handler)
        self.status = status
        Thread(target=self.serve_forever, name="status", daemon=True).start()

    def server_bind(self) -> None:
        """As in HTTPServer, but without its look-up of the host's name, which may wait for a DNS server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "", int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle of an answer is no news."""
        log.debug("status request of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    server_version = "vllm-agent"
    sys_version = ""
    timeout = 5  # seconds a client may take to send its request

    def do_GET(self) -> None:
        status = self.server.status
        kind = "text/plain; charset=utf-8"
        match self.path.partition("?")[0]:
            case "/health":
                code, text = status.health_now()
                text += "\n"
            case "/status":
                code, text, kind = 200, json.dumps(status.document()) + "\n", "application/json"
            case "/metrics":
                code, text, kind = 200, status.metrics(), "text/plain; version=0.0.4; charset=utf-8"
            case _:
                code, text = 404, "not found; try /health, /status or /metrics\n"
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Health checks come every second; the journal is not the place for them."""
