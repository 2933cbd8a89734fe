# SPDX-License-Identifier: GPL-3.0-or-later
"""A Spark in the hands of a test: what it does, and what can be done to it."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from testinfra.host import Host

_AGENT_PORTS = {"replica": 9401, "tp": 9402}


def until(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until the condition holds, at most so long; return how many seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)
    return time.monotonic() - began


class Spark:
    """The simulated Spark `name` in `mode`; `container` is its name on the machine that simulates it."""

    def __init__(self, name: str, host: Host, address: str, container: str, mode: str) -> None:
        self.name = name
        self.mode = mode
        self.unit = f"vllm-{mode}"
        self._host = host
        self.address = address
        self._container = container

    def __str__(self) -> str:
        return self.name

    def run(self, command: str) -> str:
        """Run a command as root; it must succeed. Returns what it printed."""
        with self._host.sudo():
            return str(self._host.check_output(command)).strip()

    def show(self, name: str, mode: str = "") -> str:
        """One property of the unit."""
        return self.run(f"systemctl show --property={name} --value vllm-{mode or self.mode}.service")

    def ask(self, path: str) -> tuple[int, str]:
        """Ask the agent; status 0 when it does not answer."""
        url = f"http://{self.address}:{_AGENT_PORTS[self.mode]}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        """What the agent tells of itself; empty when it does not answer."""
        code, text = self.ask("/status")
        return dict(json.loads(text)) if code == 200 else {}

    @property
    def serves(self) -> bool:
        """Does its agent say so?"""
        return self.ask("/health") == (200, "serving\n")

    def engine(self) -> str:
        """Id of the running engine's container; empty when there is none."""
        return self.run(f"docker ps --quiet --no-trunc --filter name=^{self.unit}$")

    def processes(self) -> list[str]:
        """The commands of all processes of engines on this Spark, whoever owns them."""
        # comm is all that a killed container's processes keep for a moment; those that are dead already do not count.
        table = self.run("ps -eo stat=,comm=").splitlines()
        names = [line.split(maxsplit=1) for line in table if not line.startswith("Z")]
        return sorted(
            name for _state, name in names if name.startswith(("vllm", "VLLM", "EngineCore", "Worker"))
        )

    def restart(self) -> float:
        """Restart the unit as a person does; returns how many seconds that took."""
        began = time.monotonic()
        self.run(f"systemctl restart {self.unit}")
        return time.monotonic() - began

    def fault(self, words: str = "") -> None:
        """Give the stand-in engine a fault; without words take all faults from it."""
        self.run(f"mkdir -p /run/standin && echo '{words}' > /run/standin/fault")

    def wait_until_serving(self, seconds: float = 90) -> float:
        """Wait until it serves; returns how long that took."""
        return until(lambda: self.serves, seconds, f"{self.name} serves; it is {self.ask('/health')}")

    def mend(self) -> None:
        """Take all faults away, bring it back if it stays down, and wait until its failures are forgiven."""
        self.fault()
        if self.show("ActiveState") in ("failed", "inactive"):
            self.run(f"systemctl reset-failed {self.unit} || true; systemctl start --no-block {self.unit}")
        self.wait_until_serving()
        until(lambda: self.status().get("attempts") == 0, 30, f"{self.name}'s failures are forgiven")
        self.run(f"systemctl reset-failed {self.unit} || true")

    def hang_up(self) -> None:
        """Cut every connection by which it is administered."""
        self._inside("pkill", "--full", "sshd.*@")

    def shut(self) -> None:
        """Let nobody in who would administer it."""
        self._inside("iptables", "-I", "INPUT", "-p", "tcp", "--dport", "22", "-j", "DROP")

    def open(self) -> None:
        """Let them in again."""
        self._inside("iptables", "-F", "INPUT")

    def _inside(self, *command: str) -> None:
        subprocess.run(["docker", "exec", self._container, *command], check=True)

    def power_off(self) -> None:
        """Take its power away: nothing on it can say goodbye."""
        self._machine("kill")

    def power_on(self) -> None:
        """Give it power again."""
        self._machine("start")

    def reboot(self) -> None:
        """Restart it as `reboot` does: everything gets the time to stop."""
        self._machine("restart")

    def _machine(self, verb: str) -> None:
        subprocess.run(["docker", verb, self._container], check=True, stdout=subprocess.DEVNULL)
