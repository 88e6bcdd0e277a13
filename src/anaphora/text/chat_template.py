"""Renders chat messages to prompt text with a model's Jinja template."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from anaphora.errors import ConfigError, InvalidRequest, ModelError
from anaphora.text import sandbox

Message = dict[str, Any]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the message to continue; the rendering is cut there."""
_MARK = "anaphora_probe"
_ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """A Jinja template, configured as in transformers and rendered in a sandbox with limited time and memory.

    Which messages it accepts is found by rendering small conversations when first needed, not by reading its source.
    ``special_tokens`` maps names such as ``bos_token`` to their text; ``now`` replaces the current time. Raises
    ModelError if the template does not compile.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], now: datetime | None = None) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._now = now
        try:
            self._run([], {})
        except sandbox.TemplateSyntaxError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        except sandbox.RenderError:
            pass  # many templates refuse an empty conversation

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Returns the prompt. ``kwargs`` are further variables of the template, such as ``documents``.

        Null content becomes empty text. Lists of text parts are joined by newlines if the template accepts text only.
        Developer messages become system messages if the template does not know the role. JSON text in arguments of
        tool calls is passed unchanged if the template accepts text, and is parsed if not.
        ``continue_final_message`` leaves the last message open. Raises InvalidRequest with the template's own message
        if it refuses the conversation.
        """
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        for name, value in (
            ("add_generation_prompt", add_generation_prompt),
            ("continue_final_message", continue_final_message),
        ):
            if not isinstance(value, bool):
                raise InvalidRequest(f"{name} must be true or false, got {value!r:.80}", param=name)
        tools = _listed_tools(tools)
        kwargs = _named_variables(kwargs)
        if clash := _RESERVED & set(kwargs):
            raise InvalidRequest(f"chat_template_kwargs must not hold {sorted(clash)[0]}", param="chat_template_kwargs")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        ready = [self._prepared(message, f"messages[{index}]") for index, message in enumerate(messages)]
        variables = {**kwargs, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            return self._render_open(ready, variables)
        return self._render(ready, variables)

    def changes(self, messages: Sequence[Message]) -> list[str]:
        """Describes how ``render`` changes the messages before the template sees them, one sentence per change."""
        found: list[str] = []
        for index, message in enumerate(messages):
            where = f"messages[{index}]"
            ready = self._prepared(message, where)
            content = message.get("content")
            if ready["role"] != message["role"]:
                found.append(f"{where}.role: {message['role']} is given to the template as {ready['role']}")
            if "content" in message and content is None:
                found.append(f"{where}.content: null is given as empty text")
            if isinstance(content, list) and isinstance(ready["content"], str):
                found.append(f"{where}.content: {len(content)} text parts are given as one text, joined by newlines")
            for number, (call, made) in enumerate(
                zip(message.get("tool_calls") or (), ready.get("tool_calls") or (), strict=True)
            ):
                given, taken = call["function"].get("arguments"), made["function"]["arguments"]
                if isinstance(given, str) and not isinstance(taken, str):
                    what = "JSON text is parsed, and the template serializes it again"
                elif given is not None and not isinstance(given, str) and isinstance(taken, str):
                    what = "the object is given as JSON text"
                else:
                    continue
                found.append(f"{where}.tool_calls[{number}].function.arguments: {what}")
        return found

    @functools.cached_property
    def drops_tools(self) -> bool:
        """Whether the template leaves tools out of the prompt."""
        tool = {"name": _MARK, "description": "", "parameters": {"type": "object", "properties": {}}}
        text = self._probe([_message("user")], tools=[{"type": "function", "function": tool}])
        return text is not None and _MARK not in text

    # --- rendering ---------------------------------------------------------------------------------------------------

    def _run(self, messages: list[Message], variables: dict[str, Any]) -> str:
        defaults: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": False}
        merged = {**self._special_tokens, **defaults, **variables, "messages": messages}
        return sandbox.shared().render(self.source, merged, self._now)

    def at(self, now: datetime) -> ChatTemplate:
        """Returns the same template with ``now`` as the current time."""
        return ChatTemplate(self.source, self._special_tokens, now)

    def _render(self, messages: list[Message], variables: dict[str, Any]) -> str:
        try:
            return self._run(messages, variables)
        except sandbox.RenderError as error:
            reason = str(error) if error.refused else f"the chat template cannot render these messages: {error}"
            raise InvalidRequest(reason, param="messages") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"messages, tools and chat_template_kwargs must be JSON values: {error}", param="messages"
            ) from error

    def _render_open(self, messages: list[Message], variables: dict[str, Any]) -> str:
        """Renders with a mark after the last message's text and cuts there, as transformers does."""
        last = dict(messages[-1])
        content = last.get("content")
        if isinstance(content, list):
            final = content[-1]["text"] if content else ""
            last["content"] = [*content[:-1], {"type": "text", "text": final + _CUT}]
        else:
            final = str(content or "")
            last["content"] = final + _CUT
        text = self._render([*messages[:-1], last], variables)
        end = text.rfind(_CUT.strip())
        if end < 0 or final.strip() not in text:
            raise InvalidRequest("the chat template does not show the final message", param="continue_final_message")
        kept = text[:end]
        return kept if text.startswith(_CUT, end) else kept.rstrip()

    # --- messages in the form that the template accepts --------------------------------------------------------------

    def _prepared(self, message: Message, where: str) -> Message:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{where} must be an object with a role", param=where)
        ready = {name: value for name, value in message.items() if value is not None}
        if ready["role"] == "developer" and not self._knows_developer:
            ready["role"] = "system"
        ready["content"] = self._content(ready.get("content", ""), ready["role"], f"{where}.content")
        reasoning = next((ready[name] for name in _REASONING if name in ready), None)
        if reasoning is not None:
            ready = {"thinking": reasoning, **ready, "reasoning_content": reasoning}
        calls = ready.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise InvalidRequest(f"{where}.tool_calls must be a list", param=where)
            ready["tool_calls"] = [self._call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        return ready

    def _content(self, content: Any, role: str, where: str) -> Any:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise InvalidRequest(f"{where} must be text, a list of parts, or null", param=where)
        texts = [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
        if len(texts) > 1 and role in self._list_roles:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where} must hold a function with a name", param=where)
        arguments = function.get("arguments")
        arguments = "{}" if arguments in (None, "") else arguments
        takes_text, takes_object = self._argument_kinds
        if isinstance(arguments, str) and not takes_text:
            arguments = _parsed(arguments, f"{where}.function.arguments")
        elif not isinstance(arguments, str) and not takes_object:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    # --- capabilities of the template --------------------------------------------------------------------------------

    def _probe(self, messages: list[Message], **variables: Any) -> str | None:
        """Renders a small conversation; None if the template refuses it or fails."""
        try:
            return self._run(messages, variables)
        except sandbox.RenderError:
            return None

    @functools.cached_property
    def _list_roles(self) -> frozenset[str]:
        """Roles whose content may be a list of parts: it renders like the same text in one string."""
        return frozenset(role for role in _ROLES if self._takes_list(role))

    def _takes_list(self, role: str) -> bool:
        before = {"system": [], "user": [], "assistant": [_message("user")]}.get(
            role, [_message("user"), _calling("{}")]
        )
        after = [_message("user")] if role == "system" else []
        as_text, as_list = (
            self._probe([*before, {"role": role, "tool_call_id": "probe1234", "content": content}, *after])
            for content in (_MARK, [{"type": "text", "text": _MARK}])
        )
        return as_text is not None and as_text == as_list

    @functools.cached_property
    def _knows_developer(self) -> bool:
        """Whether the prompt contains developer messages; many templates refuse the role or drop its text."""
        text = self._probe([{"role": "developer", "content": _MARK}, _message("user")])
        return text is not None and _MARK in text

    @functools.cached_property
    def _argument_kinds(self) -> tuple[bool, bool]:
        """Whether arguments of tool calls may be JSON text (rendered unchanged), and whether they may be objects."""
        text = f'{{"{_MARK}":  1}}'
        result = {"role": "tool", "tool_call_id": "probe1234", "content": "1"}
        as_text = self._probe([_message("user"), _calling(text), result])
        as_object = self._probe([_message("user"), _calling({_MARK: 1}), result])
        takes_text = as_text is not None and text in as_text
        return takes_text, as_object is not None or not takes_text


@functools.cache
def default_template() -> str:
    """Returns the source of the embedded ChatML template, for models that have no template of their own."""
    return files("anaphora.text").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")


def read_template(given: str, special_tokens: dict[str, str], named: str = "--chat-template") -> ChatTemplate:
    """Loads a template from a file, or from ``given`` itself if it contains Jinja or a line break.

    ``named`` is the source of ``given`` for error messages. Raises ConfigError if it is neither a readable file nor a
    template, and ModelError if the template does not compile.
    """
    if "{{" in given or "{%" in given or "\n" in given:
        return ChatTemplate(given, special_tokens)
    try:
        source = Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{named} {given!r:.200} is not a readable file and not a template: {error}", param="chat_template"
        ) from None
    return ChatTemplate(source, special_tokens)


def _listed_tools(tools: object) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidRequest(f"tools must be a list of objects, got {tools!r:.80}", param="tools")
    return list(tools)


def _named_variables(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise InvalidRequest(
            f"chat_template_kwargs must be an object with names as keys, got {kwargs!r:.80}",
            param="chat_template_kwargs",
        )
    return kwargs


def _message(role: str) -> Message:
    return {"role": role, "content": "probe"}


def _calling(arguments: Any) -> Message:
    function = {"name": "probe", "arguments": arguments}
    # Mistral's templates require ids of nine characters.
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "probe1234", "type": "function", "function": function}],
    }


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in ("text", "refusal"):
        raise InvalidRequest(f"{where} is of type {kind!r:.80}; this model takes text parts only", param=where)
    if not isinstance(text := part.get(kind), str):
        raise InvalidRequest(f"{where}.{kind} must be text", param=where)
    return text


def _parsed(arguments: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}", param=where) from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{where} must be a JSON object, got {arguments!r:.80}", param=where)
    return parsed
