# SPDX-License-Identifier: GPL-3.0-or-later
"""Both engines, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.parity.engines import IMAGES, Engine

Both = dict[str, Engine]


@pytest.fixture(scope="session")
def both() -> Iterator[Both]:
    """One of each, serving for the whole session."""
    engines = {which: Engine(which) for which in IMAGES}
    try:
        for engine in engines.values():
            engine.start()
        for engine in engines.values():
            engine.wait_until_ready()
        yield engines
    finally:
        for engine in engines.values():
            engine.remove()


@pytest.fixture(params=list(IMAGES))
def which(request: pytest.FixtureRequest) -> str:
    """Each engine in turn: what is expected is the same of both."""
    return str(request.param)


@pytest.fixture
def start(which: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines of this kind that end with the test."""
    started: list[Engine] = []

    def begin(*more: str) -> Engine:
        started.append(Engine(which))
        return started[-1].start(*more)

    yield begin
    for engine in started:
        engine.remove()
