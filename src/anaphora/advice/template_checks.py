"""A chat template played through: does each turn extend the one before it, and if not, where does it stop."""

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
_ROOM = 40
_MORNING = datetime(2001, 2, 3, 4, 5, 6)
_CLOCKS = (
    (datetime(2001, 2, 3, 17, 38, 49), "the time of day", "every prompt differs from there on"),
    (datetime(2001, 2, 4, 4, 5, 6), "today's date", "every prompt changes at midnight"),
    (datetime(2013, 11, 30, 4, 5, 6), "the month or the year", "every prompt changes with it"),
)


@dataclass(frozen=True, slots=True)
class TemplateCheck:
    """One thing tried. ``problem`` is empty where the template passes; ``before`` and ``after`` show where it fails.

    ``breaks`` False: worth knowing, but no turn stops extending the one before it for this.
    """

    name: str
    problem: str = ""
    before: str = ""
    after: str = ""
    breaks: bool = True

    @property
    def mend(self) -> str:
        """What to do about the problem."""
        return _MENDS.get(self.name, _EXTEND)


_PLACE, _TOOLS, _THE_DATE = "place of the system text", "tools", "the date"
_REASONING, _ARGUMENTS_OF_CALLS = "reasoning in the history", "arguments of tool calls"
_EXTEND = "give --chat-template a template whose later turns repeat the earlier ones as they were"
_MENDS = {
    _THE_DATE: "give --chat-template a copy without it; where it matters, the client writes it into the user message",
    _PLACE: "give --chat-template a copy that writes the system text first",
    _TOOLS: "give --chat-template a copy that writes the tools before the messages",
    _REASONING: "give --chat-template a copy that keeps the reasoning, or let the client leave it out from the start",
    _ARGUMENTS_OF_CALLS: "give --chat-template a copy that writes arguments sent as text as they are",
}


def check_template(template: ChatTemplate) -> list[TemplateCheck]:
    """The date, two turns, thinking on and off, a tool round, reasoning, tools."""
    return [
        _date(template),
        _turns(template, "two turns", {}),
        _turns(template, "two turns, thinking off", {"enable_thinking": False}),
        _places(template),
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


def _stop(name: str, first: str, second: str, problem: str) -> TemplateCheck:
    """``first`` should be the beginning of ``second``."""
    shared = _common(first, second)
    if shared == len(first):
        return TemplateCheck(name)
    low = max(0, shared - _ROOM)
    return TemplateCheck(
        name,
        f"{problem}: they share {shared} of {len(first)} characters",
        first[low : shared + _ROOM],
        second[low : shared + _ROOM],
    )


def _common(first: str, second: str) -> int:
    """Length of the common beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _refused(name: str, error: InvalidRequest) -> TemplateCheck:
    """What a template refuses breaks no reuse."""
    return TemplateCheck(name, f"the template refuses this: {error.message}", breaks=False)


def _conversation(template: ChatTemplate) -> list[Message]:
    """With a system text, where the template takes one."""
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
    # A model may write its own marks before the answer, so only the prompt itself is compared.
    check = _stop(name, first, second, "turn two does not extend turn one and its answer")
    if check.problem and _FIRST in first[: _common(first, second)]:
        return TemplateCheck(
            name,
            "what the template writes to begin the answer is not there when the answer is history: "
            "each turn computes the last answer again",
            check.before,
            check.after,
        )
    return check


def _places(template: ChatTemplate) -> TemplateCheck:
    name = _PLACE
    try:
        text = template.render(_CONVERSATION)
    except InvalidRequest as error:
        return _refused(name, error)
    if _SYSTEM not in text:
        return TemplateCheck(name, "the system text does not show")
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
        return TemplateCheck(name, "the template drops tools: they do not show in the prompt", breaks=False)
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
    return _stop(name, shorter, longer, problem)


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
    return TemplateCheck(name, "arguments are written anew, not byte for byte as the model wrote them", breaks=False)


def _date(template: ChatTemplate) -> TemplateCheck:
    """The same prompts in the morning, in the evening, on the next day, and years later."""
    messages = _conversation(template)
    prompts: tuple[tuple[str, list[Message], list[dict[str, Any]] | None], ...] = (
        ("", messages, None),
        (" where no system text is given", _CONVERSATION[1:], None),
        (" where tools are given", messages, [_SCHEMA]),
    )
    for where, messages, tools in prompts:
        try:
            first = template.at(_MORNING).render(messages, tools=tools)
            for now, printed, changes in _CLOCKS:
                text = template.at(now).render(messages, tools=tools)
                check = _stop(_THE_DATE, first, text, f"the template prints {printed}{where}: {changes}")
                if check.problem:
                    return check
        except InvalidRequest:
            continue  # the other checks say what it refuses
    return TemplateCheck(_THE_DATE)
