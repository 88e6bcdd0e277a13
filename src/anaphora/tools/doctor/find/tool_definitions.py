"""Tools that come in another order, with other key order, or as another set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import partial

from anaphora.text.outline import NOBODY, TOOLS
from anaphora.tools.doctor.find.findings import Finding, Repair, shown
from anaphora.tools.doctor.find.value_classes import canonical, describe
from anaphora.tools.doctor.find.variation import Occurrence
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt, Run
from anaphora.tools.doctor.read.token_store import TokenStore

MOST_UNITED = 3
SETS = ("required", "enum", "type")
"""Lists of JSON Schema whose order means nothing; programs that keep them as sets write them in any."""
_ADVICE = {
    "same_set": "send the same tools in every request, also those that it does not need",
    "tool_order": "sort the tools (by name, say) before they are sent",
    "key_order": "write each tool's schema with its keys in one order",
    "tool_set": "send those tools that are always there first, the others last",
}


class ToolRewriter:
    """Writes tools with equal JSON the same way, and puts them in one order: the most frequent ones first."""

    def __init__(self, prompts: Sequence[Prompt], store: TokenStore) -> None:
        self.active: set[str] = set()
        self._store = store
        self._first: dict[str, int] = {}
        counts: Counter[str] = Counter()
        self.keys: dict[int, str] = {}
        for prompt in prompts:
            for text in prompt.tool_texts:
                if text not in self.keys:
                    self.keys[text] = canonical(store.text(text), SETS) or store.text(text)
                    self._first.setdefault(self.keys[text], text)
            counts.update({self.keys[text] for text in prompt.tool_texts})
        by_use = sorted(self._first, key=lambda key: -counts[key])
        self._rank = {key: rank for rank, key in enumerate(by_use)}
        self._all = [self._first[key] for key in by_use]
        self._between = _between(prompts)
        most = max((len(prompt.tool_texts) for prompt in prompts), default=0)
        self.unites = len(self._all) <= MOST_UNITED * most and len({_name(key) for key in by_use}) == len(by_use)
        """Whether all requests could have the same tools: there are not many more than one request has already."""

    def switch(self, kind: str, on: bool) -> None:
        if on:
            self.active.add(kind)
        else:
            self.active.discard(kind)

    def reset(self) -> None:
        pass

    def order(self, texts: Sequence[int]) -> list[int]:
        """The indices of ``texts`` in the order in which they should stand."""
        return sorted(range(len(texts)), key=lambda i: (self._rank.get(self.keys.get(texts[i], ""), 0), i))

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        places = [i for i, (owner, _) in enumerate(runs) if owner >= 0 and prompt.segments[owner].message == TOOLS]
        if not self.active or not places:
            return runs
        tools = [runs[i] for i in places]
        if "key_order" in self.active:
            tools = [(owner, self._first_form(prompt, owner, text)) for owner, text in tools]
        if self.active & {"tool_order", "tool_set"}:
            tools = [tools[i] for i in self.order([prompt.segments[owner].text for owner, _ in tools])]
        if "same_set" in self.active and len(places) == len(prompt.tool_texts):
            united = [(NOBODY, number) for text in self._all for number in (*self._between, text)]
            return [*runs[: places[0]], *united[len(self._between) :], *runs[places[-1] + 1 :]]
        changed = list(runs)
        for place, run in zip(places, tools, strict=True):
            changed[place] = run
        return changed if changed != runs else runs

    def first_form(self, text: int) -> str:
        """The first tool text with the same JSON."""
        return self._store.text(self._first[self.keys[text]])

    def _first_form(self, prompt: Prompt, owner: int, text: int) -> int:
        own = prompt.segments[owner].text
        return self._first[self.keys[own]] if text == own else text


def find(log: Log, previous: Sequence[int]) -> tuple[list[Finding], ToolRewriter]:
    """How the tools of each request differ from those of the one before it in its conversation, else of its kind."""
    stage = ToolRewriter(log.prompts, log.store)
    latest: dict[tuple[str, frozenset[str]], Prompt] = {}
    seen: dict[str, list[tuple[Prompt, Prompt]]] = {}
    occurrences: list[Occurrence] = []
    names = {text: _name(key) for text, key in stage.keys.items()}
    for prompt in log.prompts:
        if not prompt.tool_texts:
            continue
        before = log.prompts[previous[prompt.number]] if previous[prompt.number] >= 0 else None
        key = prompt.root, frozenset(names[text] for text in prompt.tool_texts)
        if before is None or not before.tool_texts:
            before = latest.get(key) or _relative(prompt, latest, names)
        latest[key] = prompt
        value = " ".join(map(str, prompt.tool_texts))
        occurrences.append(Occurrence(prompt.number, 0, prompt.time, value))
        if before is not None and (kind := _difference(before, prompt, stage)) is not None:
            seen.setdefault(kind, []).append((before, prompt))
    return [_finding(kind, pairs, log, stage, occurrences, names) for kind, pairs in seen.items()], stage


def _between(prompts: Sequence[Prompt]) -> list[int]:
    """What the template writes between two tools, as numbers of texts."""
    for prompt in prompts:
        places = [i for i, (o, _) in enumerate(prompt.runs) if o >= 0 and prompt.segments[o].message == TOOLS]
        if len(places) > 1:
            return [text for _, text in prompt.runs[places[0] + 1 : places[1]]]
    return []


def _relative(prompt: Prompt, latest: dict[tuple[str, frozenset[str]], Prompt], names: dict[int, str]) -> Prompt | None:
    """The latest request that has most of these tools."""
    own = {names[text] for text in prompt.tool_texts}
    for (root, theirs), candidate in reversed(latest.items()):
        if root == prompt.root and 2 * len(own & theirs) > max(len(own), len(theirs)):
            return candidate
    return None


def _difference(before: Prompt, after: Prompt, stage: ToolRewriter) -> str | None:
    if before.tool_texts == after.tool_texts:
        return None
    old, new = ([stage.keys[text] for text in prompt.tool_texts] for prompt in (before, after))
    if old == new:
        return "key_order"
    if sorted(old) == sorted(new):
        return "tool_order"
    if {_name(key) for key in old} == {_name(key) for key in new}:
        return None  # their texts differ: a slot
    return "tool_set"


def _name(text: str) -> str:
    """The name of a tool, from its JSON; tools without one are known by their text."""
    try:
        tool = json.loads(text)
    except ValueError:
        return text
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(inner.get("name") or text) if isinstance(inner, dict) else text


def _repairs(kind: str, stage: ToolRewriter) -> list[Repair]:
    here = Repair("same place", _ADVICE[kind], partial(stage.switch, kind))
    if kind == "tool_set" and stage.unites:
        return [here, Repair("all tools", _ADVICE["same_set"], partial(stage.switch, "same_set"), rewrites=False)]
    return [here]


def _finding(
    kind: str,
    pairs: list[tuple[Prompt, Prompt]],
    log: Log,
    stage: ToolRewriter,
    occurrences: list[Occurrence],
    names: dict[int, str],
) -> Finding:
    before, after = pairs[0]
    first = next(
        (i for i, (a, b) in enumerate(zip(before.tool_texts, after.tool_texts, strict=False)) if a != b),
        min(len(before.tool_texts), len(after.tool_texts)),
    )
    segments = [segment for segment in after.segments if segment.message == TOOLS]
    at = segments[min(first, len(segments) - 1)]
    samples = [", ".join(names[t] for t in p.tool_texts) for pair in pairs[:4] for p in pair]
    if kind == "key_order":
        samples = [log.store.text(p.tool_texts[first]) for p in pairs[0]]
    end = segments[-1].offset + len(log.store.text(segments[-1].text))
    return Finding(
        kind=kind,
        status="confirmed",
        message=TOOLS,
        role="tools",
        path=at.path,
        start=at.offset,
        end=at.offset + len(log.store.text(at.text)) if kind == "key_order" else end,
        samples=shown(list(dict.fromkeys(samples))),
        repairs=_repairs(kind, stage),
        seen=len(pairs),
        line=after.line,
        varies=describe(occurrences),
        context=[(f"{p.line}: {', '.join(names[t] for t in p.tool_texts)[:160]}\n", p is after) for p in pairs[0]],
    )
