# SPDX-License-Identifier: GPL-3.0-or-later
"""The built and installed collection: what it holds, and that everything is found by its full name.

Nothing is fetched: the build is installed from its own archive into a temporary folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOKS = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
MODULES = sorted(path.stem for path in (ROOT / "plugins/modules").glob("*.py"))
ROLES = sorted(path.parents[1].name for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))

# What a build holds, by the first part of its path.
SHIPPED = {
    "CHANGELOG.rst",
    "FILES.json",
    "LICENSE",
    "MANIFEST.json",
    "README.md",
    "docs",
    "inventories",
    "meta",
    "playbooks",
    "plugins",
    "roles",
}


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Output of a command, without this checkout's Ansible settings; fails the test with all it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive that ansible-galaxy builds from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    run("ansible-galaxy", "collection", "build", "--output-path", str(folder), cwd=ROOT)
    (archive,) = folder.glob("twospark-serving-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def elsewhere(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the checkout with the collection installed and the example inventory."""
    folder = tmp_path_factory.mktemp("elsewhere")
    run("ansible-galaxy", "collection", "install", "--offline", "-p", "collections", str(archive), cwd=folder)
    shutil.copytree(ROOT / "inventories/example", folder / "inventory")
    return folder


def listed_tasks(playbook: str, inventory: Path, cwd: Path, **environment: str) -> list[str]:
    """The lines of --list-tasks that name plays and tasks."""
    output = run(
        "ansible-playbook",
        "-i",
        str(inventory),
        playbook,
        "--list-tasks",
        "-e",
        "mode=tp",
        cwd=cwd,
        **environment,
    )
    return [line for line in output.splitlines() if line.startswith("  ")]


def test_archive_holds_what_a_user_needs(archive: Path) -> None:
    with tarfile.open(archive) as content:
        names = {member.name for member in content if member.isfile()}
        folders = {member.name for member in content if member.isdir()}
    assert {name.partition("/")[0] for name in names | folders} == SHIPPED
    git = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *SHIPPED)
    known = {name for name in run(*git, cwd=ROOT).split("\0") if (ROOT / name).is_file()}
    simulation = {name for name in known if name.startswith("inventories/simulation/")}
    assert names - {"FILES.json", "MANIFEST.json"} == known - simulation
    assert not [name for name in folders if "__pycache__" in name]


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_playbook_is_found_by_its_full_name(playbook: str, elsewhere: Path) -> None:
    installed = listed_tasks(
        f"twospark.serving.{playbook}",
        elsewhere / "inventory",
        elsewhere,
        ANSIBLE_COLLECTIONS_PATH="collections",
    )
    checkout = listed_tasks(
        f"playbooks/{playbook}.yml",
        ROOT / "inventories/example",
        ROOT,
        ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"),
    )
    assert installed == checkout
    assert any("TAGS:" in line for line in installed)


@pytest.mark.parametrize("module", MODULES)
def test_module_is_documented(module: str, elsewhere: Path) -> None:
    text = run(
        "ansible-doc",
        "-t",
        "module",
        f"twospark.serving.{module}",
        cwd=elsewhere,
        ANSIBLE_COLLECTIONS_PATH="collections",
    )
    assert "OPTIONS" in text or "RETURN" in text


@pytest.mark.parametrize("role", ROLES)
def test_role_is_documented(role: str, elsewhere: Path) -> None:
    text = run(
        "ansible-doc",
        "-t",
        "role",
        f"twospark.serving.{role}",
        cwd=elsewhere,
        ANSIBLE_COLLECTIONS_PATH="collections",
    )
    assert f"twospark.serving.{role}" in text
