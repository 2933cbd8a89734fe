# SPDX-License-Identifier: GPL-3.0-or-later
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What one Spark shall run in each mode, worked out from a preset and the inventory. Private to the collection.

Pure: nothing is read or contacted here. Everything that is wrong is collected, so that one run names it all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean

from . import _command as command
from . import _memory as memory

MODES = ("replica", "tp")
WISHES = (*MODES, "stopped")

# Flags that a role variable sets; written as a free flag they would contradict it, so they are refused.
OWNED_FLAGS = {
    "api-key": "vllm_api_key",
    "distributed-executor-backend": "vllm_tp_hosts",
    "gpu-memory-utilization": "vllm_gpu_memory_utilization or vllm_tp_gpu_memory_utilization",
    "device-memory-utilization": "vllm_gpu_memory_utilization or vllm_tp_gpu_memory_utilization",
    "headless": "vllm_tp_hosts",
    "host": "vllm_host",
    "master-addr": "fabric_address",
    "master-port": "vllm_tp_rendezvous_port",
    "max-num-seqs": "vllm_max_requests or vllm_tp_max_requests",
    "model": "vllm_model_path",
    "nnodes": "vllm_tp_hosts",
    "node-rank": "vllm_tp_hosts",
    "port": "vllm_port",
    "served-model-name": "vllm_served_model_name",
    "shutdown-timeout": "vllm_shutdown_timeout",
    "tensor-parallel-size": "vllm_tp_hosts",
}
# Options that the agent's ownership of the container rests on, or that would put a secret on a command line.
OWNED_OPTIONS = {
    "detach": "the agent runs the container in the foreground",
    "entrypoint": "the command is always `vllm serve`",
    "env": "use vllm_environment",
    "env-file": "use vllm_environment",
    "init": "always on",
    "interactive": "the engine reads no input",
    "name": "one name per mode",
    "pull": "an image is brought by the role, never at a start",
    "restart": "systemd restarts the unit; two owners of one container fight",
    "rm": "always on",
    "sig-proxy": "only the agent signals the engine",
    "tty": "the engine reads no input",
}
# A tag that is moved to a new image every now and then; a dated or versioned tag is taken as it is.
MOVING_TAG = re.compile(r"(^|[-_.])(latest|nightly|main|master|dev|edge|stable)$")
_PORT_HINT = "Give a free TCP port."
_SECONDS_HINT = "Seconds."
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Problems(list[str]):
    """Collects what is wrong, each as: variable, value, what is allowed, what to do."""

    def number(
        self, name: str, value: object, low: float, high: float, hint: str, whole: bool = False
    ) -> float:
        """Read a number between two bounds, both included; a problem (and the lower bound) when it is none."""
        kind = "a whole number" if whole else "a number"
        try:
            number = float(value)  # type: ignore[arg-type]
            fits = (
                low <= number <= high and not isinstance(value, bool) and (not whole or number == int(number))
            )
        except (TypeError, ValueError):
            fits = False
        if not fits:
            self.append(f"{name} is {value!r}; allowed is {kind} from {low:g} to {high:g}. {hint}")
            return low
        return number

    def truth(self, name: str, value: object) -> bool:
        """Read a yes or no in any form that Ansible takes; a problem (and no) when it is none."""
        try:
            return bool(boolean(value))
        except TypeError:
            self.append(f"{name} is {value!r}; allowed is true or false. Set it to one of them.")
            return False

    def mapping(self, name: str, value: object) -> dict[str, Any]:
        """Read a mapping; a problem (and an empty one) when it is none."""
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.append(
                f"{name} is {value!r}; allowed is a mapping of names to values, like {{max-model-len: 131072}}."
            )
            return {}
        return dict(value)


