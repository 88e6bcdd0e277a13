from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.errors import InvalidRequest, ModelError
from anaphora.text import sandbox
from anaphora.text.chat_template import ChatTemplate, default_template
from tests.support import vocabularies

TEMPLATES = (
    "GLM-4.7-Flash",
    "HuggingFaceTB-SmolLM3-3B",
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-V3.1",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "openai-gpt-oss-120b",
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "é"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": "get", "description": 'Get <it> & "more"', "parameters": PARAMETERS}}
]


def call(arguments: Any, content: str | None = "") -> dict[str, Any]:
    function = {"name": "get", "arguments": arguments}
    calls = [{"id": "abcdefgh1", "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


USER = {"role": "user", "content": "Hi <b> & 'you'"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Hello!"}
RESULT = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get", "content": '{"ok": 1}'}
SHAPES: dict[str, list[dict[str, Any]]] = {
    "a question": [USER],
    "with a system message": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ANSWER, USER],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "hm"}, USER],
    "reasoning by another name": [USER, {**ANSWER, "reasoning": "hm"}, USER],
    "a tool call": [USER, call({"x": "a  b", "y": 1})],
    "a tool result": [SYSTEM, USER, call({"x": "é"}), RESULT],
    "after a tool result": [SYSTEM, USER, call({"x": "a"}), RESULT, ANSWER, USER],
    "roles that do not alternate": [USER, USER],
}


@pytest.fixture(scope="module")
def chatml() -> ChatTemplate:
    return ChatTemplate(default_template(), {})


def load(shared_data: Path, name: str) -> ChatTemplate:
    return ChatTemplate((shared_data / "chat-templates" / f"{name}.jinja").read_text(), SPECIAL)


def _outcome(render: Callable[..., str], *args: Any, **options: Any) -> str | Exception:
    try:
        return render(*args, **options)
    except Exception as error:
        return error


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, shared_data: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=vocabularies.make("byte_level"), **SPECIAL)
    ours = load(shared_data, name)
    rendered = 0
    for shape, messages in SHAPES.items():
        for tools in (None, TOOLS):
            for more in ({}, {"enable_thinking": False, "xml_tools": tools}):
                options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True}
                expected = _outcome(
                    theirs.apply_chat_template, messages, chat_template=ours.source, tokenize=False, **options, **more
                )
                got = _outcome(ours.render, messages, kwargs=more, **options)
                rendered += not isinstance(expected, Exception)
                assert str(got) == str(expected), shape
    assert rendered >= 24


@pytest.mark.parametrize("name", TEMPLATES)
def test_continues_the_final_message_as_transformers_does(name: str, shared_data: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=vocabularies.make("byte_level"), **SPECIAL)
    ours = load(shared_data, name)
    for content in ("The answer is", "The answer is ", "4"):
        messages = [USER, {"role": "assistant", "content": content}]
        expected = theirs.apply_chat_template(
            messages, chat_template=ours.source, tokenize=False, continue_final_message=True
        )
        assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_given_as_text(name: str, shared_data: Path) -> None:
    """Templates that accept text get the arguments byte for byte, the others get the parsed object."""
    ours = load(shared_data, name)
    text = '{"x":  "é", "n":1.0}'
    prompt = ours.render([USER, call(text), RESULT], tools=TOOLS)
    if name.startswith("Qwen-Qwen3"):
        assert text in prompt
    else:
        assert prompt == ours.render([USER, call(json.loads(text)), RESULT], tools=TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_null_and_absent_content_are_empty_text(name: str, shared_data: Path) -> None:
    ours = load(shared_data, name)
    empty = ours.render([USER, call({"x": "a"}, ""), RESULT])
    absent = {key: value for key, value in call({"x": "a"}).items() if key != "content"}
    assert ours.render([USER, call({"x": "a"}, None), RESULT]) == empty
    assert ours.render([USER, absent, RESULT]) == empty


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_part_of_a_list_is_in_the_prompt(name: str, shared_data: Path) -> None:
    parts = [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}]
    one = [{"type": "text", "text": "Hi <b> & 'you'"}]
    ours = load(shared_data, name)
    prompt = ours.render([{"role": "user", "content": parts}])
    assert prompt.index("part one") < prompt.index("part two")
    assert "type" not in prompt[prompt.index("part one") :]
    assert ours.render([{"role": "user", "content": one}]) == ours.render([USER])


