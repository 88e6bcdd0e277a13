"""Reads request bodies from OpenTelemetry gen_ai spans: trace files, OTLP JSON, and one span a line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anaphora.tools.shared.request_log.valid_text import loads


def requests_in(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Returns objects with ``body``, ``usage``, time and session, one a chat span; None if the value is not a trace."""
    spans = list(_spans(value))
    if not spans:
        return None
    found = [(span, _attributes(span)) for span in spans]
    ready = [request for span, attributes in found if (request := _request(span, attributes)) is not None]
    return sorted(ready, key=lambda request: str(request.get("start_time") or ""))


def _spans(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if isinstance(value.get("resourceSpans"), list):
        for resource in _objects(value["resourceSpans"]):
            for scope in _objects(resource.get("scopeSpans")):
                yield from _objects(scope.get("spans"))
    elif isinstance(value.get("spans"), list):
        yield from _objects(value["spans"])
    elif "attributes" in value and any(str(key).startswith("gen_ai.") for key in _attributes(value)):
        yield value


def _objects(value: Any) -> list[dict[str, Any]]:
    """Returns the objects in a list; an empty list for any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _attributes(span: dict[str, Any]) -> dict[str, Any]:
    raw = span.get("attributes") or {}
    if isinstance(raw, list):
        raw = {item["key"]: _any_value(item.get("value")) for item in raw if isinstance(item, dict) and "key" in item}
    if not isinstance(raw, dict):
        return {}
    for event in _objects(span.get("events")):
        if isinstance(event.get("attributes"), (dict, list)):
            raw = {**_attributes({"attributes": event["attributes"]}), **raw}
    return raw


def _any_value(value: Any) -> Any:
    """Unwraps OTLP's AnyValue, such as ``{"stringValue": ...}``."""
    if not isinstance(value, dict):
        return value
    if "arrayValue" in value:
        return [_any_value(item) for item in value["arrayValue"].get("values", ())]
    if "intValue" in value:
        return int(value["intValue"])
    return next(iter(value.values()), None)


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return loads(value)
        except ValueError:
            return value
    return value


def _request(span: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any] | None:
    messages = _parsed(attributes.get("gen_ai.input.messages", attributes.get("gen_ai.prompt")))
    if messages is None:
        messages = _numbered(attributes)
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list) or not messages:
        return None
    body: dict[str, Any] = {"messages": [_message(message) for message in messages]}
    if system := _parsed(attributes.get("gen_ai.system_instructions")):
        body["system"] = _message({"content": system})["content"]
    if isinstance(tools := _parsed(attributes.get("gen_ai.tool.definitions")), list):
        body["tools"] = tools
    body["model"] = attributes.get("gen_ai.request.model", "")
    started = span.get("start_time", span.get("startTimeUnixNano"))
    return {
        "body": body,
        "start_time": int(started) / 1e9 if isinstance(started, str) and started.isdigit() else started,
        "session": next((str(v) for k, v in attributes.items() if k.endswith(("session.id", "conversation.id"))), ""),
        "usage": {
            name: value
            for name in ("input_tokens", "output_tokens", "cache_read.input_tokens", "cached_tokens")
            if isinstance(value := attributes.get(f"gen_ai.usage.{name}"), (int, float))
        },
    }


def _numbered(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads messages from the older attributes ``gen_ai.prompt.0.role``, ``gen_ai.prompt.0.content``."""
    messages: list[dict[str, Any]] = []
    while (role := attributes.get(f"gen_ai.prompt.{len(messages)}.role")) is not None:
        messages.append({"role": role, "content": attributes.get(f"gen_ai.prompt.{len(messages)}.content")})
    return messages


def _message(message: Any) -> dict[str, Any]:
    """Converts a message to OpenAI's form, in which parts have ``text`` instead of ``content``."""
    if not isinstance(message, dict):
        return {"role": "user", "content": str(message)}
    parts = message.get("parts", message.get("content"))
    if isinstance(parts, list):
        parts = [
            {"type": "text", "text": part.get("content", part.get("text", ""))}
            if isinstance(part, dict) and part.get("type") == "text"
            else part
            for part in parts
        ]
    return {key: value for key, value in message.items() if key != "parts"} | {"content": parts}
