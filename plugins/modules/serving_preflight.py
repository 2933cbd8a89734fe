#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_preflight
short_description: Check that one Spark has everything its modes need
version_added: 0.1.0
description:
  - Looks for the model's folder, the image and its platform, flags that the image's engine does not know, ports that others
    hold, and memory that the host does not have; with O(mode=tp) also for the direct link to the other Spark.
  - Reports everything that is wrong at once, and changes nothing on the host but a cache of the flags that an image knows.
  - Meant to run before anything is stopped.
options:
  mode:
    description: The mode that shall be possible with what is installed.
    type: str
    choices: [replica, tp]
  configs:
    description:
      - The agents' configurations of the modes that shall be possible, as they would be installed.
      - Exactly one of O(mode) and O(configs) must be given.
    type: list
    elements: dict
extends_documentation_fragment:
  - twospark.serving.attributes
attributes:
  check_mode:
    details: An image that is not there yet is no failure in check mode, since the run itself would bring it.
  diff_mode:
    support: none
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Is everything there for tensor parallelism?
  twospark.serving.serving_preflight:
    mode: tp

- name: Would these settings work?
  twospark.serving.serving_preflight:
    configs: ["{{ plan.replica.config }}", "{{ plan.tp.config }}"]
"""

RETURN = r"""
problems:
  description: What is wrong, each with what is allowed and what to do; empty when all is well.
  returned: always
  type: list
  elements: str
  sample: ["model folder /srv/models/x does not exist"]
image_id:
  description: The id of the image on this host; empty when it is not there.
  returned: success
  type: str
  sample: sha256:5d0da3dc976460b72c77d94c8a1ad043720b0416bfc16c52c45d4847e53fadb6
