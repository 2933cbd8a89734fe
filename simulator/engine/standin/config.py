# SPDX-License-Identifier: GPL-3.0-or-later
"""What one run of the stand-in is to be: the checked command line and the simulation's own knobs."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from standin import VERSION
from standin.cli import FORK_LOAD_FORMATS, NAMES, refuse, validation_errors

GIB = 2**30

# Fitted to the measured pair of figures: 121.69 GiB at 0.74 -> 0.76 M tokens, at 0.78 -> 1.08 M.
WEIGHTS_GIB = 73.97
OVERHEAD_GIB = 4.52
KV_BYTES_PER_TOKEN = 16_333
# Per rank of a split model: half the weights, and most of a token's cache. Measured: more than 3 M tokens.
TP_KV_BYTES_PER_TOKEN = 15_000

BLOCK_SIZE = 16
DEFAULT_CONTEXT = 262_144

# Real features that change how the engine serves and that the stand-in does not imitate.
NOT_IMITATED = ("uds", "grpc", "ssl_keyfile", "ssl_certfile", "data_parallel_rank", "middleware")


@dataclass(frozen=True)
class Settings:
    """The simulation's knobs, all from the environment; README.md describes them."""

    load_seconds: float
    speed: float
    device_memory_gib: float
    reply_tokens: int
    control: Path | None
    fault_at_start: str
    fault_when_ready: str

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Settings:
        """Read the STANDIN_* variables. Exits with 1 when one is not a number in its range."""

        def number(name: str, default: float, minimum: float) -> float:
            text = environ.get(name) or str(default)
            try:
                value = float(text)
            except ValueError:
                value = minimum - 1
            if not value >= minimum:
                refuse(f"{name} is {text!r}; it must be a number of at least {minimum:g}")
            return value

        return cls(
            load_seconds=number("STANDIN_LOAD_SECONDS", 8, 0),
            speed=number("STANDIN_SPEED", 1, 0.001),
            device_memory_gib=number("STANDIN_DEVICE_MEMORY_GIB", 121.69, 0.1),
            reply_tokens=int(number("STANDIN_REPLY_TOKENS", 64, 1)),
            control=Path(environ["STANDIN_CONTROL"]) if environ.get("STANDIN_CONTROL") else None,
            fault_at_start=environ.get("STANDIN_FAULT_AT_START", ""),
            fault_when_ready=environ.get("STANDIN_FAULT_WHEN_READY", ""),
        )


