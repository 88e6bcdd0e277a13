"""Advises what to do next about a running server: ranked steps, each with the figures behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LOW_HIT_RATE, FAIR_HIT_RATE = 0.02, 0.5
FULL_CACHE = 0.9
SMALL_PREFILL_SHARE = 0.1
UNEVEN_HIT_RATES = 0.2
WORTHWHILE_GAIN = 0.05
LARGE_BLOCK = 256
"""Tokens; engines use 16 to 128 unless the model requires more."""

_FLAG = {
    "vLLM": "start it with --enable-prefix-caching",
    "Anaphora": "start it without --no-enable-prefix-caching",
    "SGLang": "start it without --disable-radix-cache",
}


def advise(data: dict[str, Any]) -> list[dict[str, str]]:
    """Returns ``title``, ``why`` and ``do`` of each step, the most useful first; empty if all is well.

    ``data`` are the values of ``server_figures.figures``.
    """
    return [{"title": title, "why": why, "do": do} for title, why, do in _steps(data, judged(data))]


def judged(data: dict[str, Any]) -> dict[str, Any]:
    """Returns the window that is judged: the sample if it saw traffic, else the time since the start."""
    sample = data["sample"]
    window: dict[str, Any] = data["since_start"]
    return sample if sample is not None and (sample["requests"] or sample["looked_up"]) else window


def _steps(data: dict[str, Any], window: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    off = data["caching"]["on"] is False
    if off:
        yield "Turn prefix caching on", data["caching"]["because"], _FLAG[data["engine"]]
    if data["old"]["too_old"]:
        yield (
            "Upgrade vLLM",
            f"version {data['version']}: {data['old']['because']}",
            "install the latest stable version, then look at the hit rate of real requests again",
        )
    if not off:
        yield from _hits(data, window)
    yield from _room(data, window)
    if 0 in (window["requests"], window["looked_up"]):
        yield "Send traffic", "there was none to judge", "run this again under load, or longer with --sample"


def _hits(data: dict[str, Any], window: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    rate = window["hit_rate"]
    if rate is None:
        if window["requests"] or data["engine"] == "llama.cpp":
            yield "See what is reused", "the server does not tell its hit rate", _record(data)
        return
    rate += window["external_rate"] or 0.0
    block, prompt = data["cache"]["block_size"], window["mean_prompt"]
    if rate < FAIR_HIT_RATE and block and prompt and block >= prompt:
        yield (
            "The block is larger than the prompts",
            f"a block has {block:,} tokens, a prompt {prompt:,.0f} on average: only whole blocks are reused, so such "
            "prompts cannot hit; models with Mamba layers get blocks this large",
            "set a smaller --block-size where the model allows it; else nothing is broken, the prompts are too short",
        )
    elif rate < LOW_HIT_RATE:
        if block and block > LARGE_BLOCK:
            yield (
                "See whether the shared beginning fills a block",
                f"a block has {block:,} tokens, and a beginning that is shorter is not reused: that looks like a fault",
                f"{_record(data)} --block-size {block}",
            )
        dtype = str(data["cache"]["dtype"] or "")
        if "fp8" in dtype or "int8" in dtype:
            yield (
                "Try without KV quantisation",
                f"hit rate {rate:.1%} with a KV cache in {dtype}: some versions reuse nothing then",
                "upgrade first; then compare with --kv-cache-dtype auto on real requests",
            )
        yield (
            "Find what changes at the head of the prompts",
            f"hit rate {rate:.1%}{_share(window)}, although caching is "
            f"{'on' if data['caching']['on'] else 'not known to be off'}: an id or a time near the beginning does that",
            _record(data),
        )
    elif rate < FAIR_HIT_RATE:
        yield (
            "Find where the prompts part",
            f"hit rate {rate:.1%}{_share(window)}: a part changes early, or there is little to share",
            _record(data),
        )
    for model in data["models"]:
        rates = [part["hit_rate"] for part in data["parts"] if part["model"] == model and part["hit_rate"] is not None]
        if rates and max(rates) - min(rates) > UNEVEN_HIT_RATES:
            yield (
                "Send equal beginnings to the same engine",
                f"the hit rates of the engines of {model} run from {min(rates):.1%} to {max(rates):.1%}",
                "route by prefix or by session, not in turn",
            )


def _room(data: dict[str, Any], window: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    used, preemptions = data["cache"]["used_most"], window["preemptions"]
    more = "raise --gpu-memory-utilization, or lower --max-num-seqs or --max-model-len"
    if data["engine"] == "SGLang":
        more = "raise --mem-fraction-static, or lower --max-running-requests or --context-length"
    if preemptions:
        rate = f"{preemptions:,.0f} preemptions in {window['requests'] or 0:,} requests"
        yield "Make room for the KV cache", f"{rate}: their prompts are computed again", more
    elif used is not None and used > FULL_CACHE and (window["hit_rate"] is None or window["hit_rate"] < FAIR_HIT_RATE):
        yield (
            "Make room for the KV cache",
            f"running requests hold up to {used:.0%} of it, so little stays for reuse",
            more,
        )
    sizes = data["sizes"]
    if sizes.get(4.0, 0.0) - sizes.get(1.0, 0.0) > WORTHWHILE_GAIN:
        yield (
            "A larger cache would reuse more",
            f"hit rate {sizes[1.0]:.1%} now, {sizes[2.0]:.1%} at twice the size, {sizes[4.0]:.1%} at four times",
            "raise --gpu-memory-utilization, or --kv-cache-memory-bytes on a CPU",
        )
    queue, prefill = window["queue_s"], window["prefill_s"]
    if queue is not None and queue > max(prefill or 0.0, 0.1):
        yield (
            "Requests wait longer than they are prefilled",
            f"{queue:.2f} s in the queue" + ("" if prefill is None else f", {prefill:.2f} s of prefill"),
            "the server is full: each prompt token that is reused instead of computed shortens the queue; else add one",
        )
    share = window["prefill_share"]
    if (
        share is not None
        and share < SMALL_PREFILL_SHARE
        and not preemptions
        and (window["hit_rate"] or 0) < FAIR_HIT_RATE
    ):
        yield (
            "Expect little from the cache",
            f"prefill is {share:.1%} of the latency",
            "the answers' length and the load decide here, not the prompts",
        )


def _share(window: dict[str, Any]) -> str:
    share = window["prefill_share"]
    return "" if share is None else f", prefill is {share:.0%} of the latency"


def _record(data: dict[str, Any]) -> str:
    restart = "restart it with --record log.jsonl --record-prompts, or, without a restart, "
    return (restart if data["engine"] == "Anaphora" else "") + (
        f"anaphora record --upstream {data['url']} --port 8001 --out log.jsonl --record-prompts, send the traffic to "
        "port 8001 for a while, then: anaphora doctor log.jsonl"
    )
