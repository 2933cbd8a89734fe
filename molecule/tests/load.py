# SPDX-License-Identifier: GPL-3.0-or-later
"""Clients of the endpoint that look at every byte they get, and count what went wrong by kind."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType

import aiohttp

# What a client may meet. Of these only SILENT and GARBLED can be taken for a good answer.
WHOLE = "whole"
SILENT = "ended as if whole, but is not"
GARBLED = "tokens missing, double or out of order"
CUT = "visibly cut"
TOLD = "error told in the stream"
HUNG = "no byte for longer than the client waits"
RETRY = "503 with Retry-After"
UNREACHED = "not connected"
DECEITS = (SILENT, GARBLED)

_LONGEST_SECONDS = 600  # a load that nobody ends, ends by itself
_PAUSE_SECONDS = 0.2  # after an answer that failed, so that a gateway without workers is not flooded


@dataclass(frozen=True)
class Reply:
    """One request: what came of it, when it began (seconds, monotonic), how long it took, and who answered."""

    kind: str
    began: float
    seconds: float
    worker: str
    detail: str


class Load:
    """`clients` clients that stream completions, one after the other, for as long as the `with` block lasts.

    tokens: bounds of the length of a reply. patience: seconds without a byte after which a client hangs up.
    pause: seconds that a client thinks before it asks again.
    key: what they are let in with.
    numbered: the stand-in numbers its tokens, so that each can be checked; of a real engine they are counted.
    On leaving the block each client finishes what it has begun.
    """

    def __init__(
        self,
        url: str,
        clients: int,
        tokens: tuple[int, int] = (60, 240),
        patience: float = 60,
        pause: float = 0,
        model: str = "simulated",
        numbered: bool = True,
        key: str = "",
    ) -> None:
        self._url = url
        self._clients = clients
        self._tokens = tokens
        self._patience = patience
        self._pause = pause
        self._model = model
        self._numbered = numbered
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self._fault: BaseException | None = None
        self.replies: list[Reply] = []

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()
        self._thread.join()
        if self._fault is not None:
            raise self._fault
        assert self.replies, "nobody asked"

    def finish(self) -> None:
        """Let each client finish what it has begun, and begin nothing more."""
        self._over.set()

    @property
    def kinds(self) -> Counter[str]:
        """How many replies there were of each kind."""
        return Counter(reply.kind for reply in self.replies)

    @property
    def failed(self) -> int:
        """How many replies were not whole."""
        return len(self.replies) - self.kinds[WHOLE]

    def since(self, moment: float) -> Counter[str]:
        """The kinds of those replies that began after this moment."""
        return Counter(reply.kind for reply in self.replies if reply.began > moment)

    def __str__(self) -> str:
        workers = Counter(reply.worker for reply in self.replies if reply.kind == WHOLE)
        slowest = max((reply.seconds for reply in self.replies), default=0)
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.kinds.most_common())
        return (
            f"{self._clients} clients, {len(self.replies)} requests, {self.failed} failed: {kinds}; "
            f"slowest {slowest:.1f} s; {', '.join(f'{name} {n}' for name, n in sorted(workers.items()))}"
        )

    def _live(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as fault:
            self._fault = fault

    async def _run(self) -> None:
        limits = aiohttp.ClientTimeout(total=None, connect=self._patience, sock_read=self._patience)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            timeout=limits, connector=connector, headers=self._headers
        ) as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        lengths = random.Random(number)
        end = time.monotonic() + _LONGEST_SECONDS
        await asyncio.sleep(number / self._clients)
        while not self._over.is_set() and time.monotonic() < end:
            began = time.monotonic()
            kind, worker, detail = await self._ask(session, lengths.randint(*self._tokens))
            self.replies.append(Reply(kind, began, time.monotonic() - began, worker, detail))
            await asyncio.sleep(self._pause if kind == WHOLE else _PAUSE_SECONDS)

    async def _ask(self, session: aiohttp.ClientSession, tokens: int) -> tuple[str, str, str]:
        """One streamed completion; returns what came of it, who answered, and a detail for the reader."""
        body = {
            "model": self._model,
            "prompt": "count",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        worker = ""
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as answer:
                worker = answer.headers.get("x-served-by", "")
                if answer.status != 200:
                    retry = answer.status == 503 and "retry-after" in answer.headers
                    return RETRY if retry else f"status {answer.status}", worker, (await answer.text())[:200]
                kind, detail = self._judge(await _events(answer), tokens)
                return kind, worker, detail
        except (ValueError, KeyError) as error:
            return GARBLED, worker, repr(error)
        except TimeoutError:
            return HUNG, worker, ""
        except aiohttp.ClientConnectorError as error:
            return UNREACHED, worker, str(error)
        except (aiohttp.ClientError, OSError) as error:
            return CUT, worker, repr(error)

    def _judge(self, events: list[str], tokens: int) -> tuple[str, str]:
        """Is this stream, which ended without an error of the connection, the whole answer?"""
        text, usage, finish, done = "", 0, "", False
        for event in events:
            if event == "[DONE]":
                done = True
                continue
            chunk = json.loads(event)
            if "error" in chunk:
                return TOLD, event[:200]
            usage = (chunk.get("usage") or {}).get("completion_tokens", usage)
            for choice in chunk["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
        if self._numbered:
            numbers = text.split()
            if any(word != f"{wanted % 1000:03}" for word, wanted in zip(numbers, itertools.count())):
                return GARBLED, text[:200]
            usage = min(usage, len(numbers)) if done else len(numbers)
        if not done:
            return CUT, f"after {usage} of {tokens} tokens"
        if (usage, finish) != (tokens, "length"):
            return SILENT, f"{usage} of {tokens} tokens, finish reason {finish!r}"
        return WHOLE, ""


async def _events(answer: aiohttp.ClientResponse) -> list[str]:
    """The data of each server-sent event."""
    events = []
    async for line in answer.content:
        if line.startswith(b"data:"):
            events.append(line.removeprefix(b"data:").strip().decode())
    return events
