# SPDX-License-Identifier: GPL-3.0-or-later
"""Who holds the lock, and whether that run is still there."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _lock as lock

HERE = lock.Holder(
    "anna",
    "laptop",
    "laptop 4f2a",
    os.getpid(),
    lock.began(os.getpid()),
    "switch to tp",
    "2026-11-30 08:00:03Z",
)


def test_a_run_that_is_there() -> None:
    assert HERE.began
    assert not HERE.is_gone("laptop 4f2a")


def test_a_run_that_has_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    ended = lock.Holder("anna", "laptop", "laptop 4f2a", process.pid, lock.began(process.pid))
    assert not ended.is_gone("laptop 4f2a")
    process.kill()
    process.wait()
    assert ended.is_gone("laptop 4f2a")
    # Elsewhere nobody can see that.
    assert not ended.is_gone("laptop 77c1")


def test_the_place_is_told_and_stays() -> None:
    assert lock.place() == lock.place() != ""


def test_another_process_with_the_same_number_is_not_it() -> None:
    former = lock.Holder("anna", "laptop", "laptop 4f2a", os.getpid(), "Mon Nov 30 08:00:00 2020")
    assert former.is_gone("laptop 4f2a")
    assert not former.same_run(HERE)


def test_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATH", str(tmp_path / "lock.json"))
    assert lock.held_by() is None
    lock.hold(HERE)
    assert lock.held_by() == HERE
    assert "anna on laptop (process" in str(lock.held_by())


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({**HERE.told(), "pid": "x"})])
def test_a_file_that_nobody_wrote_so_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    monkeypatch.setattr(lock, "PATH", str(path))
    assert lock.held_by() is None
