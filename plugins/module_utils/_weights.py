# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Whether a model's files are whole, without reading them all, and the same everywhere. Private to the collection."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

INDEX = "model.safetensors.index.json"
MOST_HEADER = 100 * 10**6  # bytes; the format's own bound
SMALL = 2**20  # bytes; smaller files are compared whole, of larger ones this many blocks:
BLOCKS = 16
BLOCK = 2**16  # bytes
# What an engine reads; what else is in a model's repository may differ.
READ = (".safetensors", ".bin", ".pt", ".gguf", ".json", ".jinja", ".model", ".py", ".txt", ".tiktoken")


def problems(folder: str, mounted: Collection[str] = ()) -> list[str]:
    """What is missing in a model's folder, or shorter than it says of itself. ``mounted`` are other folders that the engine's
    container has at the same place."""
    mend = "Copy the model again, or set vllm_model_path to the folder that has all of it."
    if not os.path.isdir(folder):
        return [
            f"model folder {folder} (vllm_model_path) does not exist on this host. Put the model's files there, or set "
            "vllm_model_path to the folder that has them."
        ]
    if not os.path.isfile(os.path.join(folder, "config.json")):
        return [
            f"model folder {folder} (vllm_model_path) has no config.json, so it holds no whole model. {mend}"
        ]
    found = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    wrong = [f"has no {name}, which its {INDEX} names" for name in sorted(_indexed(folder) - found)]
    inside = tuple(os.path.join(os.path.realpath(place), "") for place in (folder, *mounted))
    outside = {name for name in os.listdir(folder) if not _real(folder, name).startswith(inside)}
    wrong += [
        f"has {name} only as a link to {_real(folder, name)}, which the container does not see (cp --dereference)"
        for name in sorted(outside)
        if name.endswith(READ)
    ]
    parts = sorted(name for name in found - outside if not _is_whole(os.path.join(folder, name)))
    wrong += [f"has only a part of {name}" for name in parts]
    return [f"model folder {folder} (vllm_model_path) {what}. {mend}" for what in wrong]


def fingerprints(folder: str) -> dict[str, str]:
    """Each file that an engine reads to what tells two of them apart, size and a digest (of a large one only of some blocks).
    Empty without a folder."""
    return {os.path.relpath(path, folder): _fingerprint(path) for path in _files(folder)}


def differences(sparks: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Which files are not the same on all Sparks (each to its fingerprints); one without any is not compared."""
    told = {host: prints for host, prints in sparks.items() if prints}
    names = sorted({name for prints in told.values() for name in prints})
    differing = [name for name in names if len({prints.get(name) for prints in told.values()}) > 1]
    if not differing:
        return []
    lacking = {name: [host for host, prints in told.items() if name not in prints] for name in differing[:3]}
    named = ", ".join(
        name + (f" (not on {', '.join(hosts)})" if hosts else "") for name, hosts in lacking.items()
    )
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    return [
        f"the model's files are not the same on {', '.join(told)}: {named}{more}. Copy the folder (vllm_model_path) from one Spark to the others."
    ]


def _real(folder: str, name: str) -> str:
    return os.path.realpath(os.path.join(folder, name))


def _files(folder: str) -> Iterator[str]:
    for top, folders, names in os.walk(folder, followlinks=True):
        # What downloaders leave.
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (os.path.join(top, name) for name in names if name.endswith(READ) and name[0] != ".")


def _fingerprint(path: str) -> str:
    digest = hashlib.sha256()
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            if size <= SMALL:
                digest.update(file.read())
            else:
                for number in range(BLOCKS):
                    file.seek(number * (size - BLOCK) // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
    except OSError as error:
        return f"not readable: {error.strerror}"
    return f"{size} {digest.hexdigest()[:16]}"


def _indexed(folder: str) -> set[str]:
    try:
        with open(os.path.join(folder, INDEX), encoding="utf-8") as file:
            names = json.load(file)["weight_map"].values()
    except FileNotFoundError:
        return set()
    except (OSError, ValueError, KeyError, AttributeError):
        # Without a readable index the engine finds no file at all.
        return {f"readable {INDEX}"}
    return {str(name) for name in names}


def _is_whole(path: str) -> bool:
    """Is this safetensors file as long as its header says? The header tells where in the file each tensor ends."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(MOST_HEADER, size):
                return False
            header: dict[str, Any] = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    return size == 8 + length + max(ends, default=0)
