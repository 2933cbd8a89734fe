# SPDX-License-Identifier: GPL-3.0-or-later
"""How the two ranks of a split model find each other, load together and step together, over real TCP.

Rank 0 listens on the master port, on all addresses. Beside it each rank listens on a random port of
its own address (VLLM_HOST_IP) and the other connects there: a firewall between the two must let
all of that through, as with real vLLM. Ranks cannot rejoin: who connects later is never answered.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

RETRY_SECONDS = 0.1

_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_Callback = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class PeerError(Exception):
    """The other rank did not come, or went away while loading."""


def own_address() -> str:
    """The address that the default route leaves from, which vLLM announces when VLLM_HOST_IP is not set."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


class Link:
    """What connects the two ranks once they have met."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._answer: asyncio.Future[None] | None = None
        self.lost = asyncio.Event()

    async def barrier(self) -> None:
        """Return when both ranks have come this far. Raises PeerError when the other is gone."""
        try:
            self._writer.write(b"L")
            await self._writer.drain()
            await self._reader.readexactly(1)
        except (OSError, EOFError) as error:
            raise PeerError("Connection closed by peer while the model was loading") from error

    async def listen(self, answer: Callable[[], Awaitable[None]] | None = None) -> None:
        """Serve the connection for ever: rank 1 answers each step with `answer`, rank 0 takes the answers."""
        try:
            while await self._reader.readexactly(1):
                if answer:
                    await answer()
                    self._writer.write(b"s")
                elif self._answer and not self._answer.done():
                    self._answer.set_result(None)
        except (OSError, EOFError):
            self.lost.set()

    async def step(self) -> None:
        """Have the other rank do a step; never returns when it is gone or does not answer."""
        self._answer = asyncio.get_running_loop().create_future()
        if not self.lost.is_set():
            self._writer.write(b"s")
        await self._answer


async def _connect(address: str, port: int) -> _Streams:
    while True:
        try:
            return await asyncio.open_connection(address, port)
        except OSError:
            await asyncio.sleep(RETRY_SECONDS)


class Rendezvous:
    """One rank's side of the meeting. Keep the object: its ports stay open for the engine's life."""

    def __init__(self, rank: int, master: str, port: int, host_ip: str | None) -> None:
        self._rank = rank
        self._master = master
        self._port = port
        self._host_ip = host_ip or own_address()
        self._servers: list[asyncio.Server] = []
        self._backchannel: asyncio.StreamWriter | None = None

    async def meet(self, seconds: float) -> Link:
        """Wait for the other rank for at most so many seconds. Raises PeerError."""
        try:
            return await asyncio.wait_for(self._meet(), seconds)
        except TimeoutError as error:
            raise PeerError(f"timed out after {seconds:g} s waiting for the other rank") from error
        except (OSError, EOFError, ValueError) as error:
            raise PeerError(f"rank {self._rank} on {self._host_ip}: {error}") from error

    async def _meet(self) -> Link:
        callers: asyncio.Queue[_Streams] = asyncio.Queue()

        async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            callers.put_nowait((reader, writer))

        own_port = await self._listen(self._host_ip, 0, called)
        if self._rank == 0:
            writer, introduction = await self._first_newcomer()
        else:
            reader, writer = await _connect(self._master, self._port)
        writer.write(json.dumps({"address": self._host_ip, "port": own_port}).encode() + b"\n")
        if self._rank > 0:
            introduction = await reader.readline()
        peer = json.loads(introduction)
        to_peer = await _connect(peer["address"], peer["port"])
        from_peer = await callers.get()
        # Rank 0's own port carries the steps (vLLM's message queue), rank 1's nothing more (gloo's mesh).
        steps, self._backchannel = (from_peer, to_peer[1]) if self._rank == 0 else (to_peer, from_peer[1])
        return Link(*steps)

    async def _first_newcomer(self) -> tuple[asyncio.StreamWriter, bytes]:
        """The first who introduces itself on the master port; probes that only connect do not count."""
        newcomers: asyncio.Queue[tuple[asyncio.StreamWriter, bytes]] = asyncio.Queue()

        async def arrived(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if introduction := await reader.readline():
                newcomers.put_nowait((writer, introduction))

        await self._listen("0.0.0.0", self._port, arrived)
        return await newcomers.get()

    async def _listen(self, address: str, port: int, callback: _Callback) -> int:
        server = await asyncio.start_server(callback, address, port)
        self._servers.append(server)
        bound: int = server.sockets[0].getsockname()[1]
        return bound
