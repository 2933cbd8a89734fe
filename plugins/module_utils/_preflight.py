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
# Of a container that only lists its engine's flags.
HELP_LABEL = "twospark.serving.help"
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
    if name or listener.name == "docker-proxy" or _IN_A_CONTAINER.search(listener.cgroup):
        return (
            f"{said} of the container {name}" if name else said,
            f"docker stop {name or 'CONTAINER'} (docker ps)",
        )
    if unit.endswith(".service"):
        return f"{said} of the unit {unit}", f"systemctl disable --now {unit}"
    return said, f"kill {listener.pid}"


def parse_help(text: str) -> list[str]:
    """The flags that ``vllm serve --help=all`` lists, and those that it hides: since 0.33 ``--enable-x`` stands there with
    ``--disable-x``, and its older ``--no-enable-x`` is taken and not shown."""
    flags = set()
    # A flag begins a line; what is said of it is indented deeper, and may name others.
    for line in re.findall(r"^  (-.*)", text, re.MULTILINE):
        names = re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", line)
        flags |= {*names, *(f"--no-{name[2:]}" for name in names[:1] if _opposite(name) in names)}
    return sorted(flags)


def _opposite(flag: str) -> str:
    """Of ``--enable-x`` that is ``--disable-x``, and the other way round."""
    for one, other in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
        if flag.startswith(one):
            return other + flag.removeprefix(one)
    return ""


def flag_problems(argv: Sequence[str], known: Collection[str], image: str) -> list[str]:
    """Flags that this image's engine would refuse, each with the nearest that it knows.

    The engine also takes an unambiguous beginning of a flag; that is refused here, since a later image may make it ambiguous.
    """
    names = {command.flag_name(name) for name in known}
    problems = []
    for flag in dict.fromkeys(command.flag_names(argv)):
        bare = command.flag_name(flag).partition(".")[0]
        if bare in names:
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


def mounted_alike(docker_command: Sequence[str]) -> list[str]:
    """The folders of the host that a ``docker run`` command mounts at the same place."""
    found = []
    for option, _equals, value in (word.partition("=") for word in docker_command):
        if option == "--volume":
            source, target = (*value.split(":"), "")[:2]
        elif option == "--mount":
            words = dict(word.partition("=")[::2] for word in value.split(","))
            source, target = (
                next((words[name] for name in names if name in words), "")
                for names in (("source", "src"), ("target", "dst", "destination"))
            )
        else:
            continue
        if source and source == target:
            found.append(source)
    return found


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
    return [*keep, f"--label={HELP_LABEL}", "--network=none", image, "vllm", "serve", "--help=all"]


def platform_problems(image: str, image_os: str, image_architecture: str, machine: str) -> list[str]:
    """An image for another processor starts nothing."""
    wanted = ARCHITECTURES.get(machine, machine)
    if (image_os, image_architecture) != ("linux", wanted):
        return [
            f"image {image} is for {image_os}/{image_architecture}, and this host is linux/{wanted}. Set vllm_image to one built for it."
        ]
    return []


@dataclass(frozen=True)
class Process:
    """A process: what it holds in GiB that nobody else does, its name, and the text of its /proc/PID/cgroup."""

    name: str
    gib: float
    cgroup: str


def memory_problems(
    budget_gib: float, total_gib: float, processes: Iterable[Process], ours: Collection[str]
) -> list[str]:
    """A budget that the host could not meet when our engine has stopped: what others hold that can be proven. ``ours`` are the
    ids of our containers. What cannot be told now the agent waits for."""
    given = f"the engine is given {budget_gib:g} GiB (vllm_gpu_memory_utilization of vllm_device_memory_gib)"
    if budget_gib > total_gib:
        return [f"{given}, and this host has {total_gib:.1f} GiB of memory in all. Lower the share."]
    others = [
        process for process in processes if not any(mark in process.cgroup for mark in (*OUR_UNITS, *ours))
    ]
    held = sum(process.gib for process in others)
    if budget_gib + held <= total_gib:
        return []
    largest = sorted(others, key=lambda process: process.gib, reverse=True)[:3]
    named = ", ".join(f"{process.name} {process.gib:.1f} GiB" for process in largest)
    return [
        f"{given}, and other processes hold {held:.1f} of this host's {total_gib:.1f} GiB (most of it: {named}). Stop some, or lower the share."
    ]


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


