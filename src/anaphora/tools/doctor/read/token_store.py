"""Stores texts and their tokens, each of them once.

A log repeats itself: every body of a conversation holds the history so far. So a text is cut into *pieces* where no
token can cross the cut (around special tokens, between lines), each piece is tokenised once, and a prompt is an array
of piece numbers. Memory grows with the new text in a log, not with the log's length.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from anaphora.cache.hashing import pack
from anaphora.text.tokenizer import Tokenizer
from anaphora.tools.shared.request_log.logged_answers import Answer

_STARTS = r"[A-Za-zÀ-ÖØ-öø-ɏͰ-ϿЀ-ӿ\u3041-\u30fa\u4e00-\u9fff\uac00-\ud7a3]|[#*<{\-|>\[(\"]"
"""First characters of a line before which a text may be cut; no digits, which some tokenizers split off first."""
_START = re.compile(_STARTS)
_AFTER_BREAK = rf"(?<=\n)(?={_STARTS})"
"""A cut behind line breaks, which Llama 3's and Qwen's rules keep together; GPT-2's split the last one off."""
_PROBE = (
    "a\nb\n\nc\n\n\nd\n\n1. e\n 2\n\n  f.\n\n- g\n\n* h:\n\n{i}\n#j \n \nk\n\t\tl\r\n\r\nm\n\n"
    '\u4e00\n\n\u00e9\n"n"\n(o)\n|p|\n'
    "[q] \n<r>,\n> s's\n't\n\n\u00b2 U\nV\n\nW"
)


class TokenStore:
    """Interns texts and tokenises their pieces.

    ``check`` selects the finest cut with which the tokenizer yields the same ids as for the whole text. ``piece_texts``
    and ``piece_tokens`` (packed token ids) are indexed by piece number.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = sorted((tokenizer.token_text(i) for i in tokenizer.special_ids), key=len, reverse=True)
        self._specials = [text for text in self._specials if text]
        self._special_set = frozenset(self._specials)
        self._cutters = self._make_cutters()
        self._cut: re.Pattern[str] | None = self._cutters[0]
        self.check(_PROBE)
        self._piece_ids: dict[str, int] = {}
        self.piece_texts: list[str] = []
        self.piece_tokens: list[bytes] = []
        self._texts: dict[bytes, int] = {}
        self._pieces: list[array[int]] = []
        self._pairs: dict[tuple[int, int], array[int] | None] = {}
        self._sealed: set[int] = set()

    def _make_cutters(self) -> list[re.Pattern[str] | None]:
        marks = "|".join(re.escape(text) for text in self._specials)
        around = f"({marks})" if marks else None
        # A line that begins with a special token is cut by the special token alone.
        before = rf"(?=\n(?!{marks})(?:{_STARTS}))" if marks else rf"(?=\n(?:{_STARTS}))"
        finest = [re.compile(f"{around}|{cut}" if around else cut) for cut in (before, _AFTER_BREAK)]
        return [*finest, *([re.compile(around)] if around else []), None]

    def check(self, text: str) -> None:
        """Selects coarser cuts until the pieces of ``text`` yield the token ids of the whole text.

        Call it with whole prompts before any text is interned.
        """
        whole = pack(self._tokenizer.encode(text, add_special_tokens=False))
        while self._cut is not None:
            parts = [self._tokenizer.encode(part, add_special_tokens=False) for part in self._split(text)]
            if b"".join(pack(part) for part in parts) == whole:
                return
            self._cut = self._cutters[self._cutters.index(self._cut) + 1]

    def _split(self, text: str) -> list[str]:
        if self._cut is None:
            return [text]
        return [part for part in self._cut.split(text) if part]

    # --- texts ---------------------------------------------------------------------------------------------------

    def intern(self, text: str) -> int:
        """Returns the number of a text; equal texts have equal numbers."""
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = len(self._pieces)
            self._pieces.append(array("I", [self._piece(part) for part in self._split(text)]))
        return known

    def _piece(self, text: str) -> int:
        known = self._piece_ids.get(text)
        if known is None:
            known = self._piece_ids[text] = len(self.piece_texts)
            self.piece_texts.append(text)
            clean = text.encode("utf-8", "replace").decode()
            self.piece_tokens.append(pack(self._tokenizer.encode(clean, add_special_tokens=False)))
        return known

    def intern_answer(self, answer: Answer) -> int:
        """Returns the number of a generated text; its tokens stay as generated, whatever text comes next to it."""
        ids = self._generated(answer)
        key = blake2b(b"answer\0" + ids + answer.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        known = self._texts.get(key)
        if known is None:
            known = self._texts[key] = len(self._pieces)
            self._sealed.add(len(self.piece_texts))
            self._pieces.append(array("I", [len(self.piece_texts)]))
            self.piece_texts.append(answer.text)
            self.piece_tokens.append(ids)
        return known

    def _generated(self, answer: Answer) -> bytes:
        """Returns the logged ids, or the ids of the logged tokens' texts, or those of the tokenised answer."""
        if answer.token_ids and self._decoded(answer.token_ids).strip() == answer.text.strip():
            return pack(answer.token_ids)
        if answer.parts and "".join(answer.parts) == answer.text:
            parts = [self._tokenizer.encode(part, add_special_tokens=False) for part in answer.parts]
            if all(len(ids) == 1 for ids in parts):
                return pack([ids[0] for ids in parts])
        clean = answer.text.encode("utf-8", "replace").decode()
        return pack(self._tokenizer.encode(clean, add_special_tokens=False))

    def _decoded(self, ids: Sequence[int]) -> str:
        try:
            return self._tokenizer.decode(ids)
        except (IndexError, KeyError, OverflowError):
            return ""  # ids of another vocabulary

    def text(self, number: int) -> str:
        """Returns the text with this number."""
        return "".join(map(self.piece_texts.__getitem__, self._pieces[number]))

    def pieces(self, number: int) -> array[int]:
        """Returns the piece numbers of the text with this number."""
        return self._pieces[number]

    # --- prompts -------------------------------------------------------------------------------------------------

    def join(self, texts: Iterable[int]) -> array[int]:
        """Returns the pieces of several texts joined as if they were one text."""
        joined: array[int] = array("I")
        for number in texts:
            pieces = self._pieces[number]
            if not pieces:
                continue
            if joined and (merged := self._merged(joined[-1], pieces[0])) is not None:
                joined.pop()
                joined.extend(merged)
                joined.extend(pieces[1:])
            else:
                joined.extend(pieces)
        return joined

    def _merged(self, left: int, right: int) -> array[int] | None:
        """Returns the pieces of two adjacent pieces' joined text; None if that text is cut between them."""
        pair = left, right
        if pair not in self._pairs:
            cut = self._is_cut_between(left, right)
            text = self.piece_texts[left] + self.piece_texts[right]
            self._pairs[pair] = None if cut else self._pieces[self.intern(text)]
        return self._pairs[pair]

    def _is_cut_between(self, left: int, right: int) -> bool:
        if left in self._sealed or right in self._sealed:
            return True
        if self._cut is None:
            return False
        a, b = self.piece_texts[left], self.piece_texts[right]
        if a in self._special_set or b in self._special_set:
            return True
        if self._cut is self._cutters[0]:
            return b[0] == "\n" and _START.match(b, 1) is not None
        return self._cut is self._cutters[1] and a.endswith("\n") and _START.match(b) is not None

    def packed(self, pieces: Sequence[int]) -> bytes:
        """Returns the token ids of the given pieces, packed as ``cache.hashing.pack`` does."""
        return b"".join(map(self.piece_tokens.__getitem__, pieces))
