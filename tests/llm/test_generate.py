"""LLM.generate over the fake runner: prompts, stop strings, salts, failed steps, interrupts, progress."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anaphora import LLM, SamplingParams
from anaphora import llm as llm_module
from anaphora.errors import EngineDead, InvalidRequest
from tests.support.engine import VOCAB, FakeRunner, expected
from tests.support.llm import WINDOW, Make, plain

# --- answers ----------------------------------------------------------------------------------------------------------


def test_every_form_of_prompt_is_answered_in_order(llm: LLM) -> None:
    prompts = ["first", [1, 2, 3, 4, 5], {"prompt": "third"}, {"prompt_token_ids": [9]}]
    prompts.append({"prompt": "words", "prompt_token_ids": [8, 8], "cache_salt": "mine"})
    outputs = llm.generate(prompts, plain())
    ids = [list(b"first"), [1, 2, 3, 4, 5], list(b"third"), [9], [8, 8]]
    tokenizer = llm.get_tokenizer()
    ids = [
        tokenizer.encode(p) if isinstance(p, str) else i for p, i in zip(["first", 0, "third", 0, 0], ids, strict=True)
    ]
    assert [output.prompt for output in outputs] == ["first", None, "third", None, "words"]
    assert [output.prompt_token_ids for output in outputs] == ids
    assert [output.outputs[0].token_ids for output in outputs] == [expected(prompt, 8) for prompt in ids]
    assert [output.outputs[0].text for output in outputs] == [tokenizer.decode(expected(p, 8)) for p in ids]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert all(output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 5


@pytest.mark.parametrize("prompt", ["alone", [1, 2, 3], {"prompt": "alone"}])
def test_a_single_prompt_gives_a_list_of_one(llm: LLM, prompt: Any) -> None:
    assert len(llm.generate(prompt, plain())) == 1


def test_no_prompts_give_no_answers(llm: LLM, runner: FakeRunner) -> None:
    assert llm.generate([], plain()) == []
    assert runner.batches == []


def test_a_repeated_beginning_is_computed_once_and_reported(llm: LLM, runner: FakeRunner) -> None:
    shared = list(range(50, 90))
    first, *others = llm.generate([[*shared, last] for last in range(4)], plain())
    assert first.num_cached_tokens == 0
    assert [other.num_cached_tokens for other in others] == [40, 40, 40]
    again = llm.generate([*shared, 0], plain())[0]
    assert (again.num_cached_tokens, again.cache.prompt_tokens, again.cache.reason) == (40, 41, "short")
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert runner.computed == 41 + 3 + 1
    assert llm.stats().hits == 160


def test_reset_forgets_the_cached_prefixes(llm: LLM) -> None:
    prompt = list(range(30))
    llm.generate(prompt, plain())
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, plain())[0].num_cached_tokens == 0


def test_caching_can_be_turned_off(make: Make) -> None:
    llm = make(enable_prefix_caching=False)
    assert [llm.generate(list(range(30)), plain())[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    outputs = llm.generate([[1], [2]], [plain(3), plain(5, n=2)])
    assert [len(output.outputs) for output in outputs] == [1, 2]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 5]
    assert outputs[1].outputs[1].token_ids == expected([2], 5, choice=1)


def test_without_max_tokens_the_answer_may_fill_the_window(llm: LLM) -> None:
    for limit in (None, 10**9):
        choice = llm.generate([[1, 2, 3]], plain(limit))[0].outputs[0]
        assert (len(choice.token_ids), choice.finish_reason) == (WINDOW - 3, "length")


def test_prompt_logprobs_come_with_the_answer(llm: LLM) -> None:
    prompt = list(range(20))
    output = llm.generate(prompt, plain(prompt_logprobs=0))[0]
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.prompt_logprobs[1:]] == prompt[1:]


def test_an_end_token_ends_the_answer_unless_ignored(make: Make, folder: Path) -> None:
    end = expected([5], 6)[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "max_new_tokens": 20}))
    llm = make()
    choice = llm.generate([[5]])[0].outputs[0]
    assert (choice.token_ids, choice.finish_reason, choice.stop_reason) == (expected([5], 6), "stop", None)
    assert choice.text == llm.get_tokenizer().decode(expected([5], 5))
    assert len(llm.generate([[5]], plain(9))[0].outputs[0].token_ids) == 9


def test_the_models_own_parameters_are_the_default(make: Make, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "max_new_tokens": 7}))
    assert make().get_default_sampling_params() == SamplingParams(temperature=0.3, max_tokens=7)
    assert make(generation_config="vllm").get_default_sampling_params() == SamplingParams()
    assert len(make().generate([[5]])[0].outputs[0].token_ids) == 7


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_its_choice_and_no_other(llm: LLM, runner: FakeRunner) -> None:
    tokens = expected([7], 40, choice=1)
    tokenizer = llm.get_tokenizer()
    stop = tokenizer.decode(tokens[3:5])
    assert stop not in tokenizer.decode(expected([7], 40))
    output = llm.generate([[7]], plain(40, n=2, stop=(stop,)))[0]
    whole, cut = output.outputs
    assert (whole.token_ids, whole.finish_reason) == (expected([7], 40), "length")
    assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (tokens[:5], "stop", stop)
    assert cut.text == tokenizer.decode(tokens[:3])
    assert sum(len(batch.chunks) for batch in runner.batches) < 40 + 10  # the ended choice takes part in no more steps


def test_after_the_last_choice_met_its_stop_string_nothing_runs_on(llm: LLM, runner: FakeRunner) -> None:
    stop = llm.get_tokenizer().decode(expected([7], 3)[2:])
    assert llm.generate([[7]], plain(190, stop=(stop,)))[0].outputs[0].finish_reason == "stop"
    assert len(runner.batches) < 10


# --- refused before anything runs -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "fields", "about"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ([VOCAB], {}, f"{VOCAB - 1}"),
        ([-1], {}, "-1"),
        ([1, True], {}, "token ids"),
        ([1, 2.0], {}, "token ids"),
        (["a"], {}, "token ids"),
        (None, {}, "a prompt is text"),
        (7.5, {}, "a prompt is text"),
        ({"prompt": 3}, {}, "a prompt is text"),
        ({"prompt_token_ids": "text"}, {}, "a prompt is text"),
        ({"cache_salt": "x"}, {}, "a prompt is text"),
        ({"prompt": "x", "multi_modal_data": {}}, {}, "multi_modal_data"),
        ([1] * WINDOW, {}, f"{WINDOW}"),
        ([1] * 10 * WINDOW, {"max_tokens": None}, f"{WINDOW}"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1] * (WINDOW - 5), {"max_tokens": None, "min_tokens": 6}, "min_tokens"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_a_bad_prompt_is_named_by_its_index_and_nothing_has_run(
    llm: LLM, runner: FakeRunner, prompt: Any, fields: dict[str, Any], about: str
) -> None:
    good = plain()
    with pytest.raises(InvalidRequest, match="prompt 1: ") as caught:
        llm.generate([[1, 2], prompt, "fine"], [good, SamplingParams(**fields), good])
    assert about in caught.value.message
    assert runner.batches == []
    assert llm.generate([[1, 2]], good)[0].outputs[0].token_ids == expected([1, 2], 8)


@pytest.mark.parametrize(
    "prompts", [None, 5, b"bytes", (text for text in ["a"])], ids=lambda given: type(given).__name__
)
def test_what_is_no_list_of_prompts_is_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompts must be one prompt or a list"):
        llm.generate(prompts, plain())


@pytest.mark.parametrize("given", [[plain()], [plain()] * 3, [plain(), {"max_tokens": 3}], [], 5, {"max_tokens": 3}])
def test_as_many_parameters_as_prompts(llm: LLM, given: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="a list of 2, one for each"):
        llm.generate(["a", "b"], given)


@pytest.mark.parametrize("salt", ["", 5, "s" * 1000])
def test_a_bad_salt_is_refused(llm: LLM, salt: Any) -> None:
    with pytest.raises(InvalidRequest, match="prompt 0: cache_salt"):
        llm.generate({"prompt": "x", "cache_salt": salt}, plain())


def test_prompts_under_different_salts_share_nothing(llm: LLM) -> None:
    ids = list(range(30))
    outputs = [
        llm.generate({"prompt_token_ids": ids, "cache_salt": salt}, plain())[0] for salt in ("one", "two", "one", None)
    ]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 29, 0]


# --- faults while it runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_request_that_fails_says_so_and_the_others_are_whole(
    make: Make, runner: FakeRunner, lookahead: int, caplog: pytest.LogCaptureFixture
) -> None:
    runner.lookahead = lookahead
    runner.poison = {777}
    llm = make()
    fine, failed, too = llm.generate([[1, 2], [3, 777], [4, 5]], plain())
    assert [fine.outputs[0].token_ids, too.outputs[0].token_ids] == [expected([1, 2], 8), expected([4, 5], 8)]
    choice = failed.outputs[0]
    assert (choice.token_ids, choice.finish_reason, failed.finished) == ([], "error", True)
    assert "made to fail" in choice.stop_reason
    assert f"request {failed.request_id} failed" in caplog.text


class InterruptingRunner(FakeRunner):
    """Gets Ctrl-C ``presses`` times in the middle of its third step."""

    presses = 1

    def submit(self, batch: Any) -> Any:
        pending = super().submit(batch)
        if len(self.batches) == 3:
            for _ in range(self.presses):
                os.kill(os.getpid(), signal.SIGINT)
        return pending


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell starts what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("lookahead", [0, 1])
def test_an_interrupt_aborts_all_between_two_steps(make: Make, monkeypatch: pytest.MonkeyPatch, lookahead: int) -> None:
    runner = InterruptingRunner(num_blocks=200, context_length=WINDOW, lookahead=lookahead)
    monkeypatch.setattr(llm_module, "load", lambda config: runner)
    llm = make()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], plain(50))
    assert len(runner.batches) <= 3 + lookahead
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate([[1, 2]], plain())[0].outputs[0].token_ids == expected([1, 2], 8)


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_strikes_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = InterruptingRunner(num_blocks=200, context_length=WINDOW)
    runner.presses = 2
    monkeypatch.setattr(llm_module, "load", lambda config: runner)
    llm = make()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]], plain(50))
    assert len(runner.batches) == 3
    llm.close()


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("terminal", "wanted"), [(False, True), (True, False), (True, True)])
def test_progress_shows_on_a_terminal_only(
    llm: LLM,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
    wanted: bool,
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    llm.generate([[1, 2, 3, 4, 5, 6, 7, 8]], plain())
    capsys.readouterr()
    llm.generate([[1, 2, 3, 4, 5, 6, 7, 8]] * 3, plain(), use_tqdm=wanted)
    shown = capsys.readouterr()
    assert shown.out == ""
    if terminal and wanted:
        assert all(text in shown.err for text in ("3/3", "tokens/s", "88% of prompt tokens from the cache"))
    else:
        assert shown.err == ""


def test_leaving_the_block_ends_it(make: Make) -> None:
    with make() as llm:
        llm.generate("x", plain())
        llm.check()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("x", plain())
