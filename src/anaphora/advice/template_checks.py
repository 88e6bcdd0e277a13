"""Renders small conversations with a chat template and checks that each prompt extends the one before it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from anaphora.errors import InvalidRequest
from anaphora.text.chat_template import ChatTemplate, Message

_SYSTEM, _FIRST, _ANSWER, _SECOND = "SYSTEMTEXT", "FIRSTQUESTION", "FIRSTANSWER", "SECONDQUESTION"
_THOUGHT, _RESULT, _TOOL = "FIRSTTHOUGHT", "TOOLRESULT", "probe_tool"
_ARGUMENTS = '{"b":  1, "a": 2}'
_EXCERPT = 40
_REFERENCE_TIME = datetime(2001, 2, 3, 4, 5, 6)
_OTHER_TIMES = (
    (datetime(2001, 2, 3, 17, 38, 49), "the time of day", "every prompt differs from there on"),
    (datetime(2001, 2, 4, 4, 5, 6), "today's date", "every prompt changes at midnight"),
    (datetime(2013, 11, 30, 4, 5, 6), "the month or the year", "every prompt changes with it"),
)


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """The result of one check. ``problem`` is empty if the template passes.

    ``before`` and ``after`` are excerpts of the two prompts where they differ. ``breaks`` False marks a note: it does
    not break reuse.
    """

    name: str
    problem: str = ""
    before: str = ""
    after: str = ""
    breaks: bool = True

    @property
    def mend(self) -> str:
        """How to fix the problem."""
        return _FIXES.get(self.name, _EXTEND)


_SYSTEM_TEXT, _TOOLS, _THE_DATE = "place of the system text", "tools", "the date"
_REASONING, _ARGUMENTS_OF_CALLS = "reasoning in the history", "arguments of tool calls"
_EXTEND = "give --chat-template a template that renders earlier turns unchanged"
_FIXES = {
    _THE_DATE: "give --chat-template a copy without it; if the date matters, put it into the user message",
    _SYSTEM_TEXT: "give --chat-template a copy that writes the system text first",
    _TOOLS: "give --chat-template a copy that writes the tools before the messages",
    _REASONING: "give --chat-template a copy that keeps the reasoning, or never send reasoning back",
    _ARGUMENTS_OF_CALLS: "give --chat-template a copy that writes text arguments unchanged",
}


def check_template(template: ChatTemplate) -> list[TemplateCheck]:
    """Runs all checks: date, two turns with thinking on and off, system text, tools, tool calls, reasoning."""
    return [
        _date(template),
        _turns(template, "two turns", {}),
        _turns(template, "two turns, thinking off", {"enable_thinking": False}),
        _system_text(template),
        _tools(template),
        _tool_round(template, "a user message after a tool round", ""),
        _tool_round(template, "a user message after a tool round with reasoning", _THOUGHT),
        _reasoning(template),
        _arguments(template),
    ]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str, thought: str = "", calls: bool = False) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        function = {"name": _TOOL, "arguments": _ARGUMENTS}
        message["tool_calls"] = [{"id": "call00001", "type": "function", "function": function}]
    return message


_CONVERSATION = [{"role": "system", "content": _SYSTEM}, _user(_FIRST), _assistant(_ANSWER), _user(_SECOND)]
_SCHEMA = {
    "type": "function",
    "function": {"name": _TOOL, "description": "tries", "parameters": {"type": "object", "properties": {}}},
}


def _check_extends(name: str, first: str, second: str, problem: str) -> TemplateCheck:
    """Checks that ``first`` is a prefix of ``second``."""
    shared = _common_length(first, second)
    if shared == len(first):
        return TemplateCheck(name)
    low = max(0, shared - _EXCERPT)
    return TemplateCheck(
        name,
        f"{problem}: they share {shared} of {len(first)} characters",
        first[low : shared + _EXCERPT],
        second[low : shared + _EXCERPT],
    )


def _common_length(first: str, second: str) -> int:
    """Returns the length of the common prefix."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _refused(name: str, error: InvalidRequest) -> TemplateCheck:
    """Returns a note: a conversation that the template refuses does not break reuse."""
    return TemplateCheck(name, f"the template refuses this: {error.message}", breaks=False)


def _conversation(template: ChatTemplate) -> list[Message]:
    """Returns the test conversation, without the system text if the template refuses one."""
    try:
        template.render(_CONVERSATION)
    except InvalidRequest:
        return _CONVERSATION[1:]
    return _CONVERSATION


