"""Computes figures from results: of one round, and median and spread over the rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from anaphora.tools.bench.client import Counters, RequestResult
from anaphora.tools.shared.money import machine_hours, monthly, rent
from anaphora.tools.shared.percentiles import percentile
from anaphora.tools.shared.simulate import full_block_hits, longest_shared_prefixes
from anaphora.types.reports import is_hit

Figures = dict[str, float | None]

PER = 100_000
BLOCK = 16
WARM_SHARE = 0.01


@dataclass(slots=True)
class Round:
    """Results of one side in one round.

    ``before`` and ``after`` are the server's counters around it, ``prefills`` seconds per request if it reports them.
    """

    results: list[RequestResult]
    before: Counters | None = None
    after: Counters | None = None
    prefills: list[float] = field(default_factory=list)

    @property
    def good(self) -> list[RequestResult]:
        """Results without an error."""
        return [result for result in self.results if result.error is None]


@dataclass(frozen=True, slots=True)
class Load:
    """What hours and prices are computed for: requests per day, and the price of a machine per hour (None: unknown)."""

    requests_per_day: int
    hour_price: float | None = None


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean; None if there are no values."""
    return statistics.fmean(values) if values else None


def ttft(result: RequestResult) -> float | None:
    """Returns the seconds from sending to the first event with content; None if there was none."""
    return None if result.first_token is None else result.first_token - result.started


def output_tokens(result: RequestResult) -> int:
    """Returns the tokens of usage, or without usage the events with content, which may be fewer."""
    return result.content_events if result.output_tokens is None else result.output_tokens


def itl(result: RequestResult) -> float | None:
    """Returns the mean seconds between tokens of one answer: (last - first) / (tokens - 1)."""
    tokens = output_tokens(result)
    if result.first_token is None or result.last_token is None or tokens < 2:
        return None
    return (result.last_token - result.first_token) / (tokens - 1)


def not_none(values: Sequence[float | None]) -> list[float]:
    """Returns the values that are known."""
    return [value for value in values if value is not None]


def figures_of(seen: Round, load: Load) -> Figures:
    """Returns all figures of one round, without its failed requests; None for what the server does not report."""
    good = seen.good
    if not good:
        return {}
    ttfts = not_none([ttft(result) for result in good])
    latencies = [result.ended - result.started for result in good]
    wall = max(result.ended for result in good) - min(result.started for result in good)
    busy = busy_seconds(good)
    prefill = mean(seen.prefills) or _mean_prefill(seen)
    hours = machine_hours(PER, len(good) / busy)
    day = hours * load.requests_per_day / PER
    day_price = rent(day, load.hour_price)
    tokens = sum(output_tokens(result) for result in good)
    found: Figures = {
        "requests_per_s": len(good) / wall,
        "output_tokens_per_s": tokens / wall,
        "latency_mean_s": mean(latencies),
        "prefill_mean_s": prefill,
        "prefill_p50_s": percentile(seen.prefills, 50) or _bucket_median(seen),
        "prefill_share": None if prefill is None else prefill / statistics.fmean(latencies),
        "ttft_mean_s": mean(ttfts),
        "ttft_p50_s": percentile(ttfts, 50),
        "ttft_p99_s": percentile(ttfts, 99),
        "itl_p50_s": percentile(not_none([itl(result) for result in good]), 50),
        "prompt_tokens_mean": mean(not_none([result.prompt_tokens for result in good])),
        "output_tokens_mean": tokens / len(good),
        "busy_share": busy / wall,
        "gpu_hours_per_100k": hours,
        "busy_hours_per_day": day,
        "price_per_100k": rent(hours, load.hour_price),
        "price_per_day": day_price,
        "price_per_month": monthly(day_price),
    }
    return found | _hit_rates(seen)


def _hit_rates(seen: Round) -> Figures:
    cached = [(result.cached_tokens, result.prompt_tokens) for result in seen.good if result.cached_tokens is not None]
    complete = len(cached) == len(seen.good)
    rates: Figures = {
        "hit_rate": token_hit_rate(seen)[0],
        "hit_rate_requests": sum(is_hit(length, hit) for hit, length in cached) / len(cached) if complete else None,
    }
    prompts = [result.request.tokens for result in seen.good]
    if all(prompts):
        hits = full_block_hits([tokens for tokens in prompts if tokens], BLOCK)
        rates["hit_rate_possible"] = sum(hits) / sum(len(tokens) for tokens in prompts if tokens)
        rates["hit_rate_requests_possible"] = sum(hit > 0 for hit in hits) / len(hits)
    return rates


