# SPDX-License-Identifier: GPL-3.0-or-later
"""Two copies that are both away for a while, as in a switch, behind our gateway and behind nginx at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gateway.gateways import OURS, Settings, launched
from benchmarks.gateway.measures import Record, away
from benchmarks.gateway.worker import Worker, careful_workers

NGINX = "nginx"
GATEWAYS = (OURS, NGINX)
FAIL_TIMEOUT = 30
SETTINGS = Settings(
    # What switch_mode.yml sets for the time of a switch.
    hold_seconds=3600,
    nginx_server=f"max_fails=3 fail_timeout={FAIL_TIMEOUT}s",
    nginx_location="proxy_next_upstream error timeout http_502 http_503;",
)
COPIES = 2
# The second copy comes so much later than the first one, in seconds.
APART = 5
# Seconds that the copies are away. What nginx makes of it depends on where in its 30 seconds the first one comes back:
# first of FULL right after nginx has looked for it in vain, then 5 s later each time.
QUICK = (2.0, 17.0)
FULL = (33.0, 38.0, 43.0, 48.0, 53.0, 58.0)


def absences(
    seconds: Sequence[float],
    directory: Path,
    names: Sequence[str] = GATEWAYS,
    watched: float = FAIL_TIMEOUT + 5,
) -> Iterator[Record]:
    """One record for each gateway and time away; ``watched`` is how long they are looked at after the first copy is back."""
    for number, outage in enumerate(seconds):
        with careful_workers(COPIES) as workers, contextlib.ExitStack() as stack:
            ports = [worker.port for worker in workers]
            gateways = [
                stack.enter_context(launched(name, directory / f"{number}-{name}", ports, SETTINGS))
                for name in names
            ]
            for one in gateways:
                if not one.serves():
                    raise RuntimeError(
                        f"{one.name} does not start: {one.program and one.program.last_words()}"
                    )
            for record in asyncio.run(away(gateways, workers, outage, watched, Worker.drain, APART)):
                yield {"round": number, **record}
