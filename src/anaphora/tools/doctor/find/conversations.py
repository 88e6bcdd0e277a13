"""Links requests into conversations by their messages; the log's own session ids only help."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from anaphora.tools.doctor.find.value_classes import canonical_json
from anaphora.tools.doctor.read.prompts import SYSTEM_ROLES, Prompt
from anaphora.tools.doctor.read.token_store import TokenStore

MAX_BY_LAST = 6
"""Latest requests that are kept for each last message."""
MAX_BY_OPENING = 2
"""Latest requests that are kept for each first message."""
MESSAGES_PER_TURN = 2
COMPARED_LENGTH = 4000
"""Characters of a message that are compared."""
OPENING_LENGTH = 40
"""Characters with which similar messages begin alike."""
MIN_SHARED = 0.5
"""Share of the earlier request's messages that the later one must have."""
_NUMBER = re.compile(r"\d+")


def link(prompts: Sequence[Prompt], store: TokenStore) -> tuple[list[int], list[int]]:
    """Returns for every request the number of the one before it in its conversation (or -1), and its conversation.

    A request continues an earlier one whose last message is in its own history; of several, the one with the greatest
    overlap of messages. If that message was rewritten, the log's session id or an equal first message leads to the
    candidate, most of whose messages must then be equal or similar.
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
        """Returns the number of the request before this one (or -1), and keeps this one for later requests."""
        found = self._exact(prompt)
        if found is None or len(found.roles) + MESSAGES_PER_TURN < len(prompt.roles):
            # The turns in between may be in the log, each with a changed message.
            nearer = self._similar(prompt)
            if nearer is not None and (found is None or len(found.roles) < len(nearer.roles) < len(prompt.roles)):
                found = nearer
        self._keep(prompt)
        return -1 if found is None else found.number

    def _exact(self, prompt: Prompt) -> Prompt | None:
        """Returns the longest earlier request whose last message is in this one's history."""
        ids = prompt.message_ids
        own = set(ids)
        for at in range(len(ids) - 2, -1, -1):
            if prompt.roles[at] in SYSTEM_ROLES or "assistant" not in prompt.roles[at:]:
                continue
            candidates = self._by_last.get((prompt.root, ids[at]), ())
            scored = [(self._overlap(c, own), c.number, c) for c in candidates]
            scored = [entry for entry in scored if entry[0] >= MIN_SHARED]
            if scored:
                return max(scored, key=lambda entry: entry[:2])[2]
        return None

    def _overlap(self, earlier: Prompt, own: set[int]) -> float:
        """Returns the share of the earlier request's messages, except system messages, that are in ``own``."""
        ids = [m for m, role in zip(earlier.message_ids, earlier.roles, strict=True) if role not in SYSTEM_ROLES]
        return sum(m in own for m in ids) / len(ids)

    def _similar(self, prompt: Prompt) -> Prompt | None:
        """Returns the latest earlier request of the session, or with the same first message, that is similar enough."""
        if "assistant" not in prompt.roles:
            return None
        candidates = [self._by_session[key]] if (key := (prompt.root, prompt.session)) in self._by_session else []
        if not prompt.session:
            candidates = self._by_opening.get((prompt.root, self._opening(prompt)), [])[::-1]
        for candidate in candidates:
            if len(candidate.roles) > len(prompt.roles) + MESSAGES_PER_TURN:
                continue
            if self._has_last_of(candidate, prompt) and self._similarity(candidate, prompt) >= MIN_SHARED:
                return candidate
        return None

    def _has_last_of(self, earlier: Prompt, later: Prompt) -> bool:
        """Tells whether the later request's history has the earlier one's last message or a similar one."""
        last = self._text(earlier, len(earlier.roles) - 1)
        return any(_are_similar(self._text(later, i), last) for i in range(len(later.roles) - 1))

    def _similarity(self, earlier: Prompt, later: Prompt) -> float:
        """Returns the share of the earlier request's messages, except system messages, that the later one has.

        A similar message at the same position counts too.
        """
        own = set(later.message_ids)
        texts = [self._text(later, i) for i, role in enumerate(later.roles) if role not in SYSTEM_ROLES]
        wanted = [i for i, role in enumerate(earlier.roles) if role not in SYSTEM_ROLES]
        found = 0
        for position, i in enumerate(wanted):
            if earlier.message_ids[i] in own:
                found += 1
            elif position < len(texts):
                found += _are_similar(self._text(earlier, i), texts[position])
        return found / max(1, len(wanted))

    def _text(self, prompt: Prompt, message: int) -> str:
        """Returns a message's text without what may change each turn: numbers, spaces, the order of JSON keys."""
        message_id = prompt.message_ids[message]
        if message_id not in self._texts:
            texts = (self._store.text(s.text) for s in prompt.segments if s.message == message)
            normal = " ".join(" ".join((canonical_json(text) or text).split()) for text in texts)
            self._texts[message_id] = _NUMBER.sub("0", normal)[:COMPARED_LENGTH]
        return self._texts[message_id]

    def _opening(self, prompt: Prompt) -> str:
        first = next((i for i, role in enumerate(prompt.roles) if role not in SYSTEM_ROLES), None)
        return "" if first is None else self._text(prompt, first)[:OPENING_LENGTH]

    def _keep(self, prompt: Prompt) -> None:
        if prompt.message_ids:
            kept = self._by_last[prompt.root, prompt.message_ids[-1]]
            kept.append(prompt)
            del kept[:-MAX_BY_LAST]
            opened = self._by_opening[prompt.root, self._opening(prompt)]
            opened.append(prompt)
            del opened[:-MAX_BY_OPENING]
        if prompt.session:
            self._by_session[prompt.root, prompt.session] = prompt


def _are_similar(a: str, b: str) -> bool:
    return bool(a and b) and (a in b or b in a or a[:OPENING_LENGTH] == b[:OPENING_LENGTH])
