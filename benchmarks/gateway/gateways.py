# SPDX-License-Identifier: GPL-3.0-or-later
"""The gateways that are compared: how each is installed, configured as its users do, and started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from benchmarks.gateway.processes import LOOPBACK, Program, free_port, running, wait_until
from benchmarks.gateway.worker import MODEL
from tests.gateway.conftest import Ansible, render
from tests.gateway.rig import environment_of

OURS = "ours"
CHAT = "/v1/chat/completions"
CLIENT_KEY = f"sk-{secrets.token_hex(32)}"
WORKERS_KEY = f"sk-{secrets.token_hex(32)}"
HEADERS = {"authorization": f"Bearer {CLIENT_KEY}", "content-type": "application/json"}
CACHE = Path(os.environ.get("TWOSPARK_CACHE", Path.home() / ".cache/twospark")) / "benchmarks"

# By their command: the Debian package of each, or what pip installs, which the tables were made with.
SYSTEM_PEERS = {"haproxy": "haproxy", "nginx": "nginx-light"}
PYTHON_PEERS = {
    "vllm-router": "vllm-router==0.1.17",
    "sglang-router": "sglang-router==0.3.2",
    "smg": "smg==1.13.0",
    "litellm": "litellm[proxy]==1.108.7",
}
ALL = [OURS, *SYSTEM_PEERS, *PYTHON_PEERS]


def install(names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Make the gateways runnable; return the version of each, and why others are left out."""
    versions, left_out = {}, {}
    for name in names:
        try:
            versions[name] = _install_one(name)
        except (OSError, subprocess.SubprocessError) as problem:
            left_out[name] = str(problem)[-300:]
    return versions, left_out


def _install_one(name: str) -> str:
    if name == OURS:
        return f"{revision()} on HAProxy {_install_one('haproxy')}"
    if name in SYSTEM_PEERS:
        need_command(name, SYSTEM_PEERS[name])
        said = subprocess.run([name, "-v"], capture_output=True, text=True, check=True)
        found = re.search(r"(?:version |nginx/)(\S+)", said.stdout + said.stderr)
        return found[1] if found else "of unknown version"
    home = CACHE / name
    complete = home / "complete"
    if not complete.exists() or complete.read_text() != PYTHON_PEERS[name]:
        print(f"installing {name} into {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin/pip"), "install", "--quiet", "--disable-pip-version-check", PYTHON_PEERS[name]]
        done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=900)
        if done.returncode:
            raise OSError(f"pip: {done.stderr.strip().splitlines()[-1]}")
        complete.write_text(PYTHON_PEERS[name])
    package = re.split(r"[\[=]", PYTHON_PEERS[name])[0]
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [str(home / "bin/python"), "-c", ask], capture_output=True, text=True, check=True
    ).stdout.strip()


def need_command(command: str, package: str) -> None:
    """Install a Debian package where its command is missing."""
    if shutil.which(command):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise OSError(f"{command} is missing; install the package {package}")
    print(f"installing {package}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update", "-qq"], ["install", "-qq", "-y", "--no-install-recommends", package]):
        subprocess.run(["apt-get", *arguments], check=True, capture_output=True, env=environment, timeout=600)


def revision() -> str:
    """The commit of this checkout, with a + where it was changed since."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown commit"


@dataclass
class Gateway:
    """A gateway that runs, or (``program`` is None) a worker that is asked directly."""

    name: str
    port: int
    program: Program | None = None

    def serves(self) -> bool:
        """Wait until it has answered a request, for two minutes at most: one of the peers takes long on a busy machine."""
        program = self.program
        return wait_until(lambda: (program and program.ended) or self.chat() == 200, 120) and not (
            program and program.ended
        )

    def get(self, path: str, seconds: float = 5) -> int:
        """Status of the answer to GET; 0 without one."""
        connection = HTTPConnection(LOOPBACK, self.port, timeout=seconds)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("GET", path, headers=HEADERS)
            return connection.getresponse().status
        return 0

    def chat(self, seconds: float = 5) -> int:
        """Status of the answer to a short completion; 0 without one."""
        connection = HTTPConnection(LOOPBACK, self.port, timeout=seconds)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("POST", CHAT, json.dumps(chat_body({})), HEADERS)
            return connection.getresponse().status
        return 0


def chat_body(wanted: dict[str, float], stream: bool = False) -> dict[str, object]:
    """A request for a completion; a careful worker finds in the message what it shall do."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": json.dumps(wanted)}],
        "stream": stream,
        "max_tokens": 16,
    }


@dataclass(frozen=True)
class Settings:
    """What a benchmark wants otherwise than the gateways' documentation has it."""

    # Seconds that ours lets a request wait for a worker; None is the role's default.
    hold_seconds: int | None = None
    # What nginx is told of each of its servers, and of the requests that it passes.
    nginx_server: str = ""
    nginx_location: str = ""


