# SPDX-License-Identifier: GPL-3.0-or-later
"""Real vLLM after its way back from tp: both copies serve again, and another model takes the place of the first."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from playbook import play
from real import KEY, MODEL, ask, clients
from spark import Spark

if TYPE_CHECKING:
    from conftest import Endpoint

Figure = Callable[[str], None]

OTHER = "/srv/models/tiny-other"
VARIABLES = "@molecule/real_engine/vars.yml"


@pytest.fixture(scope="module")
def copies(sparks: Callable[[str], list[Spark]]) -> list[Spark]:
    return sparks("replica")


def model_of(copy: Spark) -> str:
    """The folder that the copy's engine says that it serves."""
    (model,) = ask(copy, "GET", "/v1/models", authorization=f"Bearer {KEY}").json()["data"]
    assert model["id"] == MODEL
    return str(model["root"])


def test_back_from_tp(endpoint: Endpoint, copies: list[Spark]) -> None:
    assert all(copy.serves for copy in copies)
    answers = [endpoint.complete(model=MODEL) for _ in range(10)]
    assert {answer.status for answer in answers} == {200}
    assert {answer.served_by for answer in answers} == {copy.name for copy in copies}
    assert not any("-tp2-" in answer.body["system_fingerprint"] for answer in answers)


def test_another_model_under_the_same_name(endpoint: Endpoint, copies: list[Spark], figure: Figure) -> None:
    """One copy after the other, so that clients, who know its name only, lose nothing."""
    assert {model_of(copy) for copy in copies} == {f"/srv/models/{MODEL}"}
    other = ["-e", VARIABLES, "-e", json.dumps({"vllm_model_path": OTHER})]
    with clients(endpoint, 4) as load:
        # Nothing is stopped before what is installed says the same.
        status, said = play("switch_mode.yml", *other, "-e", "mode=replica")
        assert (status != 0, "playbooks/site.yml" in said) == (True, True), said
        began = time.monotonic()
        status, said = play("site.yml", *other, seconds=900)
        assert status == 0, said
        seconds = time.monotonic() - began
    figure(f"both changed after {seconds:.1f} s; {load}")
    assert load.failed == 0, load.replies
    assert {model_of(copy) for copy in copies} == {OTHER}
