# SPDX-License-Identifier: GPL-3.0-or-later
"""What a Spark lacks, judged without looking."""

from __future__ import annotations

import hashlib
from typing import Any

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
    problems = preflight.port_problems({"vllm_port": 8000}, [listener], {ID: "vllm-tp", "ab" * 32: "other"})
    assert bool(problems) is not fine
    if not fine:
        assert all(word in problems[0] for word in ("8000", "vllm_port", "nginx", "71"))


@pytest.mark.parametrize(
    ("name", "cgroup", "stop"),
    [
        ("nginx", "0::/system.slice/nginx.service\n", "systemctl disable --now nginx.service"),
        ("python3", f"0::/system.slice/docker-{ID}.scope\n", "docker stop sglang"),
        ("docker-proxy", "0::/system.slice/docker.service\n", "docker stop CONTAINER"),
        ("python3", f"0::/system.slice/docker-{'cd' * 32}.scope\n", "docker stop CONTAINER"),
        ("python3", "0::/user.slice/user-1000.slice/session-3.scope\n", "kill 71"),
    ],
)
def test_whoever_holds_a_port_is_named_with_what_ends_that(name: str, cgroup: str, stop: str) -> None:
    listener = preflight.Listener(8000, 71, name, cgroup)
    (problem,) = preflight.port_problems({"vllm_port": 8000}, [listener], {ID: "sglang"})
    assert f"Stop that: {stop}" in problem


def test_ports_that_nobody_asked_for_do_not_matter() -> None:
    listener = preflight.Listener(22, 1, "sshd", "")
    assert preflight.port_problems({"vllm_port": 8000, "other": None}, [listener], {}) == []


HELP = """\
usage: vllm serve [model_tag] [options]
  --max-model-len MAX_MODEL_LEN
  --enable-prefix-caching, --no-enable-prefix-caching
  --enable-server-load-tracking, --disable-server-load-tracking
  --disable-fastapi-docs, --enable-fastapi-docs
  --enable-expert-parallel, -ep, --disable-expert-parallel
  -sc SPECULATIVE_CONFIG, --speculative-config SPECULATIVE_CONFIG
                        like --speculation '{"a":1}', in the place of
                        --num-speculative-tokens
When passing JSON, these are equivalent:
   --json-arg.key1 value1
"""


def test_reading_help() -> None:
    assert preflight.parse_help(HELP) == [
        "--disable-expert-parallel",
        "--disable-fastapi-docs",
        "--disable-server-load-tracking",
        "--enable-expert-parallel",
        "--enable-fastapi-docs",
        "--enable-prefix-caching",
        "--enable-server-load-tracking",
        "--max-model-len",
        "--no-disable-fastapi-docs",
        "--no-enable-expert-parallel",
        "--no-enable-prefix-caching",
        "--no-enable-server-load-tracking",
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
        # Only what is on or off has a --no- form.
        (["--no-max-model-len"], ["--no-max-model-len"]),
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
        *(f"--label={preflight.HELP_LABEL}", "--network=none", "img", "vllm", "serve", "--help=all"),
    ]
    mounts = [
        "--volume=/a:/b",
        "--volume=c",
        "--mount=type=bind,src=/m,target=/m",
        "--mount=type=bind,src=/m,dst=/n",
    ]
    assert preflight.mounted_alike([*COMMAND, *mounts]) == ["/a", "/opt/x", "/m"]
    assert preflight.engine_arguments(COMMAND, "img") == ["vllm", "serve", "/m", "--x"]


@pytest.mark.parametrize(
    ("architecture", "machine", "fine"),
    [("arm64", "aarch64", True), ("amd64", "x86_64", True), ("amd64", "aarch64", False)],
)
def test_platform(architecture: str, machine: str, fine: bool) -> None:
    assert (preflight.platform_problems("img", "linux", architecture, machine) == []) is fine


OURS = preflight.Process("VLLM::EngineCore", 70.0, f"0::/system.slice/docker-{ID}.scope")
AGENT = preflight.Process("python3", 0.1, "0::/system.slice/vllm-tp.service")
OTHER = preflight.Process("trainer", 30.0, "0::/user.slice/session-3.scope")
SMALL = preflight.Process("sshd", 0.1, "0::/system.slice/ssh.service")


