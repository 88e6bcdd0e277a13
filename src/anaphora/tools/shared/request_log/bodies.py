"""Converts request bodies of several APIs to one form: chat messages, tools as sent, and the metadata of the log."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from anaphora.tools.shared.request_log import otel_spans
from anaphora.tools.shared.request_log.logged_answers import Answer, answer_of
from anaphora.tools.shared.request_log.valid_text import loads
from anaphora.tools.shared.usage import Usage, usage_of

_TIME_KEYS = ("time", "timestamp", "t", "arrival", "ts", "created", "created_at", "start_time", "startTime")
_SESSION_KEYS = ("session_id", "session", "conversation_id", "conversation", "thread_id", "chat_id", "sessionId")
_SALT_KEYS = ("cache_salt", "salt", "prompt_cache_key")
_ROUTE_KEYS = ("route", "endpoint", "operation")
_BODY_KEYS = ("body", "request", "request_body", "payload", "params", "kwargs", "input", "data", "json")
_RESPONSE_KEYS = ("response", "response_body", "completion", "output", "result")


class NotARequest(ValueError):
    """Raised for a line without a usable request; the message gives the reason."""


@dataclass(slots=True)
class LoggedRequest:
    """One request of a log. ``origins[i]`` is the JSON path of ``messages[i]`` in the body.

    ``prompt`` is set, and ``messages`` empty, for a completion. ``time`` is Unix seconds. ``body`` is the body as it
    was sent, ``outer`` the line's object that holds it.
    """

    line: int
    messages: list[dict[str, Any]]
    origins: list[str]
    prompt: str | None = None
    tools: list[Any] = field(default_factory=list)
    model: str = ""
    time: float | None = None
    session: str = ""
    route: str = ""
    salt: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    usage: Usage | None = None
    answer: Answer | None = None
    prefill_s: float | None = None
    body: dict[str, Any] = field(default_factory=dict)
    outer: dict[str, Any] = field(default_factory=dict)


def requests_of(value: Any, line: int) -> Iterator[LoggedRequest]:
    """Yields the requests in one JSON value of the log's line number ``line``. Raises NotARequest if there is none."""
    if not isinstance(value, dict):
        raise NotARequest(f"a JSON {type(value).__name__}, not an object")
    if (found := otel_spans.requests_in(value)) is not None:
        if not found:
            raise NotARequest("a trace without gen_ai requests")
        for outer in found:
            yield from _logged(outer, line)
        return
    if isinstance(several := value.get("requests"), list) and not _is_body(value):
        for item in several:
            yield from requests_of(item, line)
        return
    yield from _logged(value, line)


