# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether one Spark has what a mode needs: the judgements, without the looking. Private to the collection."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import _command as command

GIB = 2**30
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
    wanted: Mapping[str, int | None], listeners: Iterable[Listener], our_containers: Collection[str]
) -> list[str]:
    """Ports that somebody else holds. Ours are the units of both modes and their containers (``our_containers`` are
    ids): a mode that stops makes room for the other."""
    problems = []
    held: dict[int, Listener] = {}
    for listener in listeners:
        if not any(mark in listener.cgroup for mark in (*OUR_UNITS, *our_containers)):
            held.setdefault(listener.port, listener)
    for variable, port in wanted.items():
        if port in held:
            owner = held[port]
            problems.append(
                f"port {port} ({variable}) is taken by {owner.name} (pid {owner.pid}); allowed is a port that is free or held by "
                f"our own units. Stop that process, or set {variable} to another port."
            )
    return problems


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


def memory_problems(budget_gib: float, total_bytes: int) -> list[str]:
    """A budget that the host could not meet with everything else stopped."""
    total = total_bytes / GIB
    if budget_gib > total:
        return [
            f"the engine is given {budget_gib:g} GiB (vllm_gpu_memory_utilization of vllm_device_memory_gib), and this host has {total:.1f} GiB "
            "of memory in all. Lower the share."
        ]
    return []


@dataclass(frozen=True)
class Link:
    """The way to the peer's address on the direct link: what ``ip route get`` tells of it, the interface's MTU in bytes
    (0 when unknown), and whether a small packet and one as large as the link takes came back."""

    device: str
    router: str = ""
    source: str = ""
    mtu: int = 0
    answers: bool = True
    answers_whole: bool = True


def parse_route(text: str) -> Link | None:
    """Read ``ip -json route get ADDRESS``; None when there is no way."""
    try:
        route = json.loads(text)[0]
        return Link(str(route["dev"]), str(route.get("gateway", "")), str(route.get("prefsrc", "")))
    except (ValueError, LookupError, TypeError):
        return None


def payload(address: str, mtu: int) -> int:
    """How much a ping to this address carries when its packet is as large as the link takes."""
    return mtu - (48 if ":" in address else 28)


def fabric_problems(pair: Mapping[str, Any], link: Link | None) -> list[str]:
    """Why the ranks of a pair would not find each other on the direct link."""
    peer = pair["peer"]
    if link is None:
        return [
            f"there is no way to {peer} (fabric_address of the other Spark). Give this Spark an address in its network on the direct link."
        ]
    if link.router:
        return [
            f"the way to {peer} (fabric_address of the other Spark) leads over the router {link.router} ({link.device}), so it is not the "
            "direct link. Give both Sparks an address in one network on that link."
        ]
    if pair["rank"] == 0 and link.source and link.source != pair["head"]:
        return [
            f"this Spark speaks to {peer} from {link.source} on {link.device}, and its fabric_address is {pair['head']}. Set "
            "fabric_address to its address on the direct link, or mend the address."
        ]
    if not link.answers:
        return [
            f"{peer} (fabric_address of the other Spark) does not answer on {link.device}. Look at the cable and at `ip address` on both Sparks."
        ]
    if not link.answers_whole:
        return [
            f"{peer} answers on {link.device}, but not to packets of {link.mtu} bytes (the interface's MTU). Set the same MTU on both Sparks."
        ]
    return []


def wanted_ports(config: Mapping[str, Any]) -> dict[str, int | None]:
    """The ports that a mode listens on, by the variable that sets each."""
    mode = config["mode"]
    ports: dict[str, int | None] = {f"vllm_{mode}_agent_port": config["agent"]["port"]}
    if config["api"]:
        ports["vllm_port"] = config["api"]["port"]
    if config["pair"]:
        ports["vllm_tp_heartbeat_port"] = config["pair"]["heartbeat_port"]
    return ports
