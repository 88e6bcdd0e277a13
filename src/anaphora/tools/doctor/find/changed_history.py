"""Earlier messages of a conversation that are not what they were: rewritten, trimmed, moved, or rendered otherwise."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from anaphora.text.outline import NOBODY
from anaphora.tools.doctor.find.findings import Finding, Repair, around, shown
from anaphora.tools.doctor.find.history_difference import Difference, end_of, rendered
from anaphora.tools.doctor.find.patterns import common_prefix, common_suffix, squeezed
from anaphora.tools.doctor.find.value_classes import canonical, classify, widen
from anaphora.tools.doctor.find.variation import Occurrence
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt, Run

_SYSTEM = ("system", "developer")
_ADVICE = {
    "rewritten_history": "send earlier messages as they were sent first; shorten them before that",
    "trimmed_history": "drop old messages rarely and many at once, not with each turn",
    "moved_system": "put the constant system text first and leave it there; what changes goes behind the history",
    "key_order": "keep tool calls and results as the text that they were, without parsing and writing them again",
    "whitespace": "keep earlier messages byte for byte, spaces and line breaks too",
    "retokenised": "send token ids back, not text; the same text has other tokens than those that the model wrote",
    "template": "use a chat template that writes earlier messages as it wrote them first",
}
_DEFAULT = "keep this out of earlier messages, or write it once and leave it as it was sent"
TRIM_SHARE = 0.8


@dataclass(slots=True)
class HistoryRewriter:
    """Mends by splicing: what the earlier request sent of the conversation, then what is new."""

    differences: dict[int, Difference] = field(default_factory=dict)
    previous: Sequence[int] = ()
    log: Log | None = None
    active: set[str] = field(default_factory=set)
    window: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of requests with trimmed history: (first message that may be dropped, how many more to drop)."""
    _mended: dict[int, tuple[Prompt, list[Run], int]] = field(default_factory=dict)
    """The request, its mended runs, and the index of the first that is no system text."""

    def switch(self, kind: str, on: bool) -> None:
        if on:
            self.active.add(kind)
        else:
            self.active.discard(kind)

    def reset(self) -> None:
        self._mended.clear()

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        if not self.active:
            return runs
        mended = _system_first(prompt, runs) if "moved_system" in self.active else runs
        difference = self.differences.get(prompt.number)
        if difference is not None and difference.kind == "moved_system":
            return mended
        if "trimmed_history" in self.active and prompt.number in self.window:
            mended = _without(prompt, mended, *self.window[prompt.number])
        elif difference is not None and difference.kind in self.active and difference.kind != "trimmed_history":
            mended = self._spliced(difference, prompt, mended)
        elif difference is None and (before := self.previous[prompt.number]) in self._mended:
            last = self.repeated(prompt)
            earlier = self._mended[before][0]
            mended = self._spliced(
                Difference("", earlier, prompt, prompt.head_length(), last=last or 0), prompt, mended
            )
        if mended is not runs and "trimmed_history" not in self.active:
            self._mended[prompt.number] = prompt, mended, _start(prompt, runs)
        return mended

    def repeated(self, prompt: Prompt) -> int | None:
        """The last message that repeats the request before it in the conversation, where it is to be sent as there."""
        difference, before = self.differences.get(prompt.number), self.previous[prompt.number]
        if before < 0 or self.log is None or (difference is not None and difference.kind not in self.active):
            return None
        if difference is not None:
            return None if difference.kind in ("template", "retokenised") else difference.last
        earlier = self.log.prompts[before]
        return prompt.head_length() + len(earlier.roles) - earlier.head_length() - 1

    def _spliced(self, difference: Difference, prompt: Prompt, runs: list[Run]) -> list[Run]:
        if difference.parted:
            return self._answered(difference, runs)
        earlier = difference.earlier
        _, old, old_start = self._mended.get(earlier.number, (earlier, earlier.runs, _start(earlier, earlier.runs)))
        whole = difference.kind == "template"
        old_start = 0 if whole else old_start
        new_start = 0 if whole else _start(prompt, runs)
        # What comes from the earlier request is no longer a segment of this one.
        kept = [(NOBODY, text) for _, text in old[old_start : end_of(earlier, old, len(earlier.roles) - 1)]]
        return [*runs[:new_start], *kept, *runs[end_of(prompt, runs, difference.last) :]]

    def _answered(self, difference: Difference, runs: list[Run]) -> list[Run]:
        """What the earlier request had, its answer as generated, and what is new behind it."""
        earlier = difference.earlier
        old = self._mended[earlier.number][1] if earlier.number in self._mended else earlier.runs
        assert self.log is not None
        assert earlier.answer is not None
        end = end_of(earlier, earlier.runs, len(earlier.roles) - 1)
        new, skip = [], difference.parted
        for owner, number in runs[end:]:
            text = self.log.store.text(number)
            if skip < len(text):
                new.append((owner, number) if skip == 0 else (NOBODY, self.log.store.intern(text[skip:])))
            skip = max(0, skip - len(text))
        return [*((NOBODY, text) for _, text in old), (NOBODY, earlier.answer), *new]


