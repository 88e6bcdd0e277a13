"""Which requests continue each other: found from their messages, with the log's own ids as a help only."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from anaphora.tools.doctor.find.value_classes import canonical
from anaphora.tools.doctor.read.prompts import Prompt
from anaphora.tools.doctor.read.token_store import TokenStore

KEPT = 6
"""Latest requests that are remembered for each last message."""
TURN = 2
"""Messages by which a request is usually longer than the one before it."""
COMPARED = 4000
"""Characters of a message that are looked at."""
_NUMBER = re.compile(r"\d+")
_SYSTEM = ("system", "developer")


def link(prompts: Sequence[Prompt], store: TokenStore) -> tuple[list[int], list[int]]:
    """For every request the number of the one before it in its conversation (or -1), and its conversation's number.

    A request continues an earlier one whose last message stands in its own history, with the greatest overlap of
    messages among those. Where that message was rewritten, the log's session id or an equal beginning of the
    conversation leads to the candidate, which must then have most of its messages in common or alike.
    """
    linker = _Linker(store)
    previous = [linker.previous(prompt) for prompt in prompts]
    conversations: list[int] = []
    by_session: dict[tuple[str, str], int] = {}
    for number, before in enumerate(previous):
        own = conversations[before] if before >= 0 else number
        session = prompts[number].session
        if session:
            own = by_session.setdefault((prompts[number].root, session), own)
        conversations.append(own)
    return previous, conversations


class _Linker:
    def __init__(self, store: TokenStore) -> None:
        self._store = store
        self._texts: dict[int, str] = {}
        self._by_last: defaultdict[tuple[str, int], list[Prompt]] = defaultdict(list)
        self._by_session: dict[tuple[str, str], Prompt] = {}
        self._by_opening: defaultdict[tuple[str, str], list[Prompt]] = defaultdict(list)

    def previous(self, prompt: Prompt) -> int:
        found = self._exact(prompt)
        if found is None or len(found.roles) + TURN < len(prompt.roles):
            # The turns in between may be there, each with a changed message.
            nearer = self._alike(prompt)
            if nearer is not None and (found is None or len(found.roles) < len(nearer.roles) < len(prompt.roles)):
                found = nearer
        self._keep(prompt)
        return -1 if found is None else found.number

    def _exact(self, prompt: Prompt) -> Prompt | None:
        """The longest earlier conversation whose last message stands in this one's history."""
        ids = prompt.message_ids
        own = set(ids)
        for at in range(len(ids) - 2, -1, -1):
            if prompt.roles[at] in _SYSTEM or "assistant" not in prompt.roles[at:]:
                continue
            candidates = self._by_last.get((prompt.root, ids[at]), ())
            good = [(self._overlap(c, own), c.number, c) for c in candidates]
            good = [entry for entry in good if entry[0] >= 0.5]
            if good:
                return max(good, key=lambda entry: entry[:2])[2]
        return None

    def _overlap(self, earlier: Prompt, own: set[int]) -> float:
        """Share of the earlier request's messages, system text aside, that this one has."""
        ids = [m for m, role in zip(earlier.message_ids, earlier.roles, strict=True) if role not in _SYSTEM]
        return sum(m in own for m in ids) / len(ids)

    def _alike(self, prompt: Prompt) -> Prompt | None:
        if "assistant" not in prompt.roles:
            return None
        candidates = [self._by_session[key]] if (key := (prompt.root, prompt.session)) in self._by_session else []
        if not prompt.session:
            candidates = self._by_opening.get((prompt.root, self._opening(prompt)), [])[::-1]
        for candidate in candidates:
            if len(candidate.roles) > len(prompt.roles) + 2 or not self._answers(candidate, prompt):
                continue
            if self._similar(candidate, prompt) >= 0.5:
                return candidate
        return None

    def _answers(self, earlier: Prompt, later: Prompt) -> bool:
        """Whether the earlier one's last message, changed or not, stands in the later one's history."""
        last = self._text(earlier, len(earlier.roles) - 1)
        texts = (self._text(later, i) for i in range(len(later.roles) - 1))
        return any(text and last and (text in last or last in text or text[:40] == last[:40]) for text in texts)

    def _similar(self, earlier: Prompt, later: Prompt) -> float:
        """Share of the earlier one's messages (system text aside) that the later one has, changed in part or not."""
        own = set(later.message_ids)
        texts = [self._text(later, i) for i, role in enumerate(later.roles) if role not in _SYSTEM]
        wanted = [i for i, role in enumerate(earlier.roles) if role not in _SYSTEM]
        found = 0
        for place, i in enumerate(wanted):
            if earlier.message_ids[i] in own:
                found += 1
            elif place < len(texts):
                a, b = self._text(earlier, i), texts[place]
                found += bool(a and b) and (a in b or b in a or a[:40] == b[:40])
        return found / max(1, len(wanted))

    def _text(self, prompt: Prompt, message: int) -> str:
        """A message's text without what may be written anew each turn: numbers, spaces, the order of JSON's keys."""
        key = prompt.message_ids[message]
        if key not in self._texts:
            texts = (self._store.text(s.text) for s in prompt.segments if s.message == message)
            spelt = " ".join(" ".join((canonical(text) or text).split()) for text in texts)
            self._texts[key] = _NUMBER.sub("0", spelt)[:COMPARED]
        return self._texts[key]

    def _opening(self, prompt: Prompt) -> str:
        first = next((i for i, role in enumerate(prompt.roles) if role not in _SYSTEM), None)
        return "" if first is None else self._text(prompt, first)[:40]

    def _keep(self, prompt: Prompt) -> None:
        if prompt.message_ids:
            kept = self._by_last[prompt.root, prompt.message_ids[-1]]
            kept.append(prompt)
            del kept[:-KEPT]
            opened = self._by_opening[prompt.root, self._opening(prompt)]
            opened.append(prompt)
            del opened[:-2]
        if prompt.session:
            self._by_session[prompt.root, prompt.session] = prompt
