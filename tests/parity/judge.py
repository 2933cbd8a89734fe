# SPDX-License-Identifier: GPL-3.0-or-later
"""Judges command lines by an engine's own parser, in one process: run inside the engine's container, where starting the
program for each line would take vLLM ten seconds.

Tells in one line of JSON which options the parser has. Then reads lines of JSON, each a list: whether the engine's configuration
shall be made too (of the flags' values some are only refused there), and the words after ``vllm``. For each it tells the exit status
that the program would end with (0 if it would go on), what it said, and how each flag was understood.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest import mock

Judge = Callable[[list[str], bool], Namespace]


class _Found(Exception):
    """Carries the parser out of vLLM's main()."""


def of_vllm() -> tuple[ArgumentParser, Judge]:
    """Real vLLM's parser, and what its main() and the start of its server do with a line."""

    def stop(parser: ArgumentParser) -> None:
        raise _Found(parser)

    sys.argv = ["vllm", "serve"]
    flexible = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    with mock.patch.object(flexible, "parse_args", stop):
        try:
            import_module("vllm.entrypoints.cli.main").main()
        except _Found as found:
            (parser,) = found.args
    command = import_module("vllm.entrypoints.cli.serve").ServeSubcommand()
    engine = import_module("vllm.engine.arg_utils").AsyncEngineArgs
    launcher = import_module("vllm.entrypoints.launchers.launcher")

    def judge(words: list[str], deep: bool) -> Namespace:
        # A copy, since what follows writes into values that are the parser's defaults.
        args: Namespace = deepcopy(parser.parse_args(words))
        command.validate(args)
        if deep:
            args.model = args.model_tag or args.model
            launcher.validate_api_server_args(args)
            engine.from_cli_args(args).create_engine_config(headless=args.headless)
        return args

    (subparsers,) = parser._subparsers._group_actions
    return subparsers.choices["serve"], judge


def of_standin() -> tuple[ArgumentParser, Judge]:
    """The stand-in's."""
    cli, config = import_module("standin.cli"), import_module("standin.config")

    def judge(words: list[str], deep: bool) -> Namespace:
        args: Namespace = cli.parse(words[1:])
        if deep:
            config.configure(args, config.Settings.from_environment({}), {})
        return args

    return cli.serve_parser(), judge


def table(parser: ArgumentParser) -> list[dict[str, Any]]:
    """Each flag with all its spellings, hidden ones too, and what values it takes."""
    flags: dict[Action, dict[str, Any]] = {action: {"opts": []} for action in parser._actions}
    for option, action in parser._option_string_actions.items():
        flags[action]["opts"].append(option)
    for action, flag in flags.items():
        if action.nargs != 0:
            flag["value"] = getattr(action.type, "__name__", "str")
        if action.nargs:
            flag["nargs"] = action.nargs
        if action.choices:
            flag["choices"] = [str(choice) for choice in action.choices]
    return list(flags.values())


def verdict(judge: Judge, words: list[str], deep: bool) -> dict[str, Any]:
    """What comes of one line."""
    said = io.StringIO()
    status, understood = 0, {}
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            understood = {name: repr(value) for name, value in vars(judge(words, deep)).items()}
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception as error:  # whatever it is, the program would end with it
            status = 1
            print(f"{type(error).__name__}: {error}")
    return {"status": status, "said": said.getvalue(), "understood": understood}


def main() -> None:
    # Only answers go to standard output; vLLM writes its log there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    parser, judge = of_standin() if find_spec("standin") else of_vllm()
    print(json.dumps(table(parser)), file=answers)
    for line in sys.stdin:
        deep, *words = json.loads(line)
        print(json.dumps(verdict(judge, words, deep)), file=answers)


if __name__ == "__main__":
    main()
