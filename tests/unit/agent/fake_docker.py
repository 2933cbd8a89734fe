# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in for the docker client in the agent's tests; the first line is added by the harness.

A "container" is an engine process in a session of its own, which outlives a killed client as a real one does. Its pid
stands in the file <state>/<name>. The state folder is FAKE_DOCKER_STATE.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["FAKE_DOCKER_STATE"])


def pid_of(name: str) -> int:
    try:
        return int((STATE / name).read_text())
    except (FileNotFoundError, ValueError):
        print(f"Error response from daemon: No such container: {name}", file=sys.stderr)
        sys.exit(1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def run(arguments: list[str]) -> int:
    name = arguments[arguments.index("--name") + 1]
    file = STATE / name
    if file.exists():
        print(f"docker: Error response from daemon: Conflict. The container name /{name} is already in use.")
        return 125
    engine = subprocess.Popen(
        [sys.executable, "-IS", os.environ["FAKE_ENGINE"], *arguments],
        start_new_session=True,
        stdout=subprocess.PIPE,
    )
    file.write_text(str(engine.pid))
    assert engine.stdout is not None
    for line in engine.stdout:  # the client passes the output on; a container does not hold the client's own
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
    status = engine.wait()
    file.unlink(missing_ok=True)
    return status if status >= 0 else 128 - status


def send(name: str, number: int) -> int:
    pid = pid_of(name)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return pid


def stop(arguments: list[str]) -> int:
    pid = send(arguments[-1], signal.SIGTERM)
    deadline = time.monotonic() + float(arguments[arguments.index("-t") + 1])
    while alive(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    return 0


def main(command: str, *arguments: str) -> int:
    print("WARNING: Error loading config file", file=sys.stderr)  # as docker does where it may not read /root
    with (STATE / "calls").open("a") as calls:
        calls.write(" ".join([command, *arguments]) + "\n")
    match command:
        case "run":
            return run(list(arguments))
        case "stop":
            return stop(list(arguments))
        case "kill":
            send(arguments[-1], signal.SIGKILL)
        case "rm":
            send(arguments[-1], signal.SIGKILL)
            (STATE / arguments[-1]).unlink(missing_ok=True)
        case "inspect":
            print("true" if alive(pid_of(arguments[-1])) else "false")
        case "version":
            print("0 (fake)")
        case "ps":
            print(f"{'0' * 64} other-container")
        case _:
            print(f"the fake docker has no {command}")
            return 1
    return 0


sys.exit(main(*sys.argv[1:]))