@pytest.mark.parametrize(
    ("processes", "words"),
    [
        ([], []),
        # What our engine holds is free when it has stopped, whatever its budget says.
        ([OURS, AGENT, SMALL], []),
        ([OURS, OTHER, SMALL], ["given 95 GiB (vllm_gpu_memory_utilization", "30.1 of this host's 121.0 GiB", "trainer 30.0 GiB"]),
    ],
)  # fmt: skip
def test_memory(processes: list[preflight.Process], words: list[str]) -> None:
    problems = preflight.memory_problems(95, 121.0, processes, [ID])
    assert bool(problems) == bool(words)
    assert all(word in problems[0] for word in words), problems


def test_more_memory_than_there_is() -> None:
    assert "121.0 GiB of memory in all" in preflight.memory_problems(130, 121.0, [], [])[0]


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [(0, "", ""), (18, "Driver/library version mismatch", "status 18: Driver/library"), (124, "", "124")],
)
def test_a_gpu_that_does_not_answer(status: int, said: str, words: str) -> None:
    assert [words in problem for problem in preflight.gpu_problems(status, said)] == ([True] if words else [])


def test_disk() -> None:
    (problem,) = preflight.disk_problems({"/var/cache/vllm": 4.94, "/var/lib/docker": 5.0}, 5)
    assert all(word in problem for word in ("/var/cache/vllm has 4.9 GiB", "vllm_disk_reserved_gib"))


def container(name: str, environment: tuple[str, ...] = (), **host: Any) -> dict[str, Any]:
    return {
        "Id": ID,
        "Name": f"/{name}",
        "Config": {"Image": "img", "Env": list(environment), "Labels": None},
        "HostConfig": host,
    }


@pytest.mark.parametrize(
    ("one", "found"),
    [
        (container("x", DeviceRequests=[{"Driver": "", "Count": -1}]), True),
        (container("x", ("NVIDIA_VISIBLE_DEVICES=all",), Runtime="nvidia"), True),
        # Where that runtime is the default, every container has it.
        (container("x", Runtime="nvidia"), False),
        (container("x", ("NVIDIA_VISIBLE_DEVICES=void",), Runtime="nvidia"), False),
        (container("x", Devices=[{"PathOnHost": "/dev/nvidia0"}]), True),
        (container("x", Runtime="runc", DeviceRequests=None, Devices=[{"PathOnHost": "/dev/fuse"}]), False),
        (container("vllm-replica", DeviceRequests=[{}]), False),
    ],
)
def test_containers_on_the_gpu(one: dict[str, Any], found: bool) -> None:
    assert bool(preflight.containers_on_gpu([one])) is found


def test_one_that_is_asked_for_its_flags_is_ours() -> None:
    asked = container("x", DeviceRequests=[{}])
    asked["Config"]["Labels"] = {preflight.HELP_LABEL: ""}
    assert preflight.containers_on_gpu([asked]) == []


UNITS = """\
vllm-replica.service   loaded active running vLLM
vllm-watchdog.timer    loaded active waiting
ollama.service         loaded active running
vllm-watchdog.timer    enabled enabled
my-SGLang.service      enabled enabled
"""


def test_units_that_look_after_engines() -> None:
    found = preflight.launching_units(UNITS)
    assert [one.name for one in found] == ["vllm-watchdog.timer", "my-SGLang.service"]
    assert found[0].stop == "systemctl disable --now vllm-watchdog.timer"


def test_processes_on_the_gpu() -> None:
    told = "71, /usr/bin/python3\n72, VLLM::EngineCore\n73, ollama\n74, python3\n75, gone\n76, new\n77, x\n[N/A], Xorg\n\n"
    other = container("privileged") | {"Id": "ab" * 32}
    cgroups = {
        71: "0::/user.slice/session-3.scope\n",
        72: f"0::/system.slice/docker-{ID}.scope\n",
        73: "0::/system.slice/ollama.service\n",
        74: "0::/system.slice/vllm-tp.service\n",
        75: "",
        # Began after the containers were listed: maybe ours, and nothing that one should kill.
        76: f"0::/system.slice/docker-{'cd' * 32}.scope\n",
        77: f"12:pids:/docker/{other['Id']}\n",
    }
    found = preflight.processes_on_gpu(told, cgroups, [container("vllm-tp"), other])
    assert [(one.name, one.stop) for one in found] == [
        ("/usr/bin/python3", "kill 71"),
        ("ollama.service", "systemctl stop ollama.service"),
        ("privileged", "docker update --restart=no privileged && docker stop privileged"),
    ]


