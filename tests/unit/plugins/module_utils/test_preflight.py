# SPDX-License-Identifier: GPL-3.0-or-later
"""What a Spark lacks, judged without looking."""

from __future__ import annotations

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _preflight as preflight

SS = """\
LISTEN 0      4096         0.0.0.0:8000       0.0.0.0:*    users:(("vllm",pid=71,fd=6),("vllm",pid=72,fd=6))
LISTEN 0      128             [::]:22            [::]:*    users:(("sshd",pid=1,fd=4))
LISTEN 0      5                  *:9401             *:*
LISTEN 0      5      127.0.0.1%lo:53         0.0.0.0:*    users:(("sys",pid=9,fd=1))
nonsense
"""


def test_reading_ss() -> None:
    assert preflight.parse_listeners(SS) == [
        (8000, 71, "vllm"),
        (22, 1, "sshd"),
        (9401, 0, "unknown"),
        (53, 9, "sys"),
    ]


ID = "4f" * 32


@pytest.mark.parametrize(
    ("cgroup", "fine"),
    [
        (f"0::/system.slice/docker-{ID}.scope", True),
        (f"12:pids:/docker/{ID}\n", True),
        ("0::/system.slice/vllm-tp.service", True),
        ("0::/system.slice/nginx.service", False),
        ("", False),
    ],
)
def test_a_port_may_be_free_or_ours(cgroup: str, fine: bool) -> None:
    listener = preflight.Listener(8000, 71, "nginx", cgroup)
    problems = preflight.port_problems({"vllm_port": 8000}, [listener], [ID])
    assert bool(problems) is not fine
    if not fine:
        assert all(word in problems[0] for word in ("8000", "vllm_port", "nginx", "71"))


def test_ports_that_nobody_asked_for_do_not_matter() -> None:
    listener = preflight.Listener(22, 1, "sshd", "")
    assert preflight.port_problems({"vllm_port": 8000, "other": None}, [listener], []) == []


HELP = """\
usage: vllm serve [model_tag] [options]
  --max-model-len MAX_MODEL_LEN
  --enable-prefix-caching, --no-enable-prefix-caching
  --enable-server-load-tracking, --disable-server-load-tracking
  --speculative-config, -sc SPECULATIVE_CONFIG
                        like --speculative-config '{"a":1}'; not a---flag
"""


def test_reading_help() -> None:
    assert preflight.parse_help(HELP) == [
        "--disable-server-load-tracking",
        "--enable-prefix-caching",
        "--enable-server-load-tracking",
        "--max-model-len",
        "--no-enable-prefix-caching",
        "--speculative-config",
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["vllm", "serve", "/m", "--max-model-len", "8", "--no-enable-prefix-caching"], []),
        (["--max_model_len=8", "--speculative-config.method", "mtp"], []),
        (["--no-enable-server-load-tracking"], []),
        (
            ["--max-modell-len", "8"],
            ["--max-modell-len", "Did you mean --max-model-len", "vllm_engine_flags"],
        ),
        # The engine would take this beginning of a flag today; the next image may not.
        (["--max-model", "8"], ["--max-model"]),
        (["--swap-space", "4"], ["--swap-space", "img"]),
    ],
)
def test_flags(argv: list[str], words: list[str]) -> None:
    problems = preflight.flag_problems(argv, preflight.parse_help(HELP), "img")
    assert bool(problems) == bool(words)
    assert all(word in " ".join(problems) for word in words), problems


COMMAND = ["docker", "run", "--rm", "--name=vllm-tp", "--entrypoint=", "--env-file=/e", "--gpus=all"]
COMMAND += [
    "--network=host",
    "--ipc=host",
    "--volume=/a:/a",
    "--volume=/opt/x:/opt/x:ro",
    "--mount=type=bind",
    "img",
    "vllm",
    "serve",
    "/m",
    "--x",
]


def test_asking_the_engine_needs_no_name_or_secret_and_writes_nothing() -> None:
    assert preflight.help_command(COMMAND, "img") == [
        *("docker", "run", "--rm", "--entrypoint=", "--gpus=all", "--volume=/opt/x:/opt/x:ro"),
        *("--network=none", "img", "vllm", "serve", "--help=all"),
    ]
    assert preflight.engine_arguments(COMMAND, "img") == ["vllm", "serve", "/m", "--x"]


@pytest.mark.parametrize(
    ("architecture", "machine", "fine"),
    [("arm64", "aarch64", True), ("amd64", "x86_64", True), ("amd64", "aarch64", False)],
)
def test_platform(architecture: str, machine: str, fine: bool) -> None:
    assert (preflight.platform_problems("img", "linux", architecture, machine) == []) is fine


def test_memory() -> None:
    assert preflight.memory_problems(90, 128 * 2**30) == []
    assert "vllm_gpu_memory_utilization" in preflight.memory_problems(130, 128 * 2**30)[0]


@pytest.mark.parametrize(
    ("config", "ports"),
    [
        (
            {"mode": "replica", "agent": {"port": 1}, "api": {"port": 2}, "pair": None},
            {"vllm_replica_agent_port": 1, "vllm_port": 2},
        ),
        (
            {"mode": "tp", "agent": {"port": 1}, "api": None, "pair": {"heartbeat_port": 3}},
            {"vllm_tp_agent_port": 1, "vllm_tp_heartbeat_port": 3},
        ),
    ],
)
def test_wanted_ports(config: dict[str, object], ports: dict[str, int]) -> None:
    assert preflight.wanted_ports(config) == ports


PAIR = {"rank": 0, "head": "192.0.2.1", "peer": "192.0.2.2"}
ROUTE = '[{"dst":"192.0.2.2","dev":"enp1s0f1np1","prefsrc":"192.0.2.1","flags":[],"uid":0,"cache":[]}]'
OVER_A_ROUTER = '[{"dst":"192.0.2.2","gateway":"10.0.0.1","dev":"eth0","prefsrc":"10.0.0.7","flags":[]}]'


@pytest.mark.parametrize(
    ("text", "link"),
    [
        (ROUTE, preflight.Link("enp1s0f1np1", "", "192.0.2.1")),
        (OVER_A_ROUTER, preflight.Link("eth0", "10.0.0.1", "10.0.0.7")),
        ("", None),
        ("[]", None),
        ("[ { } ]", None),
    ],
)
def test_reading_a_route(text: str, link: preflight.Link | None) -> None:
    assert preflight.parse_route(text) == link


@pytest.mark.parametrize(
    ("rank", "link", "words"),
    [
        (0, preflight.Link("enp1", "", "192.0.2.1", 9000), ""),
        (1, preflight.Link("enp1", "", "192.0.2.9", 9000), ""),
        (0, None, "there is no way"),
        (0, preflight.Link("eth0", "10.0.0.1", "10.0.0.7"), "over the router 10.0.0.1"),
        (0, preflight.Link("enp2", "", "192.0.2.9", 9000), "from 192.0.2.9 on enp2"),
        (0, preflight.Link("enp1", "", "192.0.2.1", 9000, answers=False), "does not answer on enp1"),
        (0, preflight.Link("enp1", "", "192.0.2.1", 9000, answers_whole=False), "packets of 9000 bytes"),
    ],
)
def test_the_direct_link(rank: int, link: preflight.Link | None, words: str) -> None:
    problems = preflight.fabric_problems({**PAIR, "rank": rank}, link)
    assert [words in problem for problem in problems] == ([True] if words else [])


def test_the_largest_ping() -> None:
    assert (preflight.payload("192.0.2.2", 9000), preflight.payload("2001:db8::2", 1500)) == (8972, 1452)
