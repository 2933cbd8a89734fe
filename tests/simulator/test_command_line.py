# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line is refused and taken as the real parser does it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.flags import DIFFERENT, REFUSED, SPELLINGS, VALUES
from tests.parity.judge import of_standin, verdict

PROGRAM = Path(__file__).resolve().parents[2] / "simulator" / "engine" / "vllm"
FLAGS = json.loads((PROGRAM.parent / "standin" / "flags-0.33.0.json").read_text())["flags"]
PARITY = PROGRAM.parents[2] / "tests/parity"
_PARSER, JUDGE = of_standin()
# Ends a run right after the command line is taken.
LOADED = {"STANDIN_LOAD_SECONDS": "0", "STANDIN_FAULT_AT_START": "exit 42"}


def vllm(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        capture_output=True,
        text=True,
        timeout=20,
        env={"PATH": "/usr/bin:/bin", **environment},
        check=False,
    )


def judged(model: Path, text: str, deep: bool = False) -> dict[str, Any]:
    """What comes of a line of the table that tests/parity holds before real vLLM too."""
    words = shlex.split(text.replace("/parity", str(PARITY)))
    return verdict(JUDGE, ["serve", str(model), *words], deep)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(model: Path, spelling: str) -> None:
    spelled, plain, none = (judged(model, text) for text in (spelling, SPELLINGS[spelling], ""))
    assert (spelled["status"], plain["status"]) == (0, 0), spelled["said"] + plain["said"]
    assert spelled["understood"] == plain["understood"] != none["understood"]


@pytest.mark.parametrize("text", REFUSED)
def test_the_parser_refuses_in_the_words_of_the_real_one(model: Path, text: str) -> None:
    made = judged(model, text)
    status, said = REFUSED[text]
    assert (made["status"], said in made["said"]) == (status, True), made["said"]


@pytest.mark.parametrize("text", VALUES)
def test_values(model: Path, text: str) -> None:
    made = judged(model, text, deep=True)
    assert made["status"] == (1 if VALUES[text] else 0), made["said"]
    assert VALUES[text] in made["said"]


@pytest.mark.parametrize("text", DIFFERENT)
def test_known_differences(model: Path, text: str) -> None:
    assert judged(model, text, deep=True)["status"] == DIFFERENT[text]["standin"]


def test_the_parser_refuses_with_2(model: Path) -> None:
    result = vllm("serve", str(model), "--no-such-flag", **LOADED)
    assert result.returncode == 2, result.stderr
    assert "vllm: error: unrecognized arguments: --no-such-flag" in result.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--port", "99999"], "port"),
        (["-tp", "2"], "World size"),
        (["-tp", "2", "--nnodes", "2", "--node-rank", "1"], "--headless"),
        (["--pipeline-parallel-size", "2"], "pipeline"),
        (["--ssl-keyfile", "/key.pem"], "--ssl-keyfile"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_are_refused_with_1(model: Path, flags: list[str], named: str) -> None:
    result = vllm("serve", str(model), *flags, **LOADED)
    assert result.returncode == 1, result.stderr
    assert named in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        # Spellings: abbreviated, with underscores, an alias, with the value attached, keys one by one, suffixes.
        "--gpu-memory-util 0.7 --max_num_seqs 8 --swa-bounded-replay --max-model-len 256K"
        " --speculative_config.method mtp --speculative-config.num_speculative_tokens 4"
        " --compilation-config.cudagraph_capture_sizes+ 1,2 --safetensors-load-strategy None",
        "--device-memory-utilization=0.7 --no-enable-prefix-caching --disable-log-requests --max-model-len auto",
        # The published recipe for this model and the b12x image.
        "--tensor-parallel-size 1 --pipeline-parallel-size 1 --mamba-cache-mode align --enable-prefix-caching"
        " --enable-chunked-prefill --dtype bfloat16 --kv-cache-dtype fp8 --quantization modelopt_mixed"
        " --block-size 16 --load-format b12x --max-model-len 262144 --max-num-seqs 8"
        ' --max-num-batched-tokens 4096 --speculative-config {"method":"mtp","num_speculative_tokens":4}'
        " --gdn-decode-kernel b12x --linear-backend b12x --moe-backend b12x --no-enable-flashinfer-autotune"
        " --mm-encoder-tp-mode data --reasoning-parser qwen3 --tool-call-parser qwen3_xml"
        ' --enable-auto-tool-choice --compilation-config {"pass_config":{"fuse_act_quant":true}}'
        " --gpu-memory-utilization 0.8",
    ],
    ids=["spellings", "aliases", "recipe"],
)
def test_taken(model: Path, flags: str) -> None:
    result = vllm("serve", str(model), *flags.split(), **LOADED)
    assert result.returncode == 42, result.stderr


def test_the_model_must_be_a_folder_with_a_configuration(tmp_path: Path) -> None:
    missing = vllm("serve", str(tmp_path / "nowhere"), **LOADED)
    assert (missing.returncode, "nowhere" in missing.stderr) == (1, True)
    (tmp_path / "config.json").write_text("{")
    broken = vllm("serve", str(tmp_path), **LOADED)
    assert (broken.returncode, "config.json" in broken.stderr) == (1, True)


def test_the_model_comes_before_its_served_names(model: Path) -> None:
    assert vllm("serve", "--served-model-name", "a", "--port", "1", str(model), **LOADED).returncode == 1


def test_attention_heads_must_divide(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 15}')
    result = vllm("serve", str(tmp_path), "-tp", "2", "--nnodes", "2", **LOADED)
    assert (result.returncode, "heads (15)" in result.stderr) == (1, True)


def test_knobs_of_the_simulation_are_checked(model: Path) -> None:
    result = vllm("serve", str(model), STANDIN_SPEED="fast")
    assert (result.returncode, "STANDIN_SPEED" in result.stderr) == (1, True)


def test_help_lists_every_flag_of_the_real_parser() -> None:
    result = vllm("serve", "--help=all")
    assert result.returncode == 0
    listed = set(re.findall(r"(?<![\w-])--[a-z0-9-]+", result.stdout))
    assert {opt for flag in FLAGS for opt in flag["opts"] if opt.startswith("--")} <= listed
    assert "--gdn-decode-kernel" in listed


def test_version() -> None:
    result = vllm("--version")
    assert (result.returncode, result.stdout.strip()) == (0, "0.33.0+standin")


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_other_commands_are_refused(words: list[str]) -> None:
    assert vllm(*words).returncode == 2
