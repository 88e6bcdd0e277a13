"""Small tokenizers made on the spot, one of each kind, saved as a model folder has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

KINDS = ("byte_level", "byte_fallback", "unigram", "metaspace")
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "You are the support agent of a small bank. Be brief and never guess. one, two, three, four, five, six",
    "grün und süß, キュート, emoji 😀👩‍👩‍👧, Здравствуй, 你好",
    'def f(x):\n    return {"a": x + 1}\n\n\tassert f(1) == {"a": 2}\n',
]


def make(kind: str) -> tokenizers.Tokenizer:
    """A tokenizer of about 400 tokens with the special tokens above (ids 0 to 3 but for unigram) and no BOS added."""
    if kind == "byte_level":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(TEXT, trainer)
        return tokenizer
    if kind == "metaspace":
        tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        tokenizer.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False)
        )
        return tokenizer
    tokenizer = tokenizers.Tokenizer(_sentencepiece(kind))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def _sentencepiece(kind: str) -> Any:
    """A model with a token for each byte, printable ASCII, and some words."""
    words = [f"▁{word}" for text in TEXT[:2] for word in text.replace(",", "").split()]
    pieces = list(dict.fromkeys([*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(33, 127))]))
    if kind == "unigram":
        pieces = list(dict.fromkeys([*pieces, "▁", "ü", *words]))
        vocabulary = [(piece, -1.0 if piece in words else -8.0) for piece in pieces]
        return models.Unigram(vocabulary, unk_id=0, byte_fallback=True)
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("▁", "d"), ("o", "g"), ("▁d", "og"), ("▁", "b"), ("e", "r")]
    pieces = list(dict.fromkeys([*pieces, "▁", "ü", *(left + right for left, right in merges)]))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    return models.BPE(vocabulary, merges, unk_token="<s>", byte_fallback=True, fuse_unk=True)


def with_bos(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same, putting ``<s>`` in front of each text."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def save(folder: Path, tokenizer: tokenizers.Tokenizer, **config: Any) -> Path:
    """Write tokenizer.json and tokenizer_config.json, with BOS and EOS unless ``config`` says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(defaults | config))
    return folder
