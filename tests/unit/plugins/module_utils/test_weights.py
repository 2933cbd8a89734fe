# SPDX-License-Identifier: GPL-3.0-or-later
"""A model's folder, whole and not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ansible_collections.twospark.serving.plugins.module_utils import _weights as weights


def shard(path: Path, size: int = 64) -> None:
    """A file of safetensors with one tensor of so many bytes."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model of two files."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    names = ["model-1.safetensors", "model-2.safetensors"]
    (model / weights.INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    for name in names:
        shard(model / name)
    return model


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def move_out(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "blob"))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model: None, []),
        (lambda model: (model / "model-1.safetensors").unlink(), ["has no model-1.safetensors, which its"]),
        (lambda model: cut(model / "model-2.safetensors"), ["has only a part of model-2.safetensors"]),
        # A large-file pointer, an empty file, a header that is none, a length beyond the file.
        (lambda model: (model / "model-1.safetensors").write_text("version https://git-lfs.example/v1\n"), ["part of model-1"]),
        (lambda model: (model / "model-1.safetensors").write_bytes(b""), ["part of model-1"]),
        (lambda model: (model / "model-1.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]"), ["part of model-1"]),
        (lambda model: (model / weights.INDEX).write_text("half of"), ["has no readable model.safetensors.index.json"]),
        (lambda model: (model / weights.INDEX).unlink(), []),
        # As the hub's cache has it: the container sees only the folder.
        (lambda model: move_out(model / "config.json"), ["has config.json only as a link to", "cp --dereference"]),
        (lambda model: (model / "model-3.safetensors").symlink_to("/nowhere"), ["has model-3.safetensors only as a link"]),
        (lambda model: (model / "model-3.safetensors").symlink_to(model / "nothing"), ["only a part of model-3.safetensors"]),
        (lambda model: (model / "linked.json").symlink_to(model / "config.json"), []),
        (lambda model: (model / "config.json").unlink(), ["has no config.json"]),
        (lambda model: model.rename(model.with_name("other")), ["does not exist on this host"]),
    ],
)  # fmt: skip
def test_what_is_missing(folder: Path, spoil: Callable[[Path], object], words: list[str]) -> None:
    spoil(folder)
    problems = weights.problems(str(folder))
    assert bool(problems) == bool(words), problems
    assert all(word in "\n".join(problems) for word in words), problems
    assert all("vllm_model_path" in problem for problem in problems)


def test_links_into_what_the_container_has_too(folder: Path) -> None:
    move_out(folder / "config.json")
    assert weights.problems(str(folder), [str(folder.parent)]) == []


def test_what_tells_two_models_apart(folder: Path) -> None:
    (folder / ".cache").mkdir()
    (folder / ".cache/lock.json").write_text("x")
    (folder / "README.md").write_text("differs from day to day")
    (folder / "sub").mkdir()
    large = folder / "sub/large.bin"
    large.write_bytes(bytes(3 * weights.SMALL))
    (folder / "dangling.json").symlink_to(folder / "nothing")
    prints = weights.fingerprints(str(folder))
    assert set(prints) == {
        *("config.json", "dangling.json", "model-1.safetensors", "model-2.safetensors", weights.INDEX),
        "sub/large.bin",
    }
    assert prints["dangling.json"].startswith("not readable")
    (folder / "config.json").write_text("[]")
    # Another revision has files of the same size.
    large.write_bytes(bytes(3 * weights.SMALL - 1) + b"x")
    now = weights.fingerprints(str(folder))
    assert now["config.json"] != prints["config.json"]
    assert now["sub/large.bin"] != prints["sub/large.bin"]
    assert now["model-1.safetensors"] == prints["model-1.safetensors"]
    assert weights.fingerprints(str(folder / "gone")) == {}


@pytest.mark.parametrize(
    ("sparks", "words"),
    [
        ({"a": {"x": "1"}, "b": {"x": "1"}}, []),
        ({"a": {"x": "1"}, "b": {}}, []),
        ({"a": {"x": "1", "y": "1"}, "b": {"x": "2"}}, ["not the same on a, b: x, y (not on b)."]),
        ({"a": dict.fromkeys("uvwxyz", "1"), "b": {"z": "1"}}, ["u (not on b), v (not on b), w (not on b) and 2 more."]),
    ],
)  # fmt: skip
def test_models_that_differ(sparks: dict[str, dict[str, str]], words: list[str]) -> None:
    problems = weights.differences(sparks)
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True)), problems
