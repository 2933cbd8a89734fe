#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_info
short_description: Read what one Spark shall serve and what it serves
version_added: 0.1.0
description:
  - Reads the systemd units of both modes and what the running agent says of its engine.
  - Changes nothing.
options: {}
extends_documentation_fragment:
  - twospark.serving.attributes
attributes:
  diff_mode:
    support: none
seealso:
  - module: twospark.serving.serving_mode
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Read what this Spark serves
  twospark.serving.serving_info:
  register: serving
"""

RETURN = r"""
wanted:
  description:
    - The mode that is enabled, V(stopped) when none is, and V(both) when both are, which must not be.
  returned: success
  type: str
  sample: replica
installed:
  description: Whether the unit of any mode is installed.
  returned: success
  type: bool
  sample: true
enabled:
  description: The modes whose unit is enabled.
  returned: success
  type: list
  elements: str
  sample: [replica]
active:
  description: The modes whose unit is active, which it is when the engine has answered a real completion.
  returned: success
  type: list
  elements: str
  sample: [replica]
units:
  description: Each mode's unit as systemd tells it.
  returned: success
  type: dict
  sample: {replica: {active: active, enabled: true, installed: true, restarts: 0, result: success, stale: false,
    since: 'Mon 2026-11-30 08:00:00 UTC', status: serving, sub: running}}
last_starts:
  description: Each mode to the seconds that its last start took; none where there was no start.
  returned: success
  type: dict
  sample: {replica: 412.0, tp: null}
port_problems:
  description:
    - Ports of the wanted mode that somebody else holds, each with what ends that. Empty when the mode's unit is active, which has
      them.
  returned: success
  type: list
  elements: str
  sample: []
changed_by:
  description: Who is changing what this Spark serves, in words; empty when nobody is.
  returned: success
  type: str
  sample: anna on laptop (process 4711, switch to tp, since 2026-11-30 08:00:03Z)
agent:
  description: What the running agent says of its engine; none when no agent answers.
  returned: success
  type: dict
  sample: {mode: replica, phase: serving, requests: {running: 3, waiting: 0}, tokens_per_second: 92.5, kv_cache_usage: 0.12,
           capacity: {kv_tokens: 760001, context_tokens: 262144, full_context_requests: 2.9}}
"""

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes
from ansible_collections.twospark.serving.plugins.module_utils._lock import held_by
from ansible_collections.twospark.serving.plugins.module_utils._spark import Spark


def main() -> None:
    """Read and report."""
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    spark = Spark(module)
    units = spark.units()
    enabled = modes.enabled_modes(units)
    running = [mode for mode, unit in units.items() if not unit.stopped]
    absent = [config for mode in enabled if units[mode].active != "active" and (config := spark.config(mode))]
    agents = (spark.agent(mode) for mode in [*running, *enabled])
    module.exit_json(
        changed=False,
        wanted="both" if len(enabled) > 1 else (enabled or ["stopped"])[0],
        installed=any(unit.installed for unit in units.values()),
        enabled=enabled,
        active=modes.active_modes(units),
        units={mode: unit.told() for mode, unit in units.items()},
        last_starts={mode: spark.last_start(mode) for mode in modes.UNITS},
        port_problems=[problem for config in absent for problem in spark.port_problems(config)],
        changed_by=str(held_by() or ""),
        agent=next((agent for agent in agents if agent), None),
    )


if __name__ == "__main__":
    main()
