"""Counts what cache lookups found. A prompt is reported and counted once, at its first admission."""

from __future__ import annotations

from dataclasses import replace

from anaphora.cache.explain import AtSizes
from anaphora.cache.index import Match
from anaphora.cache.manager import CacheManager
from anaphora.core.sequence import Sequence
from anaphora.types.outputs import EngineStats
from anaphora.types.reports import CacheReport, Reason, is_hit


class LookupStats:
    """Makes the cache report of each prompt and adds it to the counters in ``stats``.

    The n choices of a request have one prompt, which is counted with choice 0.
    """

    def __init__(self, cache: CacheManager, stats: EngineStats) -> None:
        self._cache = cache
        self._stats = stats

    @staticmethod
    def is_first_admission(sequence: Sequence) -> bool:
        """Return whether the sequence's next admission is the first one of its prompt."""
        return sequence.report is None and not sequence.choice

    def at_sizes(self, sequence: Sequence, match: Match) -> AtSizes | None:
        """Return what caches of other sizes would match. Called before ``match`` is taken."""
        return self._cache.at_sizes(sequence.table, match, sequence.num_prompt)

    def admitted(self, sequence: Sequence, match: Match, taken: Match, sizes: AtSizes | None, now: float) -> None:
        """Report and count a prompt at its first admission, with the part of its ``match`` that was ``taken``."""
        report = self._cache.explain(sequence.table, match, sequence.num_prompt, taken)
        sequence.report = _add_wait(report, sequence.waited_s)
        sequence.first_scheduled = now
        stats, reason = self._stats, sequence.report.reason
        stats.requests += 1
        stats.prompt_tokens += sequence.num_prompt
        stats.reasons[reason] = stats.reasons.get(reason, 0) + 1
        if reason != Reason.BYPASSED:
            stats.queries += sequence.num_prompt
            stats.hits += report.cached_tokens
            stats.requests_hit += is_hit(sequence.num_prompt, report.cached_tokens)
            self._cache.prefix_hits.add(taken.blocks, now)
        if sizes is not None:
            stats.hits_half += min(sizes.half, report.cached_tokens)  # there may have been no room for all of it
            stats.hits_twice += sizes.twice
            stats.hits_four_times += sizes.four_times
            if report.position < self._cache.block_size and reason != Reason.EVICTED:
                stats.isolated += self._cache.is_isolated(sequence.table)


def _add_wait(report: CacheReport, seconds: float) -> CacheReport:
    """Add the time spent waiting for another request. Report IN_FLIGHT only if nothing else limited the match."""
    if not seconds:
        return report
    if report.reason in (Reason.HIT, Reason.SHORT):
        detail = f"waited {seconds:.3f} s for another request that computed the same prefix"
        report = replace(report, reason=Reason.IN_FLIGHT, detail=detail)
    return replace(report, waited=True)
