"""Compares a request with the one before it in its conversation: how does its history differ from what was sent?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.cache.index import common_tokens
from anaphora.text.outline import NOBODY
from anaphora.tools.doctor.find.patterns import common_prefix, common_suffix, without_spaces
from anaphora.tools.doctor.find.value_classes import canonical_json, classify, widen
from anaphora.tools.doctor.find.variation import Occurrence
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.doctor.read.prompts import SYSTEM_ROLES, Prompt, Run, Segment

MIN_UNCHANGED = 0.3
"""Share of a changed message that must be unchanged before the changed part is classified by its value."""
_VALUE_KINDS = ("clock_time", "date", "request_id", "hash")


@dataclass(frozen=True, slots=True)
class Difference:
    """How the prompt of ``later`` fails to extend that of ``earlier``; ``kind`` is the class.

    ``message`` is the first message of ``later`` that differs, ``last_repeated`` the last one that repeats a message of
    ``earlier``. ``old`` and ``new`` are the differing segments, where known. ``dropped`` counts the messages that are
    missing. ``note`` says what the template does to an answer, and ``answer_end`` is where the answer ends in the
    later prompt's text, in characters behind the repeated messages (0: unknown).
    """

    kind: str
    earlier: Prompt
    later: Prompt
    message: int
    last_repeated: int = 0
    old: Segment | None = None
    new: Segment | None = None
    dropped: int = 0
    note: str = ""
    answer_end: int = 0


def end_of_message(prompt: Prompt, runs: Sequence[Run], message: int) -> int:
    """Returns the index behind the last run of ``message`` or of one before it.

    If there is none, it is the index behind the last template text, except the one that ends the prompt.
    """
    for index in range(len(runs) - 1, -1, -1):
        owner = runs[index][0]
        if owner >= 0 and prompt.segments[owner].message <= message:
            return index + 1
    return max((i + 1 for i, (owner, _) in enumerate(runs[:-1]) if owner == NOBODY), default=0)


def difference_of(log: Log, earlier: Prompt, later: Prompt) -> Difference | None:
    """Compares the histories of two consecutive requests of a conversation; None if the later extends the earlier."""
    a, b = earlier.num_leading_system(), later.num_leading_system()
    old, new = earlier.message_ids[a:], later.message_ids[b:]
    if new[: len(old)] == old:
        return _rendering_difference(log, earlier, later, b + len(old) - 1)
    at = next((i for i, (x, y) in enumerate(zip(old, new, strict=False)) if x != y), min(len(old), len(new)))
    if moved := _moved_system(earlier, later, at + b):
        return moved
    for dropped in range(1, len(old) - at):
        rest = old[at + dropped :]
        if new[at : at + len(rest)] == rest:
            last = b + at + len(rest) - 1
            return Difference("trimmed_history", earlier, later, at + b, last_repeated=last, dropped=dropped)
    last = max((b + i for i, message in enumerate(new) if message == old[-1]), default=b + min(len(old), len(new)) - 1)
    return _message_difference(log, Difference("rewritten_history", earlier, later, b + at, last_repeated=last), a + at)


# --- Different messages ----------------------------------------------------------------------------------------------


def _moved_system(earlier: Prompt, later: Prompt, at: int) -> Difference | None:
    """Returns the difference if the histories differ only because of a system message behind the beginning."""
    others = [
        [message for message, role in zip(prompt.message_ids, prompt.roles, strict=True) if role not in SYSTEM_ROLES]
        for prompt in (earlier, later)
    ]
    first = later.num_leading_system()
    late = [i for i, role in enumerate(later.roles) if role in SYSTEM_ROLES and i >= first]
    if not late and not any(role in SYSTEM_ROLES for role in earlier.roles[earlier.num_leading_system() :]):
        return None
    if others[1][: len(others[0])] != others[0]:
        return None
    message = late[-1] if late else at
    segment = next((s for s in later.segments if s.message == message), None)
    return Difference("moved_system", earlier, later, message, last_repeated=len(later.roles) - 1, new=segment)


def _message_difference(log: Log, difference: Difference, old_message: int) -> Difference:
    """Adds the differing segments of the first changed message, and the class that follows from their texts."""
    earlier, later = difference.earlier, difference.later
    old_segments = [segment for segment in earlier.segments if segment.message == old_message]
    new_segments = [segment for segment in later.segments if segment.message == difference.message]
    if not new_segments or earlier.roles[old_message] != later.roles[difference.message]:
        return difference
    pairs = zip(old_segments, new_segments, strict=False)
    old, new = next(((o, n) for o, n in pairs if o.text != n.text), (old_segments[-1], new_segments[-1]))
    return replace(difference, kind=_kind_of(log.store.text(old.text), log.store.text(new.text)), old=old, new=new)


def _kind_of(old: str, new: str) -> str:
    if (first := canonical_json(old)) is not None and first == canonical_json(new):
        return "key_order"
    if without_spaces(old) == without_spaces(new):
        return "whitespace"
    start = common_prefix(old, new)
    tail = common_suffix(old, new, min(len(old), len(new)) - start)
    if start + tail >= MIN_UNCHANGED * min(len(old), len(new)):
        (s, e), (t, f) = widen(old, start, len(old) - tail), widen(new, start, len(new) - tail)
        values = [Occurrence(0, 0, None, old[s:e]), Occurrence(1, 0, None, new[t:f])]
        verdict = classify(values, old[max(0, s - 40) : s]) if old[s:e] and new[t:f] else None
        if verdict and verdict.kind in _VALUE_KINDS:
            return verdict.kind
    return "rewritten_history"


# --- Equal messages, other prompt ------------------------------------------------------------------------------------


def _rendering_difference(log: Log, earlier: Prompt, later: Prompt, last: int) -> Difference | None:
    """Finds equal messages that the template renders differently, or an answer that has become other tokens."""
    if (
        earlier.tool_texts != later.tool_texts
        or earlier.message_ids[: earlier.num_leading_system()] != later.message_ids[: later.num_leading_system()]
    ):
        return None
    end = end_of_message(earlier, earlier.runs, len(earlier.roles) - 1)
    for index, run in enumerate(earlier.runs[:end]):
        if index >= len(later.runs) or later.runs[index] != run:
            owners = [owner for owner, _ in later.runs[index:] if owner >= 0]
            new = later.segments[owners[0]] if owners else None
            message = new.message if new else len(later.roles) - 1
            return Difference("template", earlier, later, message, last_repeated=last, new=new)
    return _answer_difference(log, Difference("", earlier, later, last + 1, last_repeated=last), end)


def _answer_difference(log: Log, difference: Difference, end: int) -> Difference | None:
    """Compares how an answer was begun and generated with how it is rendered as history.

    ``end`` is the index behind the runs that both prompts have in common.
    """
    earlier, later = difference.earlier, difference.later
    if difference.message >= len(later.roles) or end >= len(later.runs):
        return None
    new = next((s for s in later.segments if s.message == difference.message and s.kind == "content"), None)
    begun, now = (_joined(log, prompt.runs[end:]) for prompt in (earlier, later))
    answer = "" if earlier.answer is None else log.store.text(earlier.answer)
    answer_end = now.find(answer) + len(answer) if answer and answer in now else 0

    def described(kind: str, note: str, answer_end: int = 0) -> Difference:
        return replace(difference, kind=kind, new=new, note=note, answer_end=answer_end)

    if not now.startswith(begun):
        return described(
            "template",
            "the template begins an answer with a text that it leaves out when the answer is history",
            answer_end,
        )
    rest = now[len(begun) :]
    if not answer or rest.startswith(answer):
        other_tokens = answer and _has_other_tokens(log, earlier, later)
        return described("retokenised", "", len(begun) + len(answer)) if other_tokens else None
    if rest.startswith(answer.rstrip()) or new is None or answer.strip() not in log.store.text(new.text):
        return None
    if rest.startswith(answer.strip()):
        return described("whitespace", "the answer comes back without the spaces that it began with")
    return described(
        "template",
        "the template writes a text before the answer that was neither in the prompt nor in the output",
        answer_end,
    )


def _has_other_tokens(log: Log, earlier: Prompt, later: Prompt) -> bool:
    """Tells whether the later prompt does not begin with the tokens of the earlier prompt and its answer."""
    assert earlier.answer is not None
    whole = log.store.packed(earlier.pieces) + log.store.packed(log.store.pieces(earlier.answer))
    return common_tokens(whole, log.store.packed(later.pieces)) < len(whole) // TOKEN_BYTES - 1


def _joined(log: Log, runs: Sequence[Run]) -> str:
    return "".join(log.store.text(text) for _, text in runs)
