# SPDX-License-Identifier: GPL-3.0-or-later
"""Makes the agent importable from where the role ships it, and gives the tests one Spark each to run it on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import PACKAGE, Spark

sys.path.insert(0, str(PACKAGE))


@pytest.fixture
def spark(tmp_path: Path) -> Iterator[Spark]:
    """A host with a fake docker and a listening systemd; whatever was started on it ends with the test."""
    with Spark(tmp_path / "spark") as spark:
        yield spark


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Spark, Spark]]:
    """Two hosts, configured as head and worker of a tensor-parallel pair."""
    with Spark(tmp_path / "head") as head, Spark(tmp_path / "worker") as worker:
        head.join_pair(0, head)
        worker.join_pair(1, head)
        yield head, worker
