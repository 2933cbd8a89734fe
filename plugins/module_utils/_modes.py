# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""One Spark's mode: what systemd says of its units, and what must be done to reach another. Private to the collection.

The wish is which unit is enabled, the deed is which unit is active; both are read from systemd and kept nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNITS = {"replica": "vllm-replica.service", "tp": "vllm-tp.service"}

ARGUMENTS = {
    "mode": {"type": "str", "required": True, "choices": ["replica", "tp", "stopped"]},
    "wait": {"type": "bool", "default": True},
    "timeout": {"type": "int", "default": 5400},
    "restart_stale": {"type": "bool", "default": False},
    "restart": {"type": "bool", "default": False},
}

# What `systemctl show` is asked for; Job is the number of a pending job, 0 when there is none.
PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "Job",
    "NRestarts",
    "StatusText",
    "StateChangeTimestamp",
    "NeedDaemonReload",
)


@dataclass(frozen=True)
class Unit:
    """One unit as systemd tells it. ``stale`` is true when the running engine was started with other settings than
    those now on the disk, and None when that cannot be told (nothing runs, or its agent does not answer).
    ``outdated`` is true when systemd has not read the unit's file since it changed."""

    name: str
    installed: bool = False
    enabled: bool = False
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    job: bool = False
    restarts: int = 0
    status: str = ""
    since: str = ""
    stale: bool | None = None
    outdated: bool = False

    @property
    def stopped(self) -> bool:
        """Nothing of it runs, and nothing will start by itself."""
        return self.active in ("inactive", "failed") and not self.job

    @property
    def waiting_to_restart(self) -> bool:
        """Its last start failed and systemd waits before the next."""
        return self.sub == "auto-restart"

    @property
    def down(self) -> bool:
        """The last start failed, for good or until its next try, and nobody has asked for another yet."""
        return (self.active == "failed" or self.waiting_to_restart) and not self.job

    def told(self) -> dict[str, Any]:
        """For a module's return value."""
        return {
            "installed": self.installed,
            "enabled": self.enabled,
            "active": self.active,
            "sub": self.sub,
            "result": self.result,
            "restarts": self.restarts,
            "status": self.status,
            "since": self.since,
            "stale": self.stale,
        }


@dataclass(frozen=True)
class Progress:
    """How far a Spark is on its way to a mode: whether anything is still to be awaited, whether the mode is reached, and
    the phase with all that its unit says of it."""

    settled: bool
    reached: bool
    phase: str
    status: str


@dataclass(frozen=True)
class Difference:
    """One property of one unit that is not as wanted."""

    mode: str
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Step:
    """One call of systemctl that mends a difference."""

    verb: str
    mode: str

    def __str__(self) -> str:
        return self.verb if self.verb == "daemon-reload" else f"{self.verb} {UNITS[self.mode]}"


@dataclass
class Change:
    """All that lies between the present and a wish; check mode, diff and deed are all made from it."""

    differences: list[Difference] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def diff(self) -> dict[str, str]:
        """In the form that Ansible shows."""

        def side(which: str) -> str:
            return "".join(f"{UNITS[item.mode]}: {getattr(item, which)}\n" for item in self.differences)

        return {"before": side("before"), "after": side("after")}


def change(
    units: Mapping[str, Unit], mode: str, restart_stale: bool = False, restart: bool = False
) -> Change:
    """What leads from ``units`` (by mode) to ``mode`` (``replica``, ``tp`` or ``stopped``), in the order to do it.

    ``restart`` also restarts a unit that is active, and ``restart_stale`` one that runs with former settings.
    The new mode is enabled before the old one is touched: whatever breaks half-way, the next boot starts the new one.
    """
    result = Change()
    outdated = [name for name, unit in units.items() if unit.outdated]
    if outdated:
        # Only then: a reload can take the GPU from running containers.
        result.differences += [
            Difference(name, "unit file", "read before it changed", "read") for name in outdated
        ]
        result.steps.append(Step("daemon-reload", outdated[0]))
    # The wanted unit first, so that its wish is written down before anything is stopped.
    for name in sorted(UNITS, key=lambda name: name != mode):
        unit = units[name]
        if unit.enabled != (name == mode):
            words = ("disabled", "enabled") if name == mode else ("enabled", "disabled")
            result.differences.append(Difference(name, "enabled", *words))
            result.steps.append(Step("enable" if name == mode else "disable", name))
    for name, unit in units.items():
        if name != mode and not unit.stopped:
            result.differences.append(Difference(name, "active", unit.active, "inactive"))
            result.steps.append(Step("stop", name))
    if mode == "stopped":
        return result
    unit = units[mode]
    if unit.down or unit.active in ("inactive", "deactivating"):
        result.differences.append(
            Difference(
                mode, "active", "waiting to restart" if unit.waiting_to_restart else unit.active, "active"
            )
        )
        if unit.down:
            # A person asks: the failures before count no longer.
            result.steps.append(Step("reset-failed", mode))
        # systemd queues a plain start of a unit that waits for its restart until that wait is over.
        result.steps.append(Step("restart" if unit.waiting_to_restart else "start", mode))
    elif unit.stale and restart_stale:
        result.differences.append(
            Difference(
                mode, "settings", "running with former settings", "restarted with the present settings"
            )
        )
        result.steps.append(Step("restart", mode))
    elif restart:
        result.differences.append(Difference(mode, "engine", "running", "restarted"))
        result.steps.append(Step("restart", mode))
    return result


