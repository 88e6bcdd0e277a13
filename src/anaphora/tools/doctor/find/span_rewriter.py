"""Parts of texts that move: out of the beginning that prompts share, to where nothing is lost behind them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from anaphora.tools.doctor.find.patterns import Pattern, Span
from anaphora.tools.doctor.read.prompts import Prompt, Run
from anaphora.tools.doctor.read.token_store import TokenStore

PLACES = {
    "user": "end of the last user message",
    "tail": "end of the same text",
    "end": "a message of its own at the very end",
    "first": "same place",
}

MARK = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|</?think>|</?s>|<</?SYS>>|\[/?INST\]")
"""What chat templates write around messages, as it stands in rendered prompts."""
_TURN_END = re.compile(rf"(?:\s*(?:{MARK.pattern})\w*)+\s*$")
_LONGEST_END = 200


@dataclass(slots=True)
class Region:
    """Slots of one pattern that lie in the same or neighbouring lines: they are mended together.

    ``units`` has for each member text the span that moves, ``values`` the span of the main slot's value.
    """

    pattern: Pattern
    slots: list[int]
    group: str
    units: dict[int, Span] = field(default_factory=dict)
    values: dict[int, Span] = field(default_factory=dict)
    kind: str = ""
    spans: list[Span] = field(default_factory=list)
    """All slots in the first member."""
    first: str = ""
    """The value in the first member, which takes the place of all others where a slot is mended in place."""

    def end_of(self, text: str) -> int:
        """Where in one of its texts that which moves to the end goes.

        A rendered prompt ends with marks that open the answer, a plain one perhaps with a line such as ``Answer:`` that
        all end with: both stay last.
        """
        if self.group != "prompt":
            return len(text)
        room = max(0, len(text) - _LONGEST_END)
        if (found := _TURN_END.search(text, room)) is not None:
            return found.start()
        start, end = self.pattern.constants[-1]
        shared = self.pattern.model[start:end]
        line = shared.find("\n")
        if end < len(self.pattern.model) or len(shared) > _LONGEST_END or line < 0 or not text.endswith(shared):
            return len(text)
        return len(text) - len(shared) + line


@dataclass(slots=True)
class SpanRewriter:
    """All moves of regions in one log, applied together. ``moves`` maps a region's index to where it goes."""

    store: TokenStore
    regions: list[Region]
    of_text: dict[int, list[int]]
    moves: dict[int, str] = field(default_factory=dict)
    all_system: bool = False
    """All that changes in system texts goes to the end of the last user message."""
    _known: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)

    def reset(self) -> None:
        self._known.clear()

    def switch(self, region: int, where: str, on: bool) -> None:
        """``where`` is one of PLACES."""
        if on:
            self.moves[region] = where
        else:
            self.moves.pop(region, None)

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        changed: list[Run] | None = None
        late: dict[str, str] = {}
        for index, (owner, text) in enumerate(runs):
            if owner < 0 or text != (original := prompt.segments[owner].text) or original not in self.of_text:
                continue
            mended, moved = self.mended(original)
            if mended != text or moved:
                changed = list(runs) if changed is None else changed
                changed[index] = owner, mended
                for where, unit in moved.items():
                    late[where] = late.get(where, "") + unit
        if changed is None:
            return runs
        for where, unit in late.items():
            self._append(prompt, changed, unit, anywhere=where == "end")
        return changed

    def mended(self, number: int) -> tuple[int, dict[str, str]]:
        """The number of a text without what moves, and what goes behind the messages, by place."""
        if number not in self._known:
            chosen = {i: where for i in self.of_text[number] if (where := self._where(i)) is not None}
            wanted = list(chosen)
            text, tail = self.store.text(number), ""
            late: dict[str, str] = {}
            for index in sorted(wanted, key=lambda i: self.regions[i].units[number], reverse=True):
                region, where = self.regions[index], chosen[index]
                start, end = region.values[number] if where == "first" else region.units[number]
                unit = text[start:end].strip("\n")
                if where == "first":
                    text = text[:start] + region.first + text[end:]
                    continue
                text = text[:start] + text[end:]
                if where == "tail":
                    tail = f"{unit}\n{tail}" if tail else unit
                else:
                    late[where] = f"\n{unit}{late.get(where, '')}"
            if tail:
                at = self.regions[self.of_text[number][0]].end_of(text)
                between = "" if not at or text[at - 1] == "\n" else "\n"
                text = f"{text[:at]}{between}{tail}{text[at:]}"
            self._known[number] = (self.store.intern(text) if wanted else number), late
        return self._known[number]

    def _where(self, region: int) -> str | None:
        return self.moves.get(region) or (
            "user" if self.all_system and self.regions[region].group == "system" else None
        )

    def moved(self, number: int) -> list[tuple[str, str, str]]:
        """(class, text, place) of all that moves out of a text."""
        found = []
        for index in self.of_text[number]:
            if (where := self._where(index)) is not None:
                region = self.regions[index]
                start, end = region.values[number] if where == "first" else region.units[number]
                found.append((region.kind, self.store.text(number)[start:end], where))
        return found

    def templates(self) -> list[str]:
        """The mended texts with names in braces where they change, one for each kind of text that was mended."""
        done: dict[int, list[int]] = defaultdict(list)
        for index, region in enumerate(self.regions):
            done[id(region.pattern)].append(index)
        mended = [group for group in done.values() if any(self._where(index) is not None for index in group)]
        return [
            self._template(group) for group in mended if self.regions[group[0]].group in ("system", "prompt", "user")
        ]

    def _template(self, indices: list[int]) -> str:
        number = self.regions[indices[0]].pattern.members[0]
        text, late, names = self.store.text(number), dict.fromkeys(PLACES, ""), Counter[str]()
        kept = [i for i in indices if number in self.regions[i].units]
        for index in sorted(kept, key=lambda i: self.regions[i].units[number], reverse=True):
            region, where = self.regions[index], self._where(index)
            start, end = region.units[number]
            unit, done = "", start
            for low, high in sorted(region.spans):
                names[region.kind] += 1
                count = names[region.kind]
                unit += text[done:low] + "{" + region.kind + (f"_{count}" if count > 1 else "") + "}"
                done = high
            unit += text[done:end]
            if where in (None, "first"):
                text = text[:start] + unit + text[end:]
            else:
                text = text[:start] + text[end:]
                late[str(where)] = unit.strip("\n") + "\n" + late[str(where)]
        at = self.regions[indices[0]].end_of(text)
        text = text[:at].rstrip("\n") + "\n" + late["tail"].removesuffix("\n" if at < len(text) else "") + text[at:]
        behind = [f"\n--- {PLACES[place]} ---\n{late[place]}" for place in ("user", "end") if late[place]]
        return text + "".join(behind)

    def _append(self, prompt: Prompt, runs: list[Run], late: str, *, anywhere: bool) -> None:
        """The moved text at the end of the last message (of a user); of a completion, at the end of the prompt."""
        for index in range(len(runs) - 1, -1, -1):
            owner, text = runs[index]
            if owner >= 0 and (anywhere or prompt.segments[owner].role in ("user", "prompt")):
                runs[index] = owner, self.store.intern(f"{self.store.text(text)}\n{late}")
                return
        runs.append((-1, self.store.intern(late)))