def test_neighbours_that_are_allowed_are_none() -> None:
    both = [preflight.Neighbour("the unit", "a.service", "stop a"), preflight.Neighbour("the unit", "b", "x")]
    (problem,) = preflight.neighbour_problems(both, ["b"])
    assert all(word in problem for word in ("a.service", "stop a", "vllm_gpu_neighbours", "reserved_gib"))


def test_files_that_are_not_as_wanted() -> None:
    digests = preflight.file_digests({"tp.json": "{}\n", "ä": "ä"}, "/etc/vllm")
    assert list(digests) == ["/etc/vllm/tp.json", "/etc/vllm/ä"]
    assert digests["/etc/vllm/tp.json"] == hashlib.sha256(b"{}\n").hexdigest()
    assert preflight.file_problems([]) == []
    assert "site.yml" in preflight.file_problems(["/etc/vllm/tp.json"])[0]


GOOD: dict[str, Any] = {
    "problems": [],
    "image_id": "sha256:1",
    "model": "m",
    "weights": {"config.json": "7 a", "model.safetensors": "9"},
    "clock_ahead": 0.3,
}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, []),
        ({"problems": ["no x", "no y"]}, ["b: no x", "b: no y"]),
        ({"image_id": "sha256:2"}, ["the image is not the same on all Sparks: a sha256:1, b sha256:2"]),
        # Where there is none another line says so.
        ({"image_id": "", "weights": {}}, []),
        ({"weights": {"config.json": "7 b", "model.safetensors": "9"}}, ["not the same on a, b: config.json"]),
        ({"model": "n", "weights": {"config.json": "8 b"}}, []),
        ({"clock_ahead": -90.0}, ["the clocks of the Sparks differ (beside this machine: a +0 s, b -90 s)"]),
        ({"clock_ahead": 50.0}, []),
    ],
)  # fmt: skip
def test_what_is_in_the_way_on_all_sparks(other: dict[str, Any], words: list[str]) -> None:
    problems = preflight.preflight_problems({"a": GOOD, "b": {**GOOD, **other}})
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True)), problems


def test_a_spark_that_is_not_reached_hides_nothing_of_the_others() -> None:
    lost = {"unreachable": True, "msg": "no route to host"}
    failed = {"failed": True, "msg": "sudo: a password is required"}
    problems = preflight.preflight_problems({"a": {**GOOD, "problems": ["no x"]}, "b": lost, "c": failed})
    assert problems == [
        "a: no x",
        "b is not reached: no route to host. Try it by hand: ansible -m ansible.builtin.ping b",
        "c: sudo: a password is required",
    ]


@pytest.mark.parametrize(
    ("config", "ports"),
    [
        (
            {"mode": "replica", "agent": {"port": 1}, "api": {"port": 2}, "pair": None},
            {"vllm_replica_agent_port": 1, "vllm_port": 2},
        ),
        (
            {
                "mode": "tp",
                "agent": {"port": 1},
                "api": None,
                "pair": {"rank": 1, "heartbeat_port": 3},
                "command": [],
            },
            {"vllm_tp_agent_port": 1, "vllm_tp_heartbeat_port": 3},
        ),
        (
            {
                "mode": "tp",
                "agent": {"port": 1},
                "api": None,
                "pair": {"rank": 0, "heartbeat_port": 3},
                "command": ["--master-port", "4"],
            },
            {"vllm_tp_agent_port": 1, "vllm_tp_heartbeat_port": 3, "vllm_tp_rendezvous_port": 4},
        ),
    ],
)
def test_wanted_ports(config: dict[str, object], ports: dict[str, int]) -> None:
    assert preflight.wanted_ports(config) == ports


@pytest.mark.parametrize(
    ("argv", "ports"), [(["vllm", "serve"], [9403]), (["--master-port", "29501", "--x"], [9403, 29501])]
)
def test_ports_of_the_other_spark(argv: list[str], ports: list[int]) -> None:
    assert preflight.pair_ports({"pair": {"heartbeat_port": 9403}, "command": argv}) == ports
