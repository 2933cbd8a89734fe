#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_wait
short_description: Wait a while for one Spark on its way to a serving mode
version_added: 0.1.0
description:
  - Returns as soon as the mode is reached, cannot be reached any more, or another phase begins, and after O(seconds) at the
    latest.
  - Changes nothing, and does not fail when the mode is not reached; that is for M(twospark.serving.serving_mode) to judge,
    which waits with it.
options:
  mode:
    description: The mode that is waited for.
    type: str
    required: true
    choices: [replica, tp, stopped]
  seconds:
    description: How long to wait at most.
    type: float
    default: 0
  phase:
    description: The phase that was last seen.
    type: str
    default: ''
extends_documentation_fragment:
  - twospark.serving.attributes
attributes:
  diff_mode:
    support: none
seealso:
  - module: twospark.serving.serving_mode
  - module: twospark.serving.serving_info
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: How far is it?
  twospark.serving.serving_wait:
    mode: replica
"""

RETURN = r"""
settled:
  description: Whether nothing is to be waited for any more.
  returned: success
  type: bool
  sample: false
reached:
  description: Whether the mode is reached.
  returned: success
  type: bool
  sample: false
phase:
  description: The phase of the unit that is stopping, else of the one that is starting.
  returned: success
  type: str
  sample: loading
status:
  description: All that the unit says of the phase.
  returned: success
  type: str
  sample: "loading: weights 40%, 31 s of usually 312 s"
units:
  description: Each mode's unit as systemd tells it.
  returned: success
  type: dict
  sample: {tp: {active: activating, enabled: true, installed: true, restarts: 0, result: success, stale: null,
    since: 'Mon 2026-11-30 08:05:00 UTC', status: 'loading: weights 40%, 31 s of usually 312 s', sub: start}}
engine_seconds:
  description: What the wished mode's last start took, from the start of the engine's container to its first real completion.
  returned: success
  type: float
  sample: 305.4
cause:
  description: Why the mode is not reached, with the unit's last lines and what to do; empty when it is.
  returned: success
  type: str
  sample: ""
"""

import dataclasses

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes
from ansible_collections.twospark.serving.plugins.module_utils._spark import Spark


def main() -> None:
    """Wait and report."""
    module = AnsibleModule(
        argument_spec={
            "mode": modes.ARGUMENTS["mode"],
            "seconds": {"type": "float", "default": 0.0},
            "phase": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    mode = module.params["mode"]
    spark = Spark(module)
    units, progress = spark.wait(mode, module.params["seconds"], module.params["phase"])
    module.exit_json(
        changed=False,
        **dataclasses.asdict(progress),
        units={name: unit.told() for name, unit in units.items()},
        engine_seconds=spark.last_start(mode),
        cause="" if progress.reached else modes.unreached(units, mode, spark.last_lines),
    )


if __name__ == "__main__":
    main()
