# SPDX-License-Identifier: GPL-3.0-or-later
"""A Spark that shall serve nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

testinfra_hosts = ["ansible://sparks"]


@pytest.mark.parametrize("mode", ["replica", "tp"])
def test_nothing_is_wanted_and_nothing_runs(unit: Callable[[str], dict[str, str]], mode: str) -> None:
    shown = unit(mode)
    assert (shown["enabled"], shown["ActiveState"], shown["Result"]) == ("disabled", "inactive", "success")


def test_nothing_is_left(containers: Callable[[], list[str]]) -> None:
    assert containers() == []
