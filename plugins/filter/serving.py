# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Filters of the roles and playbooks: thin names for the pure functions in module_utils."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.twospark.serving.plugins.module_utils import (
    _plan,
    _preflight,
    _status,
    _switch,
    _worker,
)


class FilterModule:
    """The collection's filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filter name to function."""
        return {
            "engine_plan": _plan.engine_plan,
            "file_digests": _preflight.file_digests,
            "host_mode": _plan.host_mode,
            "status_report": _status.status_report,
            "mode_problems": _plan.mode_problems,
            "preflight_problems": _preflight.preflight_problems,
            "rolling_problems": _switch.rolling_problems,
            "switch_announcement": _switch.switch_announcement,
            "switch_end": _switch.switch_end,
            "switch_outcome": _switch.switch_outcome,
            "switch_report": _switch.switch_report,
            "wanted_mode": _plan.wanted_mode,
            "worker_servers": _worker.worker_servers,
        }
