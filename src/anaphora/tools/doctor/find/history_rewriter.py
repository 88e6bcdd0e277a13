"""Rewrites the history in prompts: as it was first sent, with system texts in front, or trimmed rarely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from anaphora.text.outline import NOBODY
from anaphora.tools.doctor.find.history_difference import Difference, end_of_message
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import SYSTEM_ROLES, Prompt, Run


@dataclass(slots=True)
class HistoryRewriter:
    """Splices: what the earlier request sent of the conversation, then what is new in the later one.

    ``previous`` has for each request the number of the one before it in its conversation (or -1). ``differences`` are
    those of the requests whose history differs. ``active`` are the classes whose repair is switched on.
    ``trim`` maps requests with trimmed history to (first message to drop, how many more to drop).
    """

    log: Log
    previous: Sequence[int]
    differences: dict[int, Difference] = field(default_factory=dict)
    trim: dict[int, tuple[int, int]] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    _rewritten: dict[int, tuple[Prompt, list[Run], int]] = field(default_factory=dict)
    """The request, its rewritten runs, and the index of the first run behind the system texts."""

    def switch(self, kind: str, on: bool) -> None:
        """Turns the repair of one class on or off."""
        if on:
            self.active.add(kind)
        else:
            self.active.discard(kind)

    def reset(self) -> None:
        """Forgets the rewritten prompts; call it before the log is run again."""
        self._rewritten.clear()

    def apply(self, prompt: Prompt, runs: list[Run]) -> list[Run]:
        """Returns the runs with the history rewritten, or ``runs`` itself if nothing changes."""
        if not self.active:
            return runs
        rewritten = _system_first(prompt, runs) if "moved_system" in self.active else runs
        difference = self.differences.get(prompt.number)
        if difference is not None and difference.kind == "moved_system":
            return rewritten
        if "trimmed_history" in self.active and prompt.number in self.trim:
            rewritten = _without_messages(prompt, rewritten, *self.trim[prompt.number])
        elif difference is not None and difference.kind in self.active and difference.kind != "trimmed_history":
            rewritten = self._spliced(difference, prompt, rewritten)
        elif difference is None and (before := self.previous[prompt.number]) in self._rewritten:
            earlier, last = self._rewritten[before][0], self.last_repeated(prompt) or 0
            unchanged = Difference("", earlier, prompt, prompt.num_leading_system(), last_repeated=last)
            rewritten = self._spliced(unchanged, prompt, rewritten)
        if rewritten is not runs and "trimmed_history" not in self.active:
            self._rewritten[prompt.number] = prompt, rewritten, _start_of_history(prompt, runs)
        return rewritten

    def last_repeated(self, prompt: Prompt) -> int | None:
        """Returns the last message that repeats the request before it; None if it is not to be sent as it was there."""
        difference, before = self.differences.get(prompt.number), self.previous[prompt.number]
        if before < 0 or (difference is not None and difference.kind not in self.active):
            return None
        if difference is not None:
            return None if difference.kind in ("template", "retokenised") else difference.last_repeated
        earlier = self.log.prompts[before]
        return prompt.num_leading_system() + len(earlier.roles) - earlier.num_leading_system() - 1

    def _spliced(self, difference: Difference, prompt: Prompt, runs: list[Run]) -> list[Run]:
        if difference.answer_end:
            return self._with_answer_as_generated(difference, runs)
        earlier = difference.earlier
        unchanged = earlier, earlier.runs, _start_of_history(earlier, earlier.runs)
        _, old, old_start = self._rewritten.get(earlier.number, unchanged)
        whole = difference.kind == "template"
        old_start = 0 if whole else old_start
        new_start = 0 if whole else _start_of_history(prompt, runs)
        # Runs that come from the earlier request are not segments of this one.
        kept = [(NOBODY, text) for _, text in old[old_start : end_of_message(earlier, old, len(earlier.roles) - 1)]]
        return [*runs[:new_start], *kept, *runs[end_of_message(prompt, runs, difference.last_repeated) :]]

    def _with_answer_as_generated(self, difference: Difference, runs: list[Run]) -> list[Run]:
        """Returns the earlier prompt, its answer with the generated tokens, and what is new after the answer."""
        earlier = difference.earlier
        old = self._rewritten[earlier.number][1] if earlier.number in self._rewritten else earlier.runs
        assert earlier.answer is not None
        end = end_of_message(earlier, earlier.runs, len(earlier.roles) - 1)
        new, skip = [], difference.answer_end
        for owner, number in runs[end:]:
            text = self.log.store.text(number)
            if skip < len(text):
                new.append((owner, number) if skip == 0 else (NOBODY, self.log.store.intern(text[skip:])))
            skip = max(0, skip - len(text))
        return [*((NOBODY, text) for _, text in old), (NOBODY, earlier.answer), *new]


def _start_of_history(prompt: Prompt, runs: list[Run]) -> int:
    """Returns the index of the first run of the first message behind the leading system messages."""
    first = prompt.num_leading_system()
    return next((i for i, (o, _) in enumerate(runs) if o >= 0 and prompt.segments[o].message >= first), len(runs))


def _system_first(prompt: Prompt, runs: list[Run]) -> list[Run]:
    """Puts later system messages, each with the template's text before it, in front of everything else."""
    first = prompt.num_leading_system()
    moved: list[Run] = []
    rest: list[Run] = []
    for owner, text in runs:
        if owner >= 0 and prompt.segments[owner].message >= first and prompt.segments[owner].role in SYSTEM_ROLES:
            moved += [rest.pop(), (owner, text)] if rest and rest[-1][0] == NOBODY else [(owner, text)]
        else:
            rest.append((owner, text))
    return [*moved, *rest] if moved else runs


def _without_messages(prompt: Prompt, runs: list[Run], first: int, count: int) -> list[Run]:
    """Drops ``count`` messages from ``first`` on, each with the template's text behind it."""
    kept: list[Run] = []
    dropping = False
    for owner, text in runs:
        if owner >= 0:
            dropping = first <= prompt.segments[owner].message < first + count
        if not dropping:
            kept.append((owner, text))
    return kept