def _is_body(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    if any(isinstance(value.get(key), list) for key in ("messages", "contents", "tools")):
        return True
    if isinstance(value.get("prompt"), (str, list)) or isinstance(value.get("input"), (str, list)):
        return True
    return isinstance(value.get("system"), (str, list))


def _body(outer: dict[str, Any], depth: int = 0) -> dict[str, Any] | None:
    for key in _BODY_KEYS:
        inner = outer.get(key)
        if isinstance(inner, str) and inner[:1] == "{":
            try:
                inner = loads(inner)
            except ValueError:
                continue
        if isinstance(inner, dict):
            if _is_body(inner):
                return inner
            if depth < 2 and (found := _body(inner, depth + 1)) is not None:
                return found
    return outer if _is_body(outer) else None


def _logged(outer: dict[str, Any], line: int) -> Iterator[LoggedRequest]:
    body = _body(outer)
    status = outer.get("status")
    if body is not outer and isinstance(status, int) and status >= 400:
        raise NotARequest(f"it was not answered (HTTP {status})")
    if body is None:
        if "prompt_tokens" in outer or "total_s" in outer:
            raise NotARequest("it has lengths but no body: record again with --record-prompts")
        raise NotARequest("it has neither messages nor a prompt")
    common: dict[str, Any] = {
        "line": line,
        "body": body,
        "outer": outer,
        "model": str(body.get("model") or outer.get("model") or ""),
        "time": _time(outer) or _time(body),
        "session": _first(_SESSION_KEYS, outer, body.get("metadata"), outer.get("metadata"), body),
        "route": _first(_ROUTE_KEYS, outer, outer.get("metadata"), body.get("metadata")),
        "salt": _first(_SALT_KEYS, outer, body),
        "usage": usage_of(outer, *(outer.get(key) for key in _RESPONSE_KEYS)),
        "answer": answer_of(*(outer.get(key) for key in _RESPONSE_KEYS), outer),
        "prefill_s": _number(outer.get("prefill_s")),
    }
    tools = body.get("tools")
    if not isinstance(tools, list):
        functions = body.get("functions")
        tools = [{"type": "function", "function": f} for f in functions] if isinstance(functions, list) else []
    kwargs = body.get("chat_template_kwargs")
    common |= {"tools": tools, "kwargs": kwargs if isinstance(kwargs, dict) else {}}
    if not isinstance(body.get("messages"), list) and "prompt" in body:
        for prompt in _prompts(body["prompt"]):
            yield LoggedRequest(messages=[], origins=[], prompt=prompt, **common)
        return
    messages, origins = _messages(body)
    if not messages and not tools:
        raise NotARequest("its messages are empty")
    yield LoggedRequest(messages=messages, origins=origins, **common)


def _prompts(prompt: Any) -> list[str]:
    several = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(several, list) or not several or not all(isinstance(text, str) and text for text in several):
        raise NotARequest("its prompt is not text (token ids cannot be shown; log the text)")
    return several


def _first(keys: tuple[str, ...], *places: Any) -> str:
    for place in places:
        if isinstance(place, dict):
            for key in keys:
                if isinstance(value := place.get(key), (str, int)) and value != "":
                    return str(value)
    return ""


def _number(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -_MOST <= value <= _MOST:
        return None
    return float(value)


_MOST = 1e30
"""Larger numbers are neither times nor durations, whatever their unit."""


def _time(place: dict[str, Any]) -> float | None:
    for key in _TIME_KEYS:
        value = place.get(key)
        if (number := _number(value)) is not None:
            while number > 1e11:
                number /= 1000
            return number
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                continue
    return None


_SYSTEM_ORIGINS = {
    "system": "system",
    "instructions": "instructions",
    "systemInstruction": "systemInstruction.parts",
    "system_instruction": "system_instruction.parts",
}


# --- Messages --------------------------------------------------------------------------------------------------------


def _messages(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    system = body.get("system", body.get("instructions"))
    if isinstance(instruction := body.get("systemInstruction", body.get("system_instruction")), dict):
        system = instruction.get("parts")
    if system:
        messages.append({"role": "system", "content": _plain_parts(system)})
        origins.append(_SYSTEM_ORIGINS[next(key for key in _SYSTEM_ORIGINS if key in body)])
    name = next((key for key in ("messages", "input", "contents") if key in body), "messages")
    listed = body.get(name) or []
    if isinstance(listed, str):
        listed = [{"role": "user", "content": listed}]
    if not isinstance(listed, list):
        raise NotARequest(f"its {name} are not a list")
    for index, message in enumerate(listed):
        if not isinstance(message, dict):
            raise NotARequest(f"{name}[{index}] is not an object")
        for converted in _converted(message, f"{name}[{index}]"):
            messages.append(converted)
            origins.append(f"{name}[{index}]")
    return messages, origins


def _plain_parts(content: Any) -> Any:
    """Returns a text, or a list of text parts; a part that is not text becomes its type and a digest of its content."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    return [{"type": "text", "text": _part_text(part)} for part in content]


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal", "content", "thinking"):
            if isinstance(part.get(key), str):
                return str(part[key])
    # For an image or a file: equal ones give equal texts, different ones do not.
    return f"<{part.get('type', 'part') if isinstance(part, dict) else 'part'} {hash_text(part)}>"


def hash_text(value: Any) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def _converted(message: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Yields a message of any API as OpenAI chat messages; a list of Anthropic tool results becomes several."""
    kind = message.get("type")
    if kind == "function_call":
        call = {"name": str(message.get("name")), "arguments": message.get("arguments") or "{}"}
        yield _calls(None, [(message.get("call_id"), call)])
        return
    if kind == "function_call_output":
        output = _plain_parts(message.get("output"))
        yield {"role": "tool", "tool_call_id": str(message.get("call_id")), "content": output}
        return
    role = message.get("role")
    if not isinstance(role, str):
        raise NotARequest(f"{where} has no role")
    role = {"model": "assistant", "function": "tool", "human": "user", "ai": "assistant"}.get(role, role)
    content = message.get("content", message.get("parts"))
    if isinstance(content, list) and any(isinstance(p, dict) and p.get("type") in _BLOCKS for p in content):
        yield from _blocks(role, content)
        return
    more: dict[str, Any] = {
        key: message[key] for key in ("tool_call_id", "reasoning_content") if isinstance(message.get(key), str)
    }
    old = message.get("function_call")
    calls = [{"id": "call", "function": old}] if isinstance(old, dict) else message.get("tool_calls") or []
    if calls:
        more["tool_calls"] = [_call(call, where) for call in calls]
    yield {"role": role, "content": _plain_parts(content), **more}


_BLOCKS = ("tool_use", "tool_result", "tool_call", "tool_call_response", "thinking", "reasoning")


def _blocks(role: str, blocks: list[Any]) -> Iterator[dict[str, Any]]:
    texts: list[Any] = []
    calls: list[tuple[Any, dict[str, Any]]] = []
    reasoning = ""
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("tool_use", "tool_call"):
            given = block.get("input", block.get("arguments"))
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            calls.append((block.get("id"), {"name": str(block.get("name")), "arguments": text}))
        elif kind in ("tool_result", "tool_call_response"):
            result = block.get("content", block.get("response", block.get("result")))
            called = block.get("tool_use_id", block.get("id"))
            yield {"role": "tool", "tool_call_id": str(called), "content": _plain_parts(result)}
        elif kind in ("thinking", "reasoning"):
            reasoning += _part_text(block)
        else:
            texts.append(block)
    if texts or calls or reasoning:
        message = _calls(_plain_parts(texts) if texts else None, calls) | {"role": role}
        yield message | ({"reasoning_content": reasoning} if reasoning else {})


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise NotARequest(f"{where} has a tool call without a function's name")
    return {"id": str(call.get("id")), "type": "function", "function": function}


def _calls(content: Any, calls: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    listed = [{"id": str(called), "type": "function", "function": function} for called, function in calls]
    return {"role": "assistant", "content": content} | ({"tool_calls": listed} if listed else {})
