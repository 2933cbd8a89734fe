# SPDX-License-Identifier: GPL-3.0-or-later
"""What is written in two places must say the same: specs, defaults, READMEs, and the rules of the house.

Runs under plain pytest and under ansible-test units.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
PLAYBOOKS = sorted((ROOT / "playbooks").glob("*.yml"))
SCENARIOS = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))

# The Python types of each argument type's default; a templated default is a string whatever its type.
TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "dict": (dict,),
    "float": (float, int),
    "int": (int,),
    "list": (list,),
    "path": (str,),
    "raw": (object,),
    "str": (str,),
}

# What needs more than a list of roles and modules belongs into a role or a module.
NOT_IN_PLAYBOOKS = {"command", "raw", "script", "set_fact", "shell"}
PLAY_KEYWORDS = {"tasks", "pre_tasks", "post_tasks", "handlers"}


def project_files() -> Iterator[Path]:
    """Each file of the project: what git knows or would take, or all of an export that has no git."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
            "\0"
        )
        paths = [ROOT / name for name in names if name]
    else:
        made = {"__pycache__", ".hypothesis"}
        paths = [path for path in ROOT.rglob("*") if made.isdisjoint(path.parts)]
        paths = [path for path in paths if not path.is_relative_to(ROOT / "tests/output")]
    yield from (path for path in paths if path.is_file() and not path.is_symlink())


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each text file of the project."""
    for path in project_files():
        try:
            yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def specs(role: str) -> dict[str, Any]:
    """A role's entry points by name."""
    entries: dict[str, Any] = load(ROOT / "roles" / role / "meta/argument_specs.yml")["argument_specs"]
    return entries


def main_spec(role: str) -> dict[str, dict[str, Any]]:
    """The options of a role's main entry point by name."""
    options: dict[str, dict[str, Any]] = specs(role)["main"].get("options", {})
    return options


def defaults_of(role: str) -> dict[str, Any]:
    path = ROOT / "roles" / role / "defaults/main.yml"
    return (load(path) if path.exists() else None) or {}


def shows_default(cell: str, option: dict[str, Any]) -> bool:
    """Whether a README's cell says what an option's default is: its value in backticks, `empty` or `required`."""
    if option.get("required"):
        return cell == "required"
    default = option.get("default")
    if default is None or default == "":
        return cell == "empty"
    text = cell.strip("`")
    return text == default or (not str(default).startswith("{{") and bool(yaml.safe_load(text) == default))


