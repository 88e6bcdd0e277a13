from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora.checkpoint.gguf_tokenizer import GgufTokenizer
from anaphora.text.tokenizer import Tokenizer
from tests.support import vocabularies


def write(path: Path, model: str, pre: str, tokens: list[str], merges: list[str], **more: Any) -> GgufTokenizer:
    """A GGUF file with nothing but a tokenizer."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [3 if token in vocabularies.SPECIALS else 4 if token == "<think>" else 1 for token in tokens]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(3)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufTokenizer(path)


def byte_level(folder: Path, pre: str, **more: Any) -> GgufTokenizer:
    model = json.loads(vocabularies.make("byte_level").to_str())["model"]
    tokens = [*model["vocab"], "<think>", "12", "123"]
    merges = [*(" ".join(pair) for pair in model["merges"]), "1 2", "12 3"]
    return write(folder / "x.gguf", "gpt2", pre, tokens, merges, **more)


def load(folder: Path, tokenizer: GgufTokenizer) -> Tokenizer:
    assert tokenizer.can_write
    tokenizer.write(folder)
    tokenizer.correct_special_tokens(folder)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
    ],
)
def test_digits_are_split_as_the_model_saw_them(pre: str, pieces: list[str], tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(tmp_path, pre))
    ids = tokenizer.encode("1234")
    assert [tokenizer.token_text(token_id) for token_id in ids] == pieces
    for text in vocabularies.TEXT:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_canonical_forms_are_composed_for_qwen_only(tmp_path: Path) -> None:
    for pre, text in (("qwen2", "\u00fc"), ("llama-bpe", "u\u0308")):
        tokenizer = load(tmp_path, byte_level(tmp_path, pre))
        assert tokenizer.decode(tokenizer.encode("u\u0308")) == text


def test_special_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level(tmp_path, "qwen2", add_bos_token=True, pad_token_id=1))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.encode("a")[0] == 0
    think = tokenizer.encode("<think>a")
    assert tokenizer.decode(think) == "<think>a", "a user-defined token is one token, and shows"
    assert len(think) == 3


def test_what_another_writer_got_wrong_is_corrected(tmp_path: Path) -> None:
    source = byte_level(tmp_path, "unheard-of", add_bos_token=False)
    assert not source.can_write
    wrong = {"eos_token": "<s>", "eos_token_id": 0, "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(wrong))
    source.correct_special_tokens(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "legacy": False,
    }
