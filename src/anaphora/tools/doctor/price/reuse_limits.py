"""Counts why requests reuse no more than they do where nothing is broken."""

from __future__ import annotations

from collections import Counter

from anaphora.tools.doctor.price.breaks import MIN_TOKENS
from anaphora.tools.doctor.price.rerun_log import Outcome
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.shared.simulate import UnlimitedCache

LIMITS = ("cold", "ended", "block_too_large", "cache_too_small", "routing_key")
COLD_TOKENS = 16
"""A request that finds fewer tokens was the first of its kind."""


def reuse_limits(log: Log, before: Outcome, best: Outcome, limited: Outcome | None, block_size: int) -> Counter[str]:
    """Counts requests by LIMITS. Requests that gain by the repairs are not counted.

    ``before`` is the log as it is, with its matches; ``best`` the repaired log; ``limited`` the log in a cache of
    limited size, if it was run.
    """
    limits: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
    counts = zip(before.tokens, before.cached, best.tokens, best.cached, strict=True)
    gaining = {n for n, (a, b, c, d) in enumerate(counts) if (a - b) - (c - d) >= MIN_TOKENS}
    shared = _found_without_roots(log) if len({prompt.root for prompt in log.prompts}) > 1 else None
    for prompt, found, tokens, cached in zip(log.prompts, before.found, before.tokens, before.cached, strict=True):
        if prompt.number in gaining:
            continue
        if shared is not None and shared[prompt.number] > found.tokens + COLD_TOKENS:
            limits["routing_key"] += 1
        elif found.tokens >= min(COLD_TOKENS, tokens - 1) and found.tokens < block_size:
            limits["block_too_large"] += 1
        elif found.tokens < COLD_TOKENS and found.tokens < tokens - 1:
            limits["cold"] += 1
        else:
            limits["ended"] += 1
        if limited is not None and limited.cached[prompt.number] + COLD_TOKENS <= cached:
            limits["cache_too_small"] += 1
    return limits


def _found_without_roots(log: Log) -> list[int]:
    """Returns the tokens that each prompt would find if all salts shared one cache."""
    cache = UnlimitedCache()
    return [cache.look(log.store.packed(prompt.pieces), prompt.number, prompt.model).tokens for prompt in log.prompts]
