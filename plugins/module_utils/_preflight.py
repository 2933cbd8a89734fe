# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether one Spark has what a mode needs: the judgements, without the looking. Private to the collection."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _command as command
from . import _weights as weights

OUR_UNITS = ("vllm-replica.service", "vllm-tp.service")
OUR_CONTAINERS = ("vllm-replica", "vllm-tp")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Listener:
    """A process that listens on a TCP port; ``cgroup`` is the text of its /proc/PID/cgroup."""

    port: int
    pid: int
    name: str
    cgroup: str


def parse_listeners(text: str) -> list[tuple[int, int, str]]:
    """Read ``ss -Hltnp``: port, pid and name of each listening process (pid 0 where ss does not tell)."""
    found = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        port = fields[3].rpartition(":")[2]
        owner = re.search(r'\("([^"]*)",pid=(\d+)', line)
        if port.isdigit():
            found.append((int(port), int(owner[2]) if owner else 0, owner[1] if owner else "unknown"))
    return found


def port_problems(
    wanted: Mapping[str, int | None], listeners: Iterable[Listener], containers: Mapping[str, str]
) -> list[str]:
    """Ports that somebody else holds, with the command that ends it. Ours are the units of both modes and their containers
    (``containers`` maps the id of each running one to its name): a mode that stops makes room for the other."""
    problems = []
    ours = [identity for identity, name in containers.items() if name in OUR_CONTAINERS]
    held: dict[int, Listener] = {}
    for listener in listeners:
        if not any(mark in listener.cgroup for mark in (*OUR_UNITS, *ours)):
            held.setdefault(listener.port, listener)
    for variable, port in wanted.items():
        if port in held:
            owner, stop = _owner(held[port], containers)
            problems.append(
                f"port {port} ({variable}) is taken by {owner}; allowed is a port that is free or held by our own units. "
                f"Stop that: {stop}, or set {variable} to another port."
            )
    return problems


def _owner(listener: Listener, containers: Mapping[str, str]) -> tuple[str, str]:
    """Who listens there, and the command that ends it."""
    name = next((name for identity, name in containers.items() if identity in listener.cgroup), "")
    unit = listener.cgroup.strip().rpartition("/")[2]
    said = f"{listener.name} (pid {listener.pid})"
    # Docker listens itself for a container with a network of its own.
    if name or listener.name == "docker-proxy":
        return (
            f"{said} of the container {name}" if name else said,
            f"docker stop {name or 'CONTAINER'} (docker ps)",
        )
    if unit.endswith(".service"):
        return f"{said} of the unit {unit}", f"systemctl disable --now {unit}"
    return said, f"kill {listener.pid}"


def parse_help(text: str) -> list[str]:
    """The flags that ``vllm serve --help=all`` lists."""
    return sorted(set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text)))


def flag_problems(argv: Sequence[str], known: Collection[str], image: str) -> list[str]:
    """Flags that this image's engine would refuse, each with the nearest that it knows.

    The engine also takes an unambiguous beginning of a flag; that is refused here, since a later image may make it ambiguous.
    """
    names = {command.flag_name(name) for name in known}
    problems = []
    for flag in dict.fromkeys(command.flag_names(argv)):
        bare = command.flag_name(flag).partition(".")[0]
        # Every --enable-x is listed with its --no-enable-x or (since 0.33) its --disable-x; the --no- form works in all.
        if bare in names or (bare.startswith("no-") and bare[3:] in names):
            continue
        near = difflib.get_close_matches(bare, names, n=3)
        hint = f" Did you mean {' or '.join('--' + name for name in near)}?" if near else ""
        problems.append(
            f"flag {flag} is not known to the engine in {image}.{hint} Look for it in vllm_engine_flags, vllm_replica_flags, "
            "vllm_tp_flags and the preset; give it the value null to take a preset's flag out."
        )
    return problems


def engine_arguments(docker_command: Sequence[str], image: str) -> list[str]:
    """The engine's own arguments: what follows the image in a ``docker run`` command."""
    return list(docker_command[list(docker_command).index(image) + 1 :])