def _start(prompt: Prompt, runs: list[Run]) -> int:
    """Index of the first run of the first message that is no system text."""
    head = prompt.head_length()
    return next((i for i, (o, _) in enumerate(runs) if o >= 0 and prompt.segments[o].message >= head), len(runs))


def _system_first(prompt: Prompt, runs: list[Run]) -> list[Run]:
    """System messages from behind the beginning, each with the template's text before it, put before all."""
    head = prompt.head_length()
    moved: list[Run] = []
    rest: list[Run] = []
    for owner, text in runs:
        if owner >= 0 and prompt.segments[owner].message >= head and prompt.segments[owner].role in _SYSTEM:
            moved += [rest.pop(), (owner, text)] if rest and rest[-1][0] == NOBODY else [(owner, text)]
        else:
            rest.append((owner, text))
    return [*moved, *rest] if moved else runs


def _without(prompt: Prompt, runs: list[Run], first: int, count: int) -> list[Run]:
    """The runs without ``count`` messages from ``first`` on, each with the template's text behind it."""
    kept: list[Run] = []
    dropping = False
    for owner, text in runs:
        if owner >= 0:
            dropping = first <= prompt.segments[owner].message < first + count
        if not dropping:
            kept.append((owner, text))
    return kept


# --- Finding ---------------------------------------------------------------------------------------------------------


def find(log: Log, previous: Sequence[int]) -> tuple[list[Finding], HistoryRewriter]:
    """Every way in which conversations fail to extend themselves."""
    stage = HistoryRewriter(previous=previous, log=log)
    for prompt in log.prompts:
        if (before := previous[prompt.number]) >= 0:
            difference = _difference(log, log.prompts[before], prompt)
            if difference is not None:
                stage.differences[prompt.number] = difference
    by_kind: dict[str, list[Difference]] = defaultdict(list)
    for difference in stage.differences.values():
        by_kind[difference.kind].append(difference)
    if "trimmed_history" in by_kind:
        stage.window = _windows(log.prompts, previous, stage.differences, by_kind["trimmed_history"])
    return [_finding(kind, found, log, stage) for kind, found in by_kind.items()], stage


def _difference(log: Log, earlier: Prompt, later: Prompt) -> Difference | None:
    a, b = earlier.head_length(), later.head_length()
    old, new = earlier.message_ids[a:], later.message_ids[b:]
    if new[: len(old)] == old:
        return rendered(log, earlier, later, b + len(old) - 1)
    at = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), min(len(old), len(new)))
    if moved := _moved(earlier, later, at + b):
        return moved
    for dropped in range(1, len(old) - at):
        rest = old[at + dropped :]
        if new[at : at + len(rest)] == rest:
            last = b + at + len(rest) - 1
            return Difference("trimmed_history", earlier, later, at + b, dropped=dropped, last=last)
    last = max((b + i for i, message in enumerate(new) if message == old[-1]), default=b + min(len(old), len(new)) - 1)
    return _changed(log, Difference("rewritten_history", earlier, later, b + at, last=last), a + at)


def _moved(earlier: Prompt, later: Prompt, at: int) -> Difference | None:
    """A system message behind the beginning that is the only reason why the histories differ."""
    lists = [[m for m, r in zip(p.message_ids, p.roles, strict=True) if r not in _SYSTEM] for p in (earlier, later)]
    late = [i for i, role in enumerate(later.roles) if role in _SYSTEM and i >= later.head_length()]
    if not late and not any(r in _SYSTEM for r in earlier.roles[earlier.head_length() :]):
        return None
    if lists[1][: len(lists[0])] != lists[0]:
        return None
    place = late[-1] if late else at
    segment = next((s for s in later.segments if s.message == place), None)
    return Difference("moved_system", earlier, later, place, new=segment, last=len(later.roles) - 1)


