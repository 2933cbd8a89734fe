# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Waits for what the module serving_mode has asked for, and shows how far each Spark is."""

from __future__ import annotations

import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.twospark.serving.plugins.module_utils._modes import ARGUMENTS, Watch

LOOK_SECONDS = 10
PATIENCE_SECONDS = 30  # with a Spark that is not reached; a start takes minutes, and the network may blink


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """The part of serving_mode that runs where the playbook does."""

    _supports_check_mode = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Have the module change what is to be changed, then wait."""
        super().run(tmp, task_vars)
        _validation, arguments = self.validate_argument_spec(argument_spec=ARGUMENTS)
        result: dict[str, Any] = self._execute_module(
            module_name="twospark.serving.serving_mode", module_args=arguments, task_vars=task_vars
        )
        if result.get("failed") or result["reached"] or self._task.check_mode or not arguments["wait"]:
            return result
        return {**result, **self._wait(arguments["mode"], arguments["timeout"], task_vars or {})}

    def _wait(self, mode: str, timeout: float, task_vars: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        watch = Watch(task_vars["inventory_hostname"], began)
        while True:
            left = max(began + timeout - time.monotonic(), 0)
            seen = self._look(
                {"mode": mode, "phase": watch.phase, "seconds": min(LOOK_SECONDS, left)}, task_vars
            )
            if seen.get("failed"):
                return seen
            if line := watch.see(time.monotonic(), seen["phase"], seen["status"]):
                Display().display(line)
            if seen["settled"] or not left:
                break
        told = {"after": seen["units"], "durations": watch.durations, "reached": seen["reached"]}
        if seen["reached"]:
            return {**told, "engine_seconds": seen["engine_seconds"]}
        late = "" if seen["settled"] else f"Waited for {timeout:.0f} s. "
        return {**told, "failed": True, "msg": late + seen["cause"]}

    def _look(self, arguments: dict[str, Any], task_vars: dict[str, Any]) -> dict[str, Any]:
        """See how far the Spark is, also when it is not reached for a moment."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return dict(
                    self._execute_module(
                        module_name="twospark.serving.serving_wait",
                        module_args=arguments,
                        task_vars=task_vars,
                    )
                )
            except AnsibleConnectionFailure as failure:
                if time.monotonic() > end:
                    raise
                host = task_vars["inventory_hostname"]
                # No warning: Ansible keeps those until the task has ended.
                Display().display(
                    f"{host} is not reached, which is tried for {PATIENCE_SECONDS} s: {failure}"
                )
                time.sleep(2)