def _container(one: Mapping[str, Any]) -> Neighbour:
    name = str(one["Name"]).lstrip("/")
    stop = f"docker update --restart=no {name} && docker stop {name}"
    return Neighbour(f"the container of {one['Config']['Image']}", name, stop)


def _uses_gpu(one: Mapping[str, Any]) -> bool:
    host, config = one["HostConfig"], one["Config"]
    devices = (str(device.get("PathOnHost", "")) for device in host.get("Devices") or [])
    environment = dict(entry.partition("=")[::2] for entry in config.get("Env") or [])
    # Where that runtime is the default, every container has it.
    by_runtime = host.get("Runtime") == "nvidia" and (
        environment.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "void", "none")
    )
    return (
        by_runtime
        or bool(host.get("DeviceRequests"))
        or any(path.startswith("/dev/nvidia") for path in devices)
    )


def is_ours(one: Mapping[str, Any]) -> bool:
    """Is this container (as ``docker inspect`` tells it) an engine of ours, or one that is asked for its flags?"""
    return one["Name"].lstrip("/") in OUR_CONTAINERS or HELP_LABEL in (one["Config"].get("Labels") or {})


def containers_on_gpu(inspected: Sequence[Mapping[str, Any]]) -> list[Neighbour]:
    """Of running containers (as ``docker inspect`` tells them) those that use the GPU and are not ours."""
    return [_container(one) for one in inspected if _uses_gpu(one) and not is_ours(one)]


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


def processes_on_gpu(
    told: str, cgroups: Mapping[int, str], inspected: Sequence[Mapping[str, Any]]
) -> list[Neighbour]:
    """Of the lines ``PID, NAME`` that nvidia-smi tells those that are not ours, each by its container or unit where it has one.
    ``cgroups`` maps each pid to its cgroup, empty where the process has ended; ``inspected`` are the running containers."""
    found = []
    for line in told.splitlines():
        pid, _comma, name = (word.strip() for word in line.partition(","))
        cgroup = cgroups.get(int(pid), "").strip() if pid.isdigit() else ""
        if not cgroup or any(unit in cgroup for unit in OUR_UNITS):
            continue
        container = next((one for one in inspected if one["Id"] in cgroup), None)
        if container:
            if not is_ours(container):
                found.append(_container(container))
        elif not _IN_A_CONTAINER.search(cgroup):
            # One in a container that is not among the running ones has just begun or ended.
            unit = cgroup.rpartition("/")[2]
            if unit.endswith(".service"):
                found.append(Neighbour("the unit", unit, f"systemctl stop {unit}"))
            else:
                found.append(Neighbour(f"the process {pid} of", name, f"kill {pid}"))
    return found


_IN_A_CONTAINER = re.compile(r"docker[-/][0-9a-f]{64}")


def gpu_problems(status: int, said: str) -> list[str]:
    """A GPU whose driver does not answer: a running engine may go on, but no other would start."""
    if not status:
        return []
    return [
        f"the GPU does not answer (nvidia-smi ended with status {status}: {said.strip()[:300]}). A driver that was upgraded under a "
        "running engine needs a reboot of this host."
    ]


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


MOST_CLOCKS_APART = 60.0  # seconds; far beyond what a slow connection makes of clocks in step


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
            f"the image is not the same on all Sparks: {told}. Pin it by digest (vllm_image: name@sha256:...), or save it on one Spark and "
            "load it on all (vllm_image_archive)."
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
        if config["pair"]["rank"] == 0:
            ports["vllm_tp_rendezvous_port"] = _rendezvous_port(config)
    return ports


def pair_ports(config: Mapping[str, Any]) -> list[int]:
    """The ports of the other Spark that the agent and the engine of a rank speak to."""
    return [port for port in (config["pair"]["heartbeat_port"], _rendezvous_port(config)) if port]


def _rendezvous_port(config: Mapping[str, Any]) -> int | None:
    argv = config["command"]
    return int(argv[argv.index("--master-port") + 1]) if "--master-port" in argv else None
