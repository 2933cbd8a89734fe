# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection as it is installed from its build, on hosts that the checkout has brought up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, *command: str) -> str:
    """Run a command away from the checkout and its settings, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "ANSIBLE_CONFIG"}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**environment, "ANSIBLE_COLLECTIONS_PATH": str(folder / "collections")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose collections are nothing but the installed build."""
    folder = tmp_path_factory.mktemp("installed")
    run(folder, "ansible-galaxy", "collection", "build", str(ROOT), "--output-path", str(folder))
    build = next(folder.glob("*.tar.gz"))
    run(
        folder,
        "ansible-galaxy",
        "collection",
        "install",
        "--offline",
        "-p",
        str(folder / "collections"),
        str(build),
    )
    return folder


def play(installed: Path, playbook: str, *arguments: str) -> dict[str, int]:
    """Run a playbook by its full name; returns how many changes each host saw."""
    inventory = f"--inventory={ROOT / 'molecule/inventory'}"
    told = run(installed, "ansible-playbook", inventory, *arguments, f"twospark.serving.{playbook}")
    told = re.sub(r"\x1b\[[0-9;]*m", "", told)
    return {
        host: int(changed) for host, changed in re.findall(r"^(\S+) +: .*changed=(\d+)", told, re.MULTILINE)
    }


def test_site_finds_nothing_to_do(installed: Path) -> None:
    assert play(installed, "site") == {"gateway": 0, "spark-a": 0, "spark-b": 0}


def test_the_switch(installed: Path) -> None:
    assert play(installed, "switch_mode", "--extra-vars", "mode=tp") == {
        "gateway": 0,
        "spark-a": 1,
        "spark-b": 1,
    }


def test_the_status(installed: Path) -> None:
    assert set(play(installed, "status").values()) == {0}
