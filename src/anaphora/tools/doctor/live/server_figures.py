"""Computes figures of a server's prefix cache from its metrics, over the sample and since its start.

None means unknown throughout: a figure that the server does not report never counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from anaphora.tools.doctor.live.scrape import ScrapedServer
from anaphora.tools.shared.metrics_page import HIT_RATE_GAUGE, MOST, Growth, Hits, Page, hits, number
from anaphora.tools.shared.server_version import version_of

NAMES = {"anaphora": "Anaphora", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}

_FINISHED = ("vllm:e2e_request_latency_seconds_count", "vllm:request_success_total", "sglang:num_requests_total")
_PREFILL = "vllm:request_prefill_time_seconds"
_TIMES = {
    "queue_s": ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    "ttft_s": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "latency_s": ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
}
_PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
_GAUGES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"),
}
_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio")


def figures(server: ScrapedServer) -> dict[str, Any]:
    """Returns all figures: rates from 0 to 1, times in seconds, lengths in tokens. docs/doctor.md lists the keys."""
    first, last = server.pages[0], server.pages[-1]
    settings = cache_settings(server)
    sampled = Growth(last, first) if len(server.pages) > 1 else None
    since_start = _window(Growth(last), settings["block_size"])
    data = {
        "url": server.url,
        "engine": NAMES[server.engine],
        "version": server.version,
        "models": sorted({model for page in server.pages for model in _label_values(page, "model_name")}),
        "engines": max(1, len(_label_values(last, "engine"))),
        "seconds": server.seconds,
        "cache": settings | _use(server.pages),
        "caching": _caching(server, settings, since_start),
        "old": _old(server),
        "load": {name: _over_time(server.pages, names) for name, names in _GAUGES.items()},
        "sample": _window(sampled, settings["block_size"]) if sampled is not None else None,
        "since_start": since_start,
        "parts": list(_parts(sampled or Growth(last))),
        "misses": _misses(sampled or Growth(last)),
        "sizes": _sizes(Growth(last)),
    }
    return data | {"notes": list(_notes(server, data))}


# --- The settings ----------------------------------------------------------------------------------------------------


def cache_settings(server: ScrapedServer) -> dict[str, Any]:
    """Returns blocks, block size, capacity in tokens over all engines, KV dtype, and whether caching is on."""
    page, details = server.pages[-1], server.details
    if server.engine == "sglang":
        labels = next(iter(page.labels("sglang:cache_config_info")), {})
        size = _int(labels.get("page_size")) or _int(details.get("page_size"))
        tokens = page.most("sglang:max_total_num_tokens") or _int(details.get("max_total_num_tokens"))
        off = details.get("disable_radix_cache")
        return {
            "block_size": size,
            "blocks": _int(labels.get("num_pages")) or (int(tokens // size) if tokens and size else None),
            "tokens": int(tokens) if tokens else None,
            "dtype": details.get("kv_cache_dtype"),
            "enabled": not off if isinstance(off, bool) else None,
        }
    found = page.labels("vllm:cache_config_info")
    labels = found[0] if found else {}
    size, blocks = _int(labels.get("block_size")), _sum(_int(one.get("num_gpu_blocks")) for one in found)
    told = _sum(_int(one.get("kv_cache_size_tokens")) for one in found)
    states = {one.get("enable_prefix_caching", "").lower() for one in found}
    return {
        "block_size": size,
        "blocks": blocks,
        "tokens": told or (blocks * size if blocks and size else None),
        "dtype": labels.get("cache_dtype"),
        "enabled": {"true": True, "false": False}.get(states.pop()) if len(states) == 1 else None,
    }


def _int(value: Any) -> int | None:
    try:
        found = int(value)
    except (OverflowError, TypeError, ValueError):
        return None
    return found if abs(found) <= MOST else None


def _sum(values: Iterator[int | None]) -> int | None:
    known = list(values)
    return None if not known or None in known else sum(value or 0 for value in known)


def _label_values(page: Page, label: str) -> set[str]:
    return {value for series in page.samples.values() for labels in series for name, value in labels if name == label}


def _caching(server: ScrapedServer, settings: dict[str, Any], since_start: dict[str, Any]) -> dict[str, Any]:
    """Returns whether caching is ``on`` (True, False or None) and ``because``: how that is known."""
    page = server.pages[-1]
    if settings["enabled"] is not None:
        flag = "disable_radix_cache" if server.engine == "sglang" else "enable_prefix_caching"
        value = not settings["enabled"] if server.engine == "sglang" else settings["enabled"]
        return {"on": settings["enabled"], "because": f"the server says {flag}={value}"}
    gauge = page.most(HIT_RATE_GAUGE)
    if gauge is not None and gauge < 0:
        return {"on": False, "because": f"{HIT_RATE_GAUGE} is {gauge:g}, which means off"}
    if since_start["hit_rate"]:
        return {"on": True, "because": "it has hits"}
    version = version_of(server.version)
    if server.engine == "vllm" and version is not None:
        usual = version >= (0, 8, 0)
        which = f"version {server.version} has it {'on' if usual else 'off'} unless a flag says otherwise"
        return {"on": None, "because": f"the server does not say; {which}"}
    if server.engine == "llamacpp":
        return {"on": None, "because": "each request decides (cache_prompt, on by default)"}
    return {"on": None, "because": "the server does not say"}


def _old(server: ScrapedServer) -> dict[str, Any]:
    """Returns ``too_old`` (True, False, or None if unknown) and ``because``: what the version means for the cache."""
    if server.engine != "vllm":
        known = server.version is not None
        return {"too_old": None, "because": "" if known else "the server does not tell its version"}
    version = version_of(server.version)
    if version is None:
        which = f"{server.version} is a build of its own" if server.version else "the server does not tell its version"
        return {"too_old": None, "because": which}
    if version < (0, 4, 0):
        return {"too_old": True, "because": "prefix caching came with 0.4"}
    if version < (0, 8, 0):
        return {"too_old": True, "because": "before 0.8 the old engine runs, in which prefix caching is off by default"}
    if version < (0, 11, 0):
        why = "new enough; it still falls back to the old engine on some hardware, where prefix caching is off"
        return {"too_old": False, "because": why}
    return {"too_old": False, "because": "new enough: prefix caching is on by default"}


# --- A window of time ------------------------------------------------------------------------------------------------


def _window(growth: Growth, block_size: int | None) -> dict[str, Any]:
    looked = hits(growth)
    requests = growth.total(*_FINISHED)
    means = {name: growth.mean(*histograms) for name, histograms in _TIMES.items()}
    prefill = growth.mean(_PREFILL) or growth.mean("sglang:per_stage_req_latency_seconds", stage="prefill_forward")
    window = {
        "requests": None if requests is None else round(requests),
        "requests_scheduled": growth.total("anaphora:requests_scheduled_total"),
        "prompt_tokens": growth.total("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
        "unit": looked.unit if looked else None,
        "looked_up": looked.looked_up if looked else None,
        "found": looked.found if looked else None,
        "hit_rate": looked.rate if looked else None,
        "external_rate": _external_rate(growth, looked),
        "requests_hit": _requests_hit(growth, looked, requests, block_size),
        "prefill_s": prefill,
        "prefill_share": _prefill_share(growth, prefill, means["latency_s"]),
        **means,
        "mean_prompt": growth.mean("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
        "preemptions": growth.total(*_PREEMPTIONS),
    }
    if growth.before is None and (looked is None or looked.found is None):
        gauge = growth.after.most(HIT_RATE_GAUGE)
        window["hit_rate"] = gauge if gauge is not None and gauge >= 0 else None
        window["unit"] = None if window["hit_rate"] is None else "blocks"
    return window


def _external_rate(growth: Growth, looked: Hits | None) -> float | None:
    """Returns the share of the tokens looked up that vLLM found only in an external store (a KV connector)."""
    external = growth.total("vllm:external_prefix_cache_hits_total")
    return external / looked.looked_up if external is not None and looked is not None and looked.looked_up else None


def _prefill_share(growth: Growth, prefill: float | None, latency: float | None) -> float | None:
    """Returns the share of the requests' latency; for llama.cpp, which reports no latency, of its computing time."""
    if prefill is not None and latency:
        return prefill / latency
    computing = growth.total("llamacpp:prompt_seconds_total")
    decoding = growth.total("llamacpp:tokens_predicted_seconds_total")
    both = (computing or 0.0) + (decoding or 0.0)
    return computing / both if computing is not None and decoding is not None and both else None


