"""A chat template played through: does each turn extend the one before it, and if not, where does it stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.text.chat import ChatTemplate
from anaphora.text.tokenizer import Tokenizer
from anaphora.tools.doctor import clocks
from anaphora.tools.doctor.patterns import common_prefix

_SYSTEM, _FIRST, _ANSWER, _SECOND = "SYSTEMTEXT", "FIRSTQUESTION", "FIRSTANSWER", "SECONDQUESTION"
_THOUGHT, _RESULT, _TOOL = "FIRSTTHOUGHT", "TOOLRESULT", "probe_tool"
_ARGUMENTS = '{"b":  1, "a": 2}'
_ROOM = 40
_SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
_DAYS = ("%Y-%m-%d", "%d %B %Y", "%d %b %Y", "%B %d, %Y", "%b %d, %Y", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing tried. ``problem`` is empty where the template passes; ``before`` and ``after`` show where it fails.

    ``breaks`` False: worth knowing, but no turn stops extending the one before it for this.
    """

    name: str
    problem: str = ""
    before: str = ""
    after: str = ""
    breaks: bool = True


def load_template(name: str) -> ChatTemplate:
    """From a file with a template, or a model folder. Raises ConfigError or ModelError."""
    path = Path(name)
    if path.is_dir():
        template = Tokenizer.load(path).chat_template
        if template is None:
            raise ConfigError(f"--template: {name} has no chat template")
        return template
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), _SPECIALS)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--template cannot read {name}: {error}") from None


def examine(template: ChatTemplate) -> list[Check]:
    """Two turns, thinking on and off, a tool round, reasoning, tools, the date."""
    return [
        _turns(template, "two turns", {}),
        _turns(template, "two turns, thinking off", {"enable_thinking": False}),
        _places(template),
        _tools(template),
        _tool_round(template, "a user message after a tool round", ""),
        _tool_round(template, "a user message after a tool round with reasoning", _THOUGHT),
        _reasoning(template),
        _arguments(template),
        _date(template),
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


def _stop(name: str, first: str, second: str, problem: str) -> Check:
    """``first`` should be the beginning of ``second``."""
    shared = common_prefix(first, second)
    if shared == len(first):
        return Check(name)
    low = max(0, shared - _ROOM)
    return Check(
        name,
        f"{problem}: they share {shared} of {len(first)} characters",
        first[low : shared + _ROOM],
        second[low : shared + _ROOM],
    )


def _turns(template: ChatTemplate, name: str, kwargs: dict[str, Any]) -> Check:
    try:
        first = template.render(_CONVERSATION[:2], kwargs=kwargs)
        second = template.render(_CONVERSATION, kwargs=kwargs)
    except InvalidRequest as error:
        return Check(name, f"the template refuses it: {error.message}")
    # A model may write its own marks before the answer, so only the prompt itself is compared.
    check = _stop(name, first, second, "turn two does not extend turn one and its answer")
    if check.problem and _FIRST in first[: common_prefix(first, second)]:
        return Check(
            name,
            "what the template writes to begin the answer is not there when the answer is history: "
            "each turn computes the last answer again",
            check.before,
            check.after,
        )
    return check


def _places(template: ChatTemplate) -> Check:
    name = "place of the system text"
    try:
        text = template.render(_CONVERSATION)
    except InvalidRequest as error:
        return Check(name, f"the template refuses it: {error.message}")
    if _SYSTEM not in text:
        return Check(name, "the system text does not show")
    if text.index(_SYSTEM) > text.find(_FIRST) >= 0:
        return Check(name, "the system text is moved to the last user message, so it moves with each turn")
    return Check(name)


def _tools(template: ChatTemplate) -> Check:
    name = "tools"
    try:
        text = template.render(_CONVERSATION, tools=[_SCHEMA])
    except InvalidRequest as error:
        return Check(name, f"the template refuses them: {error.message}")
    if _TOOL not in text:
        return Check(name, "the template drops tools: they do not show in the prompt", breaks=False)
    if text.index(_TOOL) > text.find(_FIRST) >= 0:
        return Check(name, "tools are moved to the last user message, so they move with each turn")
    return Check(name)


def _tool_round(template: ChatTemplate, name: str, thought: str) -> Check:
    result = {"role": "tool", "tool_call_id": "call00001", "content": _RESULT}
    first = [_user(_FIRST), _assistant("", thought, calls=True), result]
    second = [*first, _assistant(_ANSWER), _user(_SECOND)]
    try:
        shorter = template.render(first, tools=[_SCHEMA], add_generation_prompt=False)
        longer = template.render(second, tools=[_SCHEMA])
    except InvalidRequest as error:
        return Check(name, f"the template refuses it: {error.message}")
    problem = "the prompt is rewritten from the tool call on"
    if thought and thought in shorter and thought not in longer:
        problem = "reasoning is dropped when a user message follows, so the prompt breaks at the tool call"
    return _stop(name, shorter, longer, problem)


def _reasoning(template: ChatTemplate) -> Check:
    name = "reasoning in the history"
    turn = [_user(_FIRST), _assistant(_ANSWER, _THOUGHT)]
    try:
        last = template.render(turn, add_generation_prompt=False)
        earlier = template.render([*turn, _user(_SECOND)])
    except InvalidRequest as error:
        return Check(name, f"the template refuses it: {error.message}")
    if _THOUGHT in last and _THOUGHT not in earlier:
        return Check(name, "reasoning is dropped from earlier turns, so each turn computes the last answer again")
    return Check(name)


def _arguments(template: ChatTemplate) -> Check:
    name = "arguments of tool calls"
    result = {"role": "tool", "tool_call_id": "call00001", "content": _RESULT}
    try:
        text = template.render([_user(_FIRST), _assistant("", calls=True), result], tools=[_SCHEMA])
    except InvalidRequest as error:
        return Check(name, f"the template refuses them: {error.message}")
    if _ARGUMENTS in text:
        return Check(name)
    return Check(name, "arguments are written anew, not byte for byte as the model wrote them", breaks=False)


def _date(template: ChatTemplate) -> Check:
    name = "the date"
    try:
        text = template.render(_CONVERSATION)
    except InvalidRequest:
        text = template.render([_user(_FIRST)])
    today = datetime.now()
    found = [text[s:e] for s, e, _ in clocks.matches(text)]
    if any(today.strftime(form) in value for form in _DAYS for value in found):
        return Check(name, "the template prints today's date: every prompt changes at midnight", found[0])
    return Check(name)


def as_json(checks: list[Check]) -> Iterator[dict[str, str | bool]]:
    for check in checks:
        yield {
            "check": check.name,
            "ok": not (check.problem and check.breaks),
            "problem": check.problem,
            "before": check.before,
            "after": check.after,
        }
