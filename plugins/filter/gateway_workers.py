# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The workers that a gateway stands in front of, worked out from the inventory's Sparks."""

from __future__ import annotations

DOCUMENTATION = r"""
name: gateway_workers
short_description: The workers of a group of Sparks
version_added: 0.1.0
author: The twospark.serving maintainers
description:
  - Lists what a gateway sends requests to; the copy of each Spark, and the head of the pair that serves in mode V(tp).
  - A value is taken from the Spark's inventory variables, else from its preset, else from the defaults.
  - The head of the pair is left out where mode V(tp) cannot be; C(vllm_tp_hosts) must name two Sparks
    (default the first two), each with a C(fabric_address).
positional: _input, hostvars, defaults, presets
options:
  _input:
    description: Inventory names of the Sparks.
    type: list
    elements: str
    required: true
  hostvars:
    description: Variables of each host, as in the magic variable C(hostvars).
    type: dict
    required: true
  defaults:
    description: Variables of a Spark that the inventory does not set.
    type: dict
    required: true
  presets:
    description: Content of each preset that C(vllm_preset) of a Spark names.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show the workers
  ansible.builtin.debug:
    msg: "{{ groups['sparks'] | twospark.serving.gateway_workers(hostvars, defaults, presets) }}"
  vars:
    defaults:
      vllm_preset: simulation
      vllm_port: 8000
      vllm_replica_agent_port: 9401
      vllm_tp_agent_port: 9402
    presets:
      simulation: {replica: {max_requests: 12}, tp: {max_requests: 4}}
"""

RETURN = r"""
_value:
  description: One mapping a worker, the copies in the order of the Sparks, then the head of the pair.
  type: list
  elements: dict
  contains:
    name:
      description: The Spark's inventory name; for the head of the pair C(-tp) is added.
      type: str
    host:
      description: The Spark's inventory name.
      type: str
    address:
      description: C(ansible_host) of the Spark, else its inventory name.
      type: str
    port:
      description: Port of the engine's API.
      type: int
    health_port:
      description: Port of the agent that answers health checks.
      type: int
    max_requests:
      description: Requests that the worker takes at once.
      type: int
  sample:
    - {name: spark-a, host: spark-a, address: 192.0.2.11, port: 8000, health_port: 9401, max_requests: 12}
    - {name: spark-a-tp, host: spark-a, address: 192.0.2.11, port: 8000, health_port: 9402, max_requests: 4}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

# An engine's own limit where neither inventory nor preset states one; the same in the role vllm.
MAX_REQUESTS = 12


def gateway_workers(
    sparks: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """List the workers of ``sparks``; see DOCUMENTATION.

    Raises AnsibleFilterError, which names host and variable, where a value cannot be used.
    """

    def setting(spark: str, name: str) -> Any:
        value = hostvars[spark].get(name)
        return defaults.get(name) if value is None or value == "" else value

    def worker(spark: str, mode: str) -> dict[str, Any]:
        preset = str(setting(spark, "vllm_preset"))
        if preset not in presets:
            raise AnsibleFilterError(
                f"vllm_preset of {spark} is {preset!r}; presets given are {', '.join(presets) or 'none'}."
            )
        prefix = "vllm_tp_" if mode == "tp" else "vllm_"
        of_mode = presets[preset].get(mode) or {}
        numbers = {
            "vllm_port": setting(spark, "vllm_port"),
            f"vllm_{mode}_agent_port": setting(spark, f"vllm_{mode}_agent_port"),
            f"{prefix}max_requests": setting(spark, f"{prefix}max_requests")
            or of_mode.get("max_requests", MAX_REQUESTS),
        }
        for name, value in numbers.items():
            try:
                numbers[name] = int(value)
            except (TypeError, ValueError):
                raise AnsibleFilterError(
                    f"{name} of {spark} is {value!r}; allowed is a whole number. Mend it in the inventory."
                ) from None
        port, health_port, max_requests = numbers.values()
        return {
            "name": f"{spark}-tp" if mode == "tp" else spark,
            "host": spark,
            "address": str(setting(spark, "ansible_host") or spark),
            "port": port,
            "health_port": health_port,
            "max_requests": max_requests,
        }

    workers = [worker(spark, "replica") for spark in sparks]
    pair = _pair(sparks, hostvars)
    if len(pair) == 2 and all(hostvars[spark].get("fabric_address") for spark in pair):
        workers.append(worker(pair[0], "tp"))
    return workers


def _pair(sparks: Sequence[str], hostvars: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The Sparks of mode tp, head first, on which all Sparks must agree."""
    named = {spark: hostvars[spark].get("vllm_tp_hosts") for spark in sparks}
    stated = {spark: list(hosts) for spark, hosts in named.items() if hosts is not None}
    if not stated:
        return list(sparks[:2])
    pair = next(iter(stated.values()))
    if any(hosts != pair for hosts in stated.values()):
        said = "; ".join(f"{spark}: {', '.join(hosts)}" for spark, hosts in stated.items())
        raise AnsibleFilterError(f"vllm_tp_hosts differs ({said}). Set it once, for the group sparks.")
    strangers = [host for host in pair if host not in sparks]
    if strangers:
        raise AnsibleFilterError(
            f"vllm_tp_hosts names {', '.join(strangers)}, not in group sparks; allowed are {', '.join(sparks)}. "
            "Add the host to the group, or name another."
        )
    return pair


class FilterModule:
    """The filter under its name."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Filter name to function."""
        return {"gateway_workers": gateway_workers}