def help_command(docker_command: Sequence[str], image: str) -> list[str]:
    """The command that asks the image's engine for its flags: the same container, so that it finds the same GPU and
    what is mounted read-only for it, but without name, secrets and model, with nothing it may write, and no network."""
    left_out = ("--name", "--env-file", "--mount", "--network", "--ipc")
    options = docker_command[: list(docker_command).index(image)]
    keep = [
        word
        for word in options
        if not word.startswith(left_out) and (not word.startswith("--volume") or word.endswith(":ro"))
    ]
    return [*keep, "--network=none", image, "vllm", "serve", "--help=all"]


def platform_problems(image: str, image_os: str, image_architecture: str, machine: str) -> list[str]:
    """An image for another processor starts nothing."""
    wanted = ARCHITECTURES.get(machine, machine)
    if (image_os, image_architecture) != ("linux", wanted):
        return [
            f"image {image} is for {image_os}/{image_architecture}, and this host is linux/{wanted}. Set vllm_image to one built for it."
        ]
    return []


def memory_problems(budget_gib: float, total_gib: float, available_gib: float, ours_gib: float) -> list[str]:
    """A budget that the host could not meet when our engine, which holds ``ours_gib``, has stopped."""
    given = f"the engine is given {budget_gib:g} GiB (vllm_gpu_memory_utilization of vllm_device_memory_gib)"
    if budget_gib > total_gib:
        return [f"{given}, and this host has {total_gib:.1f} GiB of memory in all. Lower the share."]
    if budget_gib > available_gib + ours_gib:
        others = f"{available_gib + ours_gib:.1f} GiB of this host are available"
        return [
            f"{given}, and only {others}{' with our engine stopped' if ours_gib else ''}. See what else holds memory: "
            "ps aux --sort=-rss, docker stats, nvidia-smi. Stop that, or lower the share."
        ]
    return []


def disk_problems(free_gib: Mapping[str, float], reserved_gib: float) -> list[str]:
    """File systems (a folder on each to its free GiB) that are too full for an engine to start."""
    return [
        f"{folder} has {free:.1f} GiB of free space, and {reserved_gib:g} GiB (vllm_disk_reserved_gib) shall be left for what an engine "
        "writes. Free some (docker system df, journalctl --disk-usage), or lower vllm_disk_reserved_gib."
        for folder, free in free_gib.items()
        if free < reserved_gib
    ]


@dataclass(frozen=True)
class Neighbour:
    """Something else on this host that uses the GPU or manages such: ``what`` it is, its name, and what stops it."""

    what: str
    name: str
    stop: str


def containers_on_gpu(inspected: Sequence[Mapping[str, Any]]) -> list[Neighbour]:
    """Of running containers (as ``docker inspect`` tells them) those that use the GPU and are not ours."""
    found = []
    for one in inspected:
        name, host = str(one["Name"]).lstrip("/"), one["HostConfig"]
        devices = (str(device.get("PathOnHost", "")) for device in host.get("Devices") or [])
        uses_gpu = (
            host.get("Runtime") == "nvidia"
            or bool(host.get("DeviceRequests"))
            or any(path.startswith("/dev/nvidia") for path in devices)
        )
        if uses_gpu and name not in OUR_CONTAINERS:
            stop = f"docker update --restart=no {name} && docker stop {name}"
            found.append(Neighbour(f"the container of {one['Config']['Image']}", name, stop))
    return found


# Other launchers of engines, and the watchdogs that they leave behind.
LAUNCHERS = re.compile(r"vllm|sglang|sparkrun|trtllm", re.IGNORECASE)


def launching_units(listed: str) -> list[Neighbour]:
    """Of units (the first word of each line) those that look after engines and are not ours."""
    names = (line.split()[0] for line in listed.splitlines() if line.split())
    return [
        Neighbour("the unit", name, f"systemctl disable --now {name}")
        for name in dict.fromkeys(names)
        if LAUNCHERS.search(name) and name not in OUR_UNITS
    ]


def processes_on_gpu(told: str, cgroups: Mapping[int, str], containers: Collection[str]) -> list[Neighbour]:
    """Of the lines ``PID, NAME`` that nvidia-smi tells those of neither our units nor any container (by id), which are
    judged by themselves; ``cgroups`` maps each pid to its cgroup."""
    found = []
    for line in told.splitlines():
        pid, _comma, name = line.partition(",")
        if not pid.strip().isdigit():
            continue
        cgroup = cgroups.get(int(pid), "")
        if not any(mark in cgroup for mark in (*OUR_UNITS, *containers)):
            unit = cgroup.strip().rpartition("/")[2]
            owner = unit if unit.endswith(".service") else name.strip()
            stop = f"systemctl stop {owner}" if unit.endswith(".service") else f"kill {pid.strip()}"
            found.append(Neighbour(f"the process {pid.strip()} of", owner, stop))
    return found


