# SPDX-License-Identifier: GPL-3.0-or-later
"""The digest changes with anything that an agent runs with, tells no secret, and is what a running agent tells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import PACKAGE


def digest(package: Path, folder: Path) -> str:
    """As the module serving_mode asks for it, of the package in `package` and the settings in `folder`."""
    code = (
        "from pathlib import Path; from vllm_agent.digest import settings_digest; "
        f"print(settings_digest(Path({str(folder / 'c.json')!r}), Path({str(folder / 'c.env')!r})))"
    )
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(
        PACKAGE / "vllm_agent", tmp_path / "lib/vllm_agent", ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "c.env").write_text("VLLM_API_KEY=secret")
    return tmp_path / "lib"


def test_it_stays_while_nothing_changes(package: Path, tmp_path: Path) -> None:
    (package / "vllm_agent/__pycache__").mkdir()
    assert digest(package, tmp_path) == digest(package, tmp_path)


@pytest.mark.parametrize("name", ["c.json", "c.env", "lib/vllm_agent/engine.py", "lib/vllm_agent/new.py"])
def test_it_changes_with_each_part(package: Path, tmp_path: Path, name: str) -> None:
    before = digest(package, tmp_path)
    (tmp_path / name).write_text("# other\n")
    assert digest(package, tmp_path) != before


def test_it_is_made_without_the_secrets(package: Path, tmp_path: Path) -> None:
    """Whoever reads the status could try guesses against a digest of the key."""
    before, moment = digest(package, tmp_path), (tmp_path / "c.env").stat().st_mtime_ns
    (tmp_path / "c.env").write_text("VLLM_API_KEY=other!")
    os.utime(tmp_path / "c.env", ns=(moment, moment))
    assert digest(package, tmp_path) == before
