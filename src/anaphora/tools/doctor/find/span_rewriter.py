"""Moves regions out of the shared beginning of prompts, to where they cost no reuse."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from anaphora.tools.doctor.find.regions import Region
from anaphora.tools.doctor.read.prompts import Prompt, Run
from anaphora.tools.doctor.read.token_store import TokenStore

DESTINATIONS = {
    "user": "end of the last user message",
    "tail": "end of the same text",
    "end": "a message of its own at the very end",
    "first": "same place",
}
"""Where a region goes. ``first``: it stays, and all its values become that of the pattern's first text."""


@dataclass(slots=True)
class SpanRewriter:
    """Applies all moves of regions together. ``regions_of_text`` maps text numbers to indices of ``regions``.

    ``moves`` maps the index of a region to one of DESTINATIONS. ``all_system`` moves all regions of system texts to the
    end of the last user message.
    """

    store: TokenStore
    regions: list[Region]
    regions_of_text: dict[int, list[int]]
    moves: dict[int, str] = field(default_factory=dict)
    all_system: bool = False
    _rewritten: dict[int, tuple[int, dict[str, str]]] = field(default_factory=dict)

    def reset(self) -> None:
        """Forgets rewritten texts; call it after moves are switched."""
        self._rewritten.clear()

    def switch(self, region: int, destination: str, on: bool) -> None:
        """Turns the move of a region on or off."""
        if on:
            self.moves[region] = destination
        else:
            self.moves.pop(region, None)

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        """Returns the runs with the regions moved, or ``runs`` itself if none is."""
        changed: list[Run] | None = None
        appended: dict[str, str] = {}
        for index, (owner, text) in enumerate(runs):
            if owner < 0 or text != (original := prompt.segments[owner].text) or original not in self.regions_of_text:
                continue
            rewritten, moved = self.rewritten(original)
            if rewritten != text or moved:
                changed = list(runs) if changed is None else changed
                changed[index] = owner, rewritten
                for destination, part in moved.items():
                    appended[destination] = appended.get(destination, "") + part
        if changed is None:
            return runs
        for destination, part in appended.items():
            self._append(prompt, changed, part, to_any_role=destination == "end")
        return changed

    def _append(self, prompt: Prompt, runs: list[Run], part: str, *, to_any_role: bool) -> None:
        """Appends text to the last message (of a user, unless ``to_any_role``), or to a completion's prompt."""
        for index in range(len(runs) - 1, -1, -1):
            owner, text = runs[index]
            if owner >= 0 and (to_any_role or prompt.segments[owner].role in ("user", "prompt")):
                runs[index] = owner, self.store.intern(f"{self.store.text(text)}\n{part}")
                return
        runs.append((-1, self.store.intern(part)))

    def rewritten(self, number: int) -> tuple[int, dict[str, str]]:
        """Returns the number of a text without what moves out of it, and what moves, by destination."""
        if number not in self._rewritten:
            self._rewritten[number] = self._rewrite(number)
        return self._rewritten[number]

    def _rewrite(self, number: int) -> tuple[int, dict[str, str]]:
        chosen = {i: to for i in self.regions_of_text[number] if (to := self._destination(i)) is not None}
        if not chosen:
            return number, {}
        text, tail = self.store.text(number), ""
        appended: dict[str, str] = {}
        # From the last region to the first, so that the spans of the others stay right.
        for index in sorted(chosen, key=lambda i: self.regions[i].moved[number], reverse=True):
            region, destination = self.regions[index], chosen[index]
            start, end = self._span(region, number, destination)
            if destination == "first":
                text = text[:start] + region.first_value + text[end:]
                continue
            part = text[start:end].strip("\n")
            text = text[:start] + text[end:]
            if destination == "tail":
                tail = f"{part}\n{tail}" if tail else part
            else:
                appended[destination] = f"\n{part}{appended.get(destination, '')}"
        if tail:
            at = self.regions[self.regions_of_text[number][0]].end_of(text)
            between = "" if not at or text[at - 1] == "\n" else "\n"
            text = f"{text[:at]}{between}{tail}{text[at:]}"
        return self.store.intern(text), appended

    def _span(self, region: Region, number: int, destination: str) -> tuple[int, int]:
        return region.values[number] if destination == "first" else region.moved[number]

    def _destination(self, region: int) -> str | None:
        by_default = "user" if self.all_system and self.regions[region].group == "system" else None
        return self.moves.get(region) or by_default

    def moved_parts(self, number: int) -> list[tuple[str, str, str]]:
        """Returns (class, text, destination) of all that moves out of a text."""
        found = []
        for index in self.regions_of_text[number]:
            if (destination := self._destination(index)) is not None:
                region = self.regions[index]
                start, end = self._span(region, number, destination)
                found.append((region.kind, self.store.text(number)[start:end], destination))
        return found

    # --- prompts with placeholders -------------------------------------------------------------------------------

    def prompt_templates(self) -> list[str]:
        """Returns the repaired texts with names in braces for the changing values, one for each repaired pattern."""
        of_pattern: dict[int, list[int]] = defaultdict(list)
        for index, region in enumerate(self.regions):
            of_pattern[id(region.pattern)].append(index)
        return [
            self._prompt_template(indices)
            for indices in of_pattern.values()
            if any(self._destination(index) is not None for index in indices)
            and self.regions[indices[0]].group in ("system", "prompt", "user")
        ]

    def _prompt_template(self, indices: list[int]) -> str:
        number = self.regions[indices[0]].pattern.members[0]
        text, moved, names = self.store.text(number), dict.fromkeys(DESTINATIONS, ""), Counter[str]()
        present = [i for i in indices if number in self.regions[i].moved]
        for index in sorted(present, key=lambda i: self.regions[i].moved[number], reverse=True):
            region, destination = self.regions[index], self._destination(index)
            start, end = region.moved[number]
            part = _with_placeholders(text, region, (start, end), names)
            if destination in (None, "first"):
                text = text[:start] + part + text[end:]
            else:
                text = text[:start] + text[end:]
                moved[str(destination)] = part.strip("\n") + "\n" + moved[str(destination)]
        at = self.regions[indices[0]].end_of(text)
        tail = moved["tail"].removesuffix("\n" if at < len(text) else "")
        text = text[:at].rstrip("\n") + "\n" + tail + text[at:]
        return text + "".join(f"\n--- {DESTINATIONS[to]} ---\n{moved[to]}" for to in ("user", "end") if moved[to])


def _with_placeholders(text: str, region: Region, span: tuple[int, int], names: Counter[str]) -> str:
    """Returns ``text[span]`` with ``{kind}``, ``{kind_2}``, … in place of the region's varying spans."""
    part, done = "", span[0]
    for low, high in sorted(region.varying_spans):
        names[region.kind] += 1
        count = names[region.kind]
        part += text[done:low] + "{" + region.kind + (f"_{count}" if count > 1 else "") + "}"
        done = high
    return part + text[done : span[1]]