@contextlib.contextmanager
def launched(
    name: str, directory: Path, workers: Sequence[int], settings: Settings | None = None
) -> Iterator[Gateway]:
    """Start one gateway in front of workers on these ports; it may not serve yet."""
    settings = settings or Settings()
    directory.mkdir(parents=True)
    port = free_port()
    with contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        if name == OURS:
            # The access log's receiver: the kernel drops what nobody reads.
            log = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            log.bind((LOOPBACK, 0))
            command = _ours(directory, port, workers, log.getsockname()[1], settings)
            environment |= environment_of(directory / OURS)
        elif name in SYSTEM_PEERS:
            configuration = directory / f"{name}.conf"
            configuration.write_text(
                _haproxy(port, workers) if name == "haproxy" else _nginx(port, workers, settings)
            )
            command = {
                "haproxy": ["haproxy", "-W", "-db", "-f", str(configuration)],
                "nginx": ["nginx", "-p", f"{directory}/", "-c", str(configuration)],
            }[name]
        elif name == "litellm":
            command = _litellm(directory, port, workers)
            # It would fetch a list of prices from the Internet.
            environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": CLIENT_KEY}
        else:
            command = _router(name, port, workers)
        yield Gateway(name, port, stack.enter_context(running(command, directory, environment)))


def _ours(directory: Path, port: int, workers: Sequence[int], log: int, settings: Settings) -> list[str]:
    """The role's own templates, with what an owner of several clients would set."""
    hold = {} if settings.hold_seconds is None else {"gateway_hold_seconds": settings.hold_seconds}
    variables = {
        **hold,
        "gateway_address": LOOPBACK,
        "gateway_port": port,
        "gateway_metrics_port": free_port(),
        "gateway_log": f"{LOOPBACK}:{log}",
        "gateway_pools": max(16, len(workers)),
        # More than any measurement has in flight: the cap is not what is compared.
        "gateway_workers": [
            {
                "name": f"worker-{number}",
                "kind": "vllm",
                "address": LOOPBACK,
                "port": worker,
                "health_port": worker,
                "max_requests": 1000,
            }
            for number, worker in enumerate(workers, 1)
        ],
        "gateway_api_key": WORKERS_KEY,
        "gateway_clients": [
            {"name": "benchmark", "key": CLIENT_KEY},
            *({"name": f"client-{number}", "key": f"sk-client-{number:020}"} for number in range(1, 10)),
        ],
    }
    folder = render(Ansible(directory), {OURS: variables}, {})[OURS]
    return ["haproxy", "-W", "-db", "-f", str(folder / "haproxy.cfg")]


def _haproxy(port: int, workers: Sequence[int]) -> str:
    servers = "\n".join(f"    server worker-{worker} {LOOPBACK}:{worker} check" for worker in workers)
    return f"""\
global
    maxconn 4096
defaults
    mode http
    timeout connect 5s
    timeout client 1h
    timeout server 1h
frontend gateway
    bind {LOOPBACK}:{port}
    default_backend workers
backend workers
    balance leastconn
    option httpchk GET /health
{servers}
"""


def _nginx(port: int, workers: Sequence[int], settings: Settings) -> str:
    servers = "\n".join(f"        server {LOOPBACK}:{worker} {settings.nginx_server};" for worker in workers)
    return f"""\
daemon off;
user root;
pid nginx.pid;
error_log stderr crit;
worker_processes auto;
worker_rlimit_nofile 20000;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_max_body_size 0;
    client_body_temp_path bodies;
    proxy_temp_path proxied;
    upstream workers {{
        least_conn;
{servers}
        keepalive 32;
    }}
    server {{
        listen {LOOPBACK}:{port} backlog=4096;
        location / {{
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 1h;
            {settings.nginx_location}
        }}
    }}
}}
"""


def _router(name: str, port: int, workers: Sequence[int]) -> list[str]:
    command = [str(CACHE / name / "bin" / name)]
    if name != "vllm-router":
        command.append("launch")
    if name == "smg":
        command += ["--backend", "vllm"]
    command += ["--host", LOOPBACK, "--port", str(port), "--policy", "round_robin", "--log-level", "warn"]
    if name == "vllm-router":
        command[-1] = "warning"
    command += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(free_port())]
    return [*command, "--worker-urls", *(f"http://{LOOPBACK}:{worker}" for worker in workers)]


def _litellm(directory: Path, port: int, workers: Sequence[int]) -> list[str]:
    """litellm reads YAML, of which JSON is a part."""
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://{LOOPBACK}:{worker}/v1",
                "api_key": WORKERS_KEY,
            },
        }
        for worker in workers
    ]
    configuration = directory / "litellm.yaml"
    configuration.write_text(
        json.dumps({"model_list": models, "router_settings": {"routing_strategy": "least-busy"}})
    )
    command = [str(CACHE / "litellm/bin/litellm"), "--config", str(configuration), "--host", LOOPBACK]
    return [*command, "--port", str(port), "--num_workers", str(os.cpu_count() or 1)]
