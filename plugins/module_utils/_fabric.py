# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether the direct link would carry a pair: the judgements, without the looking. Private to the collection."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


def link_problems(pair: Mapping[str, Any], link: Link | None) -> list[str]:
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
    if (
        pair["rank"] == 0
        and link.source
        and ipaddress.ip_address(link.source) != ipaddress.ip_address(pair["head"])
    ):
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


def port_problems(peer: str, silent: Sequence[int]) -> list[str]:
    """Ports of the peer that neither took nor refused a connection. Engines also use ports that they choose by chance."""
    if not silent:
        return []
    return [
        f"{peer} (fabric_address of the other Spark) is silent on port {', '.join(map(str, silent))}, so a firewall is in between. "
        "Allow all traffic between the fabric addresses on both Sparks."
    ]


def chosen(wanted: Sequence[str], there: Sequence[str]) -> list[str]:
    """The devices that NCCL takes for these words: each a prefix, or after ``=`` a whole name, and maybe with ``:PORT``. One that
    matches nothing stands for itself. Words that exclude (``^``) choose nothing in particular."""
    found: list[str] = []
    if wanted and wanted[0].startswith("^"):
        return []
    for word in filter(None, wanted):
        name, colon, port = word.lstrip("=").partition(":")
        matching = [one for one in there if one == name or (one.startswith(name) and word[0] != "=")]
        found += [one + colon + port for one in sorted(matching) or [name]]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Rail:
    """An RDMA device of the direct link: whether it is there, its port's state (``4: ACTIVE``), its network interface, and
    that one's networks and MTU in bytes."""

    exists: bool
    state: str = ""
    device: str = ""
    networks: tuple[str, ...] = ()
    mtu: int = 0


def networks(text: str) -> tuple[str, ...]:
    """Read ``ip -json address show dev DEVICE``: its networks, without those that every interface has."""
    try:
        found = [entry for link in json.loads(text) for entry in link.get("addr_info", ())]
        return tuple(
            str(ipaddress.ip_network(f"{entry['local']}/{entry['prefixlen']}", strict=False))
            for entry in found
            if (entry.get("family"), entry.get("scope")) != ("inet6", "link")
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        return ()


def rail_problems(rails: Mapping[str, Rail]) -> list[str]:
    """Why NCCL could not use these RDMA devices (by their name in ``vllm_fabric_hcas``)."""
    problems = []
    for name, rail in rails.items():
        if not rail.exists:
            problems.append(
                f"RDMA device {name} (vllm_fabric_hcas) is not on this host. Those that are: ls /sys/class/infiniband"
            )
        elif "ACTIVE" not in rail.state:
            problems.append(
                f"RDMA device {name} (vllm_fabric_hcas) is {rail.state or 'in no known state'}, not ACTIVE. Look at the cable, and at "
                f"`ip link` for {rail.device or 'its interface'}."
            )
        elif not rail.networks:
            problems.append(
                f"{rail.device or 'the interface'} of RDMA device {name} (vllm_fabric_hcas) has no address. Give it one, each rail "
                "in a network of its own."
            )
    sizes = {name: rail.mtu for name, rail in rails.items() if rail.mtu}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{name} {mtu}" for name, mtu in sizes.items())
        problems.append(
            f"the RDMA devices (vllm_fabric_hcas) differ in their MTU: {told}. Set the same on all."
        )
    # Both rails in one network: all traffic leaves by one of them.
    seen: dict[str, str] = {}
    for name, rail in rails.items():
        for network in rail.networks:
            if network in seen:
                problems.append(
                    f"RDMA devices {seen[network]} and {name} (vllm_fabric_hcas) are both in {network}. Give each rail a network of its own."
                )
            seen.setdefault(network, name)
    return problems
