# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in for vLLM in the agent's tests: the few answers the agent reads, with vLLM's bad habits.

It obeys a JSON file named after --control, read anew for each answer:
 load_seconds: refuse connections for so long      die_loading: exit status instead of getting ready
 running: requests in flight                       stuck: hold completions and counters, /health stays 200
 busy: iterations grow although completions hang   exit: end with this status
 refuse: HTTP status for completions               deaf: ignore SIGTERM
 health: HTTP status of /health once it is ready   mute: hold /health
Before it is ready it ignores SIGTERM.
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CONTROL = Path(sys.argv[sys.argv.index("--control") + 1])
COMPLETIONS = CONTROL.with_name("completions")
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{{engine="0",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="tiny"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="tiny"}} 0.25
vllm:prompt_tokens_total{{engine="0",model_name="tiny"}} {tokens}
vllm:generation_tokens_total{{engine="0",model_name="tiny"}} {tokens}
vllm:iteration_tokens_total_count{{engine="0",model_name="tiny"}} {iterations}
"""
tokens = 0
started = time.monotonic()


def control() -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(CONTROL.read_text())
    return answer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        if self.path == "/health":
            while control().get("mute"):
                time.sleep(0.05)
            return self.answer(control().get("health", 200), "")
        orders = control()
        iterations = tokens + (int((time.monotonic() - started) * 100) if orders.get("busy") else 0)
        self.answer(
            200, METRICS.format(running=orders.get("running", 0), tokens=tokens, iterations=iterations)
        )

    def do_POST(self) -> None:
        global tokens
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with COMPLETIONS.open("a") as file:
            file.write(json.dumps({"authorization": self.headers["Authorization"], **request}) + "\n")
        while control().get("stuck") or control().get("busy"):
            time.sleep(0.05)
        if refusal := control().get("refuse"):
            return self.answer(refusal, '{"error": {"message": "no"}}')
        tokens += 1
        self.answer(200, json.dumps({"choices": [{"text": "!"}], "usage": {"completion_tokens": 1}}))

    def log_message(self, format: str, *args: Any) -> None:
        pass


def on_sigterm(_number: int, _frame: object) -> None:
    if not control().get("deaf"):
        os._exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders = control()
    print("INFO Loading safetensors checkpoint shards:  40% Completed | 2/5", flush=True)
    print(f"INFO the key is {os.environ.get('FAKE_ENGINE_TELLS', 'not told')}", flush=True)
    print(
        "INFO GPU KV cache size: 1,000 tokens, Maximum concurrency for 400 tokens per request: 2.50x",
        flush=True,
    )
    time.sleep(orders.get("load_seconds", 0))
    if "die_loading" in orders:
        print("ValueError: no room for the KV cache", flush=True)
        os._exit(orders["die_loading"])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, on_sigterm)
    while "exit" not in control():
        time.sleep(0.05)
    os._exit(control()["exit"])


main()
