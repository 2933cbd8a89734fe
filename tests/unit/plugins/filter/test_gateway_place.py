# SPDX-License-Identifier: GPL-3.0-or-later
"""Where on a gateway the virtual address belongs."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.twospark.serving.plugins.filter.gateway_place import gateway_place


def link(name: str, *addresses: str, scope: str = "global") -> dict[str, Any]:
    """A network interface, as ip(8) tells of it."""
    pairs = [address.split("/") for address in addresses]
    entries = [{"local": local, "prefixlen": int(length), "scope": scope} for local, length in pairs]
    return {"ifname": name, "addr_info": entries}


LOOPBACK = link("lo", "127.0.0.1/8", "::1/128", scope="host")
LAN = link("eth0", "192.0.2.11/24", "2001:db8::11/64")
FABRIC = link("enp1s0f1np1", "198.51.100.11/24")
HOST = [LOOPBACK, FABRIC, LAN]
GATEWAYS = {"a": ["192.0.2.11", "2001:db8::11"], "b": ["192.0.2.12", "2001:db8::12"]}
BARE = {"a": ["192.0.2.11"], "b": ["192.0.2.12"]}


@pytest.mark.parametrize(
    ("shown", "virtual", "interface", "gateways", "found"),
    [
        (HOST, "192.0.2.10", "", GATEWAYS, ("eth0", "192.0.2.11", ["192.0.2.12"])),
        (HOST, "192.0.2.10/24", "", GATEWAYS, ("eth0", "192.0.2.11", ["192.0.2.12"])),
        (HOST, "2001:db8::10", "", GATEWAYS, ("eth0", "2001:db8::11", ["2001:db8::12"])),
        # The host has it already.
        ([LOOPBACK, link("eth0", "192.0.2.10/24", "192.0.2.11/24")], "192.0.2.10", "", BARE, ("eth0", "192.0.2.11", ["192.0.2.12"])),
        # A host knows itself by a loopback address.
        (HOST, "192.0.2.10", "", {**BARE, "a": ["127.0.1.1"]}, ("eth0", "192.0.2.11", ["192.0.2.12"])),
        # Two links into the same network: that by which the others know it.
        ([link("wlan0", "192.0.2.40/24"), LAN], "192.0.2.10", "", BARE, ("eth0", "192.0.2.11", ["192.0.2.12"])),
        ([link("wlan0", "192.0.2.40/24"), LAN], "192.0.2.10", "wlan0", {**BARE, "a": ["192.0.2.40"]},
         ("wlan0", "192.0.2.40", ["192.0.2.12"])),
        # A network of which the host has no address, by a link that was named.
        (HOST, "203.0.113.10", "eth0", BARE, ("eth0", "192.0.2.11", ["192.0.2.12"])),
    ],
)  # fmt: skip
def test_place(
    shown: list[dict[str, Any]],
    virtual: str,
    interface: str,
    gateways: dict[str, list[str]],
    found: tuple[str, str, list[str]],
) -> None:
    place = gateway_place(shown, virtual, interface, "a", gateways)
    assert place["problems"] == []
    assert (place["interface"], place["address"], place["peers"]) == found


def test_priorities_fall_in_the_groups_order() -> None:
    names = [f"g{number}" for number in range(40)]
    gateways = {name: ["192.0.2.11"] for name in names}
    priorities = [gateway_place(HOST, "192.0.2.10", "", name, gateways)["priority"] for name in names]
    assert priorities == sorted(set(priorities), reverse=True)
    assert priorities[0] == 250
    assert priorities[-1] > 0


@pytest.mark.parametrize(
    ("virtual", "interface", "gateways", "expected"),
    [
        ("203.0.113.10", "", BARE, "gateway_virtual_address is 203.0.113.10, in no network of a (it has enp1s0f1np1 198.51.100.11/24, eth0 192.0.2.11/24)"),
        ("192.0.2.10", "eht0", BARE, "gateway_virtual_interface is 'eht0', which a does not have; allowed are lo, enp1s0f1np1, eth0."),
        ("192.0.2.10", "", {**BARE, "b": []}, "ansible_host of b gives no IPv4 address on a;"),
        ("2001:db8::10", "", {**GATEWAYS, "b": ["192.0.2.12"]}, "ansible_host of b gives no IPv6 address on a;"),
        ("192.0.2.10", "", {**BARE, "a": ["198.51.100.11"]}, "ansible_host of a gives 198.51.100.11, which is not on eth0,"),
        ("192.0.2.10", "enp1s0f1np1", BARE, "ansible_host of a gives 192.0.2.11, which is not on enp1s0f1np1,"),
    ],
)  # fmt: skip
def test_each_problem_is_named(
    virtual: str, interface: str, gateways: dict[str, list[str]], expected: str
) -> None:
    (problem,) = gateway_place(HOST, virtual, interface, "a", gateways)["problems"]
    assert problem.startswith(expected)