def token_hit_rate(seen: Round) -> tuple[float | None, str]:
    """Returns cached over prompt tokens, and the source: the server's ``metrics``, else ``usage``, else ``unknown``."""
    queries, hits = _counter_growth(seen, "queries"), _counter_growth(seen, "hits")
    if queries and hits is not None:
        return hits / queries, "metrics"
    pairs = [(s.cached_tokens, s.prompt_tokens) for s in seen.good if s.cached_tokens is not None and s.prompt_tokens]
    if pairs:
        return sum(hit for hit, _ in pairs) / sum(prompt for _, prompt in pairs), "usage"
    return (None, "unknown") if queries is None else (0.0, "metrics")


def _counter_growth(seen: Round, name: str) -> float | None:
    """Returns by how much a counter of /metrics rose during the round."""
    before, after = getattr(seen.before, name, None), getattr(seen.after, name, None)
    return None if before is None or after is None else float(after - before)


def busy_seconds(results: Sequence[RequestResult]) -> float:
    """Returns the seconds during which at least one request was in flight."""
    total, until = 0.0, float("-inf")
    for result in sorted(results, key=lambda result: result.started):
        total += max(0.0, result.ended - max(result.started, until))
        until = max(until, result.ended)
    return total


def peak_in_flight(results: Sequence[RequestResult]) -> int:
    """Returns the most requests that were in flight at once."""
    edges = sorted([(s.started, 1) for s in results] + [(s.ended, -1) for s in results])
    running = peak = 0
    for _, change in edges:
        running += change
        peak = max(peak, running)
    return peak


def _mean_prefill(seen: Round) -> float | None:
    seconds, count = _counter_growth(seen, "prefill_s"), _counter_growth(seen, "prefills")
    return seconds / count if count and seconds is not None else None


def _bucket_median(seen: Round) -> float | None:
    """Returns the median prefill by linear interpolation within its histogram bucket."""
    if not seen.before or not seen.after or not seen.after.prefill_buckets:
        return None
    counts = sorted((b, n - seen.before.prefill_buckets.get(b, 0.0)) for b, n in seen.after.prefill_buckets.items())
    half = counts[-1][1] / 2
    low, below = 0.0, 0.0
    for bound, count in counts:
        if half and count >= half:
            if bound == float("inf"):
                return low or None
            return low + (bound - low) * (half - below) / (count - below)
        low, below = bound, count
    return None


def warm_share(seen: Round) -> float:
    """Returns the share of prompt tokens that came from the cache although no other prompt of the round has them.

    Each request may exceed by one block: a server's own answer can begin like the scripted one by chance.
    """
    counted = [s for s in seen.good if s.cached_tokens is not None and s.request.tokens]
    prompts = [result.request.tokens or () for result in counted]
    excess = sum(
        max(0, (result.cached_tokens or 0) - shared - BLOCK)
        for result, shared in zip(counted, longest_shared_prefixes(prompts), strict=True)
    )
    return excess / max(1, sum(map(len, prompts)))


def medians(rounds: Sequence[Figures]) -> tuple[Figures, dict[str, tuple[float, float]]]:
    """Returns the median of each figure over the rounds, and its smallest and largest value."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    values = {name: not_none([figures.get(name) for figures in rounds]) for name in names}
    return (
        {name: statistics.median(found) if found else None for name, found in values.items()},
        {name: (min(found), max(found)) for name, found in values.items() if found},
    )


def foreign_share(seen: Round) -> float:
    """Returns by what share the tokens that the server looked up differ from our prompts: other traffic."""
    queries = _counter_growth(seen, "queries")
    ours = sum(result.prompt_tokens or 0 for result in seen.results)
    return abs(queries - ours) / ours if queries and ours else 0.0


def errors_of(rounds: Sequence[Round]) -> dict[str, int]:
    """Returns each error and how often it occurred, the most frequent first."""
    return dict(Counter(result.error for seen in rounds for result in seen.results if result.error).most_common())
