# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoint in mode tp."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Endpoint

testinfra_hosts = ["ansible://gateways"]


def test_the_pair_answers_together(endpoint: Endpoint) -> None:
    answers = [endpoint.complete() for _ in range(4)]
    assert {(answer.status, answer.served_by) for answer in answers} == {(200, "spark-a")}
    assert all("-tp2-" in answer.body["system_fingerprint"] for answer in answers)
