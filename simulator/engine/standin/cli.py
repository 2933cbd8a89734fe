# SPDX-License-Identifier: GPL-3.0-or-later
"""The `vllm` command line: the flags of the real parser, refused with its exit statuses.

The flags come from the real parser's own table (`flags-0.33.0.json`); what the table does not tell
(value types behind `Optional`, keys of JSON objects, parser names) stands in `names-0.33.0.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from standin import VERSION

_HERE = Path(__file__).resolve().parent
FLAGS: list[dict[str, Any]] = json.loads((_HERE / f"flags-{VERSION}.json").read_text())["flags"]
NAMES: dict[str, Any] = json.loads((_HERE / f"names-{VERSION}.json").read_text())

# What the b12x image, a fork, takes beside upstream's flags.
FORK_FLAGS: list[dict[str, Any]] = [{"opts": ["--gdn-decode-kernel"], "value": "str"}]
FORK_LOAD_FORMATS = ["b12x"]

DEFAULTS: dict[str, Any] = {
    "distributed_timeout_seconds": 600,
    "gpu_memory_utilization": 0.92,
    "load_format": "auto",
    "kv_cache_dtype": "auto",
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "max_num_seqs": 256,
    "nnodes": 1,
    "node_rank": 0,
    "pipeline_parallel_size": 1,
    "port": 8000,
    "runner": "auto",
    "shutdown_timeout": 0,
    "tensor_parallel_size": 1,
    "data_parallel_size": 1,
    "fingerprint_mode": "full",
}

_USAGE = "vllm [-v] serve [model_tag] [options]"
_TASK_HINT = "Hint: --task is not a vllm serve option. For embedding, reranking, or reward models, use --runner pooling."
_NEEDS = {"enable_auto_tool_choice": "tool_call_parser", "enable_log_outputs": "enable_log_requests"}
_MULTIPLIERS = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def human_readable_int(value: str) -> int:
    """`25.6k` is 25600, `1K` is 1024; a fraction goes with a decimal suffix only."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT])", value.strip())
    if not match:
        return int(value)
    number, suffix = match.groups()
    if suffix.islower():
        return int(float(number) * _MULTIPLIERS[suffix])
    if "." in number:
        raise argparse.ArgumentTypeError(
            f"Decimals are not allowed with binary suffixes like {suffix}. "
            f"Did you mean to use {number}{suffix.lower()} instead?"
        )
    return int(number) * _MULTIPLIERS[suffix]


def human_readable_int_or_auto(value: str) -> int:
    """As `human_readable_int`; `auto` and `-1` mean: as much as fits."""
    return -1 if value.strip().lower() in ("-1", "auto") else human_readable_int(value)


def config_object(flag: str, known_keys: Sequence[str]) -> Callable[[str], dict[str, Any]]:
    """Reads a JSON object of known keys, and words what it refuses as pydantic does."""

    def parse_dataclass(value: str) -> dict[str, Any]:
        parsed: Any = {}
        try:
            parsed = json.loads(value)
            unknown = sorted(set(parsed) - set(known_keys)) if isinstance(parsed, dict) else [""]
            problems = [f"{key}\n  Unexpected keyword argument" for key in unknown]
        except ValueError as error:
            problems = [f"  Invalid JSON: {error}"]
        if problems:
            raise argparse.ArgumentTypeError(validation_errors(flag, problems))
        return dict(parsed)

    return parse_dataclass


def validation_errors(flag: str, problems: Sequence[str]) -> str:
    """What pydantic says of the configuration behind a flag."""
    name = "".join(word.capitalize() for word in flag.split("-"))
    return "\n".join([f"{len(problems)} validation error{'s' * (len(problems) > 1)} for {name}", *problems])


def object_or_text(value: str) -> Any:
    """A JSON object where the value looks like one, else the text itself."""
    return json.loads(value) if value.lstrip().startswith("{") else value


def _value_type(name: str, table_type: str) -> Callable[[str], Any]:
    kind = NAMES["value_types"].get(name, table_type)
    plain: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "loads": json.loads,
        "union_dict_and_str": object_or_text,
        "human_readable_int": human_readable_int,
        "human_readable_int_or_auto": human_readable_int_or_auto,
    }
    convert = plain.get(kind, str)
    if kind == "object":
        keys = NAMES["object_keys"].get(name)
        # The real parser leaves the keys of this one to the engine, which exits with 1.
        convert = config_object(name, keys) if keys and name != "speculative-config" else json.loads
    return _optional(convert) if table_type == "_optional_type" else convert


def _optional(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def optional(value: str) -> Any:
        if value in ("", "None"):
            return None
        try:
            return convert(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"Value {value} cannot be converted to {convert}.") from error

    return optional


class _Switch(argparse.Action):
    """A boolean with its negative spellings (`--no-x`, `--disable-x` for `--enable-x`)."""

    def __init__(self, option_strings: Sequence[str], dest: str, positive: Sequence[str]) -> None:
        super().__init__(option_strings, dest, nargs=0, default=None)
        self.positive = positive

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, option_string in self.positive)