def neighbour_problems(neighbours: Iterable[Neighbour], allowed: Collection[str]) -> list[str]:
    """What would fight with our engine for the GPU."""
    return [
        f"{one.what} {one.name} uses the GPU or starts engines on it, and is not ours. Stop it: {one.stop}. If it shall stay, "
        f"add {one.name} to vllm_gpu_neighbours, and what it holds to vllm_memory_reserved_gib."
        for one in neighbours
        if one.name not in allowed
    ]


def file_digests(files: Mapping[str, str], folder: str) -> dict[str, str]:
    """The path of each file (name to content) in the folder, to the SHA-256 of its content in UTF-8."""
    return {
        f"{folder}/{name}": hashlib.sha256(content.encode()).hexdigest() for name, content in files.items()
    }


def file_problems(differing: Sequence[str]) -> list[str]:
    """Installed files that are not what the inventory and this collection say."""
    if not differing:
        return []
    return [
        f"{', '.join(differing)} on this host is not what the inventory says now. Take that into use first: ansible-playbook playbooks/site.yml"
    ]


MOST_CLOCKS_APART = 10.0  # seconds; far beyond what asking them one after the other makes of clocks in step


def clock_problems(ahead: Mapping[str, float]) -> list[str]:
    """Whether the clocks of all Sparks (each to the seconds that it is ahead of one common clock) are in step."""
    if not ahead or max(ahead.values()) - min(ahead.values()) <= MOST_CLOCKS_APART:
        return []
    told = ", ".join(f"{host} {seconds:+.0f} s" for host, seconds in ahead.items())
    return [
        f"the clocks of the Sparks differ (beside this machine: {told}), so logs and certificates mislead. Set them: timedatectl set-ntp true"
    ]


def preflight_problems(sparks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All that is in the way on all Sparks, each with what serving_preflight returned there."""
    problems = []
    for host, found in sparks.items():
        if found.get("unreachable"):
            problems.append(
                f"{host} is not reached: {found.get('msg', 'no answer')}. Try it by hand: ansible -m ansible.builtin.ping {host}"
            )
        elif found.get("failed"):
            problems.append(f"{host}: {found.get('msg', 'the look at it failed')}")
        problems += [f"{host}: {problem}" for problem in found.get("problems", ())]
    images = {host: found["image_id"] for host, found in sparks.items() if found.get("image_id")}
    # Ranks of different engines do not form a pair, and copies of different engines answer differently.
    if len(set(images.values())) > 1:
        told = ", ".join(f"{host} {image}" for host, image in images.items())
        problems.append(
            f"the image is not the same on all Sparks: {told}. Bring the same one: ansible-playbook playbooks/site.yml"
        )
    models: dict[str, dict[str, Mapping[str, str]]] = {}
    for host, found in sparks.items():
        models.setdefault(str(found.get("model")), {})[host] = found.get("weights") or {}
    problems += [problem for prints in models.values() for problem in weights.differences(prints)]
    ahead = {host: found["clock_ahead"] for host, found in sparks.items() if "clock_ahead" in found}
    return problems + clock_problems(ahead)


def wanted_ports(config: Mapping[str, Any]) -> dict[str, int | None]:
    """The ports that a mode listens on, by the variable that sets each."""
    mode = config["mode"]
    ports: dict[str, int | None] = {f"vllm_{mode}_agent_port": config["agent"]["port"]}
    if config["api"]:
        ports["vllm_port"] = config["api"]["port"]
    if config["pair"]:
        ports["vllm_tp_heartbeat_port"] = config["pair"]["heartbeat_port"]
    return ports


def pair_ports(config: Mapping[str, Any]) -> list[int]:
    """The ports of the other Spark that the agent and the engine of a rank speak to."""
    argv = config["command"]
    rendezvous = [int(argv[argv.index(flag) + 1]) for flag in ("--master-port",) if flag in argv]
    return [int(config["pair"]["heartbeat_port"]), *rendezvous]
