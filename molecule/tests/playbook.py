# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the project's playbooks as an operator would."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "molecule/inventory"


def command(playbook: str, *arguments: str, inventory: Path = INVENTORY) -> list[str]:
    """The command that runs a playbook."""
    environment = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_SSH_TIMEOUT": "5",
        "ANSIBLE_SSH_RETRIES": "0",
        # Molecule forces it, and it would stand between the words that a test looks for.
        "ANSIBLE_FORCE_COLOR": "0",
    }
    return [
        "env",
        *(f"{name}={value}" for name, value in environment.items()),
        *("ansible-playbook", f"--inventory={inventory}", *arguments, str(ROOT / "playbooks" / playbook)),
    ]


def play(
    playbook: str, *arguments: str, inventory: Path = INVENTORY, seconds: float = 300
) -> tuple[int, str]:
    """Run a playbook, for at most so long; returns its exit status and what it printed, white space folded."""
    done = subprocess.run(
        command(playbook, *arguments, inventory=inventory),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


def start(playbook: str, *arguments: str) -> subprocess.Popen[str]:
    """Begin to run a playbook, in a session of its own; what it prints is to be read from there."""
    return subprocess.Popen(
        command(playbook, *arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
