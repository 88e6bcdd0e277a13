from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.text.detokenizer import Detokenizer, TextDelta
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.sampling import SamplingParams
from tests.support import vocabularies


class Words:
    """A vocabulary of given byte strings; id 0 is special."""

    special_ids = frozenset({0})

    def __init__(self, tokens: Iterable[bytes | str], strips_leading_space: bool = False) -> None:
        self._tokens = [b"<end>", *(token.encode() if isinstance(token, str) else token for token in tokens)]
        self.strips_leading_space = strips_leading_space
        self.ids = list(range(1, len(self._tokens)))

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def run(
    words: Words, ids: Sequence[int] | None = None, prompt: Sequence[int] = (1,), **sampling: object
) -> list[TextDelta]:
    """Adds one token per call, then the end; checks that nothing follows a stop string."""
    detokenizer = Detokenizer(words, SamplingParams(max_tokens=None, **sampling), prompt)
    deltas = [detokenizer.add([token_id], finished=False) for token_id in (words.ids if ids is None else ids)]
    deltas.append(detokenizer.add([], finished=True))
    stops = [index for index, delta in enumerate(deltas) if delta.stop]
    if stops:
        assert all(delta == TextDelta("", 0, None) for delta in deltas[stops[0] + 1 :])
    assert detokenizer.text == "".join(delta.text for delta in deltas)
    return deltas


