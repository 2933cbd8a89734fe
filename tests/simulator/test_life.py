# SPDX-License-Identifier: GPL-3.0-or-later
"""Loading, signals, drain, crashes: what a supervisor meets, as it was measured on real vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from tests.simulator.conftest import Engine, StartEngine

LONG = 100_000  # tokens of a request that does not end within a test


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except OSError:
        return False


class Call:
    """A request in flight."""

    def __init__(self, engine: Engine, tokens: int, stream: bool = False) -> None:
        self.received = b""
        self.status: int | None = None
        self._task = asyncio.ensure_future(self._run(engine, tokens, stream))

    async def _run(self, engine: Engine, tokens: int, stream: bool) -> None:
        body = {"prompt": "x", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        url = engine.url("/v1/completions")
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            self.status = response.status
            async for chunk in response.content.iter_any():
                self.received += chunk

    async def finish(self, seconds: float = 10) -> Call:
        """Wait for its end."""
        await asyncio.wait_for(self._task, seconds)
        return self

    async def hangs(self, seconds: float = 0.5) -> bool:
        """Whether for so long neither a byte nor a close comes."""
        before = self.received
        await asyncio.sleep(seconds)
        return not self._task.done() and self.received == before

    async def leave(self) -> None:
        """Close the connection."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def json(self) -> dict[str, Any]:
        """The parsed body."""
        body: dict[str, Any] = json.loads(self.received)
        return body


# --- loading ---


async def test_connections_are_refused_while_loading(start: StartEngine) -> None:
    engine = start("--gpu-memory-utilization", "0.74", STANDIN_LOAD_SECONDS="1")
    await engine.until(lambda: "shards: 100% Completed" in engine.log)
    assert not engine.accepts_connections()
    await engine.ready()
    assert time.monotonic() - engine.started > 1
    for line in (
        "\rLoading safetensors checkpoint shards:  40% Completed | 2/5",
        "GPU KV cache size: 760,001 tokens, Maximum concurrency for 262,144 tokens per request: 2.90x",
        "Application startup complete.",
    ):
        assert line in engine.log


@pytest.mark.parametrize(
    ("flags", "memory", "least", "most"),
    [
        (["--gpu-memory-utilization", "0.78"], "121.69", 1_075_000, 1_085_000),
        (["--gpu-memory-utilization", "0.74"], "119.6", 600_000, 700_000),
        (["--kv-cache-memory-bytes", "8G"], "121.69", 500_000, 550_000),
    ],
)
async def test_capacity(start: StartEngine, flags: list[str], memory: str, least: int, most: int) -> None:
    engine = await start(*flags, STANDIN_DEVICE_MEMORY_GIB=memory).ready()
    [line] = [line for line in engine.log.splitlines() if "GPU KV cache size" in line]
    assert least <= int(line.split("size: ")[1].split()[0].replace(",", "")) <= most


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory-utilization", "0.6"], "No available memory for the cache blocks"),
        (["--gpu-memory-utilization", "0.66"], "To serve at least one request"),
        (["--load-format", "b13x"], "Load format `b13x` is not supported"),
    ],
)
async def test_what_fails_only_after_loading(start: StartEngine, flags: list[str], message: str) -> None:
    engine = start(*flags, STANDIN_LOAD_SECONDS="0.5")
    assert await engine.ended() == 1
    assert time.monotonic() - engine.started > 0.45
    assert message in engine.log


async def test_as_much_context_as_fits(start: StartEngine) -> None:
    engine = await start("--gpu-memory-utilization", "0.66", "--max-model-len", "auto").ready()
    models = json.loads((await engine.get("/v1/models"))[1])
    assert 100_000 < models["data"][0]["max_model_len"] < 262_144


async def test_a_taken_port(start: StartEngine) -> None:
    first = await start().ready()
    second = start("--port", str(first.port))
    assert await second.ended() == 1
    assert "Address already in use" in second.log


async def test_two_engines_do_not_fit_one_device(start: StartEngine, tmp_path: Path) -> None:
    shares = ["--gpu-memory-utilization", "0.7"]
    first = await start(*shares, STANDIN_CONTROL=str(tmp_path)).ready()
    second = start(*shares, STANDIN_CONTROL=str(tmp_path))
    assert await second.ended() == 1
    assert "Free memory on device cuda:0 (36.51/121.69 GiB)" in second.log
    # An orphaned worker still holds its memory; its end gives it back.
    children = first.children()
    first.process.kill()
    assert await start(*shares, STANDIN_CONTROL=str(tmp_path)).ended() == 1
    os.kill(children["EngineCore"], signal.SIGKILL)
    await first.until(lambda: not alive(children["Worker"]))
    await start(*shares, STANDIN_CONTROL=str(tmp_path)).ready()


async def test_sigterm_at_the_very_start_kills(start: StartEngine) -> None:
    engine = start(STANDIN_LOAD_SECONDS="20")
    await engine.until(lambda: "non-default args" in engine.log)
    engine.process.terminate()
    assert await engine.ended(1) == -signal.SIGTERM


