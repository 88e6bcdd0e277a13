"""Updates become outputs: what belongs to a choice, what ends it, and updates that come too late."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.text.output_processor import ChoiceDelta, OutputProcessor
from anaphora.types.batch import TokenLogprobs
from anaphora.types.outputs import FinishReason, PromptDone, SequenceUpdate
from anaphora.types.reports import CacheReport
from anaphora.types.request import Request
from anaphora.types.sampling import SamplingParams

EOS = 0


class Letters:
    """One token per byte; token 0 is the special end token."""

    special_ids = frozenset({EOS})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return b"<end>" if token_id == EOS else bytes([token_id])


def processor(prompt_text: str | None = None, **sampling) -> OutputProcessor:
    request = Request("r", (65, 66), SamplingParams(max_tokens=100, **sampling), arrival=0.0, eos_token_ids=(EOS,))
    return OutputProcessor(request, Letters(), prompt_text)


def update(
    text: str,
    finish: FinishReason | None = None,
    *,
    choice: int = 0,
    end: tuple[int, ...] = (),
    logprobs: bool = False,
    **fields,
) -> SequenceUpdate:
    tokens = (*text.encode(), *end)
    entries = tuple(TokenLogprobs(token, -0.5 * token, 1) for token in tokens) if logprobs else None
    return SequenceUpdate("r", choice, tokens, 0.0, logprobs=entries, finish_reason=finish, **fields)


def prompt_done(**fields) -> PromptDone:
    return PromptDone(CacheReport(2, 1, "hit"), queue_s=0.0, waited_s=0.0, prefill_s=0.1, **fields)


def test_an_output_has_all_fields() -> None:
    answer = processor("AB", logprobs=0)
    first = answer.update(update("he", logprobs=True, prompt=prompt_done(prompt_logprobs=(None, None))))
    last = answer.update(update("y", FinishReason.LENGTH, logprobs=True))
    assert (first.text, first.finish_reason, last.text, last.finish_reason) == ("he", None, "y", "length")
    output = answer.output()
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == ("r", "AB", [65, 66], True)
    assert (output.num_cached_tokens, output.cache.reason, output.prompt_logprobs) == (1, "hit", [None, None])
    choice = output.outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("hey", list(b"hey"), "length")
    assert [entry.token_id for entry in choice.logprobs] == list(b"hey")
    assert choice.cumulative_logprob == pytest.approx(-0.5 * sum(b"hey"))


def test_the_output_is_empty_before_the_first_token() -> None:
    output = processor().output()
    assert (output.finished, output.num_cached_tokens, output.cache) == (False, 0, None)
    assert (output.outputs[0].text, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (
        "",
        None,
        None,
    )


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("end", [EOS, ord("!")])
@pytest.mark.parametrize("include", [True, False])
def test_an_end_token_counts_and_its_text_is_optional(skip_special: bool, end: int, include: bool) -> None:
    answer = processor(skip_special_tokens=skip_special, include_stop_str_in_output=include)
    delta = answer.update(update("a", FinishReason.STOP, end=(end,), stop_reason=None if end == EOS else end))
    shown = "" if not include or (end == EOS and skip_special) else Letters().token_bytes(end).decode()
    assert delta.text == "a" + shown
    assert delta.token_ids == (ord("a"), end)
    assert (delta.finish_reason, delta.stop_reason) == ("stop", None if end == EOS else end)
    assert not delta.stopped_by_string


def test_a_stop_string_over_two_updates_ends_the_choice_once() -> None:
    answer = processor(stop=("lo w",), logprobs=1)
    first = answer.update(update("hello", logprobs=True))
    second = answer.update(update(" world", logprobs=True))
    late = answer.update(update("late", FinishReason.LENGTH, logprobs=True))
    assert (first.text, second.text) == ("hel", "")
    assert second == ChoiceDelta(
        0, "", tuple(b" w"), second.logprobs, finish_reason="stop", stop_reason="lo w", stopped_by_string=True
    )
    assert late == ChoiceDelta(0)
    choice = answer.output().outputs[0]
    assert (choice.text, bytes(choice.token_ids), choice.finish_reason) == ("hel", b"hello w", "stop")
    assert choice.stop_reason == "lo w"
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert answer.num_generated == 7


def test_a_stop_string_in_the_last_update_needs_no_abort() -> None:
    answer = processor(stop=("b",))
    delta = answer.update(update("abc", FinishReason.LENGTH))
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("a", (97, 98), "stop", "b")
    assert not delta.stopped_by_string


def test_text_held_for_a_stop_string_is_emitted_at_the_end() -> None:
    answer = processor(stop=("please",))
    answer.update(update("pleas"))
    assert answer.update(update("", FinishReason.STOP, end=(EOS,))).text == "pleas"
    assert answer.output().outputs[0].text == "pleas"


def test_choices_are_separate_and_the_output_finishes_with_the_last() -> None:
    answer = processor(n=3, stop=("x",))
    assert answer.update(update("ax", choice=2)).stopped_by_string
    assert answer.update(update("b", choice=0)).text == "b"
    answer.update(update("c", FinishReason.LENGTH, choice=1))
    assert not answer.finished
    answer.update(update("d", FinishReason.STOP, choice=0, end=(EOS,)))
    assert answer.finished
    assert [(c.index, c.text, c.finish_reason) for c in answer.output().outputs] == [
        (0, "bd", "stop"),
        (1, "c", "length"),
        (2, "a", "stop"),
    ]


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_an_end_without_tokens_keeps_the_text_before_it(reason: FinishReason) -> None:
    answer = processor(stop=("lo",))
    answer.update(update("hel"))
    delta = answer.update(SequenceUpdate("r", 0, (), 0.0, finish_reason=reason, error="broke"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("l", reason.value, "broke")
    assert answer.output().outputs[0].text == "hel"


@given(
    text=st.text(st.sampled_from("abcé€😀"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=3), max_size=3),
    cuts=st.sets(st.integers(0, 60)),
    include=st.booleans(),
)
def test_deltas_add_up_however_tokens_are_split(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    data = text.encode()
    edges = [0, *sorted(cut for cut in cuts if 0 < cut < len(data)), len(data)]
    answer = processor(stop=tuple(stops), include_stop_str_in_output=include, logprobs=0)
    deltas = []
    for first, last in itertools.pairwise(edges):
        finish = FinishReason.LENGTH if last == len(data) else None
        tokens = tuple(data[first:last])
        entries = tuple(TokenLogprobs(token, -1.0, 1) for token in tokens)
        deltas.append(answer.update(SequenceUpdate("r", 0, tokens, 0.0, logprobs=entries, finish_reason=finish)))
        if deltas[-1].stopped_by_string:
            break
    choice = answer.output().outputs[0]
    assert "".join(delta.text for delta in deltas) == choice.text
    assert [token for delta in deltas for token in delta.token_ids] == choice.token_ids
    assert len(choice.logprobs) == len(choice.token_ids)
    assert text.startswith(choice.text)
    assert sum(delta.finish_reason is not None for delta in deltas) == 1
    assert any(stop in text for stop in stops) == (choice.stop_reason in stops)
    if not include:
        assert not any(stop in choice.text for stop in stops)
