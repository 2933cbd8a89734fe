#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: text_files
short_description: Have a folder hold several text files with given contents
version_added: 0.1.0
description:
  - Does for a set of files, in one call to the host, what M(ansible.builtin.copy) does with C(content) for one file in two.
  - The folder is created when it is missing. Each file is replaced in one step, so nobody reads half of one.
options:
  path:
    description: The folder.
    type: path
    required: true
  files:
    description:
      - The name of each file to its content. The content is written as it is, in UTF-8.
      - A name must not contain a slash.
    type: dict
    required: true
  exclusive:
    description: Remove other files from the folder. Folders in it are left alone.
    type: bool
    default: false
extends_documentation_fragment:
  - ansible.builtin.files
  - twospark.serving.attributes
attributes:
  diff_mode:
    details: Use C(diff=false) and C(no_log=true) on the task where a file holds a secret.
seealso:
  - module: ansible.builtin.copy
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Install a small package
  twospark.serving.text_files:
    path: /usr/local/lib/example
    files:
      __init__.py: ""
      __main__.py: "{{ lookup('ansible.builtin.file', 'example/__main__.py', rstrip=false) }}"
    mode: "0644"
    exclusive: true
"""

RETURN = r"""
written:
  description: The files whose content was changed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: [__main__.py]
removed:
  description: The files that were removed, or would be in check mode.
  returned: success
  type: list
  elements: str
  sample: []
"""

import os
import tempfile
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.text.converters import to_text


def content_of(path: str) -> str | None:
    """The content of a file; None when there is none."""
    try:
        with open(path, "rb") as file:
            return str(to_text(file.read(), errors="surrogate_or_replace"))
    except FileNotFoundError:
        return None


def files_in(folder: str) -> list[str]:
    """The names of the files (not the folders) in a folder that may be missing."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []


def write(module: AnsibleModule, path: str, content: str) -> None:
    """Put a file in its place in one step."""
    handle, draft = tempfile.mkstemp(dir=module.tmpdir)
    with os.fdopen(handle, "wb") as file:
        file.write(content.encode("utf-8"))
    module.atomic_move(draft, path)


def main() -> None:
    """Compare, write, report."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "exclusive": {"type": "bool", "default": False},
        },
        add_file_common_args=True,
        supports_check_mode=True,
    )
    folder: str = module.params["path"]
    wanted: dict[str, str] = {name: to_text(content) for name, content in module.params["files"].items()}
    wrong = [name for name in wanted if "/" in name or name in ("", ".", "..")]
    if wrong:
        module.fail_json(
            msg=f"files has the name {wrong[0]!r}; allowed are names without a slash, in the folder {folder}."
        )
    if os.path.lexists(folder) and not os.path.isdir(folder):
        module.fail_json(msg=f"path {folder} is there and no folder. Move it away, or name another.")
    removed = [name for name in files_in(folder) if name not in wanted] if module.params["exclusive"] else []
    before = {name: content_of(os.path.join(folder, name)) for name in [*wanted, *removed]}
    written = [name for name, content in wanted.items() if before[name] != content]
    changed = bool(written or removed)
    if changed and not module.check_mode:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        for name in written:
            write(module, os.path.join(folder, name), wanted[name])
        for name in removed:
            os.unlink(os.path.join(folder, name))
    for name in wanted:
        path = os.path.join(folder, name)
        if os.path.exists(path):
            changed = module.set_fs_attributes_if_different(
                module.load_file_common_arguments(module.params, path=path), changed
            )
    diff: list[dict[str, t.Any]] = [
        {
            "before_header": os.path.join(folder, name),
            "after_header": os.path.join(folder, name),
            "before": before[name] or "",
            "after": wanted.get(name, ""),
        }
        for name in [*written, *removed]
    ]
    module.exit_json(changed=changed, written=written, removed=removed, diff=diff)


if __name__ == "__main__":
    main()
