# SPDX-License-Identifier: GPL-3.0-or-later
"""One engine from start to end: loading, its processes, signals, drain, death. Timings are measured ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, NoReturn

from aiohttp import web

from standin import VERSION, child
from standin.cli import DEFAULTS
from standin.config import GIB, KV_BYTES_PER_TOKEN, TP_KV_BYTES_PER_TOKEN, WEIGHTS_GIB, known_load_format
from standin.faults import Faults
from standin.metrics import EngineMetrics
from standin.rendezvous import Link, PeerError, Rendezvous
from standin.scheduler import EngineDeadError, Scheduler
from standin.server import Server

if TYPE_CHECKING:
    from standin.config import EngineConfig

# Shares of the load time. Up to the first, SIGTERM kills; up to the second, it leaves the engine stuck
# for ever; after that, it is lost and the engine starts all the same.
SIGTERM_KILLS_UNTIL, SIGTERM_STICKS_UNTIL = 0.1, 0.65

DEATH_SECONDS, DEATH_IN_DRAIN_SECONDS = 0.7, 2.0  # from the engine's end to the API server's
PEER_LOSS_SECONDS = 4.5  # from the peer's loss, with requests in flight, to the engine's end
HEADLESS_STOP_SECONDS = 11.5
STATS_SECONDS = 10.0


class LoadError(Exception):
    """The engine cannot start: exit status 1."""


def log(text: str, source: str = "core.py", level: str = "INFO") -> None:
    """One line in the form of vLLM's log."""
    print(
        f"(EngineCore pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} [{source}] {text}",
        flush=True,
    )


def serve(config: EngineConfig) -> NoReturn:
    """Run the engine; the process ends with its exit status."""

    async def run() -> None:
        engine = Engine(config)
        status = await engine.run()
        engine.kill_processes()
        sys.stdout.flush()
        # Requests that never got an answer must not hold up the end.
        os._exit(status)

    asyncio.run(run())
    raise AssertionError("unreachable")