def engine_plan(
    preset: Mapping[str, Any],
    settings: Mapping[str, Any],
    host: str,
    pair: Mapping[str, Any],
) -> dict[str, Any]:
    """Work out what ``host`` shall run.

    ``preset`` is the content of a preset file, ``settings`` the role's variables without their ``vllm_`` prefix, and
    ``pair`` maps the Sparks named for tp mode to their address on the direct link, head first.

    Returns ``problems`` (a list of texts, empty when all is well), ``image``, ``replica`` and ``tp`` (each a mapping
    with ``config``, what the agent reads, ``environment``, what the engine gets, and ``capacity``, or None), and
    ``tp_unavailable`` (why there is no tp mode on this host, or an empty text).
    """
    problems = Problems()
    image = _image(preset, settings, problems)
    unavailable = _why_no_tp(host, pair)
    plan: dict[str, Any] = {
        "problems": problems,
        "image": image,
        "tp_unavailable": unavailable,
        "replica": None,
        "tp": None,
    }
    _check_common(settings, problems)
    for mode in MODES:
        if mode == "replica" or not unavailable:
            plan[mode] = _ModePlan(mode, preset, settings, host, pair, problems).plan(image)
    # Both modes share most settings: what is wrong with one of those is said once.
    plan["problems"] = list(dict.fromkeys(problems))
    return plan


def host_mode(mode: object, host: str, pair: Sequence[str]) -> str:
    """Which mode this host takes part in when the farm goes to ``mode``: a Spark outside the pair keeps its copy."""
    return "replica" if mode == "tp" and host not in pair else str(mode)


