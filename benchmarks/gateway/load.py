# SPDX-License-Identifier: GPL-3.0-or-later
"""What is sent through a gateway: wrk for many requests, and clients that read and check each chunk."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.gateway.gateways import CHAT, CLIENT_KEY, HEADERS, Gateway, chat_body
from benchmarks.gateway.processes import LOOPBACK
from benchmarks.gateway.worker import MODEL

_SCRIPT = Path(__file__).with_name("post.lua")
_CHUNK = re.compile(r"(\d+)@(\d+) ")


def write_body(path: Path, size: int, model_first: bool) -> None:
    """A request for a completion of so many bytes, as clients write it: words, with quotes among them."""
    text = 'The quick brown fox says "hello" and goes on.\n' * (size // 50)
    rest = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "stream": False}
    body = {"model": MODEL, **rest} if model_first else {**rest, "model": MODEL}
    missing = size - len(json.dumps(body))
    rest["messages"] = [{"role": "user", "content": text + "x" * missing}]
    path.write_text(json.dumps({**body, **rest}))


def wrk(
    gateway: Gateway, connections: int, seconds: int, body: Path | None, path: str = CHAT
) -> dict[str, Any]:
    """Ask on so many connections, each again as soon as it has its answer; what wrk found, and CPU per request."""
    before = gateway.program.cpu_seconds() if gateway.program else 0.0
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "20s", "-s", str(_SCRIPT)]
    command += [f"http://{LOOPBACK}:{gateway.port}", "--", "POST" if body else "GET", path, str(body or "")]
    done = subprocess.run([*command, CLIENT_KEY], capture_output=True, text=True, check=False)
    if done.returncode:
        # It cannot connect: the gateway has died.
        return {
            "requests": 0,
            "seconds": seconds,
            "per_second": 0.0,
            "errors": 1,
            "problem": done.stdout[-300:],
        }
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    found["per_second"] = found["requests"] / found["seconds"]
    if gateway.program and found["requests"]:
        found["cpu_us"] = 1e6 * (gateway.program.cpu_seconds() - before) / found["requests"]
    return found


@dataclass
class Stream:
    """One streamed answer as its client saw it; times are in seconds of the monotonic clock."""

    started: float
    ended: float = 0.0
    # 0 when no answer came.
    status: int = 0
    complete: bool = False
    # An event told of an error; some send [DONE] after it all the same.
    told: bool = False
    numbers: list[int] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)

    def verdict(self, chunks: int) -> str:
        """ok; refused (an error before the first chunk); cut (it ended early, and the client can see that); or wrong."""
        said_to_be_whole = self.complete and not self.told
        if self.numbers != list(range(len(self.numbers))) or (
            said_to_be_whole and len(self.numbers) != chunks
        ):
            return "wrong"
        if said_to_be_whole:
            return "ok"
        return "cut" if self.numbers else "refused"


def client() -> aiohttp.ClientSession:
    """A client without limits of its own; each request has a connection of its own, as from many users."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(None), headers=HEADERS)


async def stream(
    session: aiohttp.ClientSession,
    gateway: Gateway,
    wanted: dict[str, float],
    first_chunk: Callable[[], None] | None = None,
) -> Stream:
    """Ask for a streamed answer and read it to its end."""
    seen = Stream(time.monotonic())
    url = f"http://{LOOPBACK}:{gateway.port}{CHAT}"
    try:
        async with session.post(url, json=chat_body(wanted, stream=True)) as answer:
            seen.status = answer.status
            async for line in answer.content:
                if line.strip() == b"data: [DONE]":
                    seen.complete = True
                elif line.startswith(b'data: {"error"'):
                    seen.told = True
                for number, sent in _CHUNK.findall(line.decode(errors="replace")):
                    seen.numbers.append(int(number))
                    seen.delays_ms.append((time.monotonic_ns() - int(sent)) / 1e6)
                    if first_chunk and len(seen.numbers) == 1:
                        first_chunk()
    except aiohttp.ClientError:
        pass
    seen.ended = time.monotonic()
    return seen


async def ask(session: aiohttp.ClientSession, gateway: Gateway, patience: float = 60) -> Stream:
    """Ask for a short answer in one piece, and wait so many seconds for it."""
    seen = Stream(time.monotonic())
    url = f"http://{LOOPBACK}:{gateway.port}{CHAT}"
    try:
        async with asyncio.timeout(patience), session.post(url, json=chat_body({})) as answer:
            await answer.read()
            seen.status = answer.status
    except (TimeoutError, aiohttp.ClientError):
        pass
    seen.ended = time.monotonic()
    return seen


async def open_loop(
    per_second: float, stop: asyncio.Event, once: Callable[[], Coroutine[None, None, Stream]]
) -> list[Stream]:
    """Ask at fixed moments, whether answers came or not, until told to stop; then wait for what is unanswered."""
    due = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = []
        while not stop.is_set():
            tasks.append(group.create_task(once()))
            due += 1 / per_second
            await asyncio.sleep(max(0, due - time.monotonic()))
    return [task.result() for task in tasks]