def _changed(log: Log, difference: Difference, old_at: int) -> Difference:
    """What the first changed message has become: the class comes from the two texts."""
    pairs = [
        [s for s in prompt.segments if s.message == message]
        for prompt, message in ((difference.earlier, old_at), (difference.later, difference.at))
    ]
    if not pairs[1] or difference.earlier.roles[old_at] != difference.later.roles[difference.at]:
        return difference
    old, new = next(((o, n) for o, n in zip(*pairs, strict=False) if o.text != n.text), (pairs[0][-1], pairs[1][-1]))
    texts = log.store.text(old.text), log.store.text(new.text)
    return Difference(
        _kind_of(*texts), difference.earlier, difference.later, difference.at, old, new, last=difference.last
    )


def _kind_of(old: str, new: str) -> str:
    if (first := canonical(old)) is not None and first == canonical(new):
        return "key_order"
    if squeezed(old) == squeezed(new):
        return "whitespace"
    start = common_prefix(old, new)
    tail = common_suffix(old, new, min(len(old), len(new)) - start)
    if start + tail >= 0.3 * min(len(old), len(new)):
        (s, e), (t, f) = widen(old, start, len(old) - tail), widen(new, start, len(new) - tail)
        values = [Occurrence(0, 0, None, old[s:e]), Occurrence(1, 0, None, new[t:f])]
        verdict = classify(values, old[max(0, s - 40) : s]) if old[s:e] and new[t:f] else None
        if verdict and verdict.kind in ("clock_time", "date", "request_id", "hash"):
            return verdict.kind
    return "rewritten_history"


def _windows(
    prompts: Sequence[Prompt], previous: Sequence[int], all_: dict[int, Difference], trimmed: list[Difference]
) -> dict[int, tuple[int, int]]:
    """How many more messages each request would drop if it dropped many at once, never keeping more than it did."""
    step = min(difference.dropped for difference in trimmed)
    size = max(len(d.later.roles) - d.at for d in trimmed)
    chunk = max(2 * step, int(TRIM_SHARE * size) // step * step)
    lost: dict[int, tuple[int, int]] = {}
    windows: dict[int, tuple[int, int]] = {}
    for prompt in prompts:
        first, count = lost.get(previous[prompt.number], (0, 0))
        difference = all_.get(prompt.number)
        if difference is not None and difference.kind == "trimmed_history":
            first, count = difference.at, count + difference.dropped
        if count:
            lost[prompt.number] = first, count
            more = -(-count // chunk) * chunk - count
            while first + more < len(prompt.roles) - 1 and prompt.roles[first + more] == "tool":
                more += 1  # a tool's result goes with its call
            windows[prompt.number] = first, min(more, len(prompt.roles) - first - 1)
    return windows


def _template_note(difference: Difference) -> str:
    later = difference.later
    order = [later.segments[owner].message for owner, _ in later.runs if owner >= 0]
    if any(b < a and b < later.head_length() for a, b in itertools.pairwise(order)):
        return "the messages are equal, but the template moves the system text (or the tools) to a later message"
    return "the messages are equal, but the template writes earlier ones differently when new ones follow"


def _finding(kind: str, found: list[Difference], log: Log, stage: HistoryRewriter) -> Finding:
    first = found[0]
    segment = first.new or next((s for s in first.later.segments if s.message == first.at), first.later.segments[-1])
    text = log.store.text(segment.text)
    old = log.store.text(first.old.text) if first.old else ""
    start, end = 0, len(text)
    if first.old:
        start = common_prefix(old, text)
        tail = common_suffix(old, text, min(len(old), len(text)) - start)
        end = len(text) - tail
        if kind not in _ADVICE:
            start, end = widen(text, start, end)
    old_value = old[start : len(old) - (len(text) - end)] if first.old else ""
    note = ""
    if kind == "trimmed_history":
        steps = sorted({difference.dropped for difference in found})
        note = f"{steps[0] if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'} of the oldest messages go each time"
    if kind == "template" or first.answer:
        note = first.answer or _template_note(first)
    return Finding(
        kind=kind,
        status="confirmed",
        message=segment.message,
        role=segment.role,
        path=segment.path,
        start=segment.offset + start,
        end=segment.offset + end,
        samples=shown([value for value in (old_value, text[start:end]) if value]),
        repairs=[
            Repair(
                "as first sent",
                _ADVICE.get(kind, _DEFAULT),
                partial(stage.switch, kind),
                rewrites=kind not in ("template", "retokenised"),
            )
        ],
        seen=len(found),
        line=first.later.line,
        varies=f"in {len(found)} of {len(log.prompts)} requests",
        context=around(text, start, end),
        note=note,
    )
