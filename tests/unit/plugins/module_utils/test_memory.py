# SPDX-License-Identifier: GPL-3.0-or-later
"""The arithmetic of one memory pool reproduces a measured pair."""

from __future__ import annotations

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _memory as memory

SPARK = 121.69
# The preset's constants for Qwen3.8-Flash-Next.
FIXED, PER_TOKEN = 78.49, 16333


@pytest.mark.parametrize(
    ("reserved", "share"),
    [(26, 0.78), (31.6, 0.74), (0, 1.0), (SPARK, 0.0), (22, 0.81), (12.169, 0.9)],
)
def test_largest_share(reserved: float, share: float) -> None:
    assert memory.largest_share(SPARK, reserved) == share
    assert SPARK - memory.budget(SPARK, share) >= reserved - 1e-9


@pytest.mark.parametrize(
    ("share", "tokens", "requests"),
    [(0.74, 760_000, 2.9), (0.78, 1_080_000, 4.1)],
)
def test_the_measured_pair(share: float, tokens: int, requests: float) -> None:
    found = memory.kv_tokens(memory.budget(SPARK, share), FIXED, PER_TOKEN)
    assert found == pytest.approx(tokens, rel=0.01)
    assert found / 262144 == pytest.approx(requests, abs=0.05)


def test_no_tokens_where_the_weights_do_not_fit() -> None:
    assert memory.kv_tokens(60, FIXED, PER_TOKEN) == 0