async def test_sigterm_while_loading_leaves_the_engine_stuck(start: StartEngine) -> None:
    engine = start(STANDIN_LOAD_SECONDS="1")
    await engine.until(lambda: " 20% Completed" in engine.log)
    engine.process.terminate()
    await asyncio.sleep(1.2)
    assert engine.process.poll() is None
    assert not engine.accepts_connections()
    engine.process.terminate()
    await asyncio.sleep(0.2)
    assert engine.process.poll() is None


async def test_sigterm_late_in_loading_is_lost(start: StartEngine) -> None:
    engine = start(STANDIN_LOAD_SECONDS="1")
    await engine.until(lambda: " 80% Completed" in engine.log)
    engine.process.terminate()
    await engine.ready()
    assert (await engine.complete())[0] == 200
    engine.process.terminate()
    assert await engine.ended(2.5) == 0


async def test_a_process_that_dies_while_loading(start: StartEngine) -> None:
    engine = start(STANDIN_LOAD_SECONDS="3")
    await engine.until(lambda: len(engine.children()) == 2)
    os.kill(engine.children()["EngineCore"], signal.SIGKILL)
    assert await engine.ended(2) == 1
    assert "Engine core initialization failed" in engine.log


async def test_idle_connections_are_closed(start: StartEngine) -> None:
    """After 5 s as a rule: who keeps connections longer than the server finds them closed."""
    engine = await start(VLLM_HTTP_TIMEOUT_KEEP_ALIVE="0.5").ready()
    reader, writer = await asyncio.open_connection(engine.address, engine.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
    began = time.monotonic()
    answer = await reader.read()  # up to the close
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert 0.4 < time.monotonic() - began < 3


# --- stopping ---


async def test_sigterm_when_idle(start: StartEngine) -> None:
    engine = await start().ready()
    async with aiohttp.ClientSession() as session, session.get(engine.url("/health")):
        children = engine.children()
        engine.process.terminate()  # an idle connection that is kept alive does not matter
        assert await engine.ended(2.5) == 0
    await engine.until(lambda: not any(map(alive, children.values())), 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_sigterm_in_flight_leaves_clients_hanging(start: StartEngine, stream: bool) -> None:
    engine = await start(STANDIN_SPEED="1").ready()
    call = Call(engine, LONG, stream)
    await engine.running(1)
    engine.process.terminate()
    await engine.until(lambda: not engine.accepts_connections(), 0.5)
    await asyncio.sleep(0.1)  # what was under way arrives
    assert await call.hangs()
    engine.process.terminate()
    assert await call.hangs()
    assert engine.process.poll() is None
    await call.leave()
    assert await engine.ended(1) == 0


async def test_drain(start: StartEngine) -> None:
    engine = await start("--shutdown-timeout", "20", STANDIN_SPEED="4").ready()
    whole, stream = Call(engine, 150), Call(engine, 150, stream=True)
    await engine.running(2)
    engine.process.terminate()
    await asyncio.sleep(0.2)
    assert await engine.get("/health") == (200, "")
    status, answer = await engine.complete()
    assert (status, answer["error"]["message"]) == (500, "cannot schedule new futures after shutdown")
    assert (await whole.finish()).json()["usage"]["completion_tokens"] == 150
    assert (await stream.finish()).received.endswith(b"data: [DONE]\n\n")
    assert await engine.ended(2) == 0


async def test_a_drain_that_takes_too_long(start: StartEngine) -> None:
    engine = await start("--shutdown-timeout", "1", STANDIN_SPEED="1").ready()
    call = Call(engine, LONG, stream=True)
    await engine.running(1)
    engine.process.terminate()
    await asyncio.sleep(0.5)
    assert engine.accepts_connections()
    assert not await call.hangs(0.3)
    await engine.until(lambda: not engine.accepts_connections(), 1)
    await asyncio.sleep(0.1)
    assert await call.hangs()
    assert engine.process.poll() is None
    await call.leave()
    assert await engine.ended(1) == 0


async def test_sigterm_to_the_whole_group_defeats_the_drain(start: StartEngine) -> None:
    engine = await start("--shutdown-timeout", "60", STANDIN_SPEED="1").ready()
    whole, stream = Call(engine, LONG), Call(engine, LONG, stream=True)
    await engine.running(2)
    began = time.monotonic()
    os.killpg(engine.process.pid, signal.SIGTERM)
    await whole.finish()
    assert 2 < time.monotonic() - began < 3.5
    assert whole.status == 500
    await stream.finish()
    assert stream.received.endswith(b"data: [DONE]\n\n")
    assert b'"error"' in stream.received.splitlines()[-4]
    assert await engine.ended() == 0
    assert 4 < time.monotonic() - began < 5.5


# --- dying ---


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
async def test_a_crash_ends_with_exit_status_0(start: StartEngine, victim: str) -> None:
    engine = await start(STANDIN_SPEED="1").ready()
    whole, stream = Call(engine, LONG), Call(engine, LONG, stream=True)
    await engine.running(2)
    children = engine.children()
    began = time.monotonic()
    os.kill(children[victim], signal.SIGKILL)
    assert (await whole.finish(2)).status == 500
    assert whole.json()["error"]["type"] == "InternalServerError"
    assert (await stream.finish(2)).received.endswith(b"data: [DONE]\n\n")
    assert b'"error"' in stream.received
    assert (await engine.get("/health"))[0] == 503
    assert await engine.ended(2) == 0
    assert 0.5 < time.monotonic() - began < 1.5
    await engine.until(lambda: not any(map(alive, children.values())), 1)


async def test_the_api_server_s_end_leaves_orphans(start: StartEngine) -> None:
    engine = await start().ready()
    children = engine.children()
    assert set(children) == {"EngineCore", "Worker"}
    engine.process.kill()
    engine.process.wait()
    try:
        await asyncio.sleep(1)
        assert all(map(alive, children.values()))
    finally:
        os.kill(children["EngineCore"], signal.SIGKILL)
    await engine.until(lambda: not alive(children["Worker"]))


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
async def test_a_stopped_process_wedges_the_engine(start: StartEngine, victim: str) -> None:
    engine = await start(STANDIN_SPEED="2").ready()
    pid = engine.children()[victim]
    call = Call(engine, 60, stream=True)
    await engine.running(1)
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.2)
    assert await call.hangs()
    assert (await engine.get("/health"))[0] == 200
    os.kill(pid, signal.SIGCONT)
    assert (await call.finish()).received.endswith(b"data: [DONE]\n\n")


# --- faults on demand ---


async def test_wedge_and_its_end(start: StartEngine, tmp_path: Path) -> None:
    engine = await start(STANDIN_CONTROL=str(tmp_path)).ready()
    (tmp_path / "fault").write_text("wedge\n")
    await asyncio.sleep(0.3)
    call = Call(engine, 10)
    generated = 'vllm:generation_tokens_total{engine="0",model_name="tiny"}'
    before = await engine.metric(generated)
    assert await call.hangs()
    assert (await engine.get("/health"))[0] == 200
    assert await engine.metric(generated) == before
    (tmp_path / "fault").unlink()
    assert (await call.finish()).status == 200


async def test_slow(start: StartEngine, tmp_path: Path) -> None:
    fault = tmp_path / "fault-file"  # STANDIN_CONTROL may be the file itself
    engine = await start(STANDIN_CONTROL=str(fault), STANDIN_SPEED="20").ready()
    call = Call(engine, LONG)
    await engine.running(1)

    async def tokens_per_second() -> float:
        counter = 'vllm:generation_tokens_total{engine="0",model_name="tiny"}'
        await asyncio.sleep(0.3)  # by now a change of the file is seen
        before, began = await engine.metric(counter), time.monotonic()
        await asyncio.sleep(0.7)
        return (await engine.metric(counter) - before) / (time.monotonic() - began)

    assert await tokens_per_second() == pytest.approx(720, rel=0.2)
    fault.write_text("slow 5")
    assert await tokens_per_second() == pytest.approx(144, rel=0.2)
    fault.unlink()
    assert await tokens_per_second() == pytest.approx(720, rel=0.2)
    await call.leave()


async def test_refuse_and_its_end(start: StartEngine, tmp_path: Path) -> None:
    engine = await start(STANDIN_CONTROL=str(tmp_path)).ready()
    (tmp_path / "fault").write_text("refuse")
    await engine.until(lambda: not engine.accepts_connections())
    assert engine.process.poll() is None
    (tmp_path / "fault").unlink()
    await engine.until(engine.accepts_connections)
    assert (await engine.complete())[0] == 200


async def test_crash(start: StartEngine, tmp_path: Path) -> None:
    engine = await start(STANDIN_CONTROL=str(tmp_path)).ready()
    (tmp_path / "fault").write_text("crash")
    assert await engine.ended(3) == 0
    assert "EngineCore died" in engine.log


async def test_deaf(start: StartEngine) -> None:
    engine = await start(STANDIN_FAULT_AT_START="slow 2; deaf").ready()
    engine.process.terminate()
    await asyncio.sleep(0.5)
    assert (await engine.complete())[0] == 200


async def test_a_fault_once_ready(start: StartEngine) -> None:
    engine = start(STANDIN_FAULT_WHEN_READY="crash")
    assert await engine.ended() == 0
    assert "Application startup complete." in engine.log


@pytest.mark.parametrize(
    ("fault", "status"), [("crash-while-loading", 1), ("exit 7", 7)], ids=["crash-while-loading", "exit"]
)
async def test_faults_at_start(start: StartEngine, fault: str, status: int) -> None:
    engine = start(STANDIN_FAULT_AT_START=fault)
    assert await engine.ended() == status


async def test_an_unknown_fault_is_named(start: StartEngine) -> None:
    engine = await start(STANDIN_FAULT_AT_START="slow; explode").ready()
    assert "the fault 'slow' is not known" in engine.log
    assert "the fault 'explode' is not known" in engine.log
