"""Diagnoses a log: what breaks prefixes, what mending each break would save, and the best hit rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anaphora.tools.doctor.find import changed_history, constant_dates, conversations, tool_definitions, varying_spans
from anaphora.tools.doctor.find.findings import Finding, Repair, Rewriter
from anaphora.tools.doctor.find.span_rewriter import SpanRewriter
from anaphora.tools.doctor.price.breaks import Break, without_price
from anaphora.tools.doctor.price.repair_search import RepairSearch
from anaphora.tools.doctor.price.rerun_log import Outcome, rerun, rerun_limited
from anaphora.tools.doctor.price.reuse_limits import reuse_limits
from anaphora.tools.doctor.read.load_log import Log

MAX_TRIED = 10
"""Findings that are priced; each needs several runs of the log."""


@dataclass(slots=True)
class Diagnosis:
    """What was found in a log.

    ``before`` is the outcome of the log as it is, ``best`` that with all repairs, ``limited`` that in a cache of
    limited size, if asked for. ``breaks`` come with the dearest first. ``limits`` counts why other requests reuse
    no more. ``rewriters`` have the repairs of ``best`` switched on.
    """

    log: Log
    before: Outcome
    best: Outcome
    breaks: list[Break]
    limits: Counter[str]
    limited: Outcome | None
    conversations: int
    rewriters: list[Rewriter]


def diagnose(
    log: Log,
    *,
    block_size: int = 1,
    cache_tokens: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Finds and prices every break.

    ``block_size`` is in tokens: only whole blocks are reused. ``cache_tokens`` is the size of a limited cache to
    compare with. ``progress`` is called with the next step in words.
    """
    progress("running the log as it is")
    before = rerun(log, block_size=block_size, keep_matches=True)
    progress("finding conversations")
    previous, conversation_of = conversations.link(log.prompts, log.store)
    progress("comparing texts")
    in_texts, spans = varying_spans.find(log, conversation_of)
    in_tools, tools = tool_definitions.find(log, previous)
    in_history, history = changed_history.find(log, previous)
    for finding in in_history:
        if finding.kind == "moved_system":
            _move_varying_spans_too(finding.repairs[0], spans)
    found = sorted(
        [*in_texts, *in_tools, *in_history],
        key=lambda finding: (finding.kind != "moved_system", finding.location.order),
    )
    tried = _most_seen(found)
    rewriters: list[Rewriter] = [spans, tools, history]
    search = RepairSearch(log, rewriters, before, block_size, progress)
    priced = search.run(tried)
    breaks = [item for item in priced if not (item.finding in in_history and _is_covered(item, priced))]
    untried = [finding for finding in found if finding not in tried and finding.kind != "user_data"]
    breaks += [without_price(finding, before, "suspected") for finding in untried]
    breaks += [without_price(finding, before, "latent") for finding in constant_dates.find(log, in_texts)]
    breaks.sort(key=lambda item: (-item.tokens_lost, item.finding.location.order))
    limited = None
    if cache_tokens is not None:
        progress("running the log with the limited cache")
        limited = rerun_limited(log, cache_tokens, block_size)
    limits = reuse_limits(log, before, search.current, limited, block_size)
    num_conversations = len(set(conversation_of))
    return Diagnosis(log, before, search.current, breaks, limits, limited, num_conversations, rewriters)


def _is_covered(item: Break, breaks: Sequence[Break]) -> bool:
    """Tells whether a changed message only shows a varying span that another break mends."""
    own = item.finding.location
    return item.repair is None and any(
        other.repair is not None
        and (own.message, own.role) == (other.finding.location.message, other.finding.location.role)
        and own.start < other.finding.location.end
        and other.finding.location.start < own.end
        for other in breaks
    )


def _move_varying_spans_too(repair: Repair, spans: SpanRewriter) -> None:
    """Makes the repair that puts system texts first also move what changes in them behind the history."""
    put_first = repair.switch

    def switch(on: bool) -> None:
        put_first(on)
        spans.all_system = on

    repair.switch = switch


def _most_seen(found: Sequence[Finding]) -> list[Finding]:
    """Returns the findings that are seen in most requests, in their order."""
    most = sorted(found, key=lambda finding: -finding.seen)[:MAX_TRIED]
    return [finding for finding in found if finding in most]
