"""From a log to its diagnosis: what breaks, what mending each break would save, what the best rate is."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from anaphora.tools.doctor.find import changed_history, constant_dates, conversations, tool_definitions, varying_spans
from anaphora.tools.doctor.find.findings import Finding, Repair, Rewriter
from anaphora.tools.doctor.find.span_rewriter import SpanRewriter
from anaphora.tools.doctor.price.rerun_log import Outcome, run, run_limited
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.shared.simulate import UnlimitedCache

MOST_TRIED = 10
LEAST_SHARE = 0.004
"""A break whose repair saves less than this share of all prompt tokens is worth nothing."""
LEAST_TOKENS = 8
"""... and so is one that saves fewer tokens than this in each request that it concerns."""
NOISE_TOKENS = 2
"""Places whose repairs differ by no more tokens in each request are equal: the one named first is proposed."""
LIMITS = ("cold", "ended", "block_too_large", "cache_too_small", "routing_key")
FEW_REQUESTS = 20
"""In a log of at least so many, what would help one request only is chance."""
_COMES_AGAIN = ("date", "clock_time", "version")
"""What a log shows once will happen again."""
COLD_TOKENS = 16


@dataclass(slots=True)
class Break:
    """A finding with its price. ``repair`` is the better of the finding's repairs, None where none is worth it.

    ``tokens_lost`` is what mending it saves once all breaks at earlier places of the prompt are mended. ``status``:
    ``confirmed`` where the log shows the change and the mended log what it costs; ``suspected`` where it changes, but
    mending it saves nothing here, or in one request only, which may be chance; ``latent`` where it has not changed yet.
    """

    finding: Finding
    repair: Repair | None
    tokens_lost: int
    requests: int
    predicted_hit_rate: float
    status: str


@dataclass(slots=True)
class Diagnosis:
    log: Log
    before: Outcome
    best: Outcome
    breaks: list[Break]
    limits: Counter[str] = field(default_factory=Counter)
    limited: Outcome | None = None
    conversations: int = 0
    rewriters: list[Rewriter] = field(default_factory=list)


def diagnose(
    log: Log,
    *,
    block_size: int = 1,
    cache_tokens: int | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> Diagnosis:
    """Find and price every break. ``advance`` is called with what comes next, in words."""
    advance("running the log as it is")
    before = run(log, block_size=block_size, keep=True)
    advance("finding conversations")
    previous, own = conversations.link(log.prompts, log.store)
    advance("comparing texts")
    in_texts, moves = varying_spans.find(log, own)
    in_tools, tools = tool_definitions.find(log, previous)
    in_history, spliced = changed_history.find(log, previous)
    rewriters: list[Rewriter] = [moves, tools, spliced]
    for finding in in_history:
        if finding.kind == "moved_system":
            _keep_behind(finding.repairs[0], moves)
    in_order = [*in_texts, *in_tools, *in_history]
    found = sorted(in_order, key=lambda finding: (finding.kind != "moved_system", finding.order))
    chosen = _promising(found)
    best, breaks = _price(log, chosen, rewriters, before, block_size, advance)
    breaks = [item for item in breaks if not (item.finding in in_history and _seen_twice(item, breaks))]
    breaks += [
        Break(f, None, 0, 0, before.hit_rate, "suspected") for f in found if f not in chosen and f.kind != "user_data"
    ]
    breaks += [Break(f, None, 0, 0, before.hit_rate, "latent") for f in constant_dates.find(log, in_texts)]
    breaks.sort(key=lambda item: (-item.tokens_lost, item.finding.order))
    limited = None
    if cache_tokens is not None:
        advance("running the log with the limited cache")
        limited = run_limited(log, cache_tokens, block_size)
    diagnosis = Diagnosis(log, before, best, breaks, limited=limited, conversations=len(set(own)), rewriters=rewriters)
    diagnosis.limits = _limits(diagnosis, block_size)
    return diagnosis


def _seen_twice(item: Break, breaks: Sequence[Break]) -> bool:
    """Whether a conversation's changed message is nothing but a text whose changing part is mended already."""
    own = item.finding
    return item.repair is None and any(
        other.repair is not None
        and (own.message, own.role) == (other.finding.message, other.finding.role)
        and own.start < other.finding.end
        and other.finding.start < own.end
        for other in breaks
    )


def _keep_behind(repair: Repair, moves: SpanRewriter) -> None:
    """Constant system text goes to the front only together with what changes in it going behind the history."""
    inner = repair.switch

    def switch(on: bool) -> None:
        inner(on)
        moves.all_system = on

    repair.switch = switch


