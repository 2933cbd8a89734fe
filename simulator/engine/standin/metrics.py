# SPDX-License-Identifier: GPL-3.0-or-later
"""The metrics of vLLM 0.32: names, types, labels and buckets as a real one exports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Summary, generate_latest

if TYPE_CHECKING:
    from standin.config import EngineConfig

_REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_HIGHR_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60,
)  # fmt: skip

_COUNTERS = {
    "prompt_tokens": "Number of prefill tokens processed.",
    "generation_tokens": "Number of generation tokens processed.",
    "prompt_tokens_cached": "Number of cached prompt tokens (local + external).",
    "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
    "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
    "external_prefix_cache_queries": "External prefix cache queries, in terms of number of queried tokens.",
    "external_prefix_cache_hits": "External prefix cache hits, in terms of number of cached tokens.",
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "num_preemptions": "Cumulative number of preemption from the engine.",
    "estimated_flops_per_gpu": "Estimated number of floating point operations per GPU.",
    "estimated_read_bytes_per_gpu": "Estimated number of bytes read from memory per GPU.",
    "estimated_write_bytes_per_gpu": "Estimated number of bytes written to memory per GPU.",
}
_SPEC_DECODE_COUNTERS = {
    "spec_decode_num_drafts": "Number of spec decoding drafts.",
    "spec_decode_num_draft_tokens": "Number of draft tokens.",
    "spec_decode_num_accepted_tokens": "Number of accepted tokens.",
}
# name -> help, the extra label, its values
_LABELLED_COUNTERS = {
    "prompt_tokens_by_source": (
        "Number of prompt tokens by source.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    "prompt_tokens_cached_by_source": (
        "Prefix-cache hit tokens by the cache tier that supplied them.",
        "source",
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    "request_success": (
        "Count of successfully processed requests.",
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
}
_GAUGES = {
    "num_requests_running": "Number of requests in model execution batches.",
    "num_requests_waiting": "Number of requests waiting to be processed.",
    "kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
}
_SECONDS_HISTOGRAMS = {
    "time_to_first_token_seconds": ("Histogram of time to first token in seconds.", _FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("Histogram of inter-token latency in seconds.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "Histogram of time per output token per request.",
        _TOKEN_SECONDS,
    ),
    "e2e_request_latency_seconds": ("Histogram of e2e request latency in seconds.", _REQUEST_SECONDS),
    "request_queue_time_seconds": ("Histogram of time spent in WAITING phase for request.", _REQUEST_SECONDS),
    "request_inference_time_seconds": (
        "Histogram of time spent in RUNNING phase for request.",
        _REQUEST_SECONDS,
    ),
    "request_prefill_time_seconds": (
        "Histogram of time spent in PREFILL phase for request.",
        _REQUEST_SECONDS,
    ),
    "request_decode_time_seconds": ("Histogram of time spent in DECODE phase for request.", _REQUEST_SECONDS),
}
# Their buckets reach up to the longest request.
_TOKEN_HISTOGRAMS = {
    "request_prompt_tokens": "Number of prefill tokens processed.",
    "request_generation_tokens": "Number of generation tokens processed.",
    "request_max_num_generation_tokens": "Histogram of maximum number of requested generation tokens.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "request_prefill_kv_computed_tokens": "Histogram of new KV tokens computed during prefill.",
}
_COUNT_HISTOGRAMS = {
    "iteration_tokens_total": (
        "Histogram of number of tokens per engine_step.",
        [2**i for i in (0, *range(3, 15))],
    ),
    "request_params_n": ("Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    "request_num_preemptions": ("Histogram of how often a request was preempted.", (1, 2, 3, 4, 5, 10, 20)),
}


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 ... up to the limit: vLLM's buckets for token counts."""
    return [m * 10**e for e in range(len(str(limit))) for m in (1, 2, 5) if m * 10**e <= limit]


