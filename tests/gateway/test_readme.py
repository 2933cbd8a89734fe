# SPDX-License-Identifier: GPL-3.0-or-later
"""The list of what went wrong elsewhere names tests that exist."""

from __future__ import annotations

import re

from tests.gateway.conftest import HERE


def test_each_test_of_the_list_is_there() -> None:
    listed = set(re.findall(r"`(test_\w+)`", (HERE / "README.md").read_text()))
    there = {
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(listed) > 25
    assert listed <= there
