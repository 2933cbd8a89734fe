#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_mode
short_description: Bring one Spark to a serving mode
version_added: 0.1.0
description:
  - Enables and starts the systemd unit of the wished mode, and disables and stops that of the other.
  - An enabled unit is the wish, so the mode comes back after a reboot; nothing is remembered elsewhere.
  - The wished unit is enabled before the other is stopped. A play that dies half-way thus leaves a Spark that comes up in
    the new mode.
  - Stopping is graceful. The unit's agent first lets the gateway send no more, and waits for the requests in flight.
  - Reloads systemd only when a unit's file has changed since systemd read it, since a reload can take the GPU from running
    containers.
options:
  mode:
    description:
      - V(replica) serves a whole copy of the model on this Spark.
      - V(tp) serves this Spark's half of a model that is split over two.
      - V(stopped) serves nothing, also not after a reboot.
    type: str
    required: true
    choices: [replica, tp, stopped]
  wait:
    description: Wait until the unit is active, which it is when the engine has answered a real completion.
    type: bool
    default: true
  timeout:
    description:
      - How long to wait for the unit, in seconds.
      - Unit files bound a start themselves; this bound should be longer.
    type: int
    default: 5400
  restart_stale:
    description:
      - Restart the unit when it runs with other settings than those that are now installed.
      - Nothing is restarted that runs with the present settings.
    type: bool
    default: false
  restart:
    description: Restart the unit even when it runs with the present settings. A unit that is not active is only started.
    type: bool
    default: false
extends_documentation_fragment:
  - twospark.serving.attributes
seealso:
  - module: twospark.serving.serving_info
  - module: twospark.serving.serving_preflight
notes:
  - In mode V(tp) the two Sparks come up together or not at all, so both must be asked within the same task
    (C(forks) of at least 2).
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Serve a copy on each Spark
  twospark.serving.serving_mode:
    mode: replica

- name: Serve nothing, also not after a reboot
  twospark.serving.serving_mode:
    mode: stopped

- name: Take new settings into use, one copy at a time
  twospark.serving.serving_mode:
    mode: replica
    restart_stale: true
  throttle: 1
"""

RETURN = r"""
before:
  description: Each mode's unit as it was.
  returned: success
  type: dict
  sample: {replica: {active: active, enabled: true, installed: true, restarts: 0, result: success, stale: false,
    since: 'Mon 2026-11-30 08:00:00 UTC', status: serving, sub: running}}
after:
  description: Each mode's unit as it is now; in check mode as it was.
  returned: success
  type: dict
  sample: {tp: {active: active, enabled: true, installed: true, restarts: 0, result: success, stale: false,
    since: 'Mon 2026-11-30 08:05:00 UTC', status: serving, sub: running}}
actions:
  description: The calls of systemctl, in order, that were made or, in check mode, would be.
  returned: success
  type: list
  elements: str
  sample: [enable vllm-tp.service, disable vllm-replica.service, stop vllm-replica.service, start vllm-tp.service]
durations:
  description:
    - Seconds that each action took; C(ready) is the wait from the start to the first real completion.
    - C(engine) is what the engine itself took of that, from the start of its container.
  returned: when something was done
  type: dict
  sample: {stop vllm-replica.service: 4.2, ready: 312.0, engine: 305.4}
"""

import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes
from ansible_collections.twospark.serving.plugins.module_utils._lock import alone
from ansible_collections.twospark.serving.plugins.module_utils._spark import Spark

# One run of this module may outlive the playbook that called it; the next waits until its steps are done.
GUARD = "/run/vllm-mode.guard"


def main() -> None:
    """Read, compare, act, wait, report."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "required": True, "choices": ["replica", "tp", "stopped"]},
            "wait": {"type": "bool", "default": True},
            "timeout": {"type": "int", "default": 5400},
            "restart_stale": {"type": "bool", "default": False},
            "restart": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    mode: str = module.params["mode"]
    spark = Spark(module)
    durations: dict[str, float] = {}
    with alone(GUARD, pretend=module.check_mode):
        before = spark.units()
        # On a bare host check mode runs before the units are there; the run itself would have installed them.
        if mode != "stopped" and not before[mode].installed and not module.check_mode:
            module.fail_json(
                msg=f"{modes.UNITS[mode]} is not installed on this host, so mode {mode} cannot be reached. Nothing was stopped. "
                "Install it first: ansible-playbook playbooks/site.yml"
            )
        change = modes.change(before, mode, module.params["restart_stale"], module.params["restart"])
        result: dict[str, t.Any] = {
            "changed": bool(change.steps),
            "before": {name: unit.told() for name, unit in before.items()},
            "actions": [str(step) for step in change.steps],
            "diff": change.diff(),
            "durations": durations,
        }
        if not module.check_mode:
            for step, action in zip(change.steps, result["actions"], strict=True):
                begin = time.monotonic()
                spark.do(step)
                durations[action] = round(time.monotonic() - begin, 1)
    if not module.check_mode and mode != "stopped" and module.params["wait"]:
        begin = time.monotonic()
        unit = spark.wait(mode, module.params["timeout"])
        durations["ready"] = round(time.monotonic() - begin, 1)
        if unit.active != "active":
            fail(module, spark, mode, unit, result)
        engine = spark.last_start(mode)
        if engine is not None and any(step.verb in ("start", "restart") for step in change.steps):
            durations["engine"] = engine
    result["after"] = (
        result["before"] if module.check_mode else {name: unit.told() for name, unit in spark.units().items()}
    )
    module.exit_json(**result)


def fail(module: AnsibleModule, spark: Spark, mode: str, unit: modes.Unit, result: dict[str, t.Any]) -> None:
    """Say why the unit does not serve, with its last lines, and what to do."""
    if unit.down:
        state = (
            f"failed ({unit.result}); systemd tries again by itself"
            if unit.waiting_to_restart
            else f"has failed ({unit.result})"
        )
    elif unit.stopped:
        state = "was stopped while it started"
    else:
        state = f"did not serve within {module.params['timeout']} s"
    module.fail_json(
        msg=f"{unit.name} {state}. Its status: {unit.status or 'none'}. Its last lines:\n{spark.last_lines(mode)}\n"
        f"Look on: journalctl -u {unit.name} -e. When it is mended, run the same command again.",
        **result,
    )


if __name__ == "__main__":
    main()