"""

import dataclasses
import json
import os
import platform
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes
from ansible_collections.twospark.serving.plugins.module_utils import _preflight as preflight
from ansible_collections.twospark.serving.plugins.module_utils._spark import Spark

FLAGS_DIRECTORY = "/var/lib/vllm/flags"


class Preflight:
    """The looking; the judgements are in module_utils."""

    def __init__(self, module: AnsibleModule, config: dict[str, t.Any]) -> None:
        self.module = module
        self.config = config
        self.problems: list[str] = []
        self.docker = module.get_bin_path("docker")
        self.image_id = ""

    def look(self, fabric: bool) -> list[str]:
        """Everything that is wrong; ``fabric`` says whether the direct link is looked at, too."""
        self.model()
        self.image_id = self.image()
        if self.image_id:
            self.flags(self.image_id)
        self.ports()
        self.memory()
        if fabric:
            self.fabric()
        return self.problems

    def model(self) -> None:
        folder = self.config["model"]
        if not os.path.isdir(folder):
            self.problems.append(
                f"model folder {folder} (vllm_model_path) does not exist on this host. Put the model's files there, or set "
                "vllm_model_path to the folder that has them."
            )
        elif not os.path.isfile(os.path.join(folder, "config.json")):
            self.problems.append(
                f"model folder {folder} (vllm_model_path) has no config.json, so it holds no whole model. Copy it again."
            )

    def image(self) -> str:
        """Judge the image and return its id (empty when it is not there)."""
        name = self.config["image"]
        if not self.docker:
            if not self.module.check_mode:
                self.problems.append(
                    "docker is not installed on this host. Install it: ansible-playbook playbooks/site.yml"
                )
            return ""
        status, out, err = self.module.run_command([self.docker, "image", "inspect", name])
        if status:
            # Check mode comes before the run that brings the image.
            if "No such image" not in err or not self.module.check_mode:
                self.problems.append(
                    f"image {name} (vllm_image) is not on this host: {err.strip()}. Bring it: ansible-playbook playbooks/site.yml"
                )
            return ""
        facts = json.loads(out)[0]
        self.problems += preflight.platform_problems(
            name, facts["Os"], facts["Architecture"], platform.machine()
        )
        return str(facts["Id"])

    def flags(self, image_id: str) -> None:
        """Compare the flags with those that the image's engine lists; asked once per image and remembered."""
        cache = os.path.join(FLAGS_DIRECTORY, f"{image_id.rpartition(':')[2]}.json")
        try:
            with open(cache, encoding="utf-8") as file:
                known: list[str] = json.load(file)
        except (OSError, ValueError):
            known = self._ask_engine()
            if known and not self.module.check_mode:
                os.makedirs(FLAGS_DIRECTORY, exist_ok=True)
                with open(f"{cache}.new", "w", encoding="utf-8") as file:
                    json.dump(known, file)
                os.replace(f"{cache}.new", cache)
        if known:
            argv = preflight.engine_arguments(self.config["command"], self.config["image"])
            self.problems += preflight.flag_problems(argv, known, self.config["image"])

    def ports(self) -> None:
        socket_statistics = self.module.get_bin_path("ss")
        if not socket_statistics:
            return
        _status, out, _err = self.module.run_command([socket_statistics, "-Hltnp"])
        wanted = preflight.wanted_ports(self.config)
        listeners = [
            preflight.Listener(port, pid, name, _read(f"/proc/{pid}/cgroup"))
            for port, pid, name in preflight.parse_listeners(out)
            if port in wanted.values()
        ]
        self.problems += preflight.port_problems(wanted, listeners, self._our_containers())

    def memory(self) -> None:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.problems += preflight.memory_problems(self.config["memory"]["budget_gib"], total)

    def fabric(self) -> None:
        """The direct link to the other Spark; only what is about to start needs it."""
        pair = self.config["pair"]
        tools = {name: self.module.get_bin_path(name) for name in ("ip", "ping")}
        missing = [name for name, path in tools.items() if not path]
        if missing:
            self.problems.append(
                f"{' and '.join(missing)} is not on this host, so the direct link cannot be checked. Install the packages iproute2 and iputils-ping."
            )
            return
        _status, out, _err = self.module.run_command([tools["ip"], "-json", "route", "get", pair["peer"]])
        link = preflight.parse_route(out)
        if link and not link.router:
            mtu = int(_read(f"/sys/class/net/{link.device}/mtu") or 0)
            ping = [tools["ping"], "-c", "2", "-i", "0.2", "-W", "1", "-M", "do"]
            size = str(preflight.payload(pair["peer"], mtu))
            link = dataclasses.replace(
                link,
                mtu=mtu,
                answers=self.module.run_command([*ping, pair["peer"]])[0] == 0,
                answers_whole=self.module.run_command([*ping, "-s", size, pair["peer"]])[0] == 0,
            )
        self.problems += preflight.fabric_problems(pair, link)

    def _ask_engine(self) -> list[str]:
        command = preflight.help_command(self.config["command"], self.config["image"])
        status, out, err = self.module.run_command([str(self.docker), *command[1:]])
        known = preflight.parse_help(out)
        if status or "--max-model-len" not in known:
            self.problems.append(
                f"the engine in {self.config['image']} did not list its flags (status {status}): {modes.tail((err or out).splitlines(), 5)}. "
                f"Try it on the host: {' '.join(command)}"
            )
            return []
        return known

    def _our_containers(self) -> list[str]:
        if not self.docker:
            return []
        _status, out, _err = self.module.run_command(
            [self.docker, "inspect", "--format={{.Id}}", *preflight.OUR_CONTAINERS]
        )
        return [line for line in out.split() if len(line) == 64]


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def main() -> None:
    """Look at everything, then report everything."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["replica", "tp"]},
            "configs": {"type": "list", "elements": "dict"},
        },
        required_one_of=[("mode", "configs")],
        mutually_exclusive=[("mode", "configs")],
        supports_check_mode=True,
    )
    mode: str | None = module.params["mode"]
    configs: list[dict[str, t.Any]] = module.params["configs"] or []
    if mode:
        installed = Spark(module).config(mode)
        if installed is None:
            module.fail_json(
                msg=f"Mode {mode} is not installed on this host. Nothing was stopped. Install it: ansible-playbook playbooks/site.yml",
                problems=[],
            )
        configs = [t.cast("dict[str, t.Any]", installed)]
    # The modes share most of what they need: what is missing for both is said once.
    looks = [Preflight(module, config) for config in configs]
    problems = list(dict.fromkeys(problem for look in looks for problem in look.look(fabric=mode == "tp")))
    if problems:
        listed = "\n".join(f"- {problem}" for problem in problems)
        module.fail_json(
            msg=f"This Spark lacks what it needs. Nothing was stopped.\n{listed}", problems=problems
        )
    module.exit_json(changed=False, problems=problems, image_id=looks[0].image_id)


if __name__ == "__main__":
    main()
