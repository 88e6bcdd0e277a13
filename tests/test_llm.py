"""The offline face over the fake runner: prompts in, answers out, faults in between."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anaphora
from anaphora import LLM, SamplingParams
from anaphora import llm as llm_module
from anaphora.checkpoint.resolve import ModelSource
from anaphora.config import CacheConfig, ModelConfig, SchedulerConfig, engine_config
from anaphora.errors import ConfigError, EngineDead, InvalidRequest
from anaphora.llm import Settings
from tests.support.engine import VOCAB, FakeRunner, expected
from tests.support.tokenizers import write_tokenizer

WINDOW = 200
Make = Callable[..., LLM]


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner(num_blocks=200, window=WINDOW)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, VOCAB)
    return tmp_path


@pytest.fixture
def make(runner: FakeRunner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes an LLM over the fake runner. At the end every one must have its blocks in order and nothing left to do."""
    made: list[LLM] = []
    monkeypatch.setattr(llm_module, "load", lambda config: runner)
    monkeypatch.setattr(llm_module, "resolve", lambda model, **options: ModelSource(folder, "fake", "fake-1"))

    def make(**settings: Any) -> LLM:
        made.append(LLM(str(folder), **({"block_size": runner.info.block_size} | settings)))
        return made[-1]

    yield make
    for llm in (llm for llm in made if not llm.closed):
        llm.check()
        stats = llm.stats()
        assert (stats.running, stats.waiting, stats.referenced_blocks) == (0, 0, 0)
    assert not runner.faults


@pytest.fixture
def llm(make: Make) -> LLM:
    return make()


def plain(max_tokens: int | None = 8, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


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
    runner = InterruptingRunner(num_blocks=200, window=WINDOW, lookahead=lookahead)
    monkeypatch.setattr(llm_module, "load", lambda config: runner)
    llm = make()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], plain(50))
    assert len(runner.batches) <= 3 + lookahead
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate([[1, 2]], plain())[0].outputs[0].token_ids == expected([1, 2], 8)


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_strikes_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = InterruptingRunner(num_blocks=200, window=WINDOW)
    runner.presses = 2
    monkeypatch.setattr(llm_module, "load", lambda config: runner)
    llm = make()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]], plain(50))
    assert len(runner.batches) == 3
    llm.close()


# --- chat -------------------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}]


def test_a_conversation_is_rendered_and_answered(llm: LLM) -> None:
    output = llm.chat(HELLO, plain())[0]
    assert output.prompt == "[user] Hello\n[assistant] "
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt)
    assert output.outputs[0].token_ids == expected(output.prompt_token_ids, 8)


def test_conversations_in_a_list_are_answered_in_order(llm: LLM) -> None:
    other = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Bye"}]
    outputs = llm.chat([HELLO, other], plain(), add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["[user] Hello\n", "[system] Be brief\n[user] Bye\n"]


def test_the_last_message_can_be_continued(llm: LLM) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Good"}]
    assert llm.chat(messages, plain(), continue_final_message=True)[0].prompt == "[user] Hello\n[assistant] Good"


def test_tools_that_the_template_drops_are_warned_about(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    llm.chat(HELLO, plain(), tools=[tool])
    assert "ignores tools" in caplog.text


@pytest.mark.parametrize("as_file", [True, False])
def test_a_template_of_ones_own(make: Make, tmp_path: Path, as_file: bool) -> None:
    template = "{{ messages[0]['content'] }}{{ mood }}"
    path = tmp_path / "mine.jinja"
    path.write_text(template)
    llm = make(chat_template=str(path) if as_file else template)
    assert llm.chat(HELLO, plain(), chat_template_kwargs={"mood": "?"})[0].prompt == "Hello?"


def test_a_template_file_that_is_not_there(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        make(chat_template="nowhere.jinja")


@pytest.mark.parametrize(
    ("messages", "options", "about"),
    [
        ([], {}, "empty"),
        ([HELLO, []], {}, "prompt 1: .*empty"),
        (["Hello"], {}, "prompt 0: a conversation is a list"),
        (HELLO, {"chat_template": "x"}, "chat_template"),
        (HELLO, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_bad_conversation_is_refused(llm: LLM, messages: Any, options: dict[str, Any], about: str) -> None:
    with pytest.raises(InvalidRequest, match=about):
        llm.chat(messages, plain(), **options)


def test_a_model_without_a_template_still_generates(make: Make, folder: Path) -> None:
    write_tokenizer(folder, VOCAB, template=None)
    llm = make()
    with pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat(HELLO, plain())
    assert llm.generate("Hello", plain())[0].finished


# --- settings ---------------------------------------------------------------------------------------------------------


def test_settings_are_the_fields_of_the_configuration() -> None:
    fields = {f.name for cls in (ModelConfig, CacheConfig, SchedulerConfig) for f in dataclasses.fields(cls)}
    assert set(Settings.__annotations__) == fields - {"model"}


def test_settings_reach_their_places() -> None:
    config = engine_config(
        {
            "seed": 4,
            "max_model_len": 100,
            "served_model_name": "mine",
            "block_size": 8,
            "kv_cache_memory_bytes": "2M",
            "gpu_memory_utilization": 1,
            "max_num_seqs": 3,
        }
    )
    assert config.model == ModelConfig(seed=4, max_model_len=100, served_model_name=("mine",))
    assert config.cache == CacheConfig(block_size=8, kv_cache_memory_bytes=2 * 2**20, gpu_memory_utilization=1)
    assert config.scheduler == SchedulerConfig(max_num_seqs=3)


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"max_model_length": 1}, "max_model_length.*did you mean max_model_len"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"dtype": "int8"}, "dtype must be one of .*bfloat16"),
        ({"dtype": 16}, "dtype must be of type str"),
        ({"block_size": "16"}, "block_size must be of type int"),
        ({"block_size": True}, "block_size must be of type int"),
        ({"block_size": 0}, "block-size"),
        ({"gpu_memory_utilization": "0.9"}, "of type float"),
        ({"enable_prefix_caching": 1}, "of type bool"),
        ({"kv_cache_memory_bytes": "much"}, "much"),
        ({"max_model_len": "long"}, "long"),
        ({"max_model_len": 100.5}, "max_model_len must be of type int"),
        ({"chat_template": 5}, "chat_template must be of type str"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], about: str) -> None:
    with pytest.raises(ConfigError, match=about):
        engine_config(settings)


def test_what_was_changed_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    llm = make(max_model_len=10**6)
    assert llm.info.max_model_len == WINDOW
    assert "1000000" in caplog.text


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


def test_the_package_gives_it_out() -> None:
    assert anaphora.LLM is llm_module.LLM


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("n", None),
            ("min_tokens", None),
            ("top_k", None),
            ("stop", 5),
            ("stop_token_ids", 5),
            ("stop_token_ids", "a"),
        ),
        *(("logit_bias", [1]), ("allowed_token_ids", 5), ("allowed_token_ids", "a")),
    ],
)
def test_sampling_values_of_a_wrong_kind_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_served_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="served_model_name must be text"):
        engine_config({"served_model_name": 5})


def test_none_stands_for_no_stop_and_no_bias() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]