class Engine:
    """The main process: the API server of rank 0, or a headless rank."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._args = config.args
        self._headless = bool(config.args.headless)
        self._faults = Faults(config.settings, lambda text: log(text, "faults.py", "WARNING"))
        self._metrics = EngineMetrics(config)
        self._scheduler = Scheduler(config, self._metrics, self._faults, self._step)
        self._server = Server(config, self._scheduler, self._metrics)
        self._runner = web.AppRunner(
            self._server.application(), access_log=None, keepalive_timeout=config.keep_alive
        )
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._link: Link | None = None
        self._rendezvous: Rendezvous | None = None
        self._status: asyncio.Future[int] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._processes_died = asyncio.Event()
        self._progress = 0.0
        self._stuck = False  # a signal came at the wrong moment: never ready, never ending
        self._terminating = False
        self._killed = False  # the engine's processes ended because we ended them

    async def run(self) -> int:
        """Load, serve, and return the exit status."""
        self._status = asyncio.get_running_loop().create_future()
        log(f"vLLM API server version {VERSION} (stand-in), model {self._config.model}", "api_server.py")
        log(f"non-default args: {self._shown_args()}", "api_server.py")
        self._spawn(self._faults.watch(self._apply_faults))
        self._spawn(self._start())
        return await self._status

    def kill_processes(self) -> None:
        """End the engine's processes at once, as part of the end of this one."""
        self._killed = True
        self._crash()

    # --- loading ---

    async def _start(self) -> None:
        try:
            if not self._headless:
                self._socket = self._bind()
            await self._load()
            self._progress = 1.0
            if self._link:
                self._spawn(self._link.listen(self._answer_step if self._headless else None))
                self._spawn(self._watch_peer(self._link))
            if not self._headless:
                await self._serve()
        except (LoadError, PeerError, OSError) as error:
            log(str(error), level="ERROR")
            log("RuntimeError: Engine core initialization failed. See root cause above.", level="ERROR")
            self._exit(1)
            return
        self._faults.ready = True

    async def _serve(self) -> None:
        await self._runner.setup()
        await self._listen()
        self._spawn(self._scheduler.run())
        self._spawn(self._server.sweep())
        self._spawn(self._log_stats())
        log(f"Starting vLLM server on http://{self._config.host}:{self._config.port}", "launcher.py")
        for line in (f"Started server process [{os.getpid()}]", "Application startup complete."):
            print(f"(APIServer pid={os.getpid()}) INFO:     {line}", flush=True)

    async def _load(self) -> None:
        await self._load_for(SIGTERM_KILLS_UNTIL)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_terminate)
        if self._args.nnodes > 1:
            self._link = await self._meet()
        await self._start_processes()
        shards = len(list(self._config.model.glob("*.safetensors"))) or 5
        began = time.monotonic()
        for done in range(shards):
            self._show_shards(done, shards, began)
            await self._load_for(0.8 / shards)
            if self._faults.number("crash-while-loading") is not None and done >= shards // 2:
                raise LoadError("CUDA error: out of memory (fault crash-while-loading)")
        self._show_shards(shards, shards, began)
        if not known_load_format(self._args.load_format):
            raise LoadError(f"Load format `{self._args.load_format}` is not supported")
        weights = WEIGHTS_GIB / self._config.tensor_parallel_size
        log(
            f"Model loading took {weights:.2f} GiB memory and {time.monotonic() - began:.6f} seconds",
            "model_runner.py",
        )
        if not self._config.pooling:
            self._show_capacity()
        log("Capturing CUDA graphs (decode, FULL): 100%", "model_runner.py")
        await self._load_for(0.1)
        if self._link:
            try:
                await asyncio.wait_for(self._link.barrier(), self._args.distributed_timeout_seconds)
            except TimeoutError as error:
                raise PeerError("timed out waiting for the other rank to load") from error

    async def _load_for(self, share: float) -> None:
        """Spend a share of the load time, unless a signal has left the engine stuck or a process has died."""
        if self._stuck:
            await asyncio.Event().wait()
        try:
            await asyncio.wait_for(self._processes_died.wait(), share * self._config.settings.load_seconds)
        except TimeoutError:
            self._progress += share
            return
        raise LoadError("a process of the engine died while the model was loading")

    async def _meet(self) -> Link:
        args = self._args
        self._rendezvous = Rendezvous(
            args.node_rank, args.master_addr, args.master_port, self._config.host_ip
        )
        head = f"{args.master_addr}:{args.master_port}"
        log(
            f"world_size={args.nnodes} rank={args.node_rank} distributed_init_method=tcp://{head}",
            "parallel_state.py",
        )
        return await self._rendezvous.meet(args.distributed_timeout_seconds)

    async def _start_processes(self) -> None:
        title = f"VLLM::Worker_TP{self._args.node_rank}" if self._args.nnodes > 1 else "VLLM::Worker"
        command = [sys.executable, "-I", "-S", child.__file__]
        command += ["worker" if self._headless else "engine-core", title]
        settings = self._config.settings
        if settings.control and settings.control.is_dir() and os.access(settings.control, os.W_OK):
            directory = str(settings.control / "memory")
            command += [directory, str(settings.device_memory_gib), str(self._config.device_memory_gib)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert self._process.stdout
        answer = (await self._process.stdout.readline()).decode().strip()
        if answer != "ready":
            raise LoadError(
                f"Free memory on device cuda:0 ({answer or '?'}/{settings.device_memory_gib} GiB) on startup is less "
                f"than desired GPU memory utilization ({self._args.gpu_memory_utilization}, "
                f"{self._config.device_memory_gib:.2f} GiB). Decrease GPU memory utilization or reduce GPU memory "
                "used by other processes."
            )
        self._spawn(self._watch_processes(self._process))

    def _show_capacity(self) -> None:
        tokens, longest = self._config.kv_tokens, self._config.max_model_len
        size = KV_BYTES_PER_TOKEN if self._config.tensor_parallel_size == 1 else TP_KV_BYTES_PER_TOKEN
        log(f"Available KV cache memory: {tokens * size / GIB:.2f} GiB", "gpu_worker.py")
        if tokens <= 0:
            raise LoadError(
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine."
            )
        if tokens < longest:
            raise LoadError(
                f"To serve at least one request with the model's max seq len ({longest}), "
                f"({longest * size / GIB:.2f} GiB KV cache is needed, which is larger than the available KV cache "
                f"memory ({tokens * size / GIB:.2f} GiB). Based on the available memory, the estimated maximum model "
                f"length is {tokens}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
            )
        log(
            f"GPU KV cache size: {tokens:,} tokens, "
            f"Maximum concurrency for {longest:,} tokens per request: {tokens / longest:.2f}x",
            "kv_cache_utils.py",
        )

    @staticmethod
    def _show_shards(done: int, shards: int, began: float) -> None:
        percent, seconds = 100 * done // shards, int(time.monotonic() - began)
        bar = f"Loading safetensors checkpoint shards: {percent:3d}% Completed | {done}/{shards} [{seconds:02d}s]"
        print(f"\r{bar}\n", end="", file=sys.stderr, flush=True)

    # --- serving ---

    async def _step(self) -> None:
        """One model step through every process of the engine; never returns when one of them is gone."""
        await self._step_processes()
        if self._link is None:
            return
        try:
            await asyncio.wait_for(self._link.step(), self._config.execute_timeout)
        except TimeoutError:
            log("RPC call to execute_model timed out.", "multiproc_executor.py", "ERROR")
            self._crash()
            await asyncio.Event().wait()

    async def _step_processes(self) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(b"s")
            await process.stdout.readexactly(1)
        except (OSError, EOFError):
            await asyncio.Event().wait()

    async def _answer_step(self) -> None:
        await self._faults.unwedged.wait()
        await self._step_processes()

    def _bind(self) -> socket.socket:
        """Take the port without listening on it: connections are refused until the model is loaded."""
        family = socket.AF_INET6 if ":" in self._config.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((self._config.host, self._config.port))
        return bound

    async def _listen(self) -> None:
        assert self._runner.server is not None
        self._socket = self._socket or self._bind()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._runner.server, sock=self._socket, backlog=2048)

    def _close_port(self) -> None:
        """Stop listening; connections that stand stay open."""
        if self._listener:
            self._listener.close()
        self._listener = self._socket = None

    async def _log_stats(self) -> None:
        while True:
            await asyncio.sleep(STATS_SECONDS)
            if self._scheduler.unfinished:
                counts = f"Running: {len(self._scheduler.running)} reqs, Waiting: {len(self._scheduler.waiting)} reqs"
                log(f"Engine 000: {counts}, GPU KV cache usage: {self._scheduler.kv_usage:.1%}", "loggers.py")

    # --- dying ---

    async def _watch_processes(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._processes_died.set()
        if self._killed or self._progress < 1:
            return
        log("EngineCore died unexpectedly.", level="ERROR")
        self._server.state.dead = True
        self._scheduler.fail(EngineDeadError())
        await asyncio.sleep(DEATH_IN_DRAIN_SECONDS if self._server.state.draining else DEATH_SECONDS)
        self._exit(0)  # measured: an engine's crash is not a failure to the shell

    async def _watch_peer(self, link: Link) -> None:
        await link.lost.wait()
        # Idle, nobody notices; nor does the headless rank, ever.
        if self._scheduler.running:
            await asyncio.sleep(PEER_LOSS_SECONDS)
            self._crash()

    def _crash(self) -> None:
        """End the engine's processes; the watch over them does the rest."""
        if self._process and self._process.returncode is None:
            self._process.kill()

    def _on_terminate(self) -> None:
        if self._progress < 1:
            self._stuck = self._stuck or self._progress < SIGTERM_STICKS_UNTIL
            log("SIGTERM while loading is not acted on", level="WARNING")
        elif self._faults.number("deaf") is None and not self._terminating:
            self._terminating = True
            self._spawn(self._stop())

    async def _stop(self) -> None:
        if self._headless:
            await asyncio.sleep(HEADLESS_STOP_SECONDS)
            self._exit(0)
            return
        seconds = self._args.shutdown_timeout
        log(
            f"Shutting down with {self._server.in_flight} requests in flight, timeout {seconds} s",
            "launcher.py",
        )
        self._server.state.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.idle.wait(), seconds)
        if self._server.state.dead:
            return
        self.kill_processes()
        self._close_port()
        # Whoever is still connected hears nothing more, and the process waits for them to leave.
        await self._server.idle.wait()
        log("Application shutdown complete.", "launcher.py")
        self._exit(0)

    def _apply_faults(self) -> None:
        if (status := self._faults.number("exit")) is not None:
            self._exit(int(status))
        if self._progress < 1 or self._terminating:
            return
        if self._faults.number("crash") is not None:
            self._crash()
        refuse = self._faults.number("refuse") is not None
        if refuse:
            self._close_port()
        elif self._faults.ready and not self._headless and self._listener is None:
            self._spawn(self._listen())

    def _exit(self, status: int) -> None:
        if self._status and not self._status.done():
            self._status.set_result(status)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()):
                traceback.print_exception(error)
                self._exit(1)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)

    def _shown_args(self) -> dict[str, Any]:
        shown = {name: v for name, v in vars(self._args).items() if v not in (None, DEFAULTS.get(name))}
        return shown | {"api_key": ["***"]} if shown.get("api_key") else shown