def _requests_hit(
    growth: Growth, looked: Hits | None, requests: float | None, block_size: int | None
) -> dict[str, float] | None:
    """Returns bounds of the share of requests with a hit, ``at_least`` and ``at_most``; None if nothing is known."""
    scheduled = growth.total("anaphora:requests_scheduled_total")
    if scheduled is not None:
        exact = (growth.total("anaphora:requests_hit_total") or 0.0) / scheduled if scheduled else None
        return None if exact is None else {"at_least": exact, "at_most": exact}
    if not requests or looked is None or looked.found is None:
        return None
    least_each = block_size or 1
    tokens = looked.found * (least_each if looked.unit == "blocks" else 1)
    at_least = max(0.0, *_shortened(growth), tokens / (longest if (longest := _longest(growth)) else math.inf))
    at_most = min(requests, tokens / least_each)
    share = {"at_least": min(at_least, at_most) / requests, "at_most": at_most / requests}
    return None if share == {"at_least": 0.0, "at_most": 1.0} else share


def _shortened(growth: Growth) -> Iterator[float]:
    """Yields per bucket n: (requests that computed <= n tokens) - (requests with prompts <= n tokens).

    Each value is a lower bound of the requests with a hit.
    """
    prompts = growth.at_most("vllm:request_prompt_tokens")
    computed = growth.at_most("vllm:request_prefill_kv_computed_tokens")
    return (count - prompts[bound] for bound, count in computed.items() if bound in prompts)


