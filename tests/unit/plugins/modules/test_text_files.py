# SPDX-License-Identifier: GPL-3.0-or-later
"""The module on real folders: created, the same again, changed, tidied, and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.twospark.serving.plugins.modules import text_files


def run(capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    with patch_module_args(arguments), pytest.raises(SystemExit):
        text_files.main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_the_life_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    wish: dict[str, Any] = {"path": str(folder), "files": {"x": "1\n", "y": "é"}, "mode": "0640"}

    would = run(capsys, **wish, _ansible_check_mode=True)
    assert would["changed"]
    assert not folder.exists()

    assert run(capsys, **wish)["written"] == ["x", "y"]
    assert (folder / "y").read_text(encoding="utf-8") == "é"
    assert (folder / "x").stat().st_mode & 0o777 == 0o640

    again = run(capsys, **wish)
    assert not again["changed"]
    assert again["diff"] == []

    (folder / "x").chmod(0o600)
    assert run(capsys, **wish)["changed"]
    assert (folder / "x").stat().st_mode & 0o777 == 0o640

    wish["files"]["x"] = "2\n"
    changed = run(capsys, **wish)
    assert changed["written"] == ["x"]
    assert (changed["diff"][0]["before"], changed["diff"][0]["after"]) == ("1\n", "2\n")


def test_other_files_go_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.py").write_text("old")
    (tmp_path / "__pycache__").mkdir()
    wish: dict[str, Any] = {"path": str(tmp_path), "files": {"new.py": "new"}}
    assert run(capsys, **wish)["removed"] == []
    assert (tmp_path / "old.py").exists()
    would = run(capsys, **wish, exclusive=True, _ansible_check_mode=True)
    assert (would["changed"], would["removed"]) == (True, ["old.py"])
    assert (tmp_path / "old.py").exists()
    assert run(capsys, **wish, exclusive=True)["removed"] == ["old.py"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["__pycache__", "new.py"]


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".."])
def test_a_name_stays_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    result = run(capsys, path=str(tmp_path / "in"), files={name: ""})
    assert result["failed"]
    assert repr(name) in result["msg"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_text("mine")
    assert "no folder" in run(capsys, path=str(tmp_path / "x"), files={"a": ""})["msg"]
    assert (tmp_path / "x").read_text() == "mine"
