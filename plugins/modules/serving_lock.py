#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_lock
short_description: Let only one run of a playbook change what a Spark serves
version_added: 0.1.0
description:
  - Writes down on the Spark who changes what it serves, and refuses whoever else comes meanwhile, with the holder's name.
  - The holder is the process that runs the playbook. When that has ended, the next run from the same machine takes the lock over
    by itself. A run from another machine cannot see that and is refused; it may say O(break=true).
  - A reboot of the Spark ends every claim on it.
  - With several Sparks take the lock on the same one first in every run, so that of two runs at the same moment one gets it.
options:
  state:
    description: V(held) takes it, V(free) gives it back if it is this run's.
    type: str
    choices: [held, free]
    default: held
  purpose:
    description: What it is taken for, in a few words for whoever is refused meanwhile.
    type: str
    default: a change
  break:
    description: Take it from whoever has it. Only when that run is surely dead.
    type: bool
    default: false
  former:
    description: Take it from this holder, and from no other. Filled in by the action of the same name where that run has ended.
    type: dict
  holder:
    description: Who takes it. Filled in by the action of the same name, which runs where the playbook does.
    type: dict
extends_documentation_fragment:
  - twospark.serving.attributes
attributes:
  check_mode:
    details: Takes nothing, and tells whether it would be refused.
  diff_mode:
    support: none
seealso:
  - module: twospark.serving.serving_mode
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Let nobody else change what this Spark serves
  twospark.serving.serving_lock:
    purpose: switch to tp

- name: Let others
  twospark.serving.serving_lock:
    state: free
"""

RETURN = r"""
taken:
  description: Whether it was taken or given back by this call, or would be in check mode.
  returned: success
  type: bool
  sample: true
former:
  description: Who had it before, where that was another run.
  returned: success
  type: dict
  sample: {user: anna, machine: laptop, place: laptop 4f2a, pid: 4711, began: '823611', purpose: switch to tp, since: '2026-11-30 08:00:03Z'}
"""

import os
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils._lock import PATH, Holder, alone, held_by, hold


def main() -> None:
    """Look who has it, take it or give it back."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["held", "free"], "default": "held"},
            "purpose": {"type": "str", "default": "a change"},
            "break": {"type": "bool", "default": False},
            "former": {"type": "dict"},
            "holder": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    since = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
    asked: dict[str, t.Any] = {**(module.params["holder"] or {}), "since": since}
    asked["purpose"] = module.params["purpose"]
    try:
        holder = Holder.of(asked)
    except (KeyError, ValueError) as error:
        module.fail_json(msg=f"holder lacks {error}; leave it out: the action of the same name fills it in.")
    # Two runs that come at the same moment look one after the other.
    with alone(f"{PATH}.guard", pretend=module.check_mode):
        former = held_by()
        other = former if former and not former.same_run(holder) else None
        changed = (
            bool(other or not former) if module.params["state"] == "held" else bool(former and not other)
        )
        may_take = module.params["break"] or (other and other.told() == module.params["former"])
        if other and module.params["state"] == "held" and not may_take:
            module.fail_json(
                msg=f"Another run changes what this Spark serves: {other}. Nothing was stopped. Wait until it is done. If it is "
                "surely dead, run this again with -e break_lock=true.",
                former=other.told(),
            )
        if changed and not module.check_mode:
            if module.params["state"] == "held":
                hold(holder)
            else:
                os.unlink(PATH)
    module.exit_json(changed=False, taken=changed, former=other.told() if other else {})


if __name__ == "__main__":
    main()