def _longest(growth: Growth) -> float | None:
    """Returns an upper bound of the longest prompt in tokens; None if unknown."""
    counts = sorted(growth.at_most("vllm:request_prompt_tokens").items())
    whole = counts[-1][1] if counts else 0
    bound = next((bound for bound, count in counts if whole and count >= whole), math.inf)
    return bound if bound < math.inf else None


# --- Moments, parts, notes -------------------------------------------------------------------------------------------


def _over_time(pages: list[Page], names: tuple[str, ...]) -> dict[str, float] | None:
    values = [value for page in pages if (value := page.total(*names)) is not None]
    return {"mean": math.fsum(values) / len(values), "most": max(values)} if values else None


def _use(pages: list[Page]) -> dict[str, float | None]:
    values = [value for page in pages if (value := page.most(*_USE)) is not None]
    return {
        "used_mean": math.fsum(values) / len(values) if values else None,
        "used_most": max(values) if values else None,
    }


def _parts(growth: Growth) -> Iterator[dict[str, Any]]:
    """Yields the hit rate of each model and engine behind the address, if there are several."""
    keys = ("model_name", "engine", "dp_rank")
    split: dict[tuple[str, ...], dict[str, dict[tuple[tuple[str, str], ...], float]]] = {}
    for name, series in growth.after.samples.items():
        for labels in series:
            key = tuple(dict(labels).get(one, "") for one in keys)
            split.setdefault(key, {}).setdefault(name, {})[labels] = series[labels]
    parts = []
    for key, samples in sorted(split.items()):
        looked = hits(Growth(Page(samples, growth.after.help if any(key) else {}), growth.before))
        if looked is not None and looked.looked_up:
            parts.append({"model": key[0], "engine": key[1] or key[2], "hit_rate": looked.rate})
    if len(parts) > 1:
        yield from parts


def _misses(growth: Growth) -> dict[str, int]:
    """Counts the reasons why requests reused no more, which only Anaphora reports."""
    misses = growth.by_labels("anaphora:cache_misses_total")
    counts = ((labels.get("reason", "unknown"), round(value)) for labels, value in misses)
    return dict(sorted(((reason, count) for reason, count in counts if count), key=lambda item: -item[1]))


def _sizes(growth: Growth) -> dict[float, float]:
    """Returns the hit rates since the start for other cache sizes (as multiples), which only Anaphora reports."""
    looked = growth.total("vllm:prefix_cache_queries_total")
    found = list(growth.by_labels("anaphora:prefix_cache_hits_at_size_total")) if looked else []
    sizes = ((number(labels.get("size")), value) for labels, value in found)
    return {size: value / looked for size, value in sizes if looked and size is not None and 0 < size <= MOST}


def _notes(server: ScrapedServer, data: dict[str, Any]) -> Iterator[str]:
    if server.broken:
        yield f"the sample ended early, after {server.seconds:.0f} s: {server.broken}"
    falls = sum(Growth(later, earlier).resets() for earlier, later in zip(server.pages, server.pages[1:], strict=False))
    if falls > 1:
        yield (
            f"counters fell {falls} times during the sample: several servers answer at this address in turn, so ask "
            "each of them by its own"
        )
    elif falls:
        yield "counters fell during the sample: the server was restarted, and only what came after it counts"
    sample = data["sample"]
    if sample is not None and not sample["requests"] and not sample["looked_up"]:
        known = sample["requests"] is not None or sample["looked_up"] is not None
        yield "no request ended during the sample" if known else "the server does not count its requests"
    if server.engine == "llamacpp":
        yield "llama.cpp counts only the prompt tokens that it computes, so its hit rate is unknown"
    if server.engine == "sglang" and data["since_start"]["found"] is None:
        yield "sglang:cached_tokens_total is not there: an old version, or nothing was ever reused"
    if data["since_start"]["hit_rate"] is not None and data["since_start"]["found"] is None:
        yield "this version tells a hit rate since its start alone, not what it is made of"
    if data["since_start"]["unit"] == "blocks":
        yield "this version counts blocks, not tokens; the rates come out much the same"
    version = version_of(server.version) if server.engine == "vllm" else None
    if version and version < (0, 11, 1) and data["since_start"]["preemptions"]:
        yield "before 0.11.1 a preempted request counts its own blocks as hits, so the hit rate looks better than it is"
