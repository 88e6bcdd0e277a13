"""POST /v1/chat/completions: an answer in one piece, or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from anaphora.server.api import responses
from anaphora.server.api.answers import Answer
from anaphora.server.api.protocol import ChatRequest
from anaphora.server.api.stream import ChatChunks, EventStream
from anaphora.server.api.tool_calls import ToolCall, ToolCallReader
from anaphora.server.cache_api import explanations
from anaphora.server.service import Call, Service, public_id
from anaphora.text.output_processor import ChoiceDelta
from anaphora.types.outputs import CompletionOutput


async def chat(service: Service, call: Call) -> Response | EventStream:
    """The response to a call: a JSON document or an EventStream."""
    body: ChatRequest = call.request
    envelope: dict[str, Any] = {
        "id": public_id(call, "chatcmpl"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": call.created,
        "model": service.model_name(body.model),
    }
    answers = await service.answers(call)
    if body.stream:
        events = _events(service, call, answers[0], envelope)
        return EventStream(events, lambda: explanations.header(answers))
    async with aclosing(service.run(call, answers)) as pieces:
        async for _ in pieces:
            pass
    envelope |= await explanations.of_answers(service, call, answers)
    return await service.in_thread(_document, service, body, answers[0], envelope)


def _document(service: Service, body: ChatRequest, answer: Answer, envelope: dict[str, Any]) -> Response:
    document = envelope | {
        "choices": [_whole(service, body, choice) for choice in answer.choices],
        "usage": responses.usage([answer]),
    }
    if body.prompt_logprobs is not None and answer.done is not None:
        tokenizer = service.text.tokenizer
        document["prompt_logprobs"] = responses.prompt_logprobs(answer.done.prompt_logprobs, tokenizer)
    if body.return_token_ids:
        document["prompt_token_ids"] = answer.request.prompt_token_ids
    return responses.json_response(document, headers=explanations.header([answer]))


def _reads_tools(service: Service, body: ChatRequest) -> bool:
    return service.config.enable_auto_tool_choice and bool(body.tools) and body.tool_choice != "none"


def _whole(service: Service, body: ChatRequest, choice: CompletionOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    finish = choice.finish_reason
    if _reads_tools(service, body):
        reader = ToolCallReader(only_first=body.parallel_tool_calls is False)
        content = reader.feed(choice.text) + reader.finish()
        if reader.calls:
            message |= {"content": content or None, "tool_calls": [call.to_dict() for call in reader.calls]}
            finish = "tool_calls" if finish == "stop" else finish
    formed: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(service, body, choice.logprobs),
        "finish_reason": finish,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        formed["token_ids"] = choice.token_ids
    return formed


def _logprobs(service: Service, body: ChatRequest, entries: Sequence[Any] | None) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return responses.chat_logprobs(entries or (), service.text.tokenizer, body.top_logprobs or 0)


def _delta(choice: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | more


async def _events(
    service: Service, call: Call, answer: Answer, envelope: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    body: ChatRequest = call.request
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    continuous = with_usage and options is not None and bool(options.continuous_usage_stats)
    plain = not body.logprobs and not body.return_token_ids and not continuous
    chunks = ChatChunks(envelope)
    readers: dict[int, ToolCallReader] = {}
    started: set[int] = set()

    def full(choice: dict[str, Any], **top: Any) -> bytes:
        return chunks.full(choice, **top, **({"usage": responses.usage([answer])} if continuous else {}))

    async with aclosing(service.run(call, [answer])) as pieces:
        async for piece in pieces:
            if piece.index not in started:
                started.add(piece.index)
                ids = {"prompt_token_ids": answer.request.prompt_token_ids} if body.return_token_ids else {}
                yield full(_delta(piece.index, {"role": "assistant", "content": ""}), **ids)
                if _reads_tools(service, body):
                    readers[piece.index] = ToolCallReader(only_first=body.parallel_tool_calls is False)
            finish = piece.finish_reason
            if reader := readers.get(piece.index):
                piece, calls = _read(reader, piece)
                for number, tool_call in calls:
                    yield full(_delta(piece.index, {"tool_calls": [{"index": number} | tool_call.to_dict()]}))
                if reader.calls and finish == "stop":
                    finish = "tool_calls"
            if plain:
                if piece.text:
                    yield chunks.text(piece.index, piece.text)
            elif piece.text or piece.token_ids:
                more = {"token_ids": piece.token_ids} if body.return_token_ids else {}
                logprobs = _logprobs(service, body, piece.logprobs)
                yield full(_delta(piece.index, {"content": piece.text}, logprobs=logprobs, **more))
            if finish is not None:
                yield full(_delta(piece.index, {}, finish_reason=finish, stop_reason=piece.stop_reason))
    last = await explanations.of_answers(service, call, [answer])
    if with_usage:
        last["usage"] = responses.usage([answer])
    if last:
        yield chunks.last(**last)


def _read(reader: ToolCallReader, piece: ChoiceDelta) -> tuple[ChoiceDelta, list[tuple[int, ToolCall]]]:
    """The piece with its plain text alone, and the tool calls that it completes, numbered."""
    before = len(reader.calls)
    text = reader.feed(piece.text)
    if piece.finish_reason is not None:
        text += reader.finish()
    return replace(piece, text=text), list(enumerate(reader.calls))[before:]
