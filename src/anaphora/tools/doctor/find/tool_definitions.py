"""Finds tools that come in another order, with their keys in another order, or as another set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from anaphora.text.outline import TOOLS
from anaphora.tools.doctor.find.findings import Finding, Location, Repair, shorten_samples
from anaphora.tools.doctor.find.tool_rewriter import ToolRewriter, tool_name
from anaphora.tools.doctor.find.value_classes import describe
from anaphora.tools.doctor.find.variation import Occurrence
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt

_ADVICE = {
    "same_set": "send the same tools in every request, also those that it does not need",
    "tool_order": "sort the tools (by name, say) before they are sent",
    "key_order": "write each tool's schema with its keys in one order",
    "tool_set": "send those tools that are always there first, the others last",
}


def find(log: Log, previous: Sequence[int]) -> tuple[list[Finding], ToolRewriter]:
    """Compares the tools of each request with those of the one before it in its conversation, else of a similar one.

    ``previous`` has for each request the number of the one before it in its conversation, or -1. Returns the findings
    and the rewriter that applies their repairs.
    """
    rewriter = ToolRewriter(log.prompts, log.store)
    names = {text: tool_name(tool) for text, tool in rewriter.canonical.items()}
    latest: dict[tuple[str, frozenset[str]], Prompt] = {}
    pairs: dict[str, list[tuple[Prompt, Prompt]]] = {}
    occurrences: list[Occurrence] = []
    for prompt in log.prompts:
        if not prompt.tool_texts:
            continue
        before = log.prompts[previous[prompt.number]] if previous[prompt.number] >= 0 else None
        key = prompt.root, frozenset(names[text] for text in prompt.tool_texts)
        if before is None or not before.tool_texts:
            before = latest.get(key) or _most_similar(prompt, latest, names)
        latest[key] = prompt
        value = " ".join(map(str, prompt.tool_texts))
        occurrences.append(Occurrence(prompt.number, 0, prompt.time, value))
        if before is not None and (kind := _difference(before, prompt, rewriter)) is not None:
            pairs.setdefault(kind, []).append((before, prompt))
    varies = describe(occurrences) if pairs else ""
    return [_finding(kind, differing, log, rewriter, varies) for kind, differing in pairs.items()], rewriter


def _most_similar(
    prompt: Prompt, latest: dict[tuple[str, frozenset[str]], Prompt], names: dict[int, str]
) -> Prompt | None:
    """Returns the latest request that has more than half of these tools."""
    own = {names[text] for text in prompt.tool_texts}
    for (root, theirs), candidate in reversed(latest.items()):
        if root == prompt.root and 2 * len(own & theirs) > max(len(own), len(theirs)):
            return candidate
    return None


def _difference(before: Prompt, after: Prompt, rewriter: ToolRewriter) -> str | None:
    if before.tool_texts == after.tool_texts:
        return None
    old, new = ([rewriter.canonical[text] for text in prompt.tool_texts] for prompt in (before, after))
    if old == new:
        return "key_order"
    if sorted(old) == sorted(new):
        return "tool_order"
    if {tool_name(tool) for tool in old} == {tool_name(tool) for tool in new}:
        return None  # their texts differ: find/varying_spans.py finds that
    return "tool_set"


def _repairs(kind: str, rewriter: ToolRewriter) -> list[Repair]:
    in_place = Repair("same place", _ADVICE[kind], partial(rewriter.switch, kind))
    if kind == "tool_set" and rewriter.can_unite:
        united = Repair("all tools", _ADVICE["same_set"], partial(rewriter.switch, "same_set"), rewrites=False)
        return [in_place, united]
    return [in_place]


def _finding(
    kind: str, pairs: Sequence[tuple[Prompt, Prompt]], log: Log, rewriter: ToolRewriter, varies: str
) -> Finding:
    """Builds the finding of all ``pairs`` of requests whose tools differ in the same way."""

    def names(prompt: Prompt) -> str:
        return ", ".join(tool_name(rewriter.canonical[text]) for text in prompt.tool_texts)

    before, after = pairs[0]
    first = next(
        (i for i, (a, b) in enumerate(zip(before.tool_texts, after.tool_texts, strict=False)) if a != b),
        min(len(before.tool_texts), len(after.tool_texts)),
    )
    segments = [segment for segment in after.segments if segment.message == TOOLS]
    at = segments[min(first, len(segments) - 1)]
    last = at if kind == "key_order" else segments[-1]
    if kind == "key_order":
        samples = [log.store.text(prompt.tool_texts[first]) for prompt in pairs[0]]
    else:
        samples = [names(prompt) for pair in pairs[:4] for prompt in pair]
    return Finding(
        kind=kind,
        status="confirmed",
        location=Location(
            message=TOOLS,
            role="tools",
            path=at.path,
            start=at.offset,
            end=last.offset + len(log.store.text(last.text)),
            context=[(f"{prompt.line}: {names(prompt)[:160]}\n", prompt is after) for prompt in pairs[0]],
        ),
        samples=shorten_samples(list(dict.fromkeys(samples))),
        repairs=_repairs(kind, rewriter),
        seen=len(pairs),
        line=after.line,
        varies=varies,
    )