def _promising(found: Sequence[Finding]) -> list[Finding]:
    """Those seen most; each is re-run several times."""
    most = sorted(found, key=lambda finding: -finding.seen)[:MOST_TRIED]
    return [finding for finding in found if finding in most]


def _price(
    log: Log,
    found: Sequence[Finding],
    rewriters: list[Rewriter],
    before: Outcome,
    block_size: int,
    advance: Callable[[str], None],
) -> tuple[Outcome, list[Break]]:
    """Mend one break after the other, from the beginning of the prompt to its end, and keep what each saves.

    What saves nothing is tried again once a later one is mended: a template may write the tools behind the system text.
    """
    current = before
    breaks: list[Break] = []
    vain: list[Break] = []
    waiting = list(found)
    while waiting:
        tried: list[Break] = []
        again = 0
        for finding in waiting:
            advance(f"mending: {finding.kind}")
            item, current = _mend(log, finding, rewriters, before, current, block_size)
            if item.repair is None:
                tried.append(item)
            else:
                breaks.append(item)
                again = len(tried)
        vain += tried[again:]
        waiting = [item.finding for item in tried[:again]]
        if not waiting and vain:
            advance("mending: several at once")
            attempt = partial(run, log, rewriters, block_size=block_size)
            joined, current = _together(vain, breaks, before, current, attempt)
            breaks += joined
            if joined:
                waiting, vain = [item.finding for item in vain if item.repair is None], []
    return _placed_again(log, rewriters, before, current, breaks, block_size), [*breaks, *vain]


def _mend(
    log: Log, finding: Finding, rewriters: list[Rewriter], before: Outcome, current: Outcome, block_size: int
) -> tuple[Break, Outcome]:
    """Try a finding's repairs on the log as it is mended so far; the best stays on where it is worth something."""
    tried: list[tuple[Outcome, Repair]] = []
    for repair in finding.repairs:
        repair.switch(True)
        tried.append((run(log, rewriters, block_size=block_size), repair))
        repair.switch(False)
    near = min(after.computed for after, _ in tried) + _noise(before)
    after, repair = next(entry for entry in tried if entry[0].computed <= near)
    gains = _gains([finding], before, current, after)
    if not gains:
        return Break(finding, None, 0, 0, before.hit_rate, "suspected"), current
    repair.switch(True)
    saved = current.computed - after.computed
    rate = _rate(before, saved, after.total - current.total)
    return Break(finding, repair, saved, gains, rate, finding.status), after


def _gains(found: Sequence[Finding], before: Outcome, current: Outcome, after: Outcome) -> int:
    """How many requests gain where ``current`` becomes ``after``; 0 where that is worth nothing, or may be chance."""
    saved = current.computed - after.computed
    gains = sum(
        (n - c) - (m - d) >= LEAST_TOKENS
        for n, c, m, d in zip(current.tokens, current.cached, after.tokens, after.cached, strict=True)
    )
    enough = gains > 1 or len(before.tokens) < FEW_REQUESTS or any(finding.kind in _COMES_AGAIN for finding in found)
    return gains if enough and saved >= max(LEAST_SHARE * before.total, LEAST_TOKENS * gains) else 0


def _together(
    vain: Sequence[Break], mended: Sequence[Break], before: Outcome, current: Outcome, attempt: Callable[[], Outcome]
) -> tuple[list[Break], Outcome]:
    """Mend at once what saves nothing alone: two values in one block, or a break behind where another's value went.

    Those that are needed are mended, and each is charged an equal share of what they save.
    """
    items = [*mended, *vain]
    old = [item.repair for item in items]
    tried: list[tuple[Outcome, list[Repair]]] = []
    for way in _ways(items):
        _switch(old, way)
        tried.append((attempt(), way))
        _switch(way, old)
    after, way = min(tried, key=lambda entry: entry[0].computed)
    if not _gains([item.finding for item in vain], before, current, after):
        return [], current
    _switch(old, way)
    needed: list[tuple[Break, Repair]] = []
    for item, repair in reversed(list(zip(vain, way[len(mended) :], strict=True))):
        repair.switch(False)
        without = attempt()
        if _gains([item.finding], before, without, after):
            repair.switch(True)
            needed.insert(0, (item, repair))
        else:
            after = without
    gains = _gains([item.finding for item, _ in needed], before, current, after) if needed else 0
    if not gains:
        _switch(way, old)
        return [], current
    for item, repair in (*zip(mended, way, strict=False), *needed):
        item.repair = repair
    saved = current.computed - after.computed
    for item, _ in needed:
        others = ", ".join(other.finding.kind for other, _ in needed if other is not item)
        item.tokens_lost, item.requests, item.status = saved // len(needed), gains, item.finding.status
        item.predicted_hit_rate = _rate(before, saved, after.total - current.total)
        if others:
            item.finding.note = "; ".join(filter(None, (item.finding.note, f"saves only together with {others}")))
    return [item for item, _ in needed], after


