# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs that measure endpoints find nothing amiss with the gateway: all is answered, and everybody counts the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.clients.conftest import CLIENT_KEY, PLACES, run
from tests.gateway.rig import LOOPBACK, Gateway, until
from tests.parity.engines import MODEL, Engine

# Twice as many at once as the engine takes: the others wait in the gateway.
REQUESTS, AT_ONCE = 40, 2 * PLACES
TOKENS_IN, TOKENS_OUT = 64, 32


def counted(endpoint: Gateway, engine: Engine) -> Counter[str]:
    """What gateway and engine have counted."""
    lines = str(engine.ask("/metrics").body).splitlines()

    def total(name: str, label: str = "") -> int:
        return sum(
            int(float(line.split()[-1]))
            for line in lines
            if line.startswith(f"vllm:{name}_total{{") and label in line
        )

    return Counter(
        routed=int(endpoint.figure('routed_requests_total{route="warm"}')),
        served=total("request_success", 'finished_reason="length"'),
        tokens_in=total("prompt_tokens"),
        tokens_out=total("generation_tokens"),
    )


def test_vllm_bench_serve(endpoint: Gateway, engine: Engine, tmp_path: Path) -> None:
    before = counted(endpoint, engine)
    report = run(
        tmp_path,
        *("vllm", "bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", f"http://{LOOPBACK}:{endpoint.port}", "--model", "tiny", "--tokenizer", MODEL),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", str(AT_ONCE), "--ignore-eos"),
        *("--dataset-name", "random", "--random-input-len", str(TOKENS_IN)),
        *("--random-output-len", str(TOKENS_OUT), "--disable-tqdm"),
        *("--save-result", "--result-dir", "/report", "--result-filename", "report.json"),
    )
    assert (report["completed"], report["failed"]) == (REQUESTS, 0)
    assert report["total_output_tokens"] == REQUESTS * TOKENS_OUT
    assert report["mean_ttft_ms"] > 0
    assert report["mean_itl_ms"] > 0
    expected = Counter(
        routed=REQUESTS,
        served=REQUESTS,
        tokens_in=report["total_input_tokens"],
        tokens_out=REQUESTS * TOKENS_OUT,
    )
    until(lambda: counted(endpoint, engine) - before == expected)
    most = endpoint.metric("haproxy_server_max_sessions", "server", 'proxy="pool1"', 'server="spark-a"')
    assert most == PLACES


def test_guidellm(endpoint: Gateway, engine: Engine, guidellm: Path, tmp_path: Path) -> None:
    before = counted(endpoint, engine)
    report = run(
        tmp_path,
        *("python3", "-m", "guidellm", "run", "--disable-console"),
        f"--backend=kind=openai_http,target=http://{LOOPBACK}:{endpoint.port},model=tiny,api_key={CLIENT_KEY}",
        f"--profile=kind=concurrent,streams={AT_ONCE}",
        f"--constraint=kind=max_requests,count={REQUESTS}",
        "--constraint=kind=max_duration,seconds=120",
        f"--data=kind=synthetic_text,prompt_tokens={TOKENS_IN},output_tokens={TOKENS_OUT}",
        f"--tokenizer=kind=huggingface_auto,model={MODEL}",
        "--output=kind=json,path=/report/report.json",
        packages=guidellm,
    )
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    totals = {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}
    assert metrics["request_totals"] == totals
    assert metrics["time_to_first_token_ms"]["successful"]["count"] == REQUESTS
    # Between two tokens each, the first one of each request aside.
    assert metrics["inter_token_latency_ms"]["successful"]["count"] == REQUESTS * (TOKENS_OUT - 1)
    expected = Counter(
        routed=REQUESTS,
        served=REQUESTS,
        tokens_in=int(metrics["prompt_token_count"]["successful"]["total_sum"]),
        tokens_out=REQUESTS * TOKENS_OUT,
    )
    until(lambda: counted(endpoint, engine) - before == expected)