def mode_problems(
    mode: object, sparks: Sequence[str], asked: Sequence[str], plans: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Why the Sparks cannot go to ``mode``.

    ``sparks`` are all that the inventory has, ``asked`` those that this run may touch (``--limit``), and ``plans`` maps
    each of those to its engine plan.
    """
    if mode not in WISHES:
        return [
            f"mode is {mode!r}; allowed are {', '.join(WISHES)}. "
            "Say it on the command line: ansible-playbook playbooks/switch_mode.yml -e mode=replica"
        ]
    problems = []
    left_out = [spark for spark in sparks if spark not in asked]
    if left_out:
        problems.append(
            f"--limit leaves out {', '.join(left_out)}, and a switch of some Sparks only would split them. Run it without --limit."
        )
    reasons = {spark: str(plans[spark]["tp_unavailable"]) for spark in asked if spark in plans}
    if mode == "tp" and all(reasons.values()):
        problems.append("mode is 'tp', which cannot be: " + "; ".join(dict.fromkeys(reasons.values())) + ".")
    return problems


def wanted_mode(
    enabled: Mapping[str, Sequence[str]], pair: Sequence[str], first_install: bool, initial: str
) -> dict[str, Any]:
    """The mode that the Sparks' enabled units ask for together.

    ``enabled`` maps each Spark to the modes whose units are enabled there. Returns ``mode`` and ``problems``.
    Where nothing is enabled anywhere the wish is ``stopped``, but on a first install it is ``initial``.
    """
    problems: list[str] = []
    for spark, modes in enabled.items():
        if len(modes) > 1:
            problems.append(f"{spark} has both modes enabled ({', '.join(modes)})")
    members = {spark: modes for spark, modes in enabled.items() if spark in pair} or dict(enabled)
    # A Spark that has nothing enabled yet joins what the others do: a new one, or one whose first run was broken off.
    wishes = {modes[0] for modes in members.values() if modes}
    if len(wishes) > 1:
        said = ", ".join(f"{spark} {modes[0] if modes else 'stopped'}" for spark, modes in members.items())
        problems.append(f"the pair is split: {said}")
    if problems:
        problems = [
            f"{'; '.join(problems)}. Bring them to one mode: ansible-playbook playbooks/switch_mode.yml -e mode=replica (or tp)"
        ]
    if wishes:
        return {"mode": sorted(wishes)[0], "problems": problems}
    outside = any(modes for modes in enabled.values())
    return {"mode": "replica" if outside else initial if first_install else "stopped", "problems": problems}


def _why_no_tp(host: str, pair: Mapping[str, Any]) -> str:
    if len(pair) != 2:
        return (
            f"vllm_tp_hosts names {len(pair)} Spark{'s' if len(pair) != 1 else ''} ({', '.join(pair) or 'none'}), and tensor "
            "parallelism takes exactly two. Add the second Spark to group sparks, or stay in mode replica"
        )
    missing = [spark for spark, address in pair.items() if not address]
    if missing:
        return f"fabric_address is not set for {' and '.join(missing)}: give each Spark of the pair its address on the direct link"
    if host not in pair:
        return f"{host} is not one of the two Sparks in vllm_tp_hosts ({', '.join(pair)}); in mode tp it keeps its own copy"
    return ""


def _image(preset: Mapping[str, Any], settings: Mapping[str, Any], problems: Problems) -> str:
    image = str(settings.get("image") or preset.get("image") or "")
    if not image:
        problems.append(
            "vllm_image is not set and the preset names none; give it as name@sha256:... or name:tag."
        )
        return image
    name, _at, digest = image.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    moving = not digest and (not tag or MOVING_TAG.search(tag))
    if moving and not problems.truth("vllm_image_allow_moving_tag", settings.get("image_allow_moving_tag")):
        problems.append(
            f"vllm_image is {image!r}, a tag that moves: the two Sparks, or today and tomorrow, would run different engines. "
            "Pin it (name@sha256:... or a dated tag), or set vllm_image_allow_moving_tag: true."
        )
    return image


def _check_common(settings: Mapping[str, Any], problems: Problems) -> None:
    """What belongs to no mode: the ports together, and what only the unit reads."""
    ports: dict[float, str] = {}
    for name in ("port", "replica_agent_port", "tp_agent_port", "tp_heartbeat_port", "tp_rendezvous_port"):
        port = problems.number(f"vllm_{name}", settings.get(name), 1, 65535, _PORT_HINT, whole=True)
        if port in ports:
            problems.append(f"vllm_{name} and vllm_{ports[port]} are both {port:g}; give each its own port.")
        ports[port] = name
    problems.number("vllm_restart_delay", settings.get("restart_delay"), 1, 86400, _SECONDS_HINT, whole=True)


class _ModePlan:
    """The plan of one mode; the parts share what they are made from."""

    def __init__(
        self,
        mode: str,
        preset: Mapping[str, Any],
        settings: Mapping[str, Any],
        host: str,
        pair: Mapping[str, Any],
        problems: Problems,
    ) -> None:
        self.mode = mode
        # The variables of mode tp carry its name; those of mode replica are the plain ones.
        self.prefix = "tp_" if mode == "tp" else ""
        self.preset = preset
        self.of_mode = problems.mapping(f"preset: {mode}", preset.get(mode))
        self.settings = settings
        self.problems = problems
        self.addresses = list(pair.values())
        self.rank = list(pair).index(host) if mode == "tp" else None
        self.headless = bool(self.rank)
        model = problems.mapping("preset: model", preset.get("model"))
        self.model_path = str(
            settings.get("model_path") or f"{settings.get('models_directory')}/{model.get('repository', '')}"
        )
        self.served_name = str(
            settings.get("served_model_name") or model.get("served_name") or self.model_path
        )
        self.environment_file = f"{settings.get('config_directory')}/{mode}.env"

    def plan(self, image: str) -> dict[str, Any]:
        """The agent's configuration, the engine's environment, and what the memory holds."""
        share, budget_gib = self.share()
        flags = self.owned_flags(share) | self.free_flags()
        measured = self.problems.mapping("preset: measured", self.preset.get("measured")).get(self.mode)
        return {
            "config": self.config(image, flags, budget_gib),
            "environment": self.environment(),
            "cache_directories": self.cache_directories(),
            "capacity": _capacity(measured, budget_gib, flags.get("max-model-len")),
        }

    def setting(self, name: str, fallback: Any = None) -> Any:
        """A variable of this mode: the inventory's, else the preset's, else the fallback."""
        return _first(self.settings.get(f"{self.prefix}{name}"), self.of_mode.get(name), fallback)

    def seconds(self, name: str, low: int = 1, high: int = 86400) -> int:
        """A variable that is a time. A value given on the command line is a text, so it is read as a number."""
        hint = _SECONDS_HINT
        return int(self.problems.number(f"vllm_{name}", self.settings.get(name), low, high, hint, whole=True))

    def port(self, name: str) -> int:
        """A variable that is a port."""
        value = self.settings.get(name)
        return int(self.problems.number(f"vllm_{name}", value, 1, 65535, _PORT_HINT, whole=True))

    def share(self) -> tuple[float, float]:
        """The engine's share of the memory, and the GiB that this is."""
        problems, settings = self.problems, self.settings
        hint = "GiB that the GPU sees; 121.69 on a DGX Spark."
        device = problems.number("vllm_device_memory_gib", settings.get("device_memory_gib"), 0.1, 4096, hint)
        hint = "GiB that the rest of the host needs."
        reserved = problems.number(
            "vllm_memory_reserved_gib", settings.get("memory_reserved_gib"), 0, device, hint
        )
        largest = memory.largest_share(device, reserved)
        name = f"vllm_{self.prefix}gpu_memory_utilization"
        stated = _first(settings.get(f"{self.prefix}gpu_memory_utilization"))
        if stated is None:
            share = min(float(self.of_mode.get("gpu_memory_utilization") or largest), largest)
            if share <= 0:
                problems.append(
                    f"vllm_memory_reserved_gib is {reserved:g} of {device:g} GiB (vllm_device_memory_gib): nothing is left for the engine. Lower it."
                )
        else:
            hint = "It is the engine's share of the whole memory of the Spark, like 0.74."
            share = problems.number(name, stated, 0.01, 0.99, hint)
            if share > largest:
                problems.append(
                    f"{name} is {share:g}, which leaves {device - memory.budget(device, share):.1f} GiB of {device:g} to the rest of the "
                    f"host; vllm_memory_reserved_gib asks for {reserved:g}. Allowed is at most {largest:g}: lower the share, or state "
                    "that less must be kept."
                )
        return share, memory.budget(device, share)

    def owned_flags(self, share: float) -> dict[str, Any]:
        """The flags that role variables set."""
        hint = "Requests served at once."
        most = self.problems.number(
            f"vllm_{self.prefix}max_requests", self.setting("max_requests", 12), 1, 4096, hint, whole=True
        )
        flags: dict[str, Any] = {
            "host": self.settings.get("host"),
            "port": self.port("port"),
            "served-model-name": [self.served_name],
            "gpu-memory-utilization": f"{share:g}",
            "max-num-seqs": int(most),
            "shutdown-timeout": self.seconds("shutdown_timeout"),
        }
        if self.rank is not None:
            flags |= {
                "tensor-parallel-size": 2,
                "distributed-executor-backend": "mp",
                "nnodes": 2,
                "node-rank": self.rank,
                "master-addr": self.addresses[0],
                "master-port": self.port("tp_rendezvous_port"),
            }
        if self.headless:
            flags["headless"] = True
        speculative = self.speculative()
        return flags | ({"speculative-config": speculative} if speculative else {})

    def free_flags(self) -> dict[str, Any]:
        """The preset's flags under those of the inventory."""
        own = {
            name: self.problems.mapping(f"vllm_{name}", self.settings.get(name))
            for name in ("engine_flags", f"{self.mode}_flags")
        }
        for name, flags in own.items():
            for key in flags:
                owner = OWNED_FLAGS.get(command.flag_name(key))
                if owner:
                    self.problems.append(
                        f"vllm_{name} has {key!r}, which is not free: it is set by {owner}. Use that."
                    )
        return command.merged(
            self.preset.get("engine_flags"), self.of_mode.get("engine_flags"), *own.values()
        )

    def speculative(self) -> dict[str, Any]:
        """The speculative decoding's settings, empty when it is off."""
        base = self.problems.mapping("preset: speculative", self.preset.get("speculative"))
        base |= self.problems.mapping(f"preset: {self.mode}: speculative", self.of_mode.get("speculative"))
        name = f"vllm_{self.prefix}speculative_tokens"
        hint = "Tokens that the model drafts ahead; 0 turns it off."
        tokens = self.problems.number(name, self.setting("speculative_tokens", 0), 0, 16, hint, whole=True)
        if tokens and not base:
            self.problems.append(
                f"{name} is {tokens:g}, but the preset has no `speculative` method. Set it to 0, or give the preset one."
            )
        return {**base, "num_speculative_tokens": int(tokens)} if tokens and base else {}

    def config(self, image: str, flags: Mapping[str, Any], budget_gib: float) -> dict[str, Any]:
        """What the agent reads."""
        settings = self.settings
        container = f"vllm-{self.mode}"
        shutdown = self.seconds("shutdown_timeout")
        return {
            "mode": self.mode,
            "unit": f"{container}.service",
            "container": container,
            "image": image,
            "model": self.model_path,
            "served_model_name": self.served_name,
            "command": [
                *(
                    "docker",
                    "run",
                    "--rm",
                    "--init",
                    "--sig-proxy=false",
                    f"--name={container}",
                    "--entrypoint=",
                ),
                f"--env-file={self.environment_file}",
                *command.docker_options(self.container_options()),
                *(image, "vllm", "serve", self.model_path),
                *command.engine_flags(flags),
            ],
            "environment_file": self.environment_file,
            "api": None if self.headless else {"port": self.port("port")},
            "agent": {"port": self.port(f"{self.mode}_agent_port")},
            "memory": {
                "budget_gib": round(budget_gib, 2),
                "wait_seconds": self.seconds("memory_wait"),
                "drop_page_cache": self.problems.truth(
                    "vllm_drop_page_cache", settings.get("drop_page_cache")
                ),
            },
            "timeouts": {
                "start": self.seconds("start_timeout"),
                "verify": self.seconds("verify_timeout"),
                "drain": self.seconds("drain_timeout"),
                "drain_notice": self.seconds("drain_notice", low=0),
                "engine_shutdown": shutdown,
                # The engine ends by itself first; Docker kills it only when it did not.
                "container_stop": shutdown + 15,
            },
            "start_limit": self.start_limit(),
            "watchdog": self.watchdog(),
            "pair": None if self.rank is None else self.pair(self.rank),
        }

    def start_limit(self) -> dict[str, int]:
        """When the agent gives up."""
        hint = "Failed starts before it stays failed."
        value = self.settings.get("start_limit_burst")
        burst = self.problems.number("vllm_start_limit_burst", value, 1, 100, hint, whole=True)
        return {"burst": int(burst), "served_seconds": self.seconds("start_limit_interval")}

    def watchdog(self) -> dict[str, int]:
        """How the agent tells a wedged engine; all three numbers must be given, as a mapping is taken whole."""
        given = self.problems.mapping("vllm_watchdog", self.settings.get("watchdog"))
        limits = {"interval": 3600, "canary_timeout": 86400, "strikes": 100}
        hint = "Give all of interval, canary_timeout (seconds) and strikes."
        for name in given:
            if name not in limits:
                self.problems.append(
                    f"vllm_watchdog has {name!r}; allowed are {', '.join(limits)}. Take it out."
                )
        return {
            name: int(
                self.problems.number(f"vllm_watchdog.{name}", given.get(name), 1, high, hint, whole=True)
            )
            for name, high in limits.items()
        }

    def pair(self, rank: int) -> dict[str, Any]:
        """How the two agents of a pair find and watch each other."""
        return {
            "rank": rank,
            "size": len(self.addresses),
            "head": self.addresses[0],
            "peer": self.addresses[1 - rank],
            "heartbeat_port": self.port("tp_heartbeat_port"),
            "heartbeat_timeout": self.seconds("tp_heartbeat_timeout", high=15),
            "peer_wait_seconds": self.seconds("tp_peer_wait"),
        }

    def container_options(self) -> dict[str, Any]:
        """Options of ``docker run``: the preset's under the inventory's, and the model's and the caches' mounts."""
        own = self.problems.mapping("vllm_container_options", self.settings.get("container_options"))
        options = command.merged(
            self.preset.get("container_options"), self.of_mode.get("container_options"), own
        )
        for key in options:
            if key in OWNED_OPTIONS:
                self.problems.append(
                    f"vllm_container_options has {key!r}, which is not free: {OWNED_OPTIONS[key]}."
                )
        caches = [f"{source}:{target}" for source, target in self.cache_directories().items()]
        # A mount fails where the folder is missing; a volume would make an empty one.
        return {
            "mount": [
                f"type=bind,source={self.model_path},target={self.model_path},readonly",
                *_items(options.pop("mount", [])),
            ],
            "volume": [*caches, *_items(options.pop("volume", []))],
            **options,
        }

    def cache_directories(self) -> dict[str, str]:
        """Folders on the host that keep what the engine compiled, to their places in the container."""
        directories = self.problems.mapping("preset: cache_directories", self.preset.get("cache_directories"))
        return {
            f"{self.settings.get('cache_directory')}/{name}": str(target)
            for name, target in directories.items()
        }

    def environment(self) -> dict[str, str]:
        """The engine's environment variables: the preset's, those of the direct link, and the inventory's over them."""
        own = {
            name: self.problems.mapping(f"vllm_{name}", self.settings.get(name))
            for name in ("environment", f"{self.mode}_environment")
        }
        environment = command.merged_environment(
            self.preset.get("environment"),
            self.of_mode.get("environment"),
            self.fabric_environment(),
            *own.values(),
        )
        for name, value in environment.items():
            if not ENVIRONMENT_NAME.fullmatch(name):
                self.problems.append(
                    f"vllm_environment has the name {name!r}; allowed are letters, digits and _, not beginning with a digit. Rename it."
                )
            if "\n" in value:
                self.problems.append(
                    f"vllm_environment: {name} has a line break, which an environment file cannot hold. Take it out."
                )
            if name == "VLLM_API_KEY":
                self.problems.append(
                    "vllm_environment has VLLM_API_KEY. Use vllm_api_key, which is kept out of logs and diffs."
                )
        return environment

    def fabric_environment(self) -> dict[str, Any]:
        """Keeps the ranks' traffic on the direct link: left alone, the engine takes the address that leads to the internet."""
        if self.rank is None:
            return {}
        environment: dict[str, Any] = {"VLLM_HOST_IP": self.addresses[self.rank]}
        interface, adapters = self.settings.get("fabric_interface"), self.settings.get("fabric_hcas")
        if interface:
            environment |= dict.fromkeys(
                ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface
            )
        if adapters:
            environment |= {"NCCL_IB_HCA": ",".join(adapters), "NCCL_IB_DISABLE": 0}
        return environment


def _items(value: object) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _capacity(
    measured: Mapping[str, Any] | None, budget_gib: float, context: object
) -> dict[str, Any] | None:
    """KV cache tokens, and requests at the full context, by the preset's measured constants (None without them)."""
    if not measured:
        return None
    tokens = memory.kv_tokens(budget_gib, float(measured["fixed_gib"]), float(measured["kv_bytes_per_token"]))
    return {
        "kv_tokens": tokens,
        "full_context_requests": round(tokens / context, 1) if isinstance(context, int) else None,
    }


def _first(*values: Any) -> Any:
    """The first value that was given (0 and false are given; None and an empty text are not)."""
    return next((value for value in values if value is not None and value != ""), None)