@dataclass(frozen=True)
class EngineConfig:
    """One engine: where it listens, what it serves, how much it holds."""

    args: argparse.Namespace
    settings: Settings
    model: Path
    model_config: Mapping[str, Any]
    served_names: tuple[str, ...]
    host: str
    port: int
    api_keys: tuple[str, ...]
    host_ip: str | None
    execute_timeout: float
    max_model_len: int
    kv_tokens: int
    keep_alive: float

    @property
    def tensor_parallel_size(self) -> int:
        """Over how many Sparks the model is split."""
        size: int = self.args.tensor_parallel_size
        return size

    @property
    def device_memory_gib(self) -> float:
        """What this engine takes of the device's memory."""
        share: float = self.args.gpu_memory_utilization
        return self.settings.device_memory_gib * share

    @property
    def pooling(self) -> bool:
        """Whether the model embeds instead of generating."""
        return bool(self.args.runner == "pooling")

    @property
    def block_size(self) -> int:
        """Tokens per block of the KV cache."""
        return self.args.block_size or BLOCK_SIZE

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts are looked up in the prefix cache; on unless switched off."""
        return self.args.enable_prefix_caching is not False

    @property
    def speculative_tokens(self) -> int:
        """How many tokens each draft proposes; 0 without speculation."""
        return int((self.args.speculative_config or {}).get("num_speculative_tokens", 0))

    @property
    def system_fingerprint(self) -> str | None:
        """As the real one builds it: `vllm-<version>[-tp<N>]-<hash>`."""
        if self.args.fingerprint_mode == "none":
            return None
        if self.args.fingerprint_mode == "custom":
            value: str | None = self.args.fingerprint_value
            return value
        digest = hashlib.sha256(f"{self.model}{sorted(vars(self.args).items())}".encode()).hexdigest()[:8]
        tp = self.tensor_parallel_size
        split = f"-tp{tp}" if tp > 1 and self.args.fingerprint_mode == "full" else ""
        return f"vllm-{VERSION}-standin{split}-{digest}"


def configure(args: argparse.Namespace, settings: Settings, environ: Mapping[str, str]) -> EngineConfig:
    """Check what the real engine checks before it loads. Exits with 1 on what it refuses."""
    _check_values(args)
    _check_parallel(args)
    model, model_config = _read_model(args.model)
    text_config = model_config.get("text_config", model_config)
    heads = text_config.get("num_attention_heads", args.tensor_parallel_size)
    if heads % args.tensor_parallel_size:
        refuse(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size "
            f"({args.tensor_parallel_size})."
        )
    kv_tokens = kv_cache_tokens(args, settings.device_memory_gib)
    keys = args.api_key or ([environ["VLLM_API_KEY"]] if environ.get("VLLM_API_KEY") else [])
    return EngineConfig(
        args=args,
        settings=settings,
        model=model,
        model_config=model_config,
        served_names=tuple(args.served_model_name or [args.model]),
        host=args.host or "0.0.0.0",
        port=args.port,
        api_keys=tuple(key for key in keys if key),
        host_ip=environ.get("VLLM_HOST_IP") or None,
        execute_timeout=float(environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS") or 300),
        max_model_len=_context(args.max_model_len, text_config.get("max_position_embeddings"), kv_tokens),
        kv_tokens=kv_tokens,
        keep_alive=float(environ.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") or 5),
    )


def kv_cache_tokens(args: argparse.Namespace, device_memory_gib: float) -> int:
    """How many tokens the KV cache holds; zero or less when the model leaves no room."""
    tp: int = args.tensor_parallel_size
    bytes_per_token = KV_BYTES_PER_TOKEN if tp == 1 else TP_KV_BYTES_PER_TOKEN
    if args.kv_cache_memory_bytes is not None:
        return int(args.kv_cache_memory_bytes // bytes_per_token)
    free_gib = device_memory_gib * args.gpu_memory_utilization - WEIGHTS_GIB / tp - OVERHEAD_GIB
    return int(free_gib * GIB / bytes_per_token)


def _context(wanted: int | None, supported: int | None, kv_tokens: int) -> int:
    if wanted == -1:
        return max(1, min(supported or DEFAULT_CONTEXT, kv_tokens))
    if wanted is None:
        return supported or DEFAULT_CONTEXT
    if supported is not None and wanted > supported:
        refuse(
            f"User-specified max_model_len ({wanted}) is greater than the derived max_model_len "
            f"(max_position_embeddings={supported} in the model's config.json)."
        )
    return wanted


def _check_values(args: argparse.Namespace) -> None:
    for name in NOT_IMITATED:
        if getattr(args, name):
            refuse(f"the stand-in engine does not imitate --{name.replace('_', '-')}")
    if not 0 < args.gpu_memory_utilization <= 1:
        refuse(
            f"gpu_memory_utilization is {args.gpu_memory_utilization}; it must be greater than 0 and at most 1"
        )
    if not 0 < args.port < 65536:
        refuse(f"port is {args.port}; it must be 1-65535")
    at_least = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
        "shutdown_timeout": 0,
        "max_num_queued_reqs": 0,
    }
    for name, minimum in {**at_least, "max_num_queued_tokens": 0, "block_size": 1}.items():
        value = getattr(args, name)
        if value is not None and value < minimum:
            refuse(f"{name} is {value}; it must be at least {minimum}")
    if args.max_model_len is not None and args.max_model_len < 1 and args.max_model_len != -1:
        refuse(f"max_model_len is {args.max_model_len}; it must be at least 1, or -1 for as much as fits")
    tool, reasoning = args.tool_call_parser, args.reasoning_parser
    if args.enable_auto_tool_choice and tool not in NAMES["tool_call_parsers"]:
        known = ",".join(NAMES["tool_call_parsers"])
        refuse(f"'invalid tool call parser: {tool} (chose from {{ {known} }})'", "KeyError")
    if reasoning and reasoning not in NAMES["reasoning_parsers"]:
        known = ", ".join(NAMES["reasoning_parsers"])
        refuse(f"\"Reasoning parser '{reasoning}' not found. Available parsers: {known}\"", "KeyError")
    if args.kv_cache_dtype not in NAMES["kv_cache_dtypes"]:
        refuse(f"Unknown KV cache dtype {args.kv_cache_dtype}; known: {', '.join(NAMES['kv_cache_dtypes'])}")
    speculation = args.speculative_config or {}
    if unknown := sorted(set(speculation) - set(NAMES["object_keys"]["speculative-config"])):
        problems = [f"{key}\n  Unexpected keyword argument" for key in unknown]
        refuse(validation_errors("speculative-config", problems), "ValidationError")
    if speculation and not int(speculation.get("num_speculative_tokens", 0)) > 0:
        refuse("num_speculative_tokens must be provided with speculative model")


def _check_parallel(args: argparse.Namespace) -> None:
    if args.pipeline_parallel_size != 1 or args.data_parallel_size != 1:
        refuse("the stand-in engine imitates neither pipeline nor data parallelism")
    if args.tensor_parallel_size < 1 or args.nnodes < 1:
        refuse("tensor_parallel_size and nnodes must be at least 1")
    if args.nnodes > 2:
        refuse("the stand-in engine imitates one node or two")
    if args.tensor_parallel_size % args.nnodes:
        refuse(
            f"Invalid data-parallel launch options: `--nnodes {args.nnodes}` must evenly divide "
            f"the total world size ({args.tensor_parallel_size})."
        )
    if args.tensor_parallel_size > args.nnodes:
        refuse(
            f"World size ({args.tensor_parallel_size}) does not fit {args.nnodes} node(s) with 1 GPU each: "
            "set --tensor-parallel-size to the number of nodes."
        )
    if not 0 <= args.node_rank < args.nnodes:
        refuse(
            f"Invalid data-parallel launch options: `--node-rank` must be between 0 and {args.nnodes - 1}; "
            f"got `--node-rank {args.node_rank}`. Set it to this node's zero-based index."
        )
    if bool(args.headless) != (args.node_rank > 0):
        refuse("the stand-in engine imitates --headless on ranks above 0, and only there")


def _read_model(name: str | None) -> tuple[Path, Mapping[str, Any]]:
    folder = Path(name or "Qwen/Qwen3-0.6B")
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        refuse(
            f"Can't load the configuration of '{folder}': {error.strerror}. MODEL must be a folder with config.json."
        )
    except ValueError as error:
        refuse(f"{folder}/config.json is not valid JSON: {error}")
    if not isinstance(config, dict):
        refuse(f"{folder}/config.json must hold a JSON object")
    return folder, config


def known_load_format(name: str) -> bool:
    """Whether upstream or the b12x image has this load format. The real one finds out only while it loads."""
    return name in NAMES["load_formats"] or name in FORK_LOAD_FORMATS
