# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the project's playbooks as an operator would."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "molecule/inventory"


def play(
    playbook: str, *arguments: str, inventory: Path = INVENTORY, seconds: float = 300
) -> tuple[int, str]:
    """Run a playbook, for at most so long; returns its exit status and what it printed, white space folded."""
    command = ["ansible-playbook", f"--inventory={inventory}", *arguments, str(ROOT / "playbooks" / playbook)]
    environment = {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_SSH_TIMEOUT": "5",
        "ANSIBLE_SSH_RETRIES": "0",
    }
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())
