#!/usr/bin/python
# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_preflight
short_description: See whether one Spark has everything its modes need
version_added: 0.1.0
description:
  - Looks at the model's files, the image and its platform, flags that the image's engine does not know, ports that others hold,
    memory, disk, and what else uses the GPU; with O(mode) also whether the installed files are those of O(files), and with
    O(mode=tp) at the direct link to the other Spark.
  - Reports everything that is wrong at once, and changes nothing on the host but a cache of the flags that an image knows.
  - Does not fail for what it finds. What must be the same on all Sparks is returned, for whoever has asked them all.
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
  starts:
    description: Whether an engine shall start afterwards. If not, it does not matter what else uses ports, memory and GPU.
    type: bool
    default: true
  files:
    description:
      - The path of each file that must be installed to the SHA-256 of what must be in it.
      - Neither content nor digest is shown, as the files may hold a secret; what is told is their names.
    type: dict
    default: {}
  neighbours:
    description: Names of containers, units and processes that may use the GPU beside the engine.
    type: list
    elements: str
    default: []
  disk_reserved_gib:
    description: Space in GiB that must be free on each file system that an engine writes to.
    type: float
    default: 5.0
  cache_directory:
    description: The folder for what the engine compiles.
    type: path
    default: /var/cache/vllm
  hcas:
    description: The RDMA devices of the direct link that the engine uses.
    type: list
    elements: str
    default: []
  clock:
    description: The time on the machine that asks, in seconds since 1970; without it RV(ignore:clock_ahead) is not told.
    type: float
extends_documentation_fragment:
  - twospark.serving.attributes
attributes:
  check_mode:
    details: An image that is not there yet is no problem in check mode, since the run itself would bring it.
  diff_mode:
    support: none
seealso:
  - plugin: twospark.serving.preflight_problems
    plugin_type: filter
author:
  - The twospark.serving founders (@twospark)
"""

EXAMPLES = r"""
- name: Is everything there for tensor parallelism?
  twospark.serving.serving_preflight:
    mode: tp
  register: found

- name: Would these settings work?
  twospark.serving.serving_preflight:
    configs: ["{{ plan.replica.config }}", "{{ plan.tp.config }}"]
  register: found
"""

RETURN = r"""
problems:
  description: What is wrong on this host, each with what is allowed and what to do; empty when all is well.
  returned: success
  type: list
  elements: str
  sample: ["model folder /srv/models/x does not exist"]
image_id:
  description: The id of the image on this host; empty when it is not there.
  returned: success
  type: str
  sample: sha256:5d0da3dc976460b72c77d94c8a1ad043720b0416bfc16c52c45d4847e53fadb6
model:
  description: The name under which the model is served.
  returned: success
  type: str
  sample: qwen3.8-flash-next
weights:
  description: Each of the model's files to its size in bytes, and of a small one also to a digest.
  returned: success
  type: dict
  sample: {config.json: 717 0a1b2c3d4e5f6071, model.safetensors: '855440000'}
clock_ahead:
  description: How many seconds this host's clock is ahead of the one that asks; the way there counts, too.
  returned: when O(clock) is given
  type: float
  sample: 0.4
