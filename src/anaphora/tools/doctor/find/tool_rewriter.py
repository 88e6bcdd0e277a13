"""Puts the tools of all requests in one order and writes equal tools the same way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from anaphora.text.outline import NOBODY, TOOLS
from anaphora.tools.doctor.find.value_classes import canonical_json
from anaphora.tools.doctor.read.prompts import Prompt, Run
from anaphora.tools.doctor.read.token_store import TokenStore

MAX_UNITED = 3
"""All tools are offered to every request only if they are at most this many times those of the largest request."""
UNORDERED_LISTS = ("required", "enum", "type")
"""Lists of JSON Schema without an order; programs that keep them as sets write them in any order."""


class ToolRewriter:
    """Applies the repairs of tool definitions that are ``active``.

    ``key_order`` writes tools with equal JSON as the first of them; ``tool_order`` and ``tool_set`` put the tools that
    most requests have first; ``same_set`` gives every request all tools. ``canonical`` maps text numbers of tools to
    their canonical JSON. ``can_unite`` tells whether ``same_set`` is worth offering.
    """

    def __init__(self, prompts: Sequence[Prompt], store: TokenStore) -> None:
        self.active: set[str] = set()
        self._store = store
        self._first: dict[str, int] = {}
        counts: Counter[str] = Counter()
        self.canonical: dict[int, str] = {}
        for prompt in prompts:
            for text in prompt.tool_texts:
                if text not in self.canonical:
                    self.canonical[text] = canonical_json(store.text(text), UNORDERED_LISTS) or store.text(text)
                    self._first.setdefault(self.canonical[text], text)
            counts.update({self.canonical[text] for text in prompt.tool_texts})
        by_use = sorted(self._first, key=lambda tool: -counts[tool])
        self._rank = {tool: rank for rank, tool in enumerate(by_use)}
        self._all = [self._first[tool] for tool in by_use]
        self._separator = _separator(prompts)
        most = max((len(prompt.tool_texts) for prompt in prompts), default=0)
        distinct_names = len({tool_name(tool) for tool in by_use}) == len(by_use)
        self.can_unite = len(self._all) <= MAX_UNITED * most and distinct_names

    def switch(self, kind: str, on: bool) -> None:
        """Turns the repair of one class on or off."""
        if on:
            self.active.add(kind)
        else:
            self.active.discard(kind)

    def reset(self) -> None:
        """Does nothing: each prompt is rewritten on its own."""

    def order(self, texts: Sequence[int]) -> list[int]:
        """Returns the indices of ``texts`` in the order in which the tools should come."""
        return sorted(range(len(texts)), key=lambda i: (self._rank.get(self.canonical.get(texts[i], ""), 0), i))

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        """Returns the runs with the tools rewritten, or ``runs`` itself if nothing changes."""
        indices = _tool_runs(prompt, runs)
        if not self.active or not indices:
            return runs
        tools = [runs[i] for i in indices]
        if "key_order" in self.active:
            tools = [(owner, self._first_equal(prompt, owner, text)) for owner, text in tools]
        if self.active & {"tool_order", "tool_set"}:
            tools = [tools[i] for i in self.order([prompt.segments[owner].text for owner, _ in tools])]
        if "same_set" in self.active and len(indices) == len(prompt.tool_texts):
            united = [(NOBODY, number) for text in self._all for number in (*self._separator, text)]
            return [*runs[: indices[0]], *united[len(self._separator) :], *runs[indices[-1] + 1 :]]
        changed = list(runs)
        for index, run in zip(indices, tools, strict=True):
            changed[index] = run
        return changed if changed != runs else runs

    def first_form(self, text: int) -> str:
        """Returns the JSON of the first tool that equals the one with this text number."""
        return self._store.text(self._first[self.canonical[text]])

    def _first_equal(self, prompt: Prompt, owner: int, text: int) -> int:
        own = prompt.segments[owner].text
        return self._first[self.canonical[own]] if text == own else text


def tool_name(text: str) -> str:
    """Returns the name of a tool from its JSON; its whole text if it has none."""
    try:
        tool = json.loads(text)
    except ValueError:
        return text
    inner = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(inner.get("name") or text) if isinstance(inner, dict) else text


def _tool_runs(prompt: Prompt, runs: Sequence[Run]) -> list[int]:
    return [i for i, (owner, _) in enumerate(runs) if owner >= 0 and prompt.segments[owner].message == TOOLS]


def _separator(prompts: Sequence[Prompt]) -> list[int]:
    """Returns what the template writes between two tools, as text numbers."""
    for prompt in prompts:
        indices = _tool_runs(prompt, prompt.runs)
        if len(indices) > 1:
            return [text for _, text in prompt.runs[indices[0] + 1 : indices[1]]]
    return []