def test_templates_that_drop_tools_are_detected(shared_data: Path, chatml: ChatTemplate) -> None:
    dropping = {name for name in TEMPLATES if load(shared_data, name).drops_tools}
    assert dropping == {"HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-V3.1"}
    assert not chatml.drops_tools


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    plain = "{% for m in messages %}{% if m.role in roles %}[{{ m.role }}:{{ m.content }}]{% endif %}{% endfor %}"
    message = {"role": "developer", "content": "D"}
    knows = ChatTemplate(plain.replace("roles", "['developer', 'user']"), {})
    drops = ChatTemplate(plain.replace("roles", "['system', 'user']"), {})
    assert knows.render([message]) == "[developer:D]"
    assert drops.render([message]) == "[system:D]"


def test_template_features() -> None:
    source = (
        "{% for m in messages %}\n    {% generation %}\n{{ m.content }}{% endgeneration %}\n"
        "    {% if loop.index == 2 %}{% break %}{% endif %}\n{% endfor %}\n"
        "{{ {'a': '<é>'} | tojson }} {{ strftime_now('%Y') | int > 2000 }} {{ documents[0].title }} {{ bos_token }}"
    )
    text = ChatTemplate(source, SPECIAL).render([USER, ANSWER, USER], kwargs={"documents": [{"title": "T"}]})
    assert text == "Hi <b> & 'you'Hello!" + '{"a": "<é>"} True T <s>'


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [
        ([], {}, "messages"),
        (["hi"], {}, r"messages\[0\]"),
        ([{"content": "x"}], {}, r"messages\[0\]"),
        ([{"role": "user", "content": 5}], {}, r"messages\[0\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], {}, "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, r"messages\[0\]\.content\[0\]\.text"),
        ([{"role": "user", "content": [None]}], {}, "NoneType"),
        ([USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}], {}, r"messages\[1\]\.tool_calls\[0\]"),
        ([USER, {"role": "assistant", "tool_calls": "x"}], {}, r"messages\[1\]\.tool_calls"),
        ([{"role": "narrator", "content": "x"}], {}, "unknown role narrator"),
        ([USER], {"kwargs": {"messages": []}}, "must not hold messages"),
        ([USER], {"kwargs": {"x": {1, 2}}}, "JSON"),
        ([USER], {"continue_final_message": True}, "exclude each other"),
    ],
)
def test_bad_messages_are_refused_by_name(
    messages: Any, options: dict[str, Any], named: str, chatml: ChatTemplate
) -> None:
    with pytest.raises(InvalidRequest, match=named):
        chatml.render(messages, **options)
    assert chatml.render([USER])


@pytest.mark.parametrize("arguments", ["{", "[1]", '"text"', "{'x': 1}"])
def test_arguments_that_a_template_needs_parsed_and_cannot_be(arguments: str) -> None:
    template = ChatTemplate(
        "{% for c in messages[1].tool_calls or [] %}{{ c.function.arguments.items() }}{% endfor %}", {}
    )
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments"):
        template.render([USER, call(arguments)])


def test_variables_may_have_the_names_of_the_engines_own_parameters() -> None:
    assert (
        ChatTemplate("{{ messages[0].content }}", {}).render([USER], kwargs={"self": 1, "args": 2}) == USER["content"]
    )


def test_a_refusal_does_not_echo_a_long_value() -> None:
    template = ChatTemplate("{{ raise_exception('no ' + messages[0].content) }}", {})
    with pytest.raises(InvalidRequest, match="no xxx") as caught:
        template.render([{"role": "user", "content": "x" * 100_000}])
    assert len(caught.value.message) <= 1000


