# SPDX-License-Identifier: GPL-3.0-or-later
"""Flags taken and refused: the table of flags.py before each engine's own parser, and before that of the newest vLLM."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import pytest
from standin.cli import FLAGS

from ansible_collections.twospark.serving.plugins.module_utils import _preflight as preflight
from tests.parity.engines import MODEL
from tests.parity.flags import DIFFERENT, REFUSED, RENDERED, SPELLINGS, VALUES
from tests.parity.parsers import PARSERS, Line, Verdict, judge

HELP = Line(("serve", "--help=all"))


def line(text: str, deep: bool = False) -> Line:
    """What follows the model, written as for a shell."""
    return Line(("serve", MODEL, *shlex.split(text)), deep)


@pytest.fixture(params=list(PARSERS))
def which(request: pytest.FixtureRequest) -> str:
    """Each parser in turn: what is expected is the same of all."""
    return str(request.param)


@functools.cache
def judged(which: str) -> tuple[list[dict[str, Any]], dict[Line, Verdict]]:
    """Whatever the tests ask, asked at once: an engine takes many seconds to say the first word."""
    plain = [*SPELLINGS, *SPELLINGS.values(), *REFUSED]
    rendered = [Line(tuple(words)) for words in RENDERED.values()]
    deep = [line(text, deep=True) for text in (*VALUES, *DIFFERENT)]
    return judge(which, [HELP, *rendered, *map(line, plain), *deep])


def verdict(which: str, asked: Line) -> Verdict:
    """What this parser made of a line."""
    return judged(which)[1][asked]


@pytest.mark.parametrize("name", RENDERED)
def test_what_the_role_writes_is_taken(which: str, name: str) -> None:
    made = verdict(which, Line(tuple(RENDERED[name])))
    assert made.status == 0, made.said


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(which: str, spelling: str) -> None:
    """Both are understood as the same, which is something else than no flag at all."""
    spelled, plain, none = (
        verdict(which, asked) for asked in (line(spelling), line(SPELLINGS[spelling]), line("", deep=True))
    )
    assert (spelled.status, plain.status) == (0, 0), spelled.said + plain.said
    assert spelled.understood == plain.understood != none.understood


@pytest.mark.parametrize("text", REFUSED)
def test_refused(which: str, text: str) -> None:
    made = verdict(which, line(text))
    status, said = REFUSED[text]
    assert made.status == status, made.said
    assert said in made.said


@pytest.mark.parametrize("text", VALUES)
def test_values(which: str, text: str) -> None:
    made = verdict(which, line(text, deep=True))
    assert made.status == (1 if VALUES[text] else 0), made.said
    assert VALUES[text] in made.said


@pytest.mark.parametrize("text", DIFFERENT)
def test_known_differences(which: str, text: str) -> None:
    made = verdict(which, line(text, deep=True))
    assert made.status == DIFFERENT[text][which], made.said


def test_preflight_reads_the_help_rightly(which: str) -> None:
    """Every option that the parser has, hidden ones too, and nothing that the help only speaks of."""
    told = verdict(which, HELP)
    assert told.status == 0
    options = {option for flag in judged(which)[0] for option in flag["opts"] if option.startswith("--")}
    assert len(options) > 300
    assert set(preflight.parse_help(told.said)) == options


def test_the_standin_has_the_newest_parsers_table() -> None:
    assert judged("newest")[0] == FLAGS
