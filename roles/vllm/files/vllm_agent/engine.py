# SPDX-License-Identifier: GPL-3.0-or-later
"""The engine seen through its HTTP interface on 127.0.0.1.

Requests run on the event loop, so that cancelling one closes its connection at once: vLLM does not end while
a client that it aborted stays connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
from dataclasses import dataclass
from typing import cast

_MOST_BYTES = 16 * 2**20
_PROBE_SECONDS = 10.0


class EngineError(Exception):
    """The engine did not do what was asked. `final` means that asking again cannot help."""

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


class NotListening(EngineError):
    """Nobody listens on the engine's port. vLLM listens from ready to its end, so it has ended or begun anew."""


@dataclass(frozen=True)
class Counters:
    """Figures of one scrape, summed over the engine's label sets; kv_cache_usage is 0 to 1."""

    running: int
    waiting: int
    prompt_tokens: float
    generation_tokens: float
    iterations: float
    kv_cache_usage: float | None

    @property
    def in_flight(self) -> int:
        """Requests that the engine has accepted and not finished."""
        return self.running + self.waiting

    @property
    def work(self) -> float:
        """Grows whenever a request gets a token. Not while long prompts are read and nothing else runs."""
        return self.prompt_tokens + self.generation_tokens + self.iterations

    def progressed_since(self, before: Counters) -> bool:
        """Has the engine got anything done? Reading a prompt in chunks shows in the KV cache alone (vLLM 0.32, 0.33)."""
        return self.work > before.work or self.kv_cache_usage != before.kv_cache_usage


def parse_metrics(text: str) -> Counters:
    """Read the few figures we need from vLLM's Prometheus text; raises EngineError when they are missing."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:"):
            continue
        name = line.partition("{")[0].split()[0]
        try:
            value = float(line.rpartition("}")[2].split()[0] if "{" in line else line.split()[1])
        except (IndexError, ValueError) as error:
            raise EngineError(f"/metrics has the malformed line {line[:120]!r}") from error
        sums[name] = sums.get(name, 0.0) + value
    try:
        return Counters(
            running=int(sums["vllm:num_requests_running"]),
            waiting=int(sums["vllm:num_requests_waiting"]),
            prompt_tokens=sums["vllm:prompt_tokens_total"],
            generation_tokens=sums["vllm:generation_tokens_total"],
            iterations=sums.get("vllm:iteration_tokens_total_count", 0.0),
            kv_cache_usage=sums.get("vllm:kv_cache_usage_perc"),
        )
    except KeyError as error:
        raise EngineError(f"/metrics does not have {error.args[0]}") from error


class Engine:
    """Probes of the engine that listens on `port`; `api_key`, unless empty, is sent with completions."""

    def __init__(self, port: int, served_model_name: str, api_key: str = "") -> None:
        self.port = port
        self._served_model_name = served_model_name
        self._api_key = api_key

    async def port_is_open(self) -> bool:
        """Does anything accept connections on the engine's port?"""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    async def healthy(self) -> bool:
        """Does /health answer 200? That proves that the server listens, not that it can generate."""
        try:
            status, _body = await self._request("GET", "/health", _PROBE_SECONDS)
        except EngineError:
            return False
        return status == 200

    async def counters(self) -> Counters:
        """Scrape /metrics; raises EngineError."""
        status, body = await self._request("GET", "/metrics", _PROBE_SECONDS)
        if status != 200:
            raise EngineError(f"/metrics answered {status}")
        return parse_metrics(body.decode(errors="replace"))

    async def complete_one_token(self, seconds: float) -> None:
        """Generate one token within `seconds`; raises EngineError."""
        prompt = {"model": self._served_model_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        status, body = await self._request("POST", "/v1/completions", seconds, json.dumps(prompt).encode())
        if status != 200:
            text = " ".join(body.decode(errors="replace").split())[:300]
            final = 400 <= status < 500 and status != 429
            raise EngineError(f"a completion was answered {status}: {text}", final)
        try:
            if not json.loads(body)["choices"]:
                raise EngineError("a completion was answered without a choice")
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"a completion was answered with {body[:120]!r}") from error

    async def _request(self, method: str, path: str, seconds: float, body: bytes = b"") -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(seconds):
                return _parse(await self._exchange(method, path, body))
        except TimeoutError as error:
            raise EngineError(f"{path} did not answer within {seconds:g} s") from error
        except ConnectionRefusedError as error:
            raise NotListening(f"nobody listens on port {self.port}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{path} failed: {error or type(error).__name__}") from error

    async def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: 127.0.0.1:{self.port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self._api_key and body:
            lines.append(f"Authorization: Bearer {self._api_key}")
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            received = bytearray()
            while chunk := await reader.read(2**16):
                received += chunk
                if len(received) > _MOST_BYTES:
                    raise EngineError(f"{path} answered more than {_MOST_BYTES} bytes")
            return bytes(received)
        finally:
            writer.close()


class _Received(io.BytesIO):
    """Bytes that http.client reads as if they came from a socket."""

    def makefile(self, *_: object) -> io.BytesIO:
        return self


def _parse(answer: bytes) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPResponse(cast(socket.socket, _Received(answer)))) as response:
        response.begin()
        return response.status, response.read()
