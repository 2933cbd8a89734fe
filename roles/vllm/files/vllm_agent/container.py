# SPDX-License-Identifier: GPL-3.0-or-later
"""One container in the foreground of the docker client; the agent alone decides when it gets a signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence

_LINE_END = re.compile(rb"[\r\n]+")  # progress bars redraw themselves with a carriage return
_LONGEST_LINE = 2**16
_CALL_SECONDS = 15.0
_KILL_TRIES = 4
_KILL_WAIT_SECONDS = 3.0
_REMOVE_PAUSE_SECONDS = 1.0


class ContainerError(Exception):
    """The docker client could not be run."""


async def docker(*arguments: str, seconds: float = _CALL_SECONDS) -> tuple[int, str]:
    """Run one docker command for at most `seconds`; returns its exit status and output, or its complaint.

    The status is 124 when it took too long and 127 when there is no docker.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            "docker",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,  # apart, as docker also warns where all is well
            start_new_session=True,
        )
    except OSError as error:
        return 127, f"docker cannot be run: {error.strerror}"
    try:
        async with asyncio.timeout(seconds):
            output, complaint = await process.communicate()
    except TimeoutError:
        return 124, f"docker {arguments[0]} did not end within {seconds:g} s"
    finally:
        if process.returncode is None:
            process.kill()
    status = process.returncode or 0
    return status, (output if status == 0 else complaint or output).decode(errors="replace").strip()


async def running_containers() -> dict[str, str]:
    """Full id to name of every running container; empty when docker does not tell."""
    status, output = await docker("ps", "--no-trunc", "--format", "{{.ID}} {{.Names}}")
    pairs = (line.split(maxsplit=1) for line in output.splitlines()) if status == 0 else ()
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def describe_exit(status: int) -> str:
    """Say what an exit status of `docker run` means."""
    if status < 0:
        return f"status {status} (the docker client was killed by {_signal_name(-status)})"
    if status == 125:
        return "status 125 (docker itself failed)"
    if status in (126, 127):
        return f"status {status} (the command cannot be run in the image)"
    if status == 128 + signal.SIGKILL:
        return "status 137 (SIGKILL: out of memory, or killed by hand)"
    if status > 128:
        return f"status {status} ({_signal_name(status - 128)})"
    return f"status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Container:
    """Runs `command`, a `docker run` in the foreground of the container `name`, once.

    `on_line` gets each line of the container's output, without its end.
    """

    def __init__(self, name: str, command: Sequence[str], on_line: Callable[[str], None]) -> None:
        self._name = name
        self._command = command
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the docker client in a session of its own, where no signal meant for us reaches it."""
        # A pipe of our own: asyncio's would delay the news of the exit for as long as anybody holds its other end.
        ours, clients = os.pipe()
        output = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(output), os.fdopen(ours, "rb", buffering=0)
        )
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=clients,
                stderr=clients,
                start_new_session=True,
            )
        except OSError as error:
            raise ContainerError(f"{self._command[0]} cannot be run: {error.strerror}") from error
        finally:
            os.close(clients)
        self._output = asyncio.create_task(self._pass_lines_on(output))

    async def wait(self) -> int:
        """Wait for the end of the docker client; returns its exit status, which is the container's."""
        assert self._process is not None
        assert self._output is not None
        status = await self._process.wait()
        await asyncio.wait({self._output}, timeout=2)  # the last lines tell the cause
        return status

    async def is_running(self) -> bool:
        """Has docker started the container?"""
        return await docker("inspect", "--format", "{{.State.Running}}", self._name) == (0, "true")

    async def end(self, grace: float | None, hurry: asyncio.Event) -> None:
        """End the container and make sure that none of its name is left.

        With `grace` (seconds) its main process gets SIGTERM first and SIGKILL afterwards, or as soon as `hurry`
        is set; without it SIGKILL at once. Takes at most grace + 70 seconds, even if docker hangs.
        """
        if grace is not None and self._is_attached:
            await self._stop(grace, hurry)
        for _try in range(_KILL_TRIES):  # a container that is only being created cannot be killed yet
            if not self._is_attached:
                break
            await docker("kill", self._name, seconds=_KILL_WAIT_SECONDS * 2)
            await self._exited_within(_KILL_WAIT_SECONDS)
        if self._process is not None:
            if self._is_attached:
                self._process.kill()
            await self._remove_in_time()
        else:
            await self.remove()

    async def remove(self) -> bool:
        """Remove any container of this name, running or not; is none left?"""
        status, output = await docker("rm", "--force", self._name)
        return status == 0 or "no such container" in output.lower()

    async def _remove_in_time(self) -> None:
        """Try again while docker fails, as long as one call that hangs would take: it may be restarting."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CALL_SECONDS):
                while True:
                    if await self.remove():
                        return
                    await asyncio.sleep(_REMOVE_PAUSE_SECONDS)

    @property
    def _is_attached(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def _stop(self, grace: float, hurry: asyncio.Event) -> None:
        whole_seconds = max(1, round(grace))
        tasks = [
            asyncio.create_task(docker("stop", "-t", str(whole_seconds), self._name, seconds=grace + 10)),
            asyncio.create_task(hurry.wait()),
        ]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if not hurry.is_set():
            await self._exited_within(_KILL_WAIT_SECONDS)

    async def _exited_within(self, seconds: float) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()

    async def _pass_lines_on(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await output.read(2**16):
            *lines, rest = _LINE_END.split(rest + chunk)
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                if line.strip():
                    self._on_line(line.decode(errors="replace").rstrip())
        if rest.strip():
            self._on_line(rest.decode(errors="replace").rstrip())