def _ways(items: Sequence[Break]) -> list[list[Repair]]:
    """Repairs for all breaks: each where it is or its first one, then all that can at one place."""
    ways: dict[tuple[str, ...], list[Repair]] = {}
    for place in (None, *dict.fromkeys(repair.place for item in items for repair in item.finding.repairs)):
        way = [
            next((repair for repair in item.finding.repairs if repair.place == place), None)
            or item.repair
            or item.finding.repairs[0]
            for item in items
        ]
        ways.setdefault(tuple(repair.place for repair in way), way)
    return list(ways.values())


def _switch(old: Sequence[Repair | None], new: Sequence[Repair | None]) -> None:
    for repair in old:
        if repair is not None:
            repair.switch(False)
    for repair in new:
        if repair is not None:
            repair.switch(True)


def _placed_again(
    log: Log, rewriters: list[Rewriter], before: Outcome, current: Outcome, breaks: list[Break], block_size: int
) -> Outcome:
    """Try the repairs' other places once more now that all breaks are mended, for all at once and for each.

    What that saves belongs to the break that was placed anew, of several to the last in the prompt.
    """
    mended = sorted((item for item in breaks if item.repair is not None), key=lambda item: item.finding.order)
    if len(mended) < 2:
        return current
    places = dict.fromkeys(repair.place for item in mended for repair in item.finding.repairs)
    for group, place in itertools.product([mended, *([item] for item in mended)], places):
        turned = [
            (item, item.repair, other)
            for item in group
            for other in item.finding.repairs
            if item.repair is not None and other.place == place != item.repair.place
        ]
        if not turned:
            continue
        for _, old, new in turned:
            old.switch(False)
            new.switch(True)
        after = run(log, rewriters, block_size=block_size)
        if after.computed < current.computed - _noise(before):
            last = turned[-1][0]
            last.tokens_lost += current.computed - after.computed
            last.predicted_hit_rate = _rate(before, last.tokens_lost, after.total - before.total)
            current = after
            for item, _, new in turned:
                item.repair = new
        else:
            for _, old, new in turned:
                new.switch(False)
                old.switch(True)
    return current


def _noise(before: Outcome) -> int:
    """Tokens by which two places differ that are as good: a line break that is one token here and none there."""
    return NOISE_TOKENS * len(before.tokens)


def _rate(before: Outcome, saved: int, longer: int) -> float:
    """The hit rate where ``saved`` tokens fewer are computed and prompts are ``longer`` tokens longer in all."""
    return 1 - (before.computed - saved) / max(1, before.total + longer)


def _limits(diagnosis: Diagnosis, block_size: int) -> Counter[str]:
    """Why requests found no more where nothing is broken."""
    log, before = diagnosis.log, diagnosis.before
    limits: Counter[str] = Counter(dict.fromkeys(LIMITS, 0))
    gained = {
        n
        for n, (a, b, c, d) in enumerate(
            zip(before.tokens, before.cached, diagnosis.best.tokens, diagnosis.best.cached, strict=True)
        )
        if (a - b) - (c - d) >= LEAST_TOKENS
    }
    shared = _without_roots(log) if len({prompt.root for prompt in log.prompts}) > 1 else None
    for prompt, found, tokens, cached in zip(log.prompts, before.found, before.tokens, before.cached, strict=True):
        if prompt.number in gained:
            continue
        if shared is not None and shared[prompt.number] > found.tokens + COLD_TOKENS:
            limits["routing_key"] += 1
        elif found.tokens >= min(COLD_TOKENS, tokens - 1) and found.tokens < block_size:
            limits["block_too_large"] += 1
        elif found.tokens < COLD_TOKENS and found.tokens < tokens - 1:
            limits["cold"] += 1
        else:
            limits["ended"] += 1
        if diagnosis.limited is not None and diagnosis.limited.cached[prompt.number] + COLD_TOKENS <= cached:
            limits["cache_too_small"] += 1
    return limits


def _without_roots(log: Log) -> list[int]:
    """What each prompt would find if all shared one cache."""
    cache = UnlimitedCache()
    return [cache.look(log.store.packed(prompt.pieces), prompt.number, prompt.model).tokens for prompt in log.prompts]
