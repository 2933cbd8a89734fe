# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the modules ask of one Spark: systemctl, the journal and the agent. Private to the collection."""

from __future__ import annotations

import json
import time
import typing as t
from urllib.error import HTTPError

from ansible.module_utils.urls import open_url

from . import _modes as modes
from . import _preflight as preflight

if t.TYPE_CHECKING:
    from ansible.module_utils.basic import AnsibleModule

CONFIG_DIRECTORY = "/etc/vllm"
STATE_DIRECTORY = "/var/lib/vllm"
AGENT_DIRECTORY = "/usr/local/lib/vllm-agent"


class Spark:
    """One host, through the module's own way of running commands."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self._systemctl = module.get_bin_path("systemctl", required=True)

    def units(self) -> dict[str, modes.Unit]:
        """Both units by mode, with whether each runs with settings that are no longer those on the disk."""
        names = list(modes.UNITS.values())
        shown = modes.parse_show(self.systemctl("show", *names, f"--property={','.join(modes.PROPERTIES)}"))
        # Asked of the files on the disk: the UnitFileState property may be older than the last enable.
        return {
            mode: modes.unit_from(
                name, shown.get(name, {}), self._enabled(name), self._stale(mode, shown.get(name, {}))
            )
            for mode, name in modes.UNITS.items()
        }

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """Run systemctl and return what it printed; fail the module when it fails."""
        status, out, err = self._module.run_command([self._systemctl, *arguments])
        if status and check:
            self._module.fail_json(
                msg=f"systemctl {' '.join(arguments)} ended with status {status}: {(err or out).strip()}"
            )
        return str(out)

    def do(self, step: modes.Step) -> None:
        """Carry out one step. Starts and stops are only asked for: systemd carries out what is queued, in the order that the
        units demand, whatever becomes of us."""
        if step.verb == "daemon-reload":
            self.systemctl("daemon-reload")
        elif step.verb in ("enable", "disable"):
            # On the files only: asked through the manager, both reload systemd, and since systemd 254 --no-reload
            # leaves every unit marked as in need of a reload.
            self.systemctl("--root=/", step.verb, modes.UNITS[step.mode])
        elif step.verb == "reset-failed":
            self.systemctl(step.verb, modes.UNITS[step.mode])
        else:
            self.systemctl("--no-block", step.verb, modes.UNITS[step.mode])

    def wait(self, mode: str, seconds: float, phase: str) -> tuple[dict[str, modes.Unit], modes.Progress]:
        """Wait while the Spark is on its way to the mode and in this phase, for so long at most; return where it then stands."""
        end = time.monotonic() + seconds
        while True:
            units = self.units()
            progress = modes.progress(units, mode)
            if progress.settled or progress.phase != phase or time.monotonic() > end:
                return units, progress
            time.sleep(1)

    def last_lines(self, mode: str) -> str:
        """The last lines of the unit's present or last run in the journal."""
        journal = self._module.get_bin_path("journalctl")
        if not journal:
            return ""
        _status, out, _err = self._module.run_command(
            [journal, "--unit", modes.UNITS[mode], "--lines=40", "--output=cat", "--no-pager"]
        )
        return modes.tail(out.splitlines())

    def config(self, mode: str) -> dict[str, t.Any] | None:
        """What the role wrote for the agent of this mode, or None."""
        try:
            with open(f"{CONFIG_DIRECTORY}/{mode}.json", encoding="utf-8") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return None

    def last_start(self, mode: str) -> float | None:
        """How many seconds the last start in this mode took; None when there was none."""
        try:
            with open(f"{STATE_DIRECTORY}/{mode}-history.json", encoding="utf-8") as file:
                seconds = json.load(file)["last_start_seconds"]
                return None if seconds is None else float(seconds)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def agent(self, mode: str) -> dict[str, t.Any] | None:
        """What the agent of this mode says of itself, or None when it does not answer."""
        config = self.config(mode)
        if config is None:
            return None
        try:
            with open_url(
                f"http://127.0.0.1:{config['agent']['port']}/status", timeout=5, use_proxy=False
            ) as answer:
                return dict(json.load(answer))
        except (OSError, ValueError, KeyError, HTTPError):
            return None

    def containers(self) -> list[dict[str, t.Any]]:
        """The running containers, as Docker tells them; none without Docker."""
        docker = self._module.get_bin_path("docker")
        if not docker:
            return []
        _status, out, _err = self.run(docker, "ps", "--quiet", "--no-trunc")
        if not out.split():
            return []
        # One that has ended meanwhile is told on the error output, and the rest all the same.
        _status, out, _err = self.run(docker, "inspect", *out.split())
        return t.cast("list[dict[str, t.Any]]", json.loads(out or "[]"))

    def run(self, *command: str) -> tuple[int, str, str]:
        """Run a command that may hang, as Docker or a driver may when something is wrong; status 124 then."""
        status, out, err = self._module.run_command(["timeout", "--kill-after=5", "30", *command])
        return int(status), str(out), str(err)

    def port_problems(self, config: t.Mapping[str, t.Any]) -> list[str]:
        """Ports of this agent's configuration that somebody else holds."""
        socket_statistics = self._module.get_bin_path("ss")
        if not socket_statistics:
            return []
        _status, out, _err = self._module.run_command([socket_statistics, "-Hltnp"])
        wanted = preflight.wanted_ports(config)
        listeners = [
            preflight.Listener(port, pid, name, read(f"/proc/{pid}/cgroup"))
            for port, pid, name in preflight.parse_listeners(out)
            if port in wanted.values()
        ]
        listeners = [one for one in listeners if not any(unit in one.cgroup for unit in preflight.OUR_UNITS)]
        names = {one["Id"]: one["Name"].lstrip("/") for one in self.containers()} if listeners else {}
        return preflight.port_problems(wanted, listeners, names)

    def _enabled(self, name: str) -> str:
        return self.systemctl("is-enabled", name, check=False).strip()

    def _stale(self, mode: str, shown: t.Mapping[str, str]) -> bool | None:
        if shown.get("ActiveState") != "active":
            return None
        agent = self.agent(mode)
        status, out, _err = self._module.run_command(
            [
                "/usr/bin/python3",
                "-m",
                "vllm_agent",
                "--config",
                f"{CONFIG_DIRECTORY}/{mode}.json",
                "--digest",
            ],
            environ_update={"PYTHONPATH": AGENT_DIRECTORY, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        return None if status or agent is None else agent.get("settings_digest") != out.strip()


def read(path: str) -> str:
    """What is in a file; empty where it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
