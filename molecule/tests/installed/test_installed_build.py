# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection as it is installed from its build, on hosts that the checkout has brought up."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of collections that holds nothing but the installed build."""
    folder = tmp_path_factory.mktemp("installed")
    galaxy = ["ansible-galaxy", "collection"]
    subprocess.run([*galaxy, "build", "--output-path", str(folder)], cwd=ROOT, check=True, timeout=120)
    build = next(folder.glob("*.tar.gz"))
    install = [*galaxy, "install", "--offline", "--collections-path", str(folder / "collections"), str(build)]
    subprocess.run(install, cwd=folder, check=True, timeout=120)
    return folder


def play(installed: Path, playbook: str, *arguments: str) -> dict[str, int]:
    """Run a playbook by its full name, away from the checkout; returns how many changes each host saw."""
    done = subprocess.run(
        [
            "ansible-playbook",
            f"--inventory={ROOT / 'molecule/inventory'}",
            *arguments,
            f"twospark.serving.{playbook}",
        ],
        cwd=installed,
        env={
            **{name: value for name, value in os.environ.items() if name != "ANSIBLE_CONFIG"},
            "ANSIBLE_COLLECTIONS_PATH": str(installed / "collections"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return {
        host: int(changed)
        for host, changed in re.findall(r"^(\S+) +: .*changed=(\d+)", done.stdout, re.MULTILINE)
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
