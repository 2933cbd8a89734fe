# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The workers that a gateway stands in front of, worked out from the inventory and from a list of further ones."""

from __future__ import annotations

DOCUMENTATION = r"""
name: gateway_workers
short_description: The workers of a gateway
version_added: 0.1.0
author: The twospark.serving maintainers
description:
  - Lists what a gateway sends requests to; the copy of each Spark, the head of the pair that serves in mode V(tp), each server of the
    role C(worker), and what is listed besides.
  - A value is taken from the Spark's inventory variables, else from its preset, else from the defaults.
  - The head of the pair is left out where mode V(tp) cannot be; C(vllm_tp_hosts) must name two Sparks
    (default the first two), each with a C(fabric_address).
  - A further worker that has the name of one of those replaces what is said of that one.
positional: _input, hostvars, defaults, presets, further, boxes
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
  further:
    description: Further workers, as in C(gateway_workers) of the role C(gateway).
    type: list
    elements: dict
    default: []
  boxes:
    description: Inventory names of the hosts whose C(worker_servers) answer.
    type: list
    elements: str
    default: []
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
  description: One mapping a worker, the copies in the order of the Sparks, then the head of the pair, the boxes' servers and the further ones.
  type: list
  elements: dict
  contains:
    name:
      description: Its name. For a copy the Spark's inventory name; for the head of the pair C(-tp) is added, for a box's
        server its own name.
      type: str
    host:
      description: The machine's name. For a Spark and a box its inventory name.
      type: str
    kind:
      description: How it tells its models. V(vllm) for a Spark, V(llama_cpp) for a box's server, else V(openai) where nothing is said.
      type: str
    models:
      description: The models that it is expected to have.
      type: list
      elements: str
    on_demand:
      description: Whether it may be asked for a model that it would have to load. By default where its kind can.
      type: bool
    weight:
      description: Its share against that of the others, by default 1.
      type: int
    health_path:
      description: Where its health is asked.
      type: str
    keep_alive:
      description: >-
        Seconds that it keeps an idle connection open; 0 where that is not known. Of a Spark C(VLLM_HTTP_TIMEOUT_KEEP_ALIVE) of the engine's
        environment.
      type: float
    address:
      description: Its address. Of a Spark and a box C(ansible_host), else its inventory name.
      type: str
    port:
      description: Port of the engine's API.
      type: int
    health_port:
      description: Port that answers health checks.
      type: int
    max_requests:
      description: Requests that the worker takes at once.
      type: int
  sample:
    - name: spark-a
      host: spark-a
      kind: vllm
      models: [qwen3.8-flash-next]
      on_demand: false
      weight: 1
      address: 192.0.2.11
      port: 8000
      health_path: /health
      keep_alive: 5
      health_port: 9401
      max_requests: 12
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.twospark.serving.plugins.module_utils._worker import worker_servers

# An engine's own limit where neither inventory nor preset states one; the same in the role vllm.
MAX_REQUESTS = 12

# Kinds that load a model when they are asked for it, and where those tell their health that do not do it at /health.
LOADS_ON_DEMAND = ("ollama", "llama_swap")
HEALTH_PATHS = {"ollama": "/api/version"}

# Seconds that vLLM keeps an idle connection (vllm/envs.py, 0.33), and the variable that changes it.
KEEP_ALIVE = 5
KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"


def gateway_workers(
    sparks: Sequence[str],
    hostvars: Mapping[str, Mapping[str, Any]],
    defaults: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    further: Sequence[Mapping[str, Any]] = (),
    boxes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """List the workers of ``sparks`` and ``boxes`` and the ``further`` ones; see DOCUMENTATION.

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
            KEEP_ALIVE_VARIABLE: KEEP_ALIVE,
        }
        environments = (
            presets[preset].get("environment"),
            of_mode.get("environment"),
            setting(spark, "vllm_environment"),
            setting(spark, f"vllm_{mode}_environment"),
        )
        for environment in environments:
            if isinstance(environment, Mapping) and KEEP_ALIVE_VARIABLE in environment:
                numbers[KEEP_ALIVE_VARIABLE] = environment[KEEP_ALIVE_VARIABLE]
        for name, value in numbers.items():
            try:
                numbers[name] = int(value)
            except (TypeError, ValueError):
                raise AnsibleFilterError(
                    f"{name} of {spark} is {value!r}; allowed is a whole number. Mend it in the inventory."
                ) from None
        port, health_port, max_requests, keep_alive = numbers.values()
        model = setting(spark, "vllm_served_model_name") or (presets[preset].get("model") or {}).get(
            "served_name"
        )
        return {
            "name": f"{spark}-tp" if mode == "tp" else spark,
            "host": spark,
            "kind": "vllm",
            "models": [str(model)] if model else [],
            "address": str(setting(spark, "ansible_host") or spark),
            "port": port,
            "health_port": health_port,
            "keep_alive": keep_alive,
            "max_requests": max_requests,
        }

    unknown = [spark for spark in sparks if spark not in hostvars]
    if unknown:
        raise AnsibleFilterError(
            f"gateway_sparks names {', '.join(unknown)}, not in the inventory; allowed are its hosts, by default the group sparks. "
            "Mend it, or list a server that is no Spark in gateway_workers."
        )
    workers = [worker(spark, "replica") for spark in sparks]
    pair = _pair(sparks, hostvars)
    if len(pair) == 2 and all(hostvars[spark].get("fabric_address") for spark in pair):
        workers.append(worker(pair[0], "tp"))
    for box in boxes:
        workers += _servers_of(box, hostvars.get(box, {}))
    return [_completed(worker) for worker in _joined(workers, further)]


def _servers_of(box: str, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The servers that the role worker runs on a host."""
    plan = worker_servers(variables.get("worker_servers") or [], box)
    if plan["problems"]:
        raise AnsibleFilterError(" ".join(plan["problems"]))
    key = variables.get("worker_api_key") or variables.get("vllm_api_key") or ""
    listens_at = str(variables.get("worker_host") or "0.0.0.0")
    everywhere = listens_at in ("0.0.0.0", "::")
    return [
        {
            "name": f"{box}-{server['name']}",
            "host": box,
            "kind": "llama_cpp",
            "models": [server["model"]],
            "address": str(variables.get("ansible_host") or box) if everywhere else listens_at,
            **{name: server[name] for name in ("port", "health_port", "max_requests", "weight")},
            **({"key": key} if key else {}),
        }
        for server in plan["servers"]
    ]


def _joined(
    workers: Sequence[dict[str, Any]], further: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The inventory's workers with what is said of them besides, and the others; a name given twice stays so, to be found."""
    besides = {str(worker.get("name")): worker for worker in reversed(further)}
    own = {worker["name"] for worker in workers}
    used = [besides[name] for name in own & set(besides)]
    return [
        *({**worker, **_stated(besides.get(worker["name"], {}))} for worker in workers),
        *(_stated(worker) for worker in further if not any(worker is one for one in used)),
    ]


def _stated(worker: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in worker.items() if value is not None}


def _completed(worker: Mapping[str, Any]) -> dict[str, Any]:
    """Each value that has a default."""
    kind = str(worker.get("kind", "openai"))
    return {
        "host": worker.get("name"),
        "kind": kind,
        "models": [],
        "on_demand": kind in LOADS_ON_DEMAND,
        "weight": 1,
        "health_path": HEALTH_PATHS.get(kind, "/health"),
        "keep_alive": KEEP_ALIVE if kind == "vllm" else 0,
        **({"health_port": worker["port"]} if "port" in worker else {}),
        **worker,
    }


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
