# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Where on a gateway the virtual address belongs, and with whom the gateway shares it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: gateway_place
short_description: Where on a gateway the virtual address belongs
version_added: 0.1.0
author: The twospark.serving maintainers
description:
  - Finds the network interface in whose network the virtual address is, the host's own address there, and those of the other gateways.
  - The first of the gateways has the highest priority.
positional: _input, virtual_address, interface, host, gateways
options:
  _input:
    description: What C(ip -json address show) tells of the host.
    type: list
    elements: dict
    required: true
  virtual_address:
    description: The address that the gateways share, with or without a prefix length.
    type: str
    required: true
  interface:
    description: Network interface for it; empty finds it.
    type: str
    required: true
  host:
    description: Inventory name of the host.
    type: str
    required: true
  gateways:
    description: Inventory name of each gateway, in the group's order, to the addresses that the host knows for it.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show the interface
  ansible.builtin.debug:
    msg: "{{ place.interface }}"
  vars:
    place: >-
      {{ shown.stdout | from_json
         | twospark.serving.gateway_place('192.0.2.10', '', 'spark-a', {'spark-a': ['192.0.2.11'], 'spark-b': ['192.0.2.12']}) }}
"""

RETURN = r"""
_value:
  description: >-
    C(interface) and C(address) of the host, C(peers) (the others' addresses), C(priority) (1 to 254), and C(problems), a text for each;
    the others count only when there is none.
  type: dict
  sample: {interface: eth0, address: 192.0.2.11, peers: [192.0.2.12], priority: 250, problems: []}
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from ipaddress import IPv4Interface, IPv6Interface, ip_address, ip_interface
from typing import Any

Interface = IPv4Interface | IPv6Interface

HIGHEST_PRIORITY = 250
# The more two gateways differ, the less both take over at once; the lower one's, the longer it waits, up to half a second.
PRIORITIES = 100


def gateway_place(
    shown: Sequence[Mapping[str, Any]],
    virtual_address: str,
    interface: str,
    host: str,
    gateways: Mapping[str, Iterable[str]],
) -> dict[str, Any]:
    """Find the place of the virtual address on ``host``; see DOCUMENTATION."""
    virtual = ip_interface(virtual_address)
    family = f"IPv{virtual.version}"
    links = {str(link["ifname"]): _addresses(link, virtual) for link in shown if link.get("ifname")}
    known = {
        name: [text for text in addresses if ip_address(text).version == virtual.version]
        for name, addresses in gateways.items()
    }
    order = list(gateways)
    place: dict[str, Any] = {
        "interface": "",
        "address": "",
        "peers": [known[name][0] for name in order if name != host and known[name]],
        "priority": HIGHEST_PRIORITY - PRIORITIES * order.index(host) // len(order),
        "problems": [],
    }
    problems: list[str] = place["problems"]
    problems += [
        f"ansible_host of {name} gives no {family} address on {host}; gateways that share gateway_virtual_address "
        f"{virtual_address} speak to each other by these. Set it to the host's address in that network."
        for name in order
        if name != host and not known[name]
    ]
    if interface and interface not in links:
        problems.append(
            f"gateway_virtual_interface is {interface!r}, which {host} does not have; allowed are "
            f"{', '.join(links)}. Choose one, or leave it empty."
        )
        return place
    fitting = [
        name
        for name, own in links.items()
        if interface in ("", name) and any(virtual.ip in address.network for address in own)
    ]
    # Of two links into the same network, that by which the others know the host.
    fitting.sort(key=lambda name: not any(str(address.ip) in known[host] for address in links[name]))
    place["interface"] = interface or (fitting[0] if fitting else "")
    if not place["interface"]:
        networks = ", ".join(f"{name} {address}" for name, own in links.items() for address in own)
        problems.append(
            f"gateway_virtual_address is {virtual_address}, in no network of {host} (it has {networks or 'no ' + family}); allowed is "
            "a free address of one. Choose another, or name the link that clients come by: gateway_virtual_interface."
        )
        return place
    own = [str(address.ip) for address in links[place["interface"]]]
    # A host often knows itself by a loopback address only.
    others_know = [text for text in known[host] if not ip_address(text).is_loopback] or own[:1]
    place["address"] = next((text for text in others_know if text in own), "")
    if not place["address"]:
        problems.append(
            f"ansible_host of {host} gives {', '.join(others_know) or 'no ' + family + ' address'}, which is not on {place['interface']}, "
            f"where gateway_virtual_address {virtual_address} belongs ({', '.join(own) or 'no ' + family}); gateways speak to each "
            "other by ansible_host. Set it to the host's address on that link."
        )
    return place


def _addresses(link: Mapping[str, Any], virtual: Interface) -> list[Interface]:
    """The link's own lasting addresses of the virtual address's family."""
    found = [
        ip_interface(f"{entry['local']}/{entry['prefixlen']}")
        for entry in link.get("addr_info", [])
        if entry.get("scope") == "global" and not entry.get("temporary")
    ]
    return [address for address in found if address.version == virtual.version and address.ip != virtual.ip]


class FilterModule:
    """The filter under its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filter name to function."""
        return {"gateway_place": gateway_place}
