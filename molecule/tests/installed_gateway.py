# SPDX-License-Identifier: GPL-3.0-or-later
"""A gateway that the role has installed, in the hands of a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from testinfra.host import Host

from tests.gateway.rig import Answer, Gateway

MODEL = "simulated"


class Installed(Gateway):
    """A gateway that the role installed, asked from outside; what clients must not reach is read on its host."""

    def __init__(self, address: str, host: Host, headers: dict[str, str] | None = None) -> None:
        super().__init__(Path("/etc/haproxy"), 8080, 8405, 0, address=address, headers=headers or {})
        self._host = host

    def run(self, command: str) -> str:
        with self._host.sudo():
            return str(self._host.check_output(command))

    def figures(self, path: str = "/metrics/gateway") -> str:
        program = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8405{path}').read().decode())"
        # What runs a command takes the last line's end away.
        return self.run(f'python3 -c "{program}"') + "\n"

    def command(self, text: str) -> str:
        return self.run(f"echo '{text}' | socat - /run/haproxy/admin.sock")

    def lives(self, worker: str) -> bool:
        return f'gateway_worker_models_read{{worker="{worker}"}} 1\n' in self.figures()

    def complete(self, model: str = MODEL, **more: object) -> Answer:
        return self.ask(
            "POST", "/v1/completions", {"model": model, "prompt": "hello", "max_tokens": 2, **more}, 60
        )

    def lines(self) -> dict[str, dict[str, object]]:
        """Request ID to its line in the access log, of the last minutes."""
        found = self.run("journalctl --identifier haproxy --output cat --since=-3min --no-pager").splitlines()
        lines = (json.loads(line[line.index("{") :]) for line in found if "{" in line)
        return {line["request_id"]: line for line in lines}

    def line(self, request_id: str) -> dict[str, object]:
        """A request's line in the access log."""
        return self.lines()[request_id]


def all_at_once(asks: Sequence[Callable[[], Answer]]) -> list[Answer]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return [future.result() for future in [pool.submit(ask) for ask in asks]]
