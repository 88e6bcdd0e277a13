"""Writes the tokenizer inside a GGUF file as the files of a Hugging Face folder.

transformers converts it too, but loses the pre-tokenizer (it merges digits that the model saw one by one) and, in some
versions, the end token. So byte-level vocabularies with a known pre-tokenizer are written from the file's own metadata;
for others only the special tokens are corrected.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_CONTROL, _USER_DEFINED = 3, 4


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(regex: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


_DIGITS = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
}
_KNOWN: dict[str, dict[str, Any]] = {
    "gpt-2": {"pre_tokenizer": _byte_level(use_regex=True)},
    **{key: {"pre_tokenizer": _DIGITS} for key in ("smollm", "starcoder", "refact", "command-r")},
    "llama-bpe": {"pre_tokenizer": _split(_REGEX % "{1,3}"), "ignore_merges": True},
    "qwen2": {"pre_tokenizer": _split(_REGEX % ""), "normalizer": {"type": "NFC"}},
}
"""What differs between byte-level tokenizers, by ``tokenizer.ggml.pre``."""


class GgufTokenizer:
    """A GGUF file's tokenizer metadata."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._fields = GGUFReader(path).fields

    def _get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(f"tokenizer.{name}")
        return default if field is None else field.contents()

    @property
    def can_write(self) -> bool:
        """Whether ``write`` knows this vocabulary."""
        return self._get("ggml.model") == "gpt2" and self._get("ggml.pre") in _KNOWN

    def write(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if the file has one, the chat template."""
        tokens: list[str] = self._get("ggml.tokens")
        kinds: list[int] = self._get("ggml.token_type", [1] * len(tokens))
        own = _KNOWN[self._get("ggml.pre")]
        added = [
            _added_token(token_id, tokens[token_id], special=kind == _CONTROL)
            for token_id, kind in enumerate(kinds)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        model = {
            "type": "BPE",
            "ignore_merges": own.get("ignore_merges", False),
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in self._get("ggml.merges", [])],
        }
        content = {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": own.get("normalizer"),
            "pre_tokenizer": own["pre_tokenizer"],
            "post_processor": None,
            "decoder": _byte_level(use_regex=True),
            "model": model,
        }
        _write_json(folder / "tokenizer.json", content)
        if template := self._get("chat_template"):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})

    def correct_special_tokens(self, folder: Path) -> None:
        """Set the special tokens (begin, end, unknown, padding) in tokenizer_config.json to the file's."""
        path = folder / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        tokens: list[str] = self._get("ggml.tokens")
        for theirs, ours in _SPECIAL.items():
            config.pop(f"{ours}_id", None)  # some versions of transformers write a wrong one
            token_id = self._get(f"ggml.{theirs}_token_id")
            if token_id is not None and token_id < len(tokens):
                config[ours] = tokens[token_id]
        if (adds_bos := self._get("ggml.add_bos_token")) is not None:
            config["add_bos_token"] = bool(adds_bos)
        _write_json(path, config)


def _added_token(token_id: int, content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": content, **flags, "special": special}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