def all_options(options: dict[str, dict[str, Any]], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each option with its dotted name, the nested ones included."""
    for name, option in options.items():
        yield prefix + name, option
        yield from all_options(option.get("options", {}), f"{prefix}{name}.")


def test_the_collection_has_roles_playbooks_and_scenarios() -> None:
    """Guards the tables below against being empty."""
    assert ROLES
    assert PLAYBOOKS
    assert SCENARIOS


@pytest.mark.parametrize("role", ROLES)
class TestRole:
    def test_defaults_and_spec_name_the_same_variables(self, role: str) -> None:
        defaults, spec = defaults_of(role), main_spec(role)
        assert set(defaults) - set(spec) == set(), "in defaults/main.yml, not in meta/argument_specs.yml"
        expected = {name for name, option in spec.items() if "default" in option}
        assert expected - set(defaults) == set(), (
            "has a default in meta/argument_specs.yml, none in defaults/main.yml"
        )
        required = {name for name, option in spec.items() if option.get("required")}
        assert required & set(defaults) == set(), "required, yet has a default"

    def test_default_values_agree(self, role: str) -> None:
        defaults, spec = defaults_of(role), main_spec(role)
        for name, value in defaults.items():
            if "default" in spec[name]:
                assert spec[name]["default"] == value, name
            else:
                assert "{{" in str(value), f"{name}: say its default in meta/argument_specs.yml too"

    def test_each_option_is_described_and_typed(self, role: str) -> None:
        entries = specs(role).values()
        for name, option in (pair for entry in entries for pair in all_options(entry.get("options", {}))):
            assert option.get("description"), f"{name} has no description"
            assert option.get("type") in TYPES, f"{name} has no type"
            assert option["type"] != "list" or "elements" in option, (
                f"{name} does not say what its elements are"
            )
            default = option.get("default")
            if default is not None and "{{" not in str(default):
                assert isinstance(default, TYPES[option["type"]]), (
                    f"{name}: {default!r} is no {option['type']}"
                )

    def test_variables_carry_the_roles_name(self, role: str) -> None:
        assert {name for name in main_spec(role) if not name.startswith(f"{role}_")} == set()

    def test_readme_tells_the_same(self, role: str) -> None:
        """The table `| variable | type | default | meaning |` of the role's README."""
        readme = (ROOT / "roles" / role / "README.md").read_text(encoding="utf-8")
        rows = re.findall(rf"^\| *`({role}_\w+)` *\| *(\w+) *\| *(.*?) *\|", readme, re.MULTILINE)
        listed = {name: (kind, default) for name, kind, default in rows}
        spec = main_spec(role)
        assert set(listed) == set(spec)
        for name, (kind, default) in listed.items():
            assert kind == spec[name]["type"], name
            assert shows_default(default, spec[name]), f"{name}: {default}"

    def test_spec_has_a_short_description(self, role: str) -> None:
        for entry, spec in specs(role).items():
            assert spec.get("short_description"), entry


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.stem)
class TestPlaybook:
    def test_holds_no_logic(self, playbook: Path) -> None:
        for play in load(playbook):
            for keyword in PLAY_KEYWORDS & set(play):
                for task in play[keyword] or []:
                    name = task.get("name", task)
                    modules = {key.rpartition(".")[2] for key in task}
                    assert modules & NOT_IN_PLAYBOOKS == set(), f"{name}: move it into a role or a module"
                    assert "block" not in task, f"{name}: move it into a role"
                    conditions = task.get("when", [])
                    conditions = conditions if isinstance(conditions, list) else [conditions]
                    assert len(conditions) <= 1, (
                        f"{name}: more than one condition is a decision; make it Python"
                    )
                    assert not re.search(r"\b(and|or)\b", str(conditions)), (
                        f"{name}: make the decision in Python"
                    )

    def test_readme_names_it(self, playbook: Path) -> None:
        assert playbook.name in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario_says_what_it_promises(scenario: str) -> None:
    lines = (ROOT / "molecule" / scenario / "molecule.yml").read_text(encoding="utf-8").splitlines()
    comment = [line.removeprefix("#").strip() for line in lines[: lines.index("---")] if line.startswith("#")]
    assert any(text and not text.startswith("SPDX-") for text in comment), "its head says nothing"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_step_of_a_scenario_is_passed_over(scenario: str) -> None:
    """Molecule passes over a step whose playbook or tests it does not find, and calls that a success."""
    folder = ROOT / "molecule" / scenario
    settings = load(folder / "molecule.yml")
    for step in settings["scenario"]["test_sequence"]:
        verb, _, argument = step.partition(" ")
        if verb == "verify":
            assert list((folder / argument).glob("test_*.py")), f"{step}: no tests there"
        if verb == "side_effect":
            assert (folder / argument).is_file(), f"{step}: no such playbook"
            assert settings["ansible"]["playbooks"]["side_effect"], (
                f"{step}: needs ansible.playbooks.side_effect"
            )


def test_files_carry_the_licence() -> None:
    # JSON has no comments, ansible-test wants __init__.py empty, programs write their own files.
    exempt = re.compile(r"(^LICENSE|^changelogs/changelog\.yaml|^tests/.*\.txt|\.json|/__init__\.py)$")
    missing = [
        name
        for name, text in texts()
        if not exempt.search(name) and "SPDX-License-Identifier: GPL-3.0-or-later" not in text[:400]
    ]
    assert not missing, "\n".join(missing)


FORBIDDEN = {
    "a path of one machine": r"(?<![\w.])/(?:wor[k]|tmp/brie[f])/\w+",
    "a package registry's host": r"https?://(?:deb|files|registry|security|index|proxy|simple)[.][a-z]|pyp[i][.]org",
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what: str) -> None:
    found = [
        f"{name}: {match.group()}" for name, text in texts() for match in re.finditer(FORBIDDEN[what], text)
    ]
    assert not found, "\n".join(found)