def text_of(deltas: Iterable[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# --- stop strings ---------------------------------------------------------------------------------------------------


def test_no_part_of_a_stop_string_leaks() -> None:
    deltas = run(Words(["ABC", "DEF", "G", "HI", "JK", "LM"]), stop=("DEFGHIJ",))
    assert [delta.text for delta in deltas] == ["ABC", "", "", "", "", "", ""]
    assert [delta.tokens for delta in deltas] == [1, 1, 1, 1, 1, 0, 0], "the token that completes the stop counts"
    assert deltas[4].stop == "DEFGHIJ"


def test_text_is_held_only_while_it_can_become_a_stop_string() -> None:
    deltas = run(Words(["ABC", "DEF", "G", "X", "D"]), stop=("DEFGHIJ",))
    assert [delta.text for delta in deltas] == ["ABC", "", "", "DEFGX", "", "D"]


def test_a_stop_string_across_tokens_is_seen() -> None:
    assert text_of(run(Words(["alpha ", "beta", " ", "gamma", " delta"]), stop=("beta gamma",))) == "alpha "


def test_text_after_the_stop_string_is_dropped() -> None:
    words = Words(["one, ", "two, ", "three, ", "four, ", "five, six", ", seven"])
    detokenizer = Detokenizer(words, SamplingParams(stop=("five",)), (1,))
    delta = detokenizer.add(words.ids, finished=True)
    assert delta == TextDelta("one, two, three, four, ", 5, "five")


def test_held_text_is_emitted_at_the_end() -> None:
    words = Words(["pl", "ea", "s", "<|eot"])
    assert text_of(run(words, [1, 2, 3], stop=("<|eot_id|>assistant", "please"))) == "pleas"
    assert text_of(run(words, stop=("<|eot_id|>assistant", "please"))) == "pleas<|eot"


def test_the_stop_string_can_be_kept() -> None:
    words = Words(["a b", "c d"])
    assert text_of(run(words, stop=("bc",), include_stop_str_in_output=True)) == "a bc"


def test_the_first_complete_stop_string_counts_and_of_two_at_once_the_longer() -> None:
    words = Words(["one two three"])
    assert run(words, stop=("two three", "wo"))[0] == TextDelta("one t", 1, "wo")
    assert run(words, stop=("wo", "two"))[0] == TextDelta("one ", 1, "two")


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    words = Words(["x", "stop", "y", "st", "op", "z"])
    deltas = run(words, stop=("stop",), min_tokens=2)
    assert text_of(deltas) == "xstopy"
    assert sum(delta.tokens for delta in deltas) == 5
    assert text_of(run(words, stop=("stop",), min_tokens=5)) == "xstopystopz"
    assert text_of(run(Words(["ab", "c", "d"]), stop=("b", "abcd"), min_tokens=1)) == "", "held across the border"


# --- characters -----------------------------------------------------------------------------------------------------


def test_text_is_append_only_and_in_whole_characters() -> None:
    deltas = run(Words([b"\xe3\x82", b"\xad", b"\xe3\x83\xa5"]))
    assert [delta.text for delta in deltas] == ["", "キ", "ュ", ""]


def test_invalid_utf8_does_not_block_the_stream() -> None:
    deltas = run(Words([b"a\xff", b"b", b"\xe3\x82", b"c", b"\xf0\x9f"]))
    assert [delta.text for delta in deltas] == ["a\ufffd", "b", "", "\ufffdc", "", "\ufffd"]


def test_an_encoded_surrogate_is_replaced() -> None:
    text = text_of(run(Words([b"\xed\xa0\xbd", b"\xed\xb8\x80"])))
    assert set(text) == {"\ufffd"}


def test_special_tokens_are_skipped_or_shown() -> None:
    words = Words(["a", b"\xe3\x82", b"\xad"])
    assert text_of(run(words, [1, 0, 2, 0, 3])) == "aキ"
    assert text_of(run(words, [1, 0], skip_special_tokens=False)) == "a<end>"


def test_the_leading_space_is_kept_only_after_a_prompt_with_text() -> None:
    words = Words([" Hello", " you"], strips_leading_space=True)
    assert text_of(run(words, prompt=[1])) == " Hello you"
    assert text_of(run(words, prompt=[0])) == "Hello you"
    assert text_of(run(words, prompt=[])) == "Hello you"


# --- any ids, any split ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    root = tmp_path_factory.mktemp("vocabularies")
    return {
        kind: Tokenizer.load(vocabularies.save(root / kind, vocabularies.make(kind))) for kind in vocabularies.KINDS
    }


def split(ids: Sequence[int], cuts: Iterable[int]) -> list[Sequence[int]]:
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[first:last] for first, last in itertools.pairwise(places)]


@pytest.mark.parametrize("kind", vocabularies.KINDS)
@given(ids=st.lists(st.integers(0, 450)), cuts=st.lists(st.integers(0, 100)), skip=st.booleans())
def test_joined_deltas_are_the_whole_decoding(
    kind: str, loaded: dict[str, Tokenizer], ids: list[int], cuts: list[int], skip: bool
) -> None:
    tokenizer = loaded[kind]
    detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    deltas = [detokenizer.add(part, finished=False) for part in split(ids, cuts)]
    deltas.append(detokenizer.add([], finished=True))
    assert text_of(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert sum(delta.tokens for delta in deltas) == len(ids)


def naive(pieces: Sequence[str], stops: Sequence[str], min_tokens: int) -> tuple[str, int, str | None]:
    """Reference that searches the whole text. Returns the text before the stop string, the tokens, the stop string."""
    text = "".join(pieces)
    owner = [count for count, piece in enumerate(pieces, start=1) for _ in piece]
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and owner[end - 1] > min_tokens:
            stop = max(ending, key=len)
            return text[: end - len(stop)], owner[end - 1], stop
    return text, len(pieces), None


@given(
    pieces=st.lists(st.text("abc", max_size=3), max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 100)),
    min_tokens=st.integers(0, 6),
)
def test_the_cut_equals_a_search_in_the_whole_text(
    pieces: list[str], stops: list[str], cuts: list[int], min_tokens: int
) -> None:
    expected, tokens, stop = naive(pieces, stops, min_tokens)
    words = Words(pieces)
    sampling = SamplingParams(stop=tuple(stops), min_tokens=min_tokens, max_tokens=None)
    detokenizer = Detokenizer(words, sampling, (1,))
    deltas, shown = [], ""
    for part in split(words.ids, cuts):
        deltas.append(detokenizer.add(part, finished=False))
        shown += deltas[-1].text
        assert expected.startswith(shown)
    deltas.append(detokenizer.add([], finished=True))
    assert text_of(deltas) == expected
    assert sum(delta.tokens for delta in deltas) == tokens
    assert [delta.stop for delta in deltas if delta.stop] == ([stop] if stop else [])