def _turns(template: ChatTemplate, name: str, kwargs: dict[str, Any]) -> TemplateCheck:
    messages = _conversation(template)
    try:
        first = template.render(messages[:-2], kwargs=kwargs)
        second = template.render(messages, kwargs=kwargs)
    except InvalidRequest as error:
        return _refused(name, error)
    # Models may start the answer with their own special tokens, so only the prompt is compared.
    check = _check_extends(name, first, second, "turn two does not extend turn one and its answer")
    if check.problem and _FIRST in first[: _common_length(first, second)]:
        return TemplateCheck(
            name,
            "the template opens an answer with text that it omits once the answer is history: each turn computes the "
            "last answer again",
            check.before,
            check.after,
        )
    return check


def _system_text(template: ChatTemplate) -> TemplateCheck:
    name = _SYSTEM_TEXT
    try:
        text = template.render(_CONVERSATION)
    except InvalidRequest as error:
        return _refused(name, error)
    if _SYSTEM not in text:
        return TemplateCheck(name, "the system text is not in the prompt")
    if text.index(_SYSTEM) > text.find(_FIRST) >= 0:
        return TemplateCheck(name, "the system text is moved to the last user message, so it moves with each turn")
    return TemplateCheck(name)


def _tools(template: ChatTemplate) -> TemplateCheck:
    name = _TOOLS
    try:
        text = template.render(_conversation(template), tools=[_SCHEMA])
    except InvalidRequest as error:
        return _refused(name, error)
    if _TOOL not in text:
        return TemplateCheck(name, "the template leaves tools out of the prompt", breaks=False)
    if text.index(_TOOL) > text.find(_FIRST) >= 0:
        return TemplateCheck(name, "tools are moved to the last user message, so they move with each turn")
    return TemplateCheck(name)


def _tool_round(template: ChatTemplate, name: str, thought: str) -> TemplateCheck:
    result = {"role": "tool", "tool_call_id": "call00001", "content": _RESULT}
    first = [_user(_FIRST), _assistant("", thought, calls=True), result]
    second = [*first, _assistant(_ANSWER), _user(_SECOND)]
    try:
        shorter = template.render(first, tools=[_SCHEMA], add_generation_prompt=False)
        longer = template.render(second, tools=[_SCHEMA])
    except InvalidRequest as error:
        return _refused(name, error)
    problem = "the prompt is rewritten from the tool call on"
    if thought and thought in shorter and thought not in longer:
        problem = "reasoning is dropped when a user message follows, so the prompt breaks at the tool call"
    return _check_extends(name, shorter, longer, problem)


def _reasoning(template: ChatTemplate) -> TemplateCheck:
    name = _REASONING
    turn = [_user(_FIRST), _assistant(_ANSWER, _THOUGHT)]
    try:
        last = template.render(turn, add_generation_prompt=False)
        earlier = template.render([*turn, _user(_SECOND)])
    except InvalidRequest as error:
        return _refused(name, error)
    if _THOUGHT in last and _THOUGHT not in earlier:
        return TemplateCheck(
            name, "reasoning is dropped from earlier turns, so each turn computes the last answer again"
        )
    return TemplateCheck(name)


def _arguments(template: ChatTemplate) -> TemplateCheck:
    name = _ARGUMENTS_OF_CALLS
    result = {"role": "tool", "tool_call_id": "call00001", "content": _RESULT}
    try:
        text = template.render([_user(_FIRST), _assistant("", calls=True), result], tools=[_SCHEMA])
    except InvalidRequest as error:
        return _refused(name, error)
    if _ARGUMENTS in text:
        return TemplateCheck(name)
    return TemplateCheck(name, "arguments are serialized again, not kept as the model wrote them", breaks=False)


def _date(template: ChatTemplate) -> TemplateCheck:
    """Renders the same prompts in the morning, in the evening, on the next day, and years later."""
    messages = _conversation(template)
    prompts: tuple[tuple[str, list[Message], list[dict[str, Any]] | None], ...] = (
        ("", messages, None),
        (" where no system text is given", _CONVERSATION[1:], None),
        (" where tools are given", messages, [_SCHEMA]),
    )
    for where, messages, tools in prompts:
        try:
            first = template.at(_REFERENCE_TIME).render(messages, tools=tools)
            for now, printed, changes in _OTHER_TIMES:
                text = template.at(now).render(messages, tools=tools)
                check = _check_extends(_THE_DATE, first, text, f"the template prints {printed}{where}: {changes}")
                if check.problem:
                    return check
        except InvalidRequest:
            continue  # the other checks report what it refuses
    return TemplateCheck(_THE_DATE)
