"""Checks whether a run can be trusted: unwanted hits, missing hits, wrong lengths, other traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anaphora.tools.bench.figures import (
    BLOCK,
    WARM_SHARE,
    Round,
    errors_of,
    foreign_share,
    not_none,
    token_hit_rate,
    warm_share,
)
from anaphora.tools.shared.simulate import full_block_hits, longest_shared_prefixes

FOREIGN_SHARE = 0.02
SHORT_OF_POSSIBLE = 0.1
CPU_NOTE = (
    "These are machine hours of this CPU. A small model on a CPU shows how the cache works; its ratio is not that of a "
    "large model on a card."
)


def warnings_about(side: str, rounds: Sequence[Round], alone: bool) -> list[str]:
    """Returns the warnings about one side. ``alone``: there is only one server, which may cache as it likes."""
    if not rounds:
        return []
    name = "the server" if alone else f"the {side} side"
    found = _failures(name, rounds)
    found += _unwanted_hits(name, rounds) if side == "off" else _missing_hits(name, rounds)
    warm = max((warm_share(seen) for seen in rounds if seen.good), default=0.0)
    if warm > WARM_SHARE:
        found.append(
            f"{name.upper()} WAS WARM: at least {warm:.0%} of the prompt tokens came from its cache though no prompt "
            "of this run has them. It had answered these prompts before; choose another --seed"
        )
    return found + _lengths(name, rounds) + _traffic(name, rounds)


def _failures(name: str, rounds: Sequence[Round]) -> list[str]:
    total = sum(len(seen.results) for seen in rounds)
    return [f"{name} failed {count} of {total} requests: {error}" for error, count in errors_of(rounds).items()]


def _unwanted_hits(name: str, rounds: Sequence[Round]) -> list[str]:
    cached = sum(result.cached_tokens or 0 for seen in rounds for result in seen.results)
    rate = max(not_none([token_hit_rate(seen)[0] for seen in rounds]), default=0.0)
    if not cached and not rate:
        return []
    amount = f"{cached:,} prompt tokens" if cached else f"{rate:.1%} of the prompt tokens"
    return [f"{name.upper()} CACHED: {amount} came from a cache that should be off. The comparison is worth nothing"]


def _missing_hits(name: str, rounds: Sequence[Round]) -> list[str]:
    prompts = [[result.request.tokens or () for result in seen.good] for seen in rounds]
    if not all(all(tokens) for tokens in prompts) or not any(prompts):
        possible = math.nan
    else:
        possible = sum(sum(full_block_hits(tokens, BLOCK)) for tokens in prompts) / sum(
            len(t) for p in prompts for t in p
        )
    rates = not_none([token_hit_rate(seen)[0] for seen in rounds])
    if not rates:
        return [f"{name} reports neither counters nor cached tokens, so its hit rate is unknown"]
    if max(rates) == 0:
        if possible == 0:
            longest = max((shared for tokens in prompts for shared in longest_shared_prefixes(tokens)), default=0)
            return [f"{name} hit nothing, and could not: the prompts share at most {longest} tokens"]
        return [
            f"{name} HIT NOTHING. The cache may be off, its block may be longer than the shared beginning, it may be "
            "too small for one prompt, or something rewrites the prompts on the way (an id in front, for example)"
        ]
    if possible - max(rates) > SHORT_OF_POSSIBLE:
        return [
            f"{name} reused {max(rates):.1%} of the prompt tokens; an unlimited cache would reuse {possible:.1%}. "
            "Blocks were evicted, or equal beginnings were computed at the same time"
        ]
    return []


def _lengths(name: str, rounds: Sequence[Round]) -> list[str]:
    found = []
    good = [result for seen in rounds for result in seen.good]
    wrong = [s for s in good if s.request.wanted and s.prompt_tokens and s.request.wanted != s.prompt_tokens]
    if wrong:
        first = wrong[0]
        found.append(
            f"{name} counted another length than asked for in {len(wrong)} of {len(good)} prompts "
            f"(for example {first.prompt_tokens} instead of {first.request.wanted} tokens)"
        )
    short = [s for s in good if s.request.fixed and s.request.out and s.output_tokens not in (None, s.request.out)]
    if short:
        found.append(f"{name} gave {len(short)} of {len(good)} answers another length than asked for")
    if without := sum(result.output_tokens is None for result in good):
        found.append(f"{name} sent no usage with {without} of {len(good)} answers: their tokens are counted by events")
    if silent := sum(result.first_token is None for result in good):
        found.append(f"{name} sent no text in {silent} of {len(good)} answers: they have no time to first token")
    return found


def _traffic(name: str, rounds: Sequence[Round]) -> list[str]:
    foreign = max((foreign_share(seen) for seen in rounds), default=0.0)
    if foreign <= FOREIGN_SHARE:
        return []
    return [
        f"{name}'s counters moved by {foreign:.0%} more or less than this run's prompts: it had other traffic, "
        "or counts preempted requests twice"
    ]
