#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_placement
short_description: Warn of models whose worker has no stand-in
version_added: 0.1.0
description:
  - Reads from a gateway which worker has which model loaded, and warns of each model that workers of
    fewer than two machines have, with what to do.
  - Never fails because of that. Where the gateway does not answer it warns that nothing is known. Changes nothing.
options:
  url:
    description: The gateway's catalogue, C(/catalogue) on its port for monitors.
    type: str
    required: true
  models:
    description: The models that shall be loaded on two workers at least.
    type: list
    elements: str
    required: true
  sparks:
    description: The workers that are copies on Sparks. A pair of them in mode tp is a worker of its own, named after its head.
    type: list
    elements: str
    default: []
  patience:
    description: Seconds that workers which have only just started get to tell their models.
    type: float
    default: 5
extends_documentation_fragment:
  - twospark.serving.attributes
attributes:
  diff_mode:
    support: none
author:
  - The twospark.serving maintainers (@twospark)
"""

EXAMPLES = r"""
- name: Warn of models whose loss would be felt
  twospark.serving.serving_placement:
    url: http://127.0.0.1:8405/catalogue
    models: [qwen3.8-flash-next]
"""

RETURN = r"""
answered:
  description: Whether the gateway answered.
  returned: success
  type: bool
  sample: true
places:
  description: Each model to the workers that have it loaded.
  returned: success
  type: dict
  sample: {qwen3.8-flash-next: [spark-a, spark-b]}
"""

import json
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

from ansible_collections.twospark.serving.plugins.module_utils import _placement as placement

PAUSE_SECONDS = 0.5


def read(url: str) -> list[dict[str, t.Any]] | None:
    """The workers as the gateway tells them; None when it does not answer."""
    try:
        return list(
            json.loads(open_url(url, timeout=5, validate_certs=False, use_proxy=False).read())["workers"]
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None


def main() -> None:
    """Look until all is well or patience is over."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "models": {"type": "list", "elements": "str", "required": True},
            "sparks": {"type": "list", "elements": "str", "default": []},
            "patience": {"type": "float", "default": 5.0},
        },
        supports_check_mode=True,
    )
    models: list[str] = module.params["models"]
    deadline = time.monotonic() + module.params["patience"]
    workers = read(module.params["url"])
    sparks: list[str] = module.params["sparks"]
    while workers and placement.placement_warnings(models, workers, sparks) and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
        workers = read(module.params["url"])
    if workers is None:
        module.warn(
            f"Whether critical models (gateway_critical_models) would survive the loss of a worker is not known: {module.params['url']} "
            "does not tell. Look at the gateway: ansible-playbook playbooks/status.yml; one of before needs playbooks/site.yml"
        )
    else:
        for warning in placement.placement_warnings(models, workers, sparks):
            module.warn(warning)
    module.exit_json(
        changed=False, answered=workers is not None, places=placement.places(models, workers or [])
    )


if __name__ == "__main__":
    main()
