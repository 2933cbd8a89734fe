# SPDX-License-Identifier: GPL-3.0-or-later
"""The heartbeat between the two agents of a tensor-parallel pair.

One TCP connection over the fabric is one life of the pair: rank 1 connects, rank 0 listens. Each side first says
who it is and refuses a peer that does not fit, then sends a beat (one JSON line with generation, phase and cause)
several times per heartbeat timeout. When the connection ends or falls silent the pair is lost and never comes
back: both agents end their engines and begin anew. Only monotonic time is used, so a clock may step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from .config import Config, PairConfig
from .status import Phase

PROTOCOL = 1
_BEATS_PER_TIMEOUT = 5
_RETRY_SECONDS = 0.5

log = logging.getLogger(__name__)


class PairError(Exception):
    """The pair is not formed yet, or was lost; the message says why."""


class Refused(PairError):
    """This peer does not fit and will not until somebody changes its configuration or ours."""


class Pair:
    """This rank's side of the heartbeat.

    `on_peer_phase(phase, cause)` is called for every change of the peer's phase, `on_lost(error)` when the
    formed pair is lost.
    """

    def __init__(
        self,
        config: Config,
        pair: PairConfig,
        on_peer_phase: Callable[[Phase, str], None],
        on_lost: Callable[[PairError], None],
    ) -> None:
        self._config = config
        self._pair = pair
        self._on_peer_phase = on_peer_phase
        self._on_lost = on_lost
        self.generation = secrets.token_hex(6) if self.is_head else ""
        self.peer_phase: Phase | None = None
        self._phase, self._cause = Phase.WAITING_FOR_PEER, ""
        self._heard: float | None = None
        self._beat_due = asyncio.Event()
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._talk: asyncio.Task[None] | None = None
        self._formed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_head(self) -> bool:
        """Rank 0 serves the API."""
        return self._pair.rank == 0

    @property
    def peer(self) -> str:
        """The other rank's name for messages."""
        return f"rank {1 - self._pair.rank} on {self._pair.peer}"

    def describe(self) -> dict[str, Any]:
        """The state of the pair for /status; age in seconds, null before the peer was first heard."""
        heard = self._heard
        return {
            "rank": self._pair.rank,
            "size": self._pair.size,
            "head": self._pair.head,
            "peer": self._pair.peer,
            "connected": self._talk is not None and not self._talk.done(),
            "peer_phase": self.peer_phase.value if self.peer_phase else None,
            "generation": self.generation or None,
            "heartbeat_age_seconds": None if heard is None else round(time.monotonic() - heard, 3),
        }

    def tell(self, phase: Phase, cause: str = "") -> None:
        """Tell the peer our phase at once."""
        self._phase, self._cause = phase, cause
        self._beat_due.set()

    async def form(self, report: Callable[[str], None]) -> None:
        """Find the peer and agree with it within peer_wait_seconds; raises PairError.

        `report` gets what is in the way, after each try that failed.
        """
        reason = "nothing heard"
        try:
            async with asyncio.timeout(self._pair.peer_wait_seconds):
                while True:
                    self._formed = asyncio.get_running_loop().create_future()
                    try:
                        await (self._listen() if self.is_head else self._connect())
                        return await self._formed
                    except Refused:
                        raise
                    except (OSError, PairError) as error:
                        reason = str(error) or "no answer"
                    report(reason)
                    await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            raise PairError(f"no {self.peer} within {self._pair.peer_wait_seconds:g} s: {reason}") from None

    async def wait_for_peer(self, *phases: Phase) -> None:
        """Wait until the peer is in one of `phases`; the caller sets the bound."""
        while self.peer_phase not in phases:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Say nothing more; the peer sees the connection end."""
        if self._server is not None:
            self._server.close()
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.wait({self._talk}, timeout=1)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._greet, self._pair.head, self._pair.heartbeat_port)

    def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")[0]
        if address != self._pair.peer:
            log.warning("heartbeat connection from %s closed; the peer is %s", address, self._pair.peer)
            writer.close()
        elif self._talk is not None:
            _send(writer, {"busy": f"already paired, generation {self.generation}"})
            writer.close()
        else:
            self._talk = asyncio.create_task(self._converse(reader, writer))

    async def _connect(self) -> None:
        async with asyncio.timeout(self._pair.heartbeat_timeout):
            reader, writer = await asyncio.open_connection(self._pair.head, self._pair.heartbeat_port)
        self._talk = asyncio.create_task(self._converse(reader, writer))

    def _identity(self, rank: int) -> dict[str, Any]:
        """What a rank of this pair says of itself; only `rank` differs between the two."""
        config = self._config
        return {
            "version": PROTOCOL,
            "rank": rank,
            "mode": config.mode,
            "image": config.image,
            "model": config.model,
        }

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The whole connection: greet, then beat and listen until either side ends."""
        beating: asyncio.Task[None] | None = None
        try:
            _send(writer, self._identity(self._pair.rank) | {"generation": self.generation})
            self._check_greeting(await self._receive(reader))
            log.info("paired with %s, generation %s", self.peer, self.generation)
            beating = asyncio.create_task(self._beat(writer))
            self._formed.set_result(None)
            while True:
                self._take_beat(await self._receive(reader))
        except PairError as error:
            if beating is not None:
                self._on_lost(error)
            else:
                self._talk = None
                if isinstance(error, Refused) or not self.is_head:  # the head listens on for another attempt
                    self._formed.set_exception(error)
        finally:
            if beating is not None:
                beating.cancel()
            writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        reason = ""
        try:
            async with asyncio.timeout(self._pair.heartbeat_timeout):
                line = await reader.readline()
        except TimeoutError:
            raise PairError(f"{self.peer} was silent for {self._pair.heartbeat_timeout:g} s") from None
        except ValueError:
            raise PairError(f"{self.peer} sent a line without an end") from None
        except OSError as error:
            line, reason = b"", f": {error.strerror}"
        if not line.endswith(b"\n"):
            doing = f" while it was {self.peer_phase}" if self.peer_phase else ""
            raise PairError(f"the connection to {self.peer} ended{doing}{reason}")
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise PairError(f"{self.peer} sent {line[:80]!r} instead of a JSON object")
        self._heard = time.monotonic()
        return message

    def _check_greeting(self, greeting: dict[str, Any]) -> None:
        if "busy" in greeting:
            raise PairError(f"{self.peer} is {greeting['busy']}")
        for key, wanted in self._identity(1 - self._pair.rank).items():
            if (found := greeting.get(key)) != wanted:
                raise Refused(f"{self.peer} refused: its {key} is {found!r}, needed is {wanted!r}")
        if not self.is_head:
            self.generation = str(greeting.get("generation"))

    def _take_beat(self, beat: dict[str, Any]) -> None:
        if (found := beat.get("generation")) != self.generation:
            raise Refused(f"{self.peer} refused: its generation is {found!r}, needed is {self.generation!r}")
        try:
            phase = Phase(beat.get("phase"))
        except ValueError:
            raise PairError(f"{self.peer} told the unknown phase {beat.get('phase')!r}") from None
        if phase is not self.peer_phase:
            self.peer_phase = phase
            self._changed.set()
            self._on_peer_phase(phase, str(beat.get("cause", "")))

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            _send(writer, {"generation": self.generation, "phase": self._phase.value, "cause": self._cause})
            self._beat_due.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pair.heartbeat_timeout / _BEATS_PER_TIMEOUT):
                    await self._beat_due.wait()


def _send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(json.dumps(message).encode() + b"\n")
