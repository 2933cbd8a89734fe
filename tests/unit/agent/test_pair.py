# SPDX-License-Identifier: GPL-3.0-or-later
"""The heartbeat on its own: who is refused, and what counts as a loss. The peer is played line by line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from vllm_agent.config import Config, PairConfig
from vllm_agent.pair import Pair, PairError, Refused
from vllm_agent.status import Phase

from .harness import free_port

GREETING = {"version": 1, "rank": 1, "mode": "tp", "image": "vllm:1", "model": "/srv/m", "generation": ""}


class Peer:
    """One connection to the head, as rank 1 would hold it; every line is sent as it is told."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> Peer:
        async with asyncio.timeout(5):
            while True:
                try:
                    self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
                except ConnectionRefusedError:  # the head does not listen yet
                    await asyncio.sleep(0.01)
                else:
                    return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def say(self, message: dict[str, Any] | bytes) -> None:
        self.writer.write(message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        async with asyncio.timeout(5):
            message: dict[str, Any] = json.loads(await self.reader.readline())
        return message


class Head:
    """A pair's rank 0 and what it reports."""

    def __init__(self) -> None:
        self.port = free_port()
        settings = PairConfig(
            rank=0,
            size=2,
            head="127.0.0.1",
            peer="127.0.0.1",
            heartbeat_port=self.port,
            peer_wait_seconds=5,
            heartbeat_timeout=1,
        )
        config = Config.__new__(Config)  # the pair reads only these three
        for name, value in {"mode": "tp", "image": "vllm:1", "model": "/srv/m"}.items():
            object.__setattr__(config, name, value)
        self.phases: list[tuple[Phase, str]] = []
        self.lost: asyncio.Future[PairError] = asyncio.get_running_loop().create_future()
        self.pair = Pair(config, settings, lambda *told: self.phases.append(told), self.lost.set_result)
        self.forming = asyncio.create_task(self.pair.form(lambda reason: None))

    async def loss(self) -> PairError:
        async with asyncio.timeout(5):
            return await self.lost


def play(story: Callable[[Head, Peer], Awaitable[None]]) -> None:
    """Run the story with a head that listens and one connection to it."""

    async def stage() -> None:
        head = Head()
        await asyncio.sleep(0.05)
        async with Peer(head.port) as peer:
            await story(head, peer)
        head.forming.cancel()
        await head.pair.close()

    asyncio.run(stage())


async def formed(head: Head, peer: Peer) -> str:
    """Greet and wait until the head agrees; returns the generation."""
    peer.say(GREETING)
    generation: str = (await peer.hear())["generation"]
    async with asyncio.timeout(5):
        await head.forming
    return generation


def test_both_agree_and_hear_of_each_other() -> None:
    async def story(head: Head, peer: Peer) -> None:
        generation = await formed(head, peer)
        assert generation == head.pair.generation != ""
        assert await peer.hear() == {"generation": generation, "phase": "waiting-for-peer", "cause": ""}
        head.pair.tell(Phase.SERVING)
        assert (await peer.hear())["phase"] == "serving"
        peer.say({"generation": generation, "phase": "loading", "cause": ""})
        peer.say({"generation": generation, "phase": "failed", "cause": "no luck"})
        await head.pair.wait_for_peer(Phase.FAILED)
        assert head.phases == [(Phase.LOADING, ""), (Phase.FAILED, "no luck")]
        assert head.pair.describe()["heartbeat_age_seconds"] < 1

    play(story)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": "vllm:2"}, r"rank 1 on 127.0.0.1 refused: its image is 'vllm:2', needed is 'vllm:1'"),
        ({"model": "/srv/n"}, "refused: its model is '/srv/n', needed is '/srv/m'"),
        ({"mode": "replica"}, "refused: its mode is 'replica', needed is 'tp'"),
        ({"rank": 0}, "refused: its rank is 0, needed is 1"),
        ({"version": 2}, "refused: its version is 2, needed is 1"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_with_both_values(change: dict[str, Any], message: str) -> None:
    async def story(head: Head, peer: Peer) -> None:
        peer.say(GREETING | change)
        async with asyncio.timeout(5):
            with pytest.raises(Refused, match=message):
                await head.forming
        assert (await peer.hear())["image"] == "vllm:1"  # so that the peer can say the same
        assert await peer.reader.read() == b""

    play(story)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"generation": "old", "phase": "loading"}, "refused: its generation is 'old', needed is '"),
        ({"phase": "loading"}, "refused: its generation is None"),
        (b"hello\n", "sent b'hello\\n' instead of a JSON object"),
        (b"[1]\n", "instead of a JSON object"),
        (b"x" * 2**17, "sent a line without an end"),
        (b"", "was silent for 1 s"),
    ],
)
def test_a_strange_or_silent_peer_is_lost(line: dict[str, Any] | bytes, message: str) -> None:
    async def story(head: Head, peer: Peer) -> None:
        await formed(head, peer)
        peer.say(line)
        assert message in str(await head.loss())

    play(story)


def test_an_unknown_phase_is_a_loss() -> None:
    async def story(head: Head, peer: Peer) -> None:
        peer.say({"generation": await formed(head, peer), "phase": "dancing"})
        assert "told the unknown phase 'dancing'" in str(await head.loss())

    play(story)


def test_the_end_of_the_connection_is_a_loss() -> None:
    async def story(head: Head, peer: Peer) -> None:
        peer.say({"generation": await formed(head, peer), "phase": "loading", "cause": ""})
        peer.writer.close()
        assert str(await head.loss()).startswith(
            "the connection to rank 1 on 127.0.0.1 ended while it was loading"
        )

    play(story)


def test_a_second_connection_does_not_disturb_the_first() -> None:
    async def story(head: Head, peer: Peer) -> None:
        await formed(head, peer)
        async with Peer(head.port) as second:
            second.say(GREETING)
            assert (await second.hear())["busy"] == f"already paired, generation {head.pair.generation}"
        peer.say({"generation": head.pair.generation, "phase": "loading", "cause": ""})
        await head.pair.wait_for_peer(Phase.LOADING)
        assert not head.lost.done()

    play(story)


def test_a_visitor_that_only_connects_does_not_end_the_wait() -> None:
    async def story(head: Head, peer: Peer) -> None:
        peer.writer.close()
        await asyncio.sleep(0.2)
        async with Peer(head.port) as again:
            await formed(head, again)

    play(story)


def test_a_stranger_is_turned_away() -> None:
    async def story(head: Head, peer: Peer) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", head.port, local_addr=("127.0.0.9", 0))
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        await formed(head, peer)

    play(story)
