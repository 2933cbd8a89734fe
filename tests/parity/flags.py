# SPDX-License-Identifier: GPL-3.0-or-later
"""Command lines of ``vllm serve MODEL``, written as a shell would take them, and what every engine shall make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ansible_collections.twospark.serving.plugins.module_utils import _plan as plan
from ansible_collections.twospark.serving.plugins.module_utils import _preflight as preflight

ROLE = Path(__file__).resolve().parents[2] / "roles/vllm"
PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROLE / "presets").glob("*.yml"))}
DEFAULTS = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
PAIR = {"spark-a": "198.18.78.11", "spark-b": "198.18.78.12"}

# Settings of an inventory, with every kind of value; null takes out a preset's flag that only its own image knows.
INVENTORIES: dict[str, dict[str, Any]] = {
    "plain": {"engine_flags": {"gdn-decode-kernel": None}},
    "own flags": {
        "host": "192.0.2.11",
        "gpu_memory_utilization": 0.74,
        "speculative_tokens": 0,
        "engine_flags": {
            "gdn_decode_kernel": None,
            "max_model_len": "256k",
            "enable-prefix-caching": False,
            "kv-cache-memory-bytes": "64M",
            "safetensors-load-strategy": "prefetch",
            "tool-call-parser": "hermes",
            "reasoning-parser": "deepseek_r1",
            "enable-auto-tool-choice": True,
            "compilation-config": {"cudagraph_capture_sizes": [1, 2, 4]},
            "speculative-config.method": "ngram",
            "cudagraph-capture-sizes": [1, 2, 4],
            "lora-modules": ["a=/srv/a", "b=/srv/b"],
            "seed": -1,
            "enable-server-load-tracking": True,
            "max-num-queued-reqs": 64,
            "disable-log-stats": True,
        },
    },
}


def _rendered() -> dict[str, list[str]]:
    """What the role writes for each preset, mode and Spark: the words after ``vllm``."""
    lines = {}
    for preset, content in PRESETS.items():
        for inventory, own in INVENTORIES.items():
            settings = {name.removeprefix("vllm_"): value for name, value in DEFAULTS.items()}
            settings |= {"config_directory": "/etc/vllm", **own}
            for host in PAIR:
                made = plan.engine_plan(content, settings, host, PAIR)
                for mode in plan.MODES:
                    config = made[mode]["config"]
                    words = preflight.engine_arguments(config["command"], config["image"])
                    lines[f"{preset}, {inventory}, {mode} on {host}"] = words[1:]
    return lines


RENDERED = _rendered()

# What config.yml says beside --max-num-seqs 8.
_OF_CONFIG = "--enable-prefix-caching --no-enforce-eager --served-model-name a b"
_OF_CONFIG += ' --speculative-config \'{"method": "ngram"}\''

# Each is understood as the line beside it.
SPELLINGS = {
    "--max_num_seqs 8": "--max-num-seqs 8",
    "--max-num-seqs=8": "--max-num-seqs 8",
    "--gpu-memory-util 0.7": "--gpu-memory-utilization 0.7",
    "--device-memory-utilization 0.7": "--gpu-memory-utilization 0.7",
    '--speculative_config \'{"method": "ngram"}\'': '--speculative-config \'{"method": "ngram"}\'',
    '-sc \'{"method": "ngram"}\'': '--speculative-config \'{"method": "ngram"}\'',
    "--speculative-config.method ngram": '--speculative-config \'{"method": "ngram"}\'',
    "--speculative_config.num_speculative_tokens 4": "--speculative-config '{\"num_speculative_tokens\": 4}'",
    "--speculative-config.a.b=1": '--speculative-config \'{"a": {"b": 1}}\'',
    "--speculative-config.a+ x,y": '--speculative-config \'{"a": ["x", "y"]}\'',
    "--speculative-config.max_model_len 1k": "--speculative-config '{\"max_model_len\": 1000}'",
    "-sc.method ngram": '--speculative-config \'{"method": "ngram"}\'',
    "-tp 2": "--tensor-parallel-size 2",
    "-tp=2": "--tensor-parallel-size 2",
    "--max-model-len 1k": "--max-model-len 1000",
    "--max-model-len 4K": "--max-model-len 4096",
    "--max-model-len auto": "--max-model-len -1",
    "--kv-cache-memory-bytes 64M": "--kv-cache-memory-bytes 67108864",
    "-O3": "--optimization-level 3",
    "--enforce-eager --no-enforce-eager": "--no-enforce-eager",
    "--max-num-seqs 4 --max-num-seqs 8": "--max-num-seqs 8",
    "--config /parity/config.yml": f"--max-num-seqs 8 {_OF_CONFIG}",
    # The command line wins, wherever the file is named.
    "--max-num-seqs 4 --config /parity/config.yml": f"--max-num-seqs 4 {_OF_CONFIG}",
    "--config /parity/config.yml --max-num-seqs 4": f"--max-num-seqs 4 {_OF_CONFIG}",
}

# The exit status, and what is said.
REFUSED = {
    "--no-such-flag 1": (2, "vllm: error: unrecognized arguments: --no-such-flag 1"),
    "a-second-model": (2, "vllm: error: unrecognized arguments: a-second-model"),
    "--swap-space 4": (2, "vllm: error: unrecognized arguments: --swap-space 4"),
    "--num-scheduler-steps 8": (2, "vllm: error: unrecognized arguments: --num-scheduler-steps 8"),
    "--guided-decoding-backend xgrammar": (2, "unrecognized arguments: --guided-decoding-backend xgrammar"),
    "--task generate": (2, "unrecognized arguments: --task generate\n\nHint: --task is not a vllm serve option."),
    "--enable-reasoning": (2, "vllm: error: unrecognized arguments: --enable-reasoning"),
    "--rope-scaling '{}'": (2, "vllm: error: unrecognized arguments: --rope-scaling {}"),
    "--no-max-num-seqs": (2, "vllm: error: unrecognized arguments: --no-max-num-seqs"),
    "--no-headless": (2, "vllm: error: unrecognized arguments: --no-headless"),
    "--json-arg x": (2, "vllm: error: unrecognized arguments: --json-arg x"),
    "--max-num 8": (2, "vllm serve: error: ambiguous option: --max-num could match --max-num-batched-tokens, "),
    "--max-num-seqs many": (2, "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'"),
    "--max-num-seqs 1.5": (2, "vllm serve: error: argument --max-num-seqs: invalid int value: '1.5'"),
    "--max-model-len 256x": (2, "argument --max-model-len: invalid human_readable_int_or_auto value: '256x'"),
    "--max-model-len 1.5K": (2, "vllm serve: error: argument --max-model-len: Decimals are not allowed"),
    "--kv-cache-memory-bytes lots": (2, "vllm serve: error: argument --kv-cache-memory-bytes: "),
    "--max-num-queued-reqs many": (2, "argument --max-num-queued-reqs: Value many cannot be converted to <class 'int'>."),
    "--gpu-memory-utilization high": (
        2,
        "argument --gpu-memory-utilization/--device-memory-utilization: invalid float value: 'high'",
    ),
    "--gpu-memory-utilization": (
        2,
        "argument --gpu-memory-utilization/--device-memory-utilization: expected one argument",
    ),
    "--served-model-name": (2, "argument --served-model-name: expected at least one argument"),
    "--headless=yes": (2, "vllm serve: error: argument --headless: ignored explicit argument 'yes'"),
    "--dtype float128": (2, "vllm serve: error: argument --dtype: invalid choice: 'float128' (choose from 'auto', "),
    "--safetensors-load-strategy fast": (2, "vllm serve: error: argument --safetensors-load-strategy: invalid choice"),
    "--speculative-config {": (2, "argument --speculative-config/-sc: Value { cannot be converted to <function loads"),
    "--speculative-config mtp": (2, "argument --speculative-config/-sc: Value mtp cannot be converted"),
    "--compilation-config {": (2, "argument --compilation-config/-cc: 1 validation error for CompilationConfig"),
    "--compilation-config '{\"level\": 3}'": (2, "argument --compilation-config/-cc: 1 validation error for CompilationConfig"),
    "--compilation-config.level 3": (2, "argument --compilation-config/-cc: 1 validation error for CompilationConfig"),
    "--default-chat-template-kwargs thinking": (2, "argument --default-chat-template-kwargs: invalid loads value: 'thinking'"),
    "--enable-auto-tool-choice": (1, "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser"),
    "--enable-log-outputs": (1, "TypeError: Error: --enable-log-outputs requires --enable-log-requests"),
    "--config /parity/judge.py": (1, "ValueError: Config file must be of a yaml/yml type. py supplied"),
    "--config /nowhere.yml": (1, "FileNotFoundError: "),
}  # fmt: skip

# Parsed, and then taken or refused with the status 1 where the engine makes its configuration: what is named then.
VALUES = {
    "": "",
    "--served-model-name a b --max-num-queued-reqs 0": "",
    "--tool-call-parser nobody": "",
    "--load-format nobody": "",
    "--speculative-config '{\"method\": \"ngram\", \"num_speculative_tokens\": 4, \"prompt_lookup_max\": 3}'": "",
    "-tp 2 --nnodes 2 --master-addr 192.0.2.11 --distributed-executor-backend mp": "",
    "-tp 2 --nnodes 2 --node-rank 1 --headless": "",
    "--gpu-memory-utilization 1.9": "gpu_memory_utilization",
    "--gpu-memory-utilization 0": "gpu_memory_utilization",
    "--gpu-memory-utilization nan": "gpu_memory_utilization",
    "--max-num-seqs 0": "max_num_seqs",
    "--max-num-batched-tokens 0": "max_num_batched_tokens",
    "--block-size 0": "block_size",
    "--shutdown-timeout -1": "shutdown_timeout",
    "--max-model-len 0": "max_model_len",
    "--max-model-len 300k": "max_model_len (300000)",
    "--enable-auto-tool-choice --tool-call-parser nobody": "KeyError: 'invalid tool call parser: nobody (chose from {",
    "--reasoning-parser nobody": "Reasoning parser 'nobody' not found. Available parsers: ",
    "--speculative-config '{\"method\": \"mtp\"}'": "num_speculative_tokens must be provided",
    "--speculative-config '{\"method\": \"mtp\", \"num_speculative_token\": 4}'": "num_speculative_token\n  Unexpected keyword argument",
    "-tp 0": "tensor_parallel_size",
    "-tp 1 --nnodes 2": "`--nnodes 2` must evenly divide the total world size (1)",
    "-tp 2 --nnodes 2 --node-rank 2 --headless": "`--node-rank` must be between 0 and 1; got `--node-rank 2`",
}  # fmt: skip

# Where engines differ, the status of each.
DIFFERENT = {
    # Both spellings of a flag that is on or off: each --enable-x has its --disable-x since 0.33.
    "--disable-log-requests": {"standin": 0, "vllm": 2, "newest": 0},
    "--enable-log-requests": {"standin": 0, "vllm": 0, "newest": 0},
    "--no-enable-log-requests": {"standin": 0, "vllm": 0, "newest": 0},
    "--disable-prefix-caching": {"standin": 0, "vllm": 2, "newest": 0},
    "--no-enable-prefix-caching": {"standin": 0, "vllm": 0, "newest": 0},
    # New in 0.33.
    "--monokernel": {"standin": 0, "vllm": 2, "newest": 0},
    '--reasoning-effort-map \'{"medium": "low"}\'': {"standin": 0, "vllm": 2, "newest": 0},
    "--sleep-mode-backend cumem": {"standin": 0, "vllm": 2, "newest": 0},
    "--watchdog-config '{\"timeout\": 60}'": {"standin": 0, "vllm": 2, "newest": 0},
    # A value that the parser refuses, and since 0.33 only the configuration.
    "--kv-cache-dtype fp9": {"standin": 1, "vllm": 2, "newest": 1},
    # Of the b12x image, a fork, which the stand-in stands in for too.
    "--gdn-decode-kernel b12x": {"standin": 0, "vllm": 2, "newest": 2},
    # The stand-in has one GPU on each node, and the real one has not looked for GPUs yet.
    "-tp 2": {"standin": 1, "vllm": 0, "newest": 0},
    # It knows a rank above 0 only as one of two nodes, and only without an API server.
    "--node-rank 1": {"standin": 1, "vllm": 0, "newest": 0},
    "-tp 2 --nnodes 2 --node-rank 1": {"standin": 1, "vllm": 0, "newest": 0},
}
