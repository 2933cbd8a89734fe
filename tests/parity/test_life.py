# SPDX-License-Identifier: GPL-3.0-or-later
"""How an engine starts, ends and is ended: what units and agent are built around, of both engines alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.parity.engines import MODEL, Answer, Engine, command

Start = Callable[..., Engine]
# Of real vLLM about four seconds; the tiny model's context bounds it.
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 3500, "ignore_eos": True}


class Asked:
    """A request under way, and what came of it."""

    def __init__(self, engine: Engine) -> None:
        self.answer: Answer | None = None
        self._thread = threading.Thread(target=self._ask, args=[engine])
        self._thread.start()
        while ' 1.0' not in "".join(
            line for line in str(engine.ask("/metrics").body).splitlines() if line.startswith("vllm:num_requests_running")
        ):  # fmt: skip
            assert self._thread.is_alive(), self.answer
            time.sleep(0.02)

    def _ask(self, engine: Engine) -> None:
        self.answer = engine.ask("/v1/completions", LONG)

    def result(self) -> Answer:
        self._thread.join(60)
        assert self.answer
        return self.answer


def test_it_refuses_while_it_loads_and_a_stop_drains(start: Start) -> None:
    engine = start()
    refused = 0
    while (status := engine.ask("/health").status) != 200:
        assert status == 0, "it listened before it served"
        refused += 1
        time.sleep(0.1)
        assert engine.is_running, engine.log[-2000:]
    assert refused > 3
    asked = Asked(engine)
    engine.signal("TERM")
    time.sleep(0.3)
    # Nobody can tell from its health that it drains, and whoever asks for something new gets an error.
    assert engine.ask("/health").status == 200
    assert engine.ask("/v1/completions", {**LONG, "max_tokens": 1}).status == 500
    assert asked.result().status == 200
    assert engine.exit_status() == 0


def test_a_stop_without_requests(start: Start) -> None:
    engine = start().wait_until_ready()
    engine.signal("TERM")
    assert engine.exit_status(20) == 0


@pytest.mark.parametrize("process", ["EngineCor"])
def test_a_crash_looks_like_a_good_end(start: Start, process: str) -> None:
    engine = start().wait_until_ready()
    asked = Asked(engine)
    engine.signal("KILL", process)
    assert asked.result().status == 500
    assert engine.exit_status(20) == 0


def test_a_full_queue_refuses(start: Start) -> None:
    engine = start("--max-num-seqs", "1", "--max-num-queued-reqs", "1").wait_until_ready()
    answers: list[Answer] = []
    threads = [
        threading.Thread(
            target=lambda: answers.append(engine.ask("/v1/completions", {**LONG, "max_tokens": 400}))
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = sorted(answer.status for answer in answers)
    assert set(statuses) == {200, 503}
    (form,) = {tuple(sorted(answer.body["error"])) for answer in answers if answer.status == 503}
    assert form == ("code", "message", "param", "type")


# The program whole; what its parser and its configuration refuse stands in flags.py.
REFUSED = {
    "an unknown flag": (["--no-such-flag", "1"], 2),
    "a share of more than all": (["--gpu-memory-utilization", "1.9"], 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(which: str, name: str) -> None:
    flags, status = REFUSED[name]
    ended, said = command(which, ["vllm", "serve", MODEL, "--port", "1", *flags])
    assert ended == status, said[-2000:]


def test_no_such_model(which: str) -> None:
    ended, said = command(which, ["vllm", "serve", "/srv/models/nowhere", "--port", "1"])
    assert ended == 1, said[-2000:]


def test_a_port_that_is_taken(start: Start, which: str) -> None:
    engine = start().wait_until_ready()
    ended, said = command(
        which, ["vllm", "serve", MODEL, "--host", "127.0.0.1", "--port", str(engine.port), "--enforce-eager"]
    )
    assert ended == 1, said[-2000:]
