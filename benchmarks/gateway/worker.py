# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers that pretend to be vLLM: nginx where many requests a second count, a small program where content counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from benchmarks.gateway.processes import LOOPBACK, free_port, running, wait_until

MODEL = "benchmark"
# Forks of a process that has loaded all: a worker is there within milliseconds, as the return of workers is timed.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["benchmarks.gateway.worker"])


def model_list(count: int = 1) -> dict[str, Any]:
    """The answer to GET /v1/models: the model that is asked for comes first."""
    names = [MODEL, *(f"{MODEL}-{number}" for number in range(1, count))]
    return {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": 1700000000,
                "owned_by": "vllm",
                "max_model_len": 131072,
            }
            for name in names
        ],
    }


def completion(content: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": content}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def healthy(port: int) -> bool:
    """Whether a worker answers GET /health with 200."""
    connection = HTTPConnection(LOOPBACK, port, timeout=2)
    with contextlib.closing(connection), contextlib.suppress(OSError):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


# Small bodies arrive with the head and are dropped by `return`; a longer one is first read whole, by passing an empty
# request on to a socket that answers.
NGINX = """\
daemon off;
# The temporary folder is open to nobody else.
user root;
pid worker.pid;
error_log stderr crit;
worker_processes 1;
worker_rlimit_nofile 20000;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    default_type application/json;
    client_max_body_size 64m;
    client_body_buffer_size 4m;
    client_body_temp_path bodies;
    proxy_temp_path proxied;
    keepalive_requests 1000000000;
    upstream answer {{ server unix:{directory}/answer.sock; keepalive 64; }}
    server {{
        listen unix:{directory}/answer.sock;
        return 200 '{answer}';
    }}
    server {{
{listen}
        location = /health {{ return 200 'ok'; }}
        location = /v1/models {{ alias {directory}/models.json; }}
        location = /v1/chat/completions {{
            if ($http_content_length ~ "^[0-9]{{1,4}}$") {{ return 200 '{answer}'; }}
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Content-Length "";
            proxy_pass_request_body off;
            proxy_pass http://answer;
        }}
    }}
}}
"""


@contextlib.contextmanager
def fast_workers(directory: Path, count: int, models: int = 1) -> Iterator[list[int]]:
    """So many workers in one nginx, each on a port of its own, that know so many models; yields the ports."""
    directory.mkdir()
    ports = [free_port() for _ in range(count)]
    listen = "\n".join(f"        listen {LOOPBACK}:{port} backlog=4096;" for port in ports)
    text = NGINX.format(directory=directory, listen=listen, answer=json.dumps(completion("Hello.")))
    (directory / "nginx.conf").write_text(text)
    (directory / "models.json").write_text(json.dumps(model_list(models)))
    with running(["nginx", "-p", f"{directory}/", "-c", "nginx.conf"], directory, {}) as program:
        if not wait_until(lambda: healthy(ports[-1]), 10):
            raise RuntimeError(f"the workers' nginx does not start: {program.last_words()}")
        yield ports


async def _chat(request: web.Request) -> web.StreamResponse:
    """The last message says what to do, as JSON: how many chunks, seconds between them, and seconds before the first."""
    raw = await request.read()
    body = json.loads(raw)
    if body.get("model") != MODEL:
        error = {"message": f"no model {body.get('model')}", "type": "NotFoundError", "code": 404}
        return web.json_response({"error": error}, status=404)
    wanted = json.loads(body["messages"][-1]["content"])
    await asyncio.sleep(wanted.get("wait", 0))
    if not body.get("stream"):
        return web.json_response(completion(str(len(raw))))
    answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
    # A client that leaves is no fault of the worker.
    with contextlib.suppress(ConnectionResetError):
        await answer.prepare(request)
        for number in range(wanted["chunks"]):
            if number:
                await asyncio.sleep(wanted["interval"])
            await answer.write(_event({"content": f"{number}@{time.monotonic_ns()} "}))
        await answer.write(_event({}, "stop"))
        await answer.write(b"data: [DONE]\n\n")
        await answer.write_eof()
    return answer


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: %s\n\n" % json.dumps(chunk).encode()


DRAIN_SECONDS = 8

# A process is one worker: what it has in hand, and whether it takes more.
_life = {"requests": 0, "drains": False}


@web.middleware
async def _count(request: web.Request, handler: Handler) -> web.StreamResponse:
    _life["requests"] += 1
    try:
        return await handler(request)
    finally:
        _life["requests"] -= 1


async def _health(_request: web.Request) -> web.Response:
    return web.Response(status=404 if _life["drains"] else 200)


async def _end_when_idle(_application: web.Application) -> None:
    """On SIGTERM answer the health check with 404, finish what is in hand, and go."""

    async def end() -> None:
        _life["drains"] = True
        # Long enough for the next health check.
        await asyncio.sleep(1)
        # Some gateways never notice, and go on sending.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while _life["requests"] > 0:  # noqa: ASYNC110  (nobody but this waits for it)
                    await asyncio.sleep(0.05)
        os._exit(0)

    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: _tasks.append(asyncio.ensure_future(end()))
    )


_tasks: list[asyncio.Future[None]] = []


async def _models(_request: web.Request) -> web.Response:
    return web.json_response(model_list())


def serve(port: int) -> None:
    """Be a worker until killed."""
    # One of the gateways tries other protocols first.
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    application = web.Application(client_max_size=64_000_000, middlewares=[_count])
    application.on_startup.append(_end_when_idle)
    application.router.add_get("/health", _health)
    application.router.add_get("/v1/models", _models)
    application.router.add_post("/v1/chat/completions", _chat)
    web.run_app(
        application,
        host=LOOPBACK,
        port=port,
        print=None,
        access_log=None,
        backlog=4096,
        handle_signals=False,
    )


class Worker:
    """A process that checks what it is asked for and streams numbered chunks; it can die and come back."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process: multiprocessing.process.BaseProcess | None = None

    def start(self) -> None:
        self._process = _FORKS.Process(target=serve, args=(self.port,), daemon=True)
        self._process.start()

    def drain(self) -> None:
        """Let it finish what it has in hand; returns when it is gone."""
        if self._process:
            self._process.terminate()
            self._process.join()
            self._process = None

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.join()
            self._process = None


@contextlib.contextmanager
def careful_workers(count: int) -> Iterator[list[Worker]]:
    """So many of these workers, up."""
    workers = [Worker() for _ in range(count)]
    try:
        for worker in workers:
            worker.start()
        if not wait_until(lambda: all(healthy(worker.port) for worker in workers), 10):
            raise RuntimeError("the workers do not start")
        yield workers
    finally:
        for worker in workers:
            worker.kill()
