"""Maps token ids to bytes.

Text is the concatenation of its tokens' bytes, decoded as UTF-8. This holds for byte-level vocabularies (GPT-2,
Llama 3, Qwen), for sentencepiece with byte fallback (Llama 2, Gemma) and for WordPiece; some decoders also drop a space
at the very beginning of a text. So text can be decoded token by token, and log-probabilities can show bytes.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import tokenizers

from anaphora.errors import ModelError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Maps token ids to bytes by the steps of the decoder in tokenizer.json. Raises ModelError for a CTC decoder."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added = {token_id: token.content for token_id, token in backend.get_added_tokens_decoder().items()}
        self._steps = _flat(json.loads(backend.decoder.__getstate__()) if backend.decoder else None)
        self._known: dict[int, bytes] = {}
        self.strips_leading_space = any(map(_strips, self._steps))
        """Whether decoding drops a space at the beginning of a text."""

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of one token; empty for an id outside the vocabulary."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._compute(token_id)
        return known

    def _compute(self, token_id: int) -> bytes:
        added = token_id in self._added
        piece = self._added[token_id] if added else self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        for step in self._steps:
            kind = step["type"]
            if kind == "ByteLevel" and not added and all(char in _byte_level() for char in piece):
                return bytes(_byte_level()[char] for char in piece)
            if kind == "ByteFallback" and (match := _BYTE.fullmatch(piece)):
                return bytes([int(match[1], 16)])
            if not (added and kind in ("Words", "WordPiece")):
                piece = _rewritten(piece, step)
        return piece.encode()


def _flat(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the decoder's steps in order. Without a decoder, tokens are joined by spaces, as the library does."""
    if decoder is None:
        return [{"type": "Words"}]
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flat(inner)]
    if decoder["type"] == "CTC":
        raise ModelError("the tokenizer's decoder is CTC, which is for speech; name a text model")
    return [decoder]


def _strips(step: dict[str, Any]) -> bool:
    kind = step["type"]
    if kind == "Strip":
        return bool(step["content"] == " " and step["start"])
    if kind == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return kind in ("Words", "WordPiece")


def _rewritten(piece: str, step: dict[str, Any]) -> str:
    kind = step["type"]
    if kind == "Replace" and "String" in step["pattern"]:
        return piece.replace(step["pattern"]["String"], step["content"])
    if kind == "Metaspace":
        return piece.replace(step["replacement"], " ")
    if kind == "WordPiece":
        return piece.removeprefix(step["prefix"]) if piece.startswith(step["prefix"]) else f" {piece}"
    if kind == "BPEDecoder":
        return piece.replace(step["suffix"], " ")
    if kind == "Words":
        return f" {piece}"
    return piece


@functools.cache
def _byte_level() -> dict[str, int]:
    """Returns GPT-2's map from characters to bytes: printable Latin-1 is itself, the rest starts at U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}
