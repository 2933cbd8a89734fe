# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Tells the module serving_lock who runs the playbook, and whether a former holder on this machine has ended."""

from __future__ import annotations

import getpass
import os
import platform
from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.twospark.serving.plugins.module_utils._lock import Holder, began, place


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """The part of serving_lock that runs where the playbook does."""

    _supports_check_mode = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the module; ask once more, with a claim, where the holder has ended."""
        super().run(tmp, task_vars)
        # A task runs in a child of the process that runs the playbook.
        pid = os.getppid()
        here = place()
        holder = Holder(getpass.getuser(), platform.node(), here, pid, began(pid))
        arguments = {**self._task.args, "holder": holder.told()}
        result: dict[str, Any] = self._ask(arguments, task_vars)
        former = result.get("former")
        if result.get("failed") and former and Holder.of(former).is_gone(here):
            # From that one only: of two runs that see this, the second finds the first.
            result = self._ask({**arguments, "former": former}, task_vars)
        return result

    def _ask(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        return dict(
            self._execute_module(
                module_name="twospark.serving.serving_lock", module_args=arguments, task_vars=task_vars
            )
        )
