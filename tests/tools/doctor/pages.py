"""/metrics pages of other servers, as their versions write them, with figures that a test chooses."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator

LABELS = {"model_name": "qwen", "engine": "0"}


def sample(name: str, value: float, **labels: str) -> str:
    shown = ",".join(f'{key}="{text}"' for key, text in sorted(labels.items()))
    return f"{name}{{{shown}}} {value}" if shown else f"{name} {value}"


def counter(name: str, value: float, help: str = "", **labels: str) -> str:
    return f"# HELP {name} {help}\n# TYPE {name} counter\n{sample(name, value, **labels)}"


def gauge(name: str, value: float, **labels: str) -> str:
    return f"# TYPE {name} gauge\n{sample(name, value, **labels)}"


def histogram(name: str, values: list[float], bounds: tuple[float, ...], **labels: str) -> str:
    lines = [f"# TYPE {name} histogram"]
    for bound in (*bounds, float("inf")):
        shown = "+Inf" if bound == float("inf") else str(float(bound))
        lines.append(sample(f"{name}_bucket", sum(value <= bound for value in values), le=shown, **labels))
    lines += [sample(f"{name}_sum", sum(values), **labels), sample(f"{name}_count", len(values), **labels)]
    return "\n".join(lines)


TIMES = (0.3, 1.0, 10.0)
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def vllm(
    requests: int = 0,
    *,
    prompt: int = 2420,
    cached: int = 0,
    caching: str = "True",
    prefill: float = 0.6,
    queue: float = 0.01,
    latency: float = 3.0,
    preemptions: int = 0,
    used: float = 0.3,
    block_size: int = 16,
    dtype: str = "auto",
    **labels: str,
) -> str:
    """Today's vLLM after ``requests`` equal requests, of whose prompt ``cached`` tokens were reused."""
    labels = LABELS | labels
    config = {"block_size": str(block_size), "num_gpu_blocks": "9000", "cache_dtype": dtype, "engine": labels["engine"]}
    tokens = "Prefix cache queries, in terms of number of queried tokens."
    return (
        "\n".join(
            [
                "# TYPE python_gc_objects_collected_total counter",
                'python_gc_objects_collected_total{generation="0"} 9.0',
                gauge("vllm:cache_config_info", 1, enable_prefix_caching=caching, **config),
                gauge("vllm:num_requests_running", 3, **labels),
                gauge("vllm:num_requests_waiting", 1, **labels),
                gauge("vllm:kv_cache_usage_perc", used, **labels),
                counter("vllm:prefix_cache_queries_total", requests * prompt, tokens, **labels),
                gauge("vllm:prefix_cache_queries_created", 1.79e9, **labels),
                counter("vllm:prefix_cache_hits_total", requests * cached, **labels),
                counter("vllm:num_preemptions_total", preemptions, **labels),
                counter("vllm:prompt_tokens_total", requests * prompt, **labels),
                histogram("vllm:request_prompt_tokens", [prompt] * requests, LENGTHS, **labels),
                histogram("vllm:request_prefill_kv_computed_tokens", [prompt - cached] * requests, LENGTHS, **labels),
                histogram("vllm:request_prefill_time_seconds", [prefill] * requests, TIMES, **labels),
                histogram("vllm:request_queue_time_seconds", [queue] * requests, TIMES, **labels),
                histogram("vllm:time_to_first_token_seconds", [prefill + queue] * requests, TIMES, **labels),
                histogram("vllm:e2e_request_latency_seconds", [latency] * requests, TIMES, **labels),
            ]
        )
        + "\n"
    )


def sglang(requests: int, *, prompt: int = 1000, cached: int | None = 0) -> str:
    labels = {"model_name": "llama", "tp_rank": "0", "engine_type": "unified"}
    lines = [
        gauge("sglang:token_usage", 0.5, **labels),
        gauge("sglang:max_total_num_tokens", 50_000, **labels),
        gauge("sglang:num_running_reqs", 4, **labels),
        gauge("sglang:num_queue_reqs", 2, **labels),
        gauge("sglang:cache_hit_rate", 0.0, **labels),
        counter("sglang:prompt_tokens_total", requests * prompt, **labels),
        counter("sglang:num_requests_total", requests, **labels),
        histogram("sglang:per_stage_req_latency_seconds", [0.3] * requests, TIMES, stage="prefill_forward", **labels),
        histogram("sglang:per_stage_req_latency_seconds", [9.0] * requests, TIMES, stage="decode", **labels),
        histogram("sglang:queue_time_seconds", [0.02] * requests, TIMES, **labels),
        histogram("sglang:time_to_first_token_seconds", [0.4] * requests, TIMES, **labels),
        histogram("sglang:e2e_request_latency_seconds", [2.0] * requests, TIMES, **labels),
    ]
    if cached is not None:
        lines.append(counter("sglang:cached_tokens_total", requests * cached, cache_source="device", **labels))
    return "\n".join(lines) + "\n"


LLAMACPP = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 5000
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 10
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total 30
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""


@contextlib.contextmanager
def serving(answer: Callable[[str, dict[str, str]], tuple[int, str]]) -> Iterator[str]:
    """A server whose answer to GET is ``answer(path, headers)``: a status and a text. Gives its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path, {name.lower(): value for name, value in self.headers.items()})
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def version(text: str) -> str:
    return json.dumps({"version": text})