def test_a_refusal_has_the_templates_own_message() -> None:
    template = ChatTemplate("{{ raise_exception('only one turn, please') }}", {})
    with pytest.raises(InvalidRequest, match=r"^only one turn, please$"):
        template.render([USER])


def test_a_template_that_does_not_compile_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="line 1"):
        ChatTemplate("{% if %}", {})


def test_kwargs_that_make_a_template_grow_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    own = sandbox.Sandbox(cpu_seconds=120.0)
    monkeypatch.setattr(sandbox, "shared", lambda: own)
    template = ChatTemplate("{{ messages[0].content * times }}", {})
    assert template.render([{"role": "user", "content": "x"}], kwargs={"times": 3}) == "xxx"
    with pytest.raises(InvalidRequest, match=r"cannot render these messages.*memory"):
        template.render([USER], kwargs={"times": 10**10})
    own.close()


# --- our own template -------------------------------------------------------------------------------------------------


def test_chatml_adds_nothing_unasked(chatml: ChatTemplate) -> None:
    assert chatml.render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chatml.render([SYSTEM, USER], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b> & 'you'<|im_end|>\n"
    )
    developer = {"role": "developer", "content": "Be brief."}
    assert chatml.render([developer, USER]) == chatml.render([SYSTEM, USER])


def test_chatml_puts_tools_in_the_system_block(chatml: ChatTemplate) -> None:
    alone, behind = chatml.render([USER], tools=TOOLS), chatml.render([SYSTEM, USER], tools=TOOLS)
    tools = json.dumps(TOOLS[0], ensure_ascii=False)
    assert alone.startswith("<|im_start|>system\n# Tools\n\n")
    assert behind.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    for prompt in (alone, behind):
        assert f"<tools>\n{tools}\n</tools>" in prompt
        assert prompt.count("<|im_start|>system") == 1


def test_chatml_writes_calls_byte_for_byte_and_results_in_one_turn(chatml: ChatTemplate) -> None:
    text = '{"x":  "é", "n":1.0}'
    prompt = chatml.render([USER, call(text, "Let me see."), RESULT, RESULT])
    assert (
        "<|im_start|>assistant\nLet me see.\n<tool_call>\n"
        f'{{"name": "get", "arguments": {text}}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        '<tool_response>\n{"ok": 1}\n</tool_response>\n<tool_response>\n{"ok": 1}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    ) in prompt
    assert '"arguments": {"x": "<é>"}' in chatml.render([USER, call({"x": "<é>"})])
    assert '"arguments": {}' in chatml.render([USER, call(None)])


def test_chatml_accepts_null_and_lists(chatml: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for role in ("system", "user", "assistant", "tool"):
        listed, joined, null = (
            chatml.render([USER, {"role": role, "content": content}, USER]) for content in (parts, "a\nb", None)
        )
        assert listed == joined
        assert null == chatml.render([USER, {"role": role, "content": ""}, USER])


_TEXTS = st.text("ab \n<>", max_size=8)
_STEPS = st.lists(st.tuples(_TEXTS, st.booleans(), _TEXTS), min_size=1, max_size=3)


@given(system=st.none() | _TEXTS, tools=st.sampled_from([None, TOOLS]), steps=_STEPS)
def test_each_chatml_turn_extends_the_one_before(
    system: str | None, tools: list[dict[str, Any]] | None, steps: list[tuple[str, bool, str]], chatml: ChatTemplate
) -> None:
    history: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    before = ""
    for question, calls_tool, answer in steps:
        history.append({"role": "user", "content": question})
        if calls_tool:
            before = chatml.render(history, tools=tools)
            before += '<tool_call>\n{"name": "get", "arguments": {"x":  1}}\n</tool_call><|im_end|>'
            history += [call('{"x":  1}', None), {"role": "tool", "content": answer}]
            assert chatml.render(history, tools=tools).startswith(before)
        prompt = chatml.render(history, tools=tools)
        assert prompt.startswith(before)
        before = prompt + answer + "<|im_end|>"
        history.append({"role": "assistant", "content": answer})
