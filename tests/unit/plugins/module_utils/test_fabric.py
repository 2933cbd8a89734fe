# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the direct link would carry a pair, judged without looking."""

from __future__ import annotations

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _fabric as fabric

PAIR = {"rank": 0, "head": "192.0.2.1", "peer": "192.0.2.2"}
ROUTE = '[{"dst":"192.0.2.2","dev":"enp1s0f1np1","prefsrc":"192.0.2.1","flags":[],"uid":0,"cache":[]}]'
OVER_A_ROUTER = '[{"dst":"192.0.2.2","gateway":"10.0.0.1","dev":"eth0","prefsrc":"10.0.0.7","flags":[]}]'


@pytest.mark.parametrize(
    ("text", "link"),
    [
        (ROUTE, fabric.Link("enp1s0f1np1", "", "192.0.2.1")),
        (OVER_A_ROUTER, fabric.Link("eth0", "10.0.0.1", "10.0.0.7")),
        ("", None),
        ("[]", None),
        ("[ { } ]", None),
    ],
)
def test_reading_a_route(text: str, link: fabric.Link | None) -> None:
    assert fabric.parse_route(text) == link


@pytest.mark.parametrize(
    ("rank", "link", "words"),
    [
        (0, fabric.Link("enp1", "", "192.0.2.1", 9000), ""),
        (1, fabric.Link("enp1", "", "192.0.2.9", 9000), ""),
        (0, None, "there is no way"),
        (0, fabric.Link("eth0", "10.0.0.1", "10.0.0.7"), "over the router 10.0.0.1"),
        (0, fabric.Link("enp2", "", "192.0.2.9", 9000), "from 192.0.2.9 on enp2"),
        (0, fabric.Link("enp1", "", "192.0.2.1", 9000, answers=False), "does not answer on enp1"),
        (0, fabric.Link("enp1", "", "192.0.2.1", 9000, answers_whole=False), "packets of 9000 bytes"),
    ],
)
def test_the_direct_link(rank: int, link: fabric.Link | None, words: str) -> None:
    problems = fabric.link_problems({**PAIR, "rank": rank}, link)
    assert [words in problem for problem in problems] == ([True] if words else [])


def test_the_largest_ping() -> None:
    assert (fabric.payload("192.0.2.2", 9000), fabric.payload("2001:db8::2", 1500)) == (8972, 1452)


def test_a_firewall_on_the_direct_link() -> None:
    assert fabric.port_problems("192.0.2.2", []) == []
    (problem,) = fabric.port_problems("192.0.2.2", [9403, 29501])
    assert "192.0.2.2 (fabric_address of the other Spark) is silent on port 9403, 29501" in problem


ADDRESSES = """[{}, {"ifname": "enp1s0f1np1", "addr_info": [
  {"family": "inet", "local": "192.0.2.1", "prefixlen": 24},
  {"family": "inet", "local": "169.254.7.1", "prefixlen": 16, "scope": "link"},
  {"family": "inet6", "local": "fe80::1", "prefixlen": 64, "scope": "link"},
  {"family": "inet6", "local": "2001:db8::1", "prefixlen": 64, "scope": "global"}]}]"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ADDRESSES, ("192.0.2.0/24", "169.254.0.0/16", "2001:db8::/64")),
        ("", ()),
        ("[{}]", ()),
        ('[{"addr_info":[{}]}]', ()),
    ],
)
def test_reading_addresses(text: str, found: tuple[str, ...]) -> None:
    assert fabric.networks(text) == found


def rail(
    state: str = "4: ACTIVE", networks: tuple[str, ...] = ("192.0.2.0/24",), mtu: int = 9000
) -> fabric.Rail:
    return fabric.Rail(True, state, "enp1", networks, mtu)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ([], []),
        (["rocep1s0f1", "roceP2p1s0f1"], ["rocep1s0f1", "roceP2p1s0f1"]),
        (["roce"], ["roceP2p1s0f1", "rocep1s0f0", "rocep1s0f1"]),
        (["=rocep1s0f1:1"], ["rocep1s0f1:1"]),
        (["=rocep1"], ["rocep1"]),
        (["mlx5_0"], ["mlx5_0"]),
        (["^rocep1s0f0", "x"], []),
        ([""], []),
    ],
)
def test_what_nccl_chooses(wanted: list[str], found: list[str]) -> None:
    assert fabric.chosen(wanted, ["rocep1s0f0", "rocep1s0f1", "roceP2p1s0f1"]) == found


@pytest.mark.parametrize(
    ("rails", "words"),
    [
        ({}, []),
        ({"rocep1": rail(), "roceP2": rail(networks=("198.51.100.0/24",))}, []),
        ({"rocep1": fabric.Rail(exists=False)}, ["RDMA device rocep1 (vllm_fabric_hcas) is not on this host"]),
        ({"rocep1": rail(state="1: DOWN")}, ["is 1: DOWN, not ACTIVE"]),
        ({"rocep1": rail(state="")}, ["in no known state"]),
        ({"rocep1": rail(networks=())}, ["enp1 of RDMA device rocep1 (vllm_fabric_hcas) has no address"]),
        ({"rocep1": rail(), "roceP2": rail()}, ["rocep1 and roceP2 (vllm_fabric_hcas) are both in 192.0.2.0/24"]),
        ({"rocep1": rail(), "roceP2": rail(networks=("198.51.100.0/24",), mtu=1500)}, ["differ in their MTU: rocep1 9000, roceP2 1500"]),
    ],
)  # fmt: skip
def test_rails(rails: dict[str, fabric.Rail], words: list[str]) -> None:
    problems = fabric.rail_problems(rails)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True)), problems