def _add_flag(parser: argparse.ArgumentParser, flag: dict[str, Any]) -> None:
    opts: list[str] = flag["opts"]
    if not opts:
        parser.add_argument("model_tag", nargs="?", help="folder of the model")
        return
    if "--help" in opts:
        parser.add_argument(*opts, action="help", help="show this list (`--help=all`) and exit")
        return
    if "value" not in flag:
        long = [opt for opt in opts if opt.startswith("--")]
        name = next((opt for opt in long if f"--no-{opt[2:]}" in long), long[0])
        positive = [name, *(opt for opt in opts if not opt.startswith("--"))]
        parser.add_argument(*opts, dest=name[2:].replace("-", "_"), action=_Switch, positive=positive)
        return
    name = next(opt for opt in opts if opt.startswith("--"))[2:]
    dest = name.replace("-", "_")
    options: dict[str, Any] = {
        "dest": dest,
        "type": _value_type(name, flag["value"]),
        "default": DEFAULTS.get(dest),
    }
    if choices := flag.get("choices"):
        options["choices"] = [None if c == "None" else options["type"](c) for c in choices]
        options["metavar"] = "{" + ",".join(choices) + "}"
    if "nargs" in flag:
        options["nargs"] = flag["nargs"]
    parser.add_argument(*opts, **options)


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `vllm serve`."""
    parser = argparse.ArgumentParser("vllm serve", usage="vllm serve [model_tag] [options]", add_help=False)
    for flag in [*FLAGS, *FORK_FLAGS]:
        _add_flag(parser, flag)
    return parser


def normalise(argv: Sequence[str]) -> list[str]:
    """Option names with dashes; `--flag.key value` and `--flag.key+ value` gathered into one JSON value."""
    result: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        option, equals, value = word.partition("=")
        if option == "--help":
            # Of vLLM's help pages this has the one.
            result.append(option)
            continue
        if optimised := re.fullmatch(r"-O=?(.+)", word):
            result += ["--optimization-level", optimised[1]]
            continue
        flag, dot, path = option.partition(".")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if not dot or not re.match("--?[a-z]", flag):
            result.append(flag + dot + path + equals + value)
            continue
        if not equals:
            value = next(words, "")
        keys = path.removesuffix("+").split(".")
        parsed: Any = value.split(",") if path.endswith("+") else _json_or_text(value)
        node = objects.setdefault(flag, {})
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        if isinstance(node.get(keys[-1]), list) and isinstance(parsed, list):
            parsed = node[keys[-1]] + parsed
        node[keys[-1]] = parsed
    for flag, content in objects.items():
        result += [flag, json.dumps(content)]
    return result


def _json_or_text(value: str) -> Any:
    for convert in (json.loads, human_readable_int):
        with contextlib.suppress(ValueError, argparse.ArgumentTypeError):
            return convert(value)
    return value


def with_config_file(argv: Sequence[str]) -> list[str]:
    """The flags of `--config FILE` in front of the others, which so win over them."""
    if "--config" not in argv:
        return list(argv)
    import yaml  # the only one who needs it

    place = argv.index("--config")
    rest = [*argv[:place], *argv[place + 2 :]]
    model = rest[:1] if rest and not rest[0].startswith("-") else []
    path = Path(argv[place + 1])
    if path.suffix not in (".yaml", ".yml"):
        refuse(f"Config file must be of a yaml/yml type. {path.suffix[1:]} supplied")
    flags: list[str] = []
    for key, value in yaml.safe_load(path.read_text()).items():
        if isinstance(value, bool):
            # One that cannot be switched off is off already.
            flag = f"--{key}" if value else f"--no-{key}"
            flags += [flag] if value or any(flag in known["opts"] for known in FLAGS) else []
        elif isinstance(value, list):
            flags += [f"--{key}", *map(str, value)] if value else []
        else:
            flags += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return [*model, *flags, *rest[len(model) :]]


def refuse(message: str, kind: str = "ValueError") -> NoReturn:
    """End as the real engine does on a value it cannot work with: exit status 1."""
    print(f"{kind}: {message}", file=sys.stderr, flush=True)
    sys.exit(1)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse what follows `vllm serve`. Exits with 2 as argparse does, with 1 where the real check comes later."""
    named = any(re.match("--served[-_]model[-_]name(=|$)", word) for word in argv)
    if argv and argv[0].startswith("-") and named and "--config" not in argv:
        refuse(
            "`model` should be provided as the first positional argument when using `vllm serve`. "
            "i.e. `vllm serve <model> --<arg> <value>`."
        )
    args, unknown = serve_parser().parse_known_args(normalise(with_config_file(argv)))
    if unknown:
        # `serve` is a sub-command: what it does not know comes back to the parser of the whole.
        hint = f"\n\n{_TASK_HINT}" if any(re.match("--task(=|$)", word) for word in unknown) else ""
        argparse.ArgumentParser("vllm", usage=_USAGE).error(
            f"unrecognized arguments: {' '.join(unknown)}{hint}"
        )
    for flag, needed in _NEEDS.items():
        if getattr(args, flag) and not getattr(args, needed):
            flag, needed = (name.replace("_", "-") for name in (flag, needed))
            refuse(f"Error: --{flag} requires --{needed}", "TypeError")
    args.model = args.model_tag or args.model
    return args


def main(argv: Sequence[str]) -> NoReturn:
    """The `vllm` command. Does not return."""
    if argv and argv[0] in ("--version", "-v"):
        print(f"{VERSION}+standin")
        sys.exit(0)
    if not argv or argv[0] != "serve":
        print(f"usage: {_USAGE}", file=sys.stderr)
        sys.exit(0 if argv and argv[0] in ("--help", "-h") else 2)
    args = parse(argv[1:])
    from standin import config

    settings = config.Settings.from_environment(os.environ)
    configuration = config.configure(args, settings, os.environ)
    from standin import engine  # slow to import (aiohttp), and not needed to refuse a command line

    engine.serve(configuration)
