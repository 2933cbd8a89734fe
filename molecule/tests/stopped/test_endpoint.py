# SPDX-License-Identifier: GPL-3.0-or-later
"""The endpoint while nothing is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Endpoint

testinfra_hosts = ["ansible://gateways"]


def test_clients_are_told_in_their_own_form(endpoint: Endpoint) -> None:
    answer = endpoint.complete()
    assert answer.status == 503
    assert answer.body["error"]["message"]


def test_the_gateway_says_that_it_has_nothing(endpoint: Endpoint) -> None:
    assert endpoint.get("/health").status == 503
