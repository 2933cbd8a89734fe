# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How a mapping of settings becomes a command line. Private to the collection.

An argument list is never joined and split again, so a value may hold spaces, quotes and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def merged(*layers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Join mappings, later ones over earlier ones; a value of None takes the key out.

    Keys are compared with ``_`` and ``-`` alike and without leading dashes, as vLLM does, and are
    returned with ``-``: a host's ``max_model_len`` replaces a preset's ``--max-model-len``.
    """
    result: dict[str, Any] = {}
    for layer in layers:
        for key, value in (layer or {}).items():
            name = flag_name(key)
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
    return result


def merged_environment(*layers: Mapping[str, Any] | None) -> dict[str, str]:
    """Join environment mappings, later ones over earlier ones; None takes a name out, the rest becomes text."""
    result: dict[str, str] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            if value is None:
                result.pop(str(name), None)
            else:
                result[str(name)] = _text(value)
    return result


def flag_name(key: object) -> str:
    """The bare name of a flag: ``--max_num_seqs`` and ``max-num-seqs`` are the same ``max-num-seqs``.

    Only the part before a dot is normalized: what follows names a key inside a JSON value.
    """
    head, dot, tail = str(key).lstrip("-").partition(".")
    return head.replace("_", "-") + dot + tail


def engine_flags(flags: Mapping[str, Any]) -> list[str]:
    """Render a mapping as flags of ``vllm serve``, in the order of the mapping.

    ======== =====================================
    value    rendered as
    ======== =====================================
    true     ``--flag``
    false    ``--no-flag``
    mapping  ``--flag`` and one JSON text
    list     ``--flag`` and each item by itself
    other    ``--flag`` and the text
    ======== =====================================
    """
    argv: list[str] = []
    for key, value in flags.items():
        name = flag_name(key)
        if value is True:
            argv.append(f"--{name}")
        elif value is False:
            argv.append(f"--no-{name}")
        elif _is_list(value):
            argv += [f"--{name}", *(_text(item) for item in value)]
        else:
            argv += _pair(name, _text(value))
    return argv


def docker_options(options: Mapping[str, Any]) -> list[str]:
    """Render a mapping as options of ``docker run``: as for the engine, but a list repeats the option and
    false is written out, since Docker has no ``--no-`` form."""
    argv: list[str] = []
    for key, value in options.items():
        name = flag_name(key)
        if value is True:
            argv.append(f"--{name}")
        elif _is_list(value):
            argv += [f"--{name}={_text(item)}" for item in value]
        else:
            argv.append(f"--{name}={_text(value)}")
    return argv


def flag_names(argv: Sequence[str]) -> list[str]:
    """The flags that a rendered argument list uses, without values (``--max-model-len``)."""
    return [word.split("=", 1)[0] for word in argv if word.startswith("--")]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _pair(name: str, text: str) -> list[str]:
    # A value that begins with a dash would be read as the next flag.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping) or _is_list(value):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return str(value)
