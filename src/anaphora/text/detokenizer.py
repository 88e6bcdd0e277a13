"""Incremental detokenization of one choice, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from anaphora.types.sampling import SamplingParams


class Vocabulary(Protocol):
    """The part of a tokenizer that the detokenizer uses."""

    @property
    def special_ids(self) -> Set[int]: ...
    @property
    def strips_leading_space(self) -> bool: ...
    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(slots=True)  # created once per token, like output_processor.ChoiceDelta
class TextDelta:
    """Text that one call adds: whole characters, without any part of a stop string.

    ``tokens`` is how many of the given ids belong to the output: all of them, or those up to and including the token
    that completes a stop string (as in vLLM). ``stop`` is that string.
    """

    text: str
    tokens: int
    stop: str | None


class Detokenizer:
    """Detokenizes one choice incrementally; each token is processed once.

    Bytes are held back until they form a whole character, characters while they may be the start of a stop string. The
    first stop string to be completed ends the output; if one character completes several, the longest counts. The
    result does not depend on how tokens are split over calls. Stop strings are ignored before token
    ``min_tokens + 1``, like end tokens. The output keeps its leading space unless the prompt has only special tokens,
    so that prompt and output can be concatenated.
    """

    def __init__(self, tokenizer: Vocabulary, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skipped: Set[int] = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self._stops = _StopFinder(sampling.stop, sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        at_start = all(token_id in tokenizer.special_ids for token_id in prompt_token_ids)
        self._strip = at_start and tokenizer.strips_leading_space
        self._parts: list[str] = []
        self._ended = False

    @property
    def text(self) -> str:
        """Returns all text emitted so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def add(self, token_ids: Sequence[int], finished: bool) -> TextDelta:
        """Adds the next tokens. ``finished`` means that no more will come, so text that is held back is emitted.

        After a stop string or ``finished``, further tokens give an empty TextDelta of 0 tokens.
        """
        if self._ended:
            return TextDelta("", 0, None)
        pieces: list[str] = []
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            text, stop = self._stops.feed(self._characters(token_id), match=self._num_tokens > self._min_tokens)
            pieces.append(text)
            if stop is not None:
                self._ended = True
                return self._emit(pieces, count, stop)
        if finished:
            self._ended = True
            pieces.append(self._stops.flush() + self._utf8.decode(b"", final=True))
        return self._emit(pieces, len(token_ids), None)

    def _emit(self, pieces: list[str], tokens: int, stop: str | None) -> TextDelta:
        text = "".join(pieces)
        if text:
            self._parts.append(text)
        return TextDelta(text, tokens, stop)

    def _characters(self, token_id: int) -> str:
        """Returns the characters that this token completes."""
        if token_id in self._skipped:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _StopFinder:
    """Finds the first stop string in a growing text in one pass (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        # Longest first: if two end at the same character, the longer one is found.
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, match: bool) -> tuple[str, str | None]:
        """Returns the text that can be emitted, and the stop string that was completed, if any and ``match`` is set."""
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None and match:
                self._held = ""
                return held[: position if self._include else position - len(stop)], stop
        safe = len(held) - max(self._matched)
        self._held = held[safe:]
        return held[:safe], None

    def flush(self) -> str:
        """Returns the text that is held back; it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Advances all automata by one character; returns the longest stop string that it completes."""
        complete = None
        for index, (stop, fallbacks) in enumerate(zip(self._stops, self._fallbacks, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                complete = complete or stop
                matched = fallbacks[-1]
            self._matched[index] = matched
        return complete


def _fallbacks(text: str) -> list[int]:
    """Returns the failure function: for each prefix of ``text``, the length of its longest proper border."""
    table = [0] * len(text)
    matched = 0
    for index in range(1, len(text)):
        while matched and text[matched] != text[index]:
            matched = table[matched - 1]
        matched += text[matched] == text[index]
        table[index] = matched
    return table
