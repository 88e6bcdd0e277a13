"""Texts in pieces have the ids that they have as a whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.hashing import unpack
from anaphora.text.tokenizer import Tokenizer
from anaphora.tools.doctor.read.token_store import TokenStore
from anaphora.tools.shared.tokenizer_and_template import load_tokenizer_and_template
from tests.support import vocabularies

TOKENIZER = load_tokenizer_and_template(None, None).tokenizer
LETTERS = ("a", "Word", "1", "42", "- x", "é", "漢", "'s", "²", "{", ".")
SPACES = (" ", "\n", "\n\n", "\t", "\r\n")
PARTS = st.lists(st.sampled_from([*LETTERS, *SPACES, "<|im_start|>", "<|im_end|>"]), max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.lists(PARTS.map("".join), max_size=5))
def test_joined_texts_are_one_text(texts: list[str]) -> None:
    store = TokenStore(TOKENIZER)
    pieces = store.join([store.intern(text) for text in texts])
    whole = "".join(texts)
    assert "".join(store.piece_texts[piece] for piece in pieces) == whole
    assert unpack(store.packed(pieces)) == TOKENIZER.encode(whole, add_special_tokens=False)


def test_lines_are_parted_for_our_tokenizer() -> None:
    store = TokenStore(TOKENIZER)
    assert len(store.pieces(store.intern("one\ntwo\n\nthree\n4\n- five"))) == 4


@pytest.mark.parametrize("kind", vocabularies.KINDS)
def test_other_tokenizers_have_the_same_ids_too(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(vocabularies.save(tmp_path, vocabularies.make(kind)))
    store, rng = TokenStore(tokenizer), random.Random(1)
    for _ in range(150):
        texts = ["".join(rng.choices([*LETTERS, *SPACES, " the"], k=rng.randrange(8))) for _ in range(4)]
        joined = store.packed(store.join([store.intern(text) for text in texts]))
        assert unpack(joined) == tokenizer.encode("".join(texts), add_special_tokens=False)