class EngineMetrics:
    """Every `vllm:` series of one engine; `add`, `set` and `observe` take names without the prefix."""

    def __init__(self, config: EngineConfig) -> None:
        model = config.served_names[0]
        self._series: dict[str, Any] = {}

        def make(kind: Any, name: str, text: str, **options: Any) -> None:
            metric = kind(f"vllm:{name}", text, ["engine", "model_name"], **options)
            self._series[name] = metric.labels("0", model)

        def make_family(kind: Any, name: str, text: str, label: str, values: Iterable[str]) -> None:
            metric = kind(f"vllm:{name}", text, ["engine", "model_name", label])
            for value in values:
                self._series[f"{name}.{value}"] = metric.labels("0", model, value)

        for name, text in _COUNTERS.items():
            make(Counter, name, text)
        for name, (text, label, values) in _LABELLED_COUNTERS.items():
            make_family(Counter, name, text, label, values)
        for name, text in _GAUGES.items():
            make(Gauge, name, text)
        for name, (text, seconds) in _SECONDS_HISTOGRAMS.items():
            make(Histogram, name, text, buckets=seconds)
        for name, text in _TOKEN_HISTOGRAMS.items():
            make(Histogram, name, text, buckets=one_two_five(config.max_model_len))
        for name, (text, counts) in _COUNT_HISTOGRAMS.items():
            make(Histogram, name, text, buckets=counts)
        if config.speculative_tokens:
            for name, text in _SPEC_DECODE_COUNTERS.items():
                make(Counter, name, text)
            positions = [str(i) for i in range(config.speculative_tokens)]
            text = "Accepted tokens per draft position."
            make_family(Counter, "spec_decode_num_accepted_tokens_per_pos", text, "position", positions)
        reasons = ("capacity", "deferred")
        make_family(
            Gauge,
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            "reason",
            reasons,
        )
        states = ("awake", "weights_offloaded", "discard_all")
        make_family(Gauge, "engine_sleep_state", "Engine sleep state.", "sleep_state", states)
        self.set("engine_sleep_state.awake", 1)
        rejections = Counter(
            "vllm:admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            ["model_name", "reason"],
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._series[f"admission_rejections.{reason}"] = rejections.labels(model, reason)
        self._cache_config_info(config)

    @staticmethod
    def _cache_config_info(config: EngineConfig) -> None:
        args, block_size = config.args, config.block_size
        info = {
            "_block_size_resolved": True,
            "block_size": block_size,
            "cache_dtype": args.kv_cache_dtype,
            "cache_hit_alignment_tokens": None,
            "effective_attention_block_size": block_size,
            "enable_mamba_shared_prefix_checkpoint": False,
            "enable_prefix_caching": config.prefix_caching,
            "engine": 0,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "hash_block_size": None,
            "is_attention_free": False,
            "kv_cache_dtype_skip_layers": [],
            "kv_cache_layout": None,
            "kv_cache_max_concurrency": config.kv_tokens / config.max_model_len,
            "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
            "kv_cache_size_tokens": config.kv_tokens,
            "kv_offloading_backend": args.kv_offloading_backend or "native",
            "kv_offloading_size": args.kv_offloading_size,
            "kv_sharing_fast_prefill": False,
            "mamba_block_size": args.mamba_block_size,
            "mamba_cache_dtype": args.mamba_cache_dtype or "auto",
            "mamba_cache_mode": args.mamba_cache_mode or "none",
            "mamba_page_size_padded": None,
            "mamba_ssm_cache_dtype": args.mamba_ssm_cache_dtype or "float32",
            "num_cpu_blocks": None,
            "num_gpu_blocks": config.kv_tokens // block_size,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
            "prefix_cache_retention_interval": args.prefix_cache_retention_interval or 0,
            "prefix_caching_hash_algo": args.prefix_caching_hash_algo or "sha256",
            "prefix_match_unit": args.prefix_match_unit,
            "replayssm_buffer_len": args.replayssm_buffer_len or 16,
            "skip_page_size_padded": None,
            "sliding_window": None,
            "swa_bounded_replay": True,
            "use_kda_recoverssm": False,
            "use_replayssm": bool(args.use_replayssm),
            "user_specified_block_size": args.block_size is not None,
        }
        text = "Information of the LLMEngine CacheConfig"
        Gauge("vllm:cache_config_info", text, list(info)).labels(**info).set(1)

    def add(self, name: str, amount: float = 1) -> None:
        """Raise a counter; `name.value` picks one value of its extra label."""
        self._series[name].inc(amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        self._series[name].set(value)

    def observe(self, name: str, value: float) -> None:
        """Put one value into a histogram."""
        self._series[name].observe(value)


class HttpMetrics:
    """The `http_` series, which vLLM's server library keeps."""

    def __init__(self) -> None:
        self.requests = Counter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            ["handler", "method", "status"],
        )
        self.request_size = Summary(
            "http_request_size_bytes", "Content length of incoming requests.", ["handler"]
        )
        self.response_size = Summary(
            "http_response_size_bytes", "Content length of outgoing responses.", ["handler"]
        )
        self.duration = Histogram(
            "http_request_duration_seconds",
            "Latency with only few buckets by handler.",
            ["handler", "method"],
            buckets=(0.1, 0.5, 1),
        )
        self.duration_highr = Histogram(
            "http_request_duration_highr_seconds",
            "Latency with many buckets but no API specific labels.",
            buckets=_HIGHR_SECONDS,
        )

    def count(
        self, handler: str, method: str, status: int, request_bytes: int, response_bytes: int, seconds: float
    ) -> None:
        """Count one answered request."""
        self.requests.labels(handler, method, f"{status // 100}xx").inc()
        self.request_size.labels(handler).observe(request_bytes)
        self.response_size.labels(handler).observe(response_bytes)
        self.duration.labels(handler, method).observe(seconds)
        self.duration_highr.observe(seconds)


def exposition() -> bytes:
    """All series in Prometheus' text format."""
    return generate_latest(REGISTRY)
