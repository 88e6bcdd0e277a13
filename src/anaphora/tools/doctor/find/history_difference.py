"""A request that repeats an earlier one and its answer word for word: does its prompt do so too, token for token?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.cache.index import common_tokens
from anaphora.text.outline import NOBODY
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import Prompt, Run, Segment


@dataclass(frozen=True, slots=True)
class Difference:
    """``at`` is the message of the later request; ``dropped`` counts messages that a window has lost."""

    kind: str
    earlier: Prompt
    later: Prompt
    at: int
    old: Segment | None = None
    new: Segment | None = None
    dropped: int = 0
    last: int = 0
    """The message of the later request up to which it repeats the earlier one."""
    answer: str = ""
    """In words, what happened to an answer: the messages before it are as they were."""
    parted: int = 0
    """Characters of the later prompt's text behind its repeated messages, up to the end of the answer; 0: none."""


def end_of(prompt: Prompt, runs: Sequence[Run], message: int) -> int:
    """Index behind the last run of ``message``; of the longest beginning that is kept where it has none."""
    for index in range(len(runs) - 1, -1, -1):
        owner = runs[index][0]
        if owner >= 0 and prompt.segments[owner].message <= message:
            return index + 1
    return max((i + 1 for i, (owner, _) in enumerate(runs[:-1]) if owner == NOBODY), default=0)


def rendered(log: Log, earlier: Prompt, later: Prompt, last: int) -> Difference | None:
    """Equal messages that the template has written otherwise, or an answer that has become other tokens."""
    if (
        earlier.tool_texts != later.tool_texts
        or earlier.message_ids[: earlier.head_length()] != later.message_ids[: later.head_length()]
    ):
        return None
    end = end_of(earlier, earlier.runs, len(earlier.roles) - 1)
    for index, run in enumerate(earlier.runs[:end]):
        if index >= len(later.runs) or later.runs[index] != run:
            owners = [o for o, _ in later.runs[index:] if o >= 0]
            new = later.segments[owners[0]] if owners else None
            at = new.message if new else len(later.roles) - 1
            return Difference("template", earlier, later, at, new=new, last=last)
    return _answered(log, earlier, later, end, last)


def _answered(log: Log, earlier: Prompt, later: Prompt, end: int, last: int) -> Difference | None:
    """What stands behind the last message now that the answer is history."""
    at = last + 1
    if at >= len(later.roles) or end >= len(later.runs):
        return None
    new = next((s for s in later.segments if s.message == at and s.kind == "content"), None)
    begun, now = (joined(log, prompt.runs[end:]) for prompt in (earlier, later))
    wrote = "" if earlier.answer is None else log.store.text(earlier.answer)

    def difference(kind: str, why: str, parted: int = 0) -> Difference:
        return Difference(kind, earlier, later, at, new=new, last=last, answer=why, parted=parted)

    behind = now.find(wrote) + len(wrote) if wrote and wrote in now else 0
    if not now.startswith(begun):
        return difference(
            "template",
            "the template begins an answer with a text that it leaves out when the answer is history",
            behind,
        )
    rest = now[len(begun) :]
    if not wrote or rest.startswith(wrote):
        return difference("retokenised", "", len(begun) + len(wrote)) if wrote and _parts(log, earlier, later) else None
    if rest.startswith(wrote.rstrip()) or new is None or wrote.strip() not in log.store.text(new.text):
        return None
    if rest.startswith(wrote.strip()):
        return difference("whitespace", "the answer comes back without the spaces that it began with")
    return difference(
        "template",
        "the template writes a text before the answer that was neither in the prompt nor in the output",
        behind,
    )


def _parts(log: Log, earlier: Prompt, later: Prompt) -> bool:
    """Whether the tokens of the earlier prompt and its answer are not the first ones of the later prompt."""
    assert earlier.answer is not None
    whole = log.store.packed(earlier.pieces) + log.store.packed(log.store.pieces(earlier.answer))
    return common_tokens(whole, log.store.packed(later.pieces)) < len(whole) // TOKEN_BYTES - 1


def joined(log: Log, runs: Sequence[Run]) -> str:
    return "".join(log.store.text(text) for _, text in runs)
