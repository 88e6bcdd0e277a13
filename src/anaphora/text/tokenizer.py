"""Encodes and decodes text with the ``tokenizers`` library; needs neither transformers nor torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from anaphora.errors import InvalidRequest, ModelError
from anaphora.text.chat_template import ChatTemplate
from anaphora.text.token_bytes import TokenBytes

logger = logging.getLogger(__name__)

_CONFIG_FILES = ("special_tokens_map.json", "tokenizer_config.json")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer: tokenizer.json and the settings of tokenizer_config.json. Safe to use from several threads.

    ``special_tokens`` maps names such as ``bos_token`` to their text. ``identity`` is a digest of everything that
    determines the ids of a text. ``chat_template`` is None if the model has none or it does not compile.
    """

    def __init__(self, serialized: bytes, config: dict[str, Any]) -> None:
        backend = tokenizers.Tokenizer.from_buffer(serialized)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._token_bytes = TokenBytes(backend)
        self.special_tokens = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name)))}
        named = {name: backend.token_to_id(text) for name, text in self.special_tokens.items()}
        marked = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids = frozenset(marked | {token_id for token_id in named.values() if token_id is not None})
        self.bos_token_id: int | None = named.get("bos_token")
        eos = named.get("eos_token")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._backend_adds_bos = self.bos_token_id is not None and backend.encode("").ids[:1] == [self.bos_token_id]
        asked = config.get("add_bos_token")
        self._adds_bos = self._backend_adds_bos if asked is None else bool(asked) and self.bos_token_id is not None
        self.identity = _identity(serialized, config)
        self.chat_template: ChatTemplate | None = None

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Loads the tokenizer of a model folder. Raises ModelError if tokenizer.json is missing or invalid."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; save the model's fast tokenizer there: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        config: dict[str, Any] = {}
        for name in _CONFIG_FILES:
            if (folder / name).is_file():
                config |= read_object(folder / name)
        try:
            tokenizer = cls(path.read_bytes(), config)
        except ModelError:
            raise
        except Exception as error:  # the library raises bare exceptions
            raise ModelError(f"{path} is broken: {error}") from error
        if (source := _template_source(folder, config)) is not None:
            tokenizer.chat_template = _template(source, tokenizer.special_tokens, folder)
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of ``text``. Does not add BOS if the text already begins with it.

        So a rendered chat whose template writes BOS has the same ids with ``add_special_tokens`` on and off.
        Raises InvalidRequest for text that is not valid Unicode (a lone surrogate).
        """
        try:
            # Not ``encode``, which holds the GIL while it works.
            (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the prompt is not valid Unicode text: it holds a lone surrogate") from error
        ids: list[int] = encoded.ids
        if not add_special_tokens or self.bos_token_id is None:
            return ids
        if self._backend_adds_bos:
            ids = ids[1:]
        if self._adds_bos and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are skipped."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        raw = b"".join(self._token_bytes.bytes_of(token_id) for token_id in ids if token_id not in skipped)
        text = raw.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    @property
    def strips_leading_space(self) -> bool:
        """Whether decoding drops a space at the very beginning of a text."""
        return self._token_bytes.strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a token inside a text; empty for an id outside the vocabulary."""
        return self._token_bytes.bytes_of(token_id)

    def token_text(self, token_id: int) -> str:
        """Returns the text of a token as log-probabilities show it: UTF-8, with U+FFFD for invalid bytes."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _content(entry: Any) -> str | None:
    """Returns the text of a special token, which config files store as text or as an object with ``content``."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns chat_template.jinja, else chat_template.json, else the config's entry (of a list: ``default``)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = config.get("chat_template")
    if (folder / "chat_template.json").is_file():
        entry = read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(entry, list):
        entry = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}.get("default")
    return entry if isinstance(entry, str) else None


def _template(source: str, special_tokens: dict[str, str], folder: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate(source, special_tokens)
    except ModelError as error:
        # Completions do not need a template, so the model can still be served.
        logger.warning("the chat template of %s cannot be used: %s", folder, error.message)
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a model's file. Raises ModelError if it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return content


def _identity(serialized: bytes, config: dict[str, Any]) -> str:
    relevant = {name: config.get(name) for name in ("add_bos_token", *_SPECIAL_NAMES)}
    digest = hashlib.sha256(serialized)
    digest.update(json.dumps(relevant, sort_keys=True).encode())
    return f"tokenizer-sha256:{digest.hexdigest()}"
