# SPDX-License-Identifier: GPL-3.0-or-later
"""A switch with clients at the gateway: they wait, and none is refused or cut."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from load import Load
from playbook import play

if TYPE_CHECKING:
    from conftest import Endpoint


def test_there_and_back(endpoint: Endpoint, figure: Callable[[str], None]) -> None:
    with Load(endpoint.url, clients=16) as load:
        for mode in ("tp", "replica"):
            began = time.monotonic()
            status, said = play("switch_mode.yml", "-e", f"mode={mode}")
            assert status == 0, said
            figure(f"to {mode} in {time.monotonic() - began:.1f} s")
            time.sleep(2)
    figure(str(load))
    assert load.failed == 0, [reply for reply in load.replies if reply.kind != "whole"]
    assert {reply.worker for reply in load.replies} == {"spark-a", "spark-b"}
