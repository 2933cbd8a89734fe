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
    description:
      - Wait until the other unit has stopped and the wished one is active, which it is when the engine has answered a real
        completion. Meanwhile the phase of each Spark is shown whenever it changes, and now and then how far it is.
      - A Spark that is not reached meanwhile is asked again for half a minute.
    type: bool
    default: true
  timeout:
    description:
      - How long to wait in all, in seconds.
      - Unit files bound stops and starts themselves; this bound should be longer.
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
reached:
  description: Whether the mode is reached, in check mode whether it was.
  returned: success
  type: bool
  sample: true
actions:
  description: The calls of systemctl, in order, that were made or, in check mode, would be.
  returned: success
  type: list
  elements: str
  sample: [enable vllm-tp.service, disable vllm-replica.service, stop vllm-replica.service, start vllm-tp.service]
durations:
  description:
    - The phases that the Spark went through while it was waited for, and the seconds of each.
    - Each is what the units say of themselves, so C(draining), C(stopping), C(loading), C(verifying) and others.
  returned: when it was waited for
  type: dict
  sample: {draining: 4.2, stopping: 1.0, loading: 310.6, verifying: 0.8}
engine_seconds:
  description: What the engine took from the start of its container to its first real completion; none in mode V(stopped).
  returned: when it was waited for and the mode was reached
  type: float
  sample: 305.4
"""

import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes
from ansible_collections.twospark.serving.plugins.module_utils._lock import alone
from ansible_collections.twospark.serving.plugins.module_utils._spark import Spark

# One run of this module may outlive the playbook that called it; the next waits until its steps are done.
GUARD = "/run/vllm-mode.guard"


def main() -> None:
    """Read, compare, act, report; the action of the same name waits."""
    module = AnsibleModule(argument_spec=modes.ARGUMENTS, supports_check_mode=True)
    mode: str = module.params["mode"]
    spark = Spark(module)
    with alone(GUARD, pretend=module.check_mode):
        before = spark.units()
        # On a bare host check mode runs before the units are there; the run itself would have installed them.
        if mode != "stopped" and not before[mode].installed and not module.check_mode:
            module.fail_json(
                msg=f"{modes.UNITS[mode]} is not installed on this host, so mode {mode} cannot be reached. Nothing was stopped. "
                "Install it first: ansible-playbook playbooks/site.yml"
            )
        change = modes.change(before, mode, module.params["restart_stale"], module.params["restart"])
        if not module.check_mode:
            for step in change.steps:
                spark.do(step)
    after = before if module.check_mode or not change.steps else spark.units()
    result: dict[str, t.Any] = {
        "changed": bool(change.steps),
        "before": {name: unit.told() for name, unit in before.items()},
        "after": {name: unit.told() for name, unit in after.items()},
        "actions": [str(step) for step in change.steps],
        "diff": change.diff(),
        "reached": modes.progress(after, mode).reached,
    }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
