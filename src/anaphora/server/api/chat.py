"""POST /v1/chat/completions: one JSON document, or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from anaphora.server.api import cache_explanations, response_parts
from anaphora.server.api.prompt_run import PromptRun, finish_runs, prepare_runs, run_prompts
from anaphora.server.api.protocol import ChatRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.api.stream import ChatChunks, EventStream
from anaphora.server.api.stream_usage import UsageOptions
from anaphora.server.api.tool_calls import ToolCall, ToolCallParser
from anaphora.server.http.json_responses import json_response
from anaphora.server.service import Service
from anaphora.text.output_processor import ChoiceDelta
from anaphora.types.outputs import CompletionOutput


async def chat(service: Service, context: RequestContext) -> Response | EventStream:
    """Answers a chat request: a JSON document or an EventStream."""
    body: ChatRequest = context.body
    envelope: dict[str, Any] = {
        "id": context.public_id("chatcmpl"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": context.created,
        "model": service.model_name(body.model),
    }
    runs = await prepare_runs(service, context)
    if body.stream:
        events = _ChatEvents(service, context, runs[0], envelope).stream()
        return EventStream(events, lambda: cache_explanations.header(runs))
    await finish_runs(service, context, runs)
    envelope |= await cache_explanations.body_field(service, context, runs)
    return await service.in_thread(_document, service, body, runs[0], envelope)


def _document(service: Service, body: ChatRequest, run: PromptRun, envelope: dict[str, Any]) -> Response:
    document = envelope | {
        "choices": [_choice(service, body, choice) for choice in run.choices],
        "usage": response_parts.usage([run]),
    }
    if body.prompt_logprobs is not None and run.done is not None:
        tokenizer = service.text.tokenizer
        document["prompt_logprobs"] = response_parts.prompt_logprobs(run.done.prompt_logprobs, tokenizer)
    if body.return_token_ids:
        document["prompt_token_ids"] = run.request.prompt_token_ids
    return json_response(document, headers=cache_explanations.header([run]))


def _parses_tool_calls(service: Service, body: ChatRequest) -> bool:
    return service.config.enable_auto_tool_choice and bool(body.tools) and body.tool_choice != "none"


def _choice(service: Service, body: ChatRequest, choice: CompletionOutput) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    finish = choice.finish_reason
    if _parses_tool_calls(service, body):
        parser = ToolCallParser(only_first=body.parallel_tool_calls is False)
        content = parser.feed(choice.text) + parser.finish()
        if parser.calls:
            message |= {"content": content or None, "tool_calls": [call.to_dict() for call in parser.calls]}
            finish = "tool_calls" if finish == "stop" else finish
    result: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(service, body, choice.logprobs),
        "finish_reason": finish,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        result["token_ids"] = choice.token_ids
    return result


def _logprobs(service: Service, body: ChatRequest, entries: Sequence[Any] | None) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    return response_parts.chat_logprobs(entries or (), service.text.tokenizer, body.top_logprobs or 0)


def _delta(choice: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | more


class _ChatEvents:
    """The events of one streamed chat."""

    def __init__(self, service: Service, context: RequestContext, run: PromptRun, envelope: dict[str, Any]) -> None:
        self._service = service
        self._context = context
        self._run = run
        self._body: ChatRequest = context.body
        self._usage = UsageOptions.of(self._body)
        self._chunks = ChatChunks(envelope)
        self._parsers: dict[int, ToolCallParser] = {}
        self._started: set[int] = set()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Runs the prompt and yields the events."""
        body, chunks = self._body, self._chunks
        text_only = not body.logprobs and not body.return_token_ids and not self._usage.in_every_chunk
        async with aclosing(run_prompts(self._service, self._context, [self._run])) as deltas:
            async for delta in deltas:
                if delta.index not in self._started:
                    yield self._first_chunk(delta.index)
                finish = delta.finish_reason
                if parser := self._parsers.get(delta.index):
                    delta, calls = _parse_tool_calls(parser, delta)
                    for number, call in calls:
                        yield self._full(_delta(delta.index, {"tool_calls": [{"index": number} | call.to_dict()]}))
                    if parser.calls and finish == "stop":
                        finish = "tool_calls"
                if text_only:
                    if delta.text:
                        yield chunks.text(delta.index, delta.text)
                elif delta.text or delta.token_ids:
                    more = {"token_ids": delta.token_ids} if body.return_token_ids else {}
                    logprobs = _logprobs(self._service, body, delta.logprobs)
                    yield self._full(_delta(delta.index, {"content": delta.text}, logprobs=logprobs, **more))
                if finish is not None:
                    yield self._full(_delta(delta.index, {}, finish_reason=finish, stop_reason=delta.stop_reason))
        if last := await self._usage.last_fields(self._service, self._context, [self._run]):
            yield chunks.last(**last)

    def _first_chunk(self, choice: int) -> bytes:
        body = self._body
        self._started.add(choice)
        if _parses_tool_calls(self._service, body):
            self._parsers[choice] = ToolCallParser(only_first=body.parallel_tool_calls is False)
        ids = {"prompt_token_ids": self._run.request.prompt_token_ids} if body.return_token_ids else {}
        return self._full(_delta(choice, {"role": "assistant", "content": ""}), **ids)

    def _full(self, choice: dict[str, Any], **top: Any) -> bytes:
        return self._chunks.full(choice, **top, **self._usage.chunk_fields([self._run]))


def _parse_tool_calls(parser: ToolCallParser, delta: ChoiceDelta) -> tuple[ChoiceDelta, list[tuple[int, ToolCall]]]:
    """Returns the delta with only its plain text, and the tool calls that it completes, numbered."""
    before = len(parser.calls)
    text = parser.feed(delta.text)
    if delta.finish_reason is not None:
        text += parser.finish()
    return replace(delta, text=text), list(enumerate(parser.calls))[before:]
