"""POST /v1/completions: one JSON document, or a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from anaphora.server.api import cache_explanations, response_parts
from anaphora.server.api.prompt_run import PromptRun, finish_runs, prepare_runs, run_prompts
from anaphora.server.api.protocol import CompletionRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.api.stream import CompletionChunks, EventStream
from anaphora.server.api.stream_usage import UsageOptions
from anaphora.server.http.json_responses import json_response
from anaphora.server.service import Service
from anaphora.text.output_processor import ChoiceDelta
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.batch import TokenLogprobs
from anaphora.types.outputs import CompletionOutput


async def complete(service: Service, context: RequestContext) -> Response | EventStream:
    """Answers a completion request: a JSON document or an EventStream."""
    body: CompletionRequest = context.body
    envelope = {
        "id": context.public_id("cmpl"),
        "object": "text_completion",
        "created": context.created,
        "model": service.model_name(body.model),
    }
    runs = await prepare_runs(service, context)
    choices = _ChoiceFormat(body, service.text.tokenizer)
    if body.stream:
        events = _CompletionEvents(service, context, runs, choices, envelope).stream()
        return EventStream(events, lambda: cache_explanations.header(runs))
    await finish_runs(service, context, runs)
    envelope |= await cache_explanations.body_field(service, context, runs)
    return await service.in_thread(choices.document, runs, envelope)


class _ChoiceFormat:
    """The JSON of a choice, as the body asks for it."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.body = body
        self._tokenizer = tokenizer

    def document(self, runs: Sequence[PromptRun], envelope: dict[str, Any]) -> Response:
        """Returns the response of a request without streaming."""
        choices = [self._whole(run, choice) for run in runs for choice in run.choices]
        document = envelope | {"choices": choices, "usage": response_parts.usage(runs)}
        return json_response(document, headers=cache_explanations.header(runs))

    def echo_chunk(self, run: PromptRun, choice: int) -> dict[str, Any]:
        """Returns the first chunk of a choice that repeats its prompt."""
        logprobs = self._logprobs(run.request.prompt_token_ids, self._prompt_entries(run))
        return _chunk(choice, self._prompt_text(run), logprobs)

    def detailed_chunk(self, delta: ChoiceDelta, offset: int) -> dict[str, Any]:
        """Returns a chunk with log-probabilities or token ids; ``offset`` is where its text begins in the choice's."""
        chunk = _chunk(delta.index, delta.text, self._logprobs(delta.token_ids, delta.logprobs or (), offset))
        if self.body.return_token_ids:
            chunk["token_ids"] = delta.token_ids
        return chunk

    def _whole(self, run: PromptRun, choice: CompletionOutput) -> dict[str, Any]:
        ids: list[int] = choice.token_ids
        text = choice.text
        token_ids: Sequence[int] = ids
        entries: Sequence[TokenLogprobs | None] = choice.logprobs or ()
        if self.body.echo:
            text = self._prompt_text(run) + text
            token_ids = [*run.request.prompt_token_ids, *ids]
            entries = [*self._prompt_entries(run), *entries]
        result: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(token_ids, entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            result["prompt_logprobs"] = response_parts.prompt_logprobs(self._prompt_entries(run), self._tokenizer)
        if self.body.return_token_ids:
            result |= {"token_ids": ids, "prompt_token_ids": run.request.prompt_token_ids}
        return result

    def _prompt_text(self, run: PromptRun) -> str:
        text = run.prompt.text
        return self._tokenizer.decode(run.prompt.token_ids, False) if text is None else text

    def _prompt_entries(self, run: PromptRun) -> Sequence[TokenLogprobs | None]:
        return (run.done.prompt_logprobs if run.done else None) or ()

    def _logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int = 0
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        return response_parts.completion_logprobs(token_ids, entries, self._tokenizer, self.body.logprobs, offset)


def _chunk(choice: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}


class _CompletionEvents:
    """The events of one streamed completion."""

    def __init__(
        self,
        service: Service,
        context: RequestContext,
        runs: Sequence[PromptRun],
        choices: _ChoiceFormat,
        envelope: dict[str, Any],
    ) -> None:
        self._service = service
        self._context = context
        self._runs = runs
        self._choices = choices
        self._body: CompletionRequest = context.body
        self._usage = UsageOptions.of(self._body)
        self._chunks = CompletionChunks(envelope)
        self._offsets: dict[int, int] = {}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Runs the prompts and yields the events."""
        body, chunks, offsets = self._body, self._chunks, self._offsets
        text_only = body.logprobs is None and not body.return_token_ids and not self._usage.in_every_chunk
        async with aclosing(run_prompts(self._service, self._context, self._runs)) as deltas:
            async for delta in deltas:
                if delta.index not in offsets:
                    for chunk in await self._first_chunks(delta.index):
                        yield chunk
                if text_only:
                    if delta.text:
                        yield chunks.text(delta.index, delta.text)
                elif delta.text or delta.token_ids:
                    detailed = self._choices.detailed_chunk(delta, offsets[delta.index])
                    offsets[delta.index] = _text_end(detailed) or offsets[delta.index]
                    yield self._full(detailed)
                if delta.finish_reason is not None:
                    end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
                    yield self._full(_chunk(delta.index, "", None) | end)
        if last := await self._usage.last_fields(self._service, self._context, self._runs):
            yield chunks.last(**last)

    async def _first_chunks(self, choice: int) -> list[bytes]:
        run = self._runs[choice // (self._body.n or 1)]
        first: list[bytes] = []
        self._offsets[choice] = 0
        if self._body.echo:
            chunk = await self._service.in_thread(self._choices.echo_chunk, run, choice)
            self._offsets[choice] = _text_end(chunk)
            first.append(self._full(chunk))
        if self._body.return_token_ids:
            ids = {"prompt_token_ids": run.request.prompt_token_ids, "token_ids": []}
            first.append(self._full(_chunk(choice, "", None) | ids))
        return first

    def _full(self, choice: dict[str, Any]) -> bytes:
        return self._chunks.full(choice, **self._usage.chunk_fields(self._runs))


def _text_end(chunk: dict[str, Any]) -> int:
    """Returns where the text of this chunk's tokens ends in the choice's text; 0 without log-probabilities."""
    logprobs = chunk["logprobs"]
    if not logprobs or not logprobs["text_offset"]:
        return 0
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])