def progress(units: Mapping[str, Unit], mode: str) -> Progress:
    """How far these units (by mode) are on the way to ``mode``, when all steps to there have been asked for."""
    at = _awaited(units, mode)
    if at is None:
        return Progress(True, True, "stopped", "stopped")
    unit = units[at]
    if at == mode and unit.active == "active" and not unit.job:
        return Progress(True, True, "serving", unit.status)
    if at == mode and (unit.down or unit.stopped):
        return Progress(True, False, "failed" if unit.down else "stopped", unit.status)
    # What an inactive unit says is of its former life.
    status = "" if unit.active in ("inactive", "failed") else unit.status
    phase = status.partition(":")[0] or ("stopping" if unit.active == "deactivating" else "starting")
    return Progress(False, False, phase, status or phase)


def unreached(units: Mapping[str, Unit], mode: str, last_lines: Callable[[str], str]) -> str:
    """Why the mode is not reached that was waited for, and what to do; ``last_lines`` gives those of a mode's unit."""
    at = _awaited(units, mode) or mode
    unit = units[at]
    if unit.waiting_to_restart and not unit.job:
        state = f"failed ({unit.result}); systemd tries again by itself"
    elif unit.down:
        state = f"has failed ({unit.result})"
    elif unit.stopped:
        state = "did not start, or was stopped meanwhile (what it needs: systemctl status docker)"
    else:
        state = "does not serve yet" if at == mode else "has not stopped yet"
    return (
        f"{unit.name} {state}. Its status: {unit.status or 'none'}. Its last lines:\n{last_lines(at)}\n"
        f"Look on: journalctl -u {unit.name} -e. When it is mended, run the same command again."
    )


def _awaited(units: Mapping[str, Unit], mode: str) -> str | None:
    """Whose unit is waited for: the other mode's until it has stopped, then that of the wished one, if one is wished."""
    stopping = [name for name, unit in units.items() if name != mode and not unit.stopped]
    return stopping[0] if stopping else None if mode == "stopped" else mode


@dataclass
class Watch:
    """What was seen of one Spark on its way, ``now`` always being in seconds: how long each phase lasted, and what is told."""

    host: str
    began: float
    every: float = 30.0
    phase: str = ""
    durations: dict[str, float] = field(default_factory=dict)
    _since: float = 0.0
    _told: float = 0.0

    def see(self, now: float, phase: str, status: str) -> str:
        """Take note; returns a line for people when the phase is another, or when nothing was told for ``every`` seconds."""
        if self.phase:
            self.durations[self.phase] = round(self.durations.get(self.phase, 0.0) + now - self._since, 1)
        is_news = phase != self.phase or now - self._told >= self.every
        self.phase, self._since = phase, now
        if not is_news:
            return ""
        self._told = now
        minutes, seconds = divmod(int(now - self.began), 60)
        return f"{self.host} {minutes}:{seconds:02} {status or phase}"


def parse_show(text: str) -> dict[str, dict[str, str]]:
    """Read ``systemctl show`` of several units: blocks of ``Name=value`` lines, parted by an empty line."""
    blocks: dict[str, dict[str, str]] = {}
    for block in text.strip().split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if "Id" in values:
            blocks[values["Id"]] = values
    return blocks


def unit_from(name: str, shown: Mapping[str, str], enabled: str, stale: bool | None = None) -> Unit:
    """A unit from its ``systemctl show`` block and the word that ``systemctl is-enabled`` printed for it."""
    return Unit(
        name=name,
        installed=shown.get("LoadState", "not-found") not in ("not-found", "masked"),
        enabled=enabled in ("enabled", "enabled-runtime"),
        active=shown.get("ActiveState", "inactive"),
        sub=shown.get("SubState", "dead"),
        result=shown.get("Result", "success"),
        job=shown.get("Job", "") not in ("", "0"),
        restarts=int(shown.get("NRestarts") or 0),
        status=shown.get("StatusText", ""),
        since=shown.get("StateChangeTimestamp", ""),
        stale=stale,
        outdated=shown.get("NeedDaemonReload") == "yes",
    )


def enabled_modes(units: Mapping[str, Unit]) -> list[str]:
    """The modes that are wished on this host: none, one, or (which must not be) both."""
    return [mode for mode, unit in units.items() if unit.enabled]


def active_modes(units: Mapping[str, Unit]) -> list[str]:
    """The modes whose unit is active: READY has been said and not been taken back."""
    return [mode for mode, unit in units.items() if unit.active == "active"]


def tail(lines: Iterable[str], most: int = 15) -> str:
    """The last lines that are not empty, for a message."""
    return "\n".join([line.rstrip() for line in lines if line.strip()][-most:])