"""

import dataclasses
import hashlib
import json
import os
import platform
import socket
import time
import typing as t

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.twospark.serving.plugins.module_utils import _fabric as fabric
from ansible_collections.twospark.serving.plugins.module_utils import _modes as modes
from ansible_collections.twospark.serving.plugins.module_utils import _preflight as preflight
from ansible_collections.twospark.serving.plugins.module_utils import _weights as weights
from ansible_collections.twospark.serving.plugins.module_utils._spark import STATE_DIRECTORY, Spark, read

FLAGS_DIRECTORY = f"{STATE_DIRECTORY}/flags"
DEVICES = "/sys/class/infiniband"
GIB = 2**30


class Preflight:
    """The looking; the judgements are in module_utils."""

    def __init__(self, module: AnsibleModule, config: dict[str, t.Any]) -> None:
        self.module = module
        self.config = config
        self.spark = Spark(module)
        self.problems: list[str] = []
        self.docker = module.get_bin_path("docker")
        self.image_id = ""

    def look(self, starts: bool) -> list[str]:
        """Everything that is wrong with what the mode needs of its host, and if it ``starts``, now."""
        self.problems += weights.problems(
            self.config["model"], preflight.mounted_alike(self.config["command"])
        )
        self.image_id = self.image()
        if self.image_id:
            self.flags(self.image_id)
        if starts:
            self.problems += self.spark.port_problems(self.config)
            self.memory()
        return self.problems

    def image(self) -> str:
        """Judge the image and return its id (empty when it is not there)."""
        name = self.config["image"]
        if not self.docker:
            if not self.module.check_mode:
                self.problems.append(
                    "docker is not installed on this host. Install it: ansible-playbook playbooks/site.yml"
                )
            return ""
        status, out, err = self.spark.run(self.docker, "image", "inspect", name)
        if status:
            if "No such image" not in err:
                self.problems.append(
                    f"Docker does not answer (status {status}: {err.strip()}). Look on this host: systemctl status docker"
                )
            # Check mode comes before the run that brings the image.
            elif not self.module.check_mode:
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

    def memory(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        processes = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            pages = read(f"/proc/{pid}/statm").split()
            if len(pages) > 2:
                gib = (int(pages[1]) - int(pages[2])) * page / GIB
                name = read(f"/proc/{pid}/comm").strip()
                processes.append(preflight.Process(name, gib, read(f"/proc/{pid}/cgroup")))
        total = os.sysconf("SC_PHYS_PAGES") * page / GIB
        ours = [one["Id"] for one in self.spark.containers() if preflight.is_ours(one)]
        self.problems += preflight.memory_problems(
            self.config["memory"]["budget_gib"], total, processes, ours
        )

    def disk(self) -> None:
        """The file systems that an engine writes to; each is named by the first folder that is on it."""
        folders = [self.module.params["cache_directory"], STATE_DIRECTORY, "/var/lib/docker"]
        if self.docker:
            status, out, _err = self.spark.run(self.docker, "info", "--format={{.DockerRootDir}}")
            folders[-1] = out.strip() if not status and out.strip() else folders[-1]
        free: dict[int, tuple[str, float]] = {}
        for folder in folders:
            there = os.path.abspath(folder)
            while not os.path.exists(there):
                there = os.path.dirname(there)
            space = os.statvfs(there)
            free.setdefault(os.stat(there).st_dev, (folder, space.f_bavail * space.f_frsize / GIB))
        self.problems += preflight.disk_problems(dict(free.values()), self.module.params["disk_reserved_gib"])

    def neighbours(self) -> None:
        """What else uses the GPU, or starts engines by itself."""
        found = []
        systemctl = self.module.get_bin_path("systemctl", required=True)
        kinds = "--type=service,timer"
        for arguments in (
            ["list-units", kinds, "--state=active,activating"],
            ["list-unit-files", kinds, "--state=enabled"],
        ):
            _status, out, _err = self.module.run_command(
                [systemctl, *arguments, "--plain", "--no-legend", "--no-pager"]
            )
            found += preflight.launching_units(out)
        nvidia_smi = self.module.get_bin_path("nvidia-smi")
        told = ""
        if nvidia_smi:
            status, told, err = self.spark.run(
                nvidia_smi, "--query-compute-apps=pid,process_name", "--format=csv,noheader"
            )
            self.problems += preflight.gpu_problems(status, err or told)
        pids = (line.partition(",")[0].strip() for line in told.splitlines())
        cgroups = {int(pid): read(f"/proc/{pid}/cgroup") for pid in pids if pid.isdigit()}
        # After the processes, so that each is in one of them.
        containers = self.spark.containers()
        found += preflight.containers_on_gpu(containers)
        found += preflight.processes_on_gpu(told, cgroups, containers)
        self.problems += preflight.neighbour_problems(dict.fromkeys(found), self.module.params["neighbours"])

    def files(self) -> None:
        """Installed files that are not as the inventory says."""
        wanted: dict[str, str] = self.module.params["files"]
        self.problems += preflight.file_problems(
            [path for path, digest in wanted.items() if _digest(path) != digest]
        )

    def direct_link(self) -> None:
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
        link = fabric.parse_route(out)
        if link and not link.router:
            mtu = int(read(f"/sys/class/net/{link.device}/mtu") or 0)
            ping = [tools["ping"], "-c", "2", "-i", "0.2", "-W", "1", "-M", "do"]
            size = str(fabric.payload(pair["peer"], mtu))
            link = dataclasses.replace(
                link,
                mtu=mtu,
                answers=self.module.run_command([*ping, pair["peer"]])[0] == 0,
                answers_whole=self.module.run_command([*ping, "-s", size, pair["peer"]])[0] == 0,
            )
        problems = fabric.link_problems(pair, link)
        if not problems:
            ports = preflight.pair_ports(self.config)
            problems = fabric.port_problems(
                pair["peer"], [port for port in ports if _is_silent(pair["peer"], port)]
            )
        there = os.listdir(DEVICES) if os.path.isdir(DEVICES) else []
        names = fabric.chosen(self.module.params["hcas"], there)
        rails = {name: self._rail(name, str(tools["ip"])) for name in names}
        self.problems += problems + fabric.rail_problems(rails)

    def _rail(self, name: str, ip: str) -> fabric.Rail:
        device, _colon, port = name.partition(":")
        folder = f"{DEVICES}/{device}"
        if not os.path.isdir(folder):
            return fabric.Rail(exists=False)
        try:
            interface = os.listdir(f"{folder}/device/net")[0]
        except (OSError, IndexError):
            interface = ""
        _status, out, _err = self.module.run_command([ip, "-json", "address", "show", "dev", interface])
        state = read(f"{folder}/ports/{port or 1}/state").strip()
        mtu = int(read(f"/sys/class/net/{interface}/mtu") or 0)
        return fabric.Rail(True, state, interface, fabric.networks(out), mtu)

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


def _is_silent(address: str, port: int) -> bool:
    """Is a connection neither taken nor refused? Somebody who refuses was reached."""
    try:
        with socket.create_connection((address, port), timeout=2):
            return False
    except ConnectionRefusedError:
        return False
    except OSError:
        return True


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return ""


def main() -> None:
    """Look at everything, then report everything."""
    asked = time.time()
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "choices": ["replica", "tp"]},
            "configs": {"type": "list", "elements": "dict"},
            "starts": {"type": "bool", "default": True},
            # Digests of files with secrets.
            "files": {"type": "dict", "default": {}, "no_log": True},
            "neighbours": {"type": "list", "elements": "str", "default": []},
            "disk_reserved_gib": {"type": "float", "default": 5.0},
            "cache_directory": {"type": "path", "default": "/var/cache/vllm"},
            "hcas": {"type": "list", "elements": "str", "default": []},
            "clock": {"type": "float"},
        },
        required_one_of=[("mode", "configs")],
        mutually_exclusive=[("mode", "configs")],
        supports_check_mode=True,
    )
    mode: str | None = module.params["mode"]
    configs: list[dict[str, t.Any]] = module.params["configs"] or []
    problems: list[str] = []
    if mode:
        installed = Spark(module).config(mode)
        configs = [installed] if installed else []
        if not installed:
            problems.append(
                f"mode {mode} is not installed on this host. Install it: ansible-playbook playbooks/site.yml"
            )
    # The modes share most of what they need: what is missing for both is said once.
    looks = [Preflight(module, config) for config in configs]
    for look in looks:
        problems += look.look(module.params["starts"])
    if looks:
        host = Preflight(module, configs[-1])
        host.disk()
        host.files()
        if module.params["starts"]:
            host.neighbours()
        if mode == "tp":
            host.direct_link()
        problems += host.problems
    result: dict[str, t.Any] = {
        "problems": list(dict.fromkeys(problems)),
        "image_id": looks[0].image_id if looks else "",
        "model": configs[0]["served_model_name"] if configs else "",
        "weights": weights.fingerprints(configs[0]["model"]) if configs else {},
    }
    if module.params["clock"] is not None:
        result["clock_ahead"] = round(asked - module.params["clock"], 1)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
