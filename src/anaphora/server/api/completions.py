"""POST /v1/completions: an answer in one piece, or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from anaphora.server.api import responses
from anaphora.server.api.answers import Answer
from anaphora.server.api.protocol import CompletionRequest
from anaphora.server.api.stream import CompletionChunks, EventStream
from anaphora.server.cache_api import explanations
from anaphora.server.service import Call, Service, public_id
from anaphora.text.output_processor import ChoiceDelta
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.batch import TokenLogprobs
from anaphora.types.outputs import CompletionOutput


async def complete(service: Service, call: Call) -> Response | EventStream:
    """The response to a call: a JSON document or an EventStream."""
    body: CompletionRequest = call.request
    envelope = {
        "id": public_id(call, "cmpl"),
        "object": "text_completion",
        "created": call.created,
        "model": service.model_name(body.model),
    }
    answers = await service.answers(call)
    form = Form(body, service.text.tokenizer)
    if body.stream:
        events = _events(service, call, answers, form, envelope)
        return EventStream(events, lambda: explanations.header(answers))
    async with aclosing(service.run(call, answers)) as pieces:
        async for _ in pieces:
            pass
    envelope |= await explanations.of_answers(service, call, answers)
    return await service.in_thread(form.document, answers, envelope)


class Form:
    """How the choices of one call look."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.body = body
        self._tokenizer = tokenizer

    def prompt_text(self, answer: Answer) -> str:
        text = answer.prompt.text
        return self._tokenizer.decode(answer.prompt.token_ids, False) if text is None else text

    def document(self, answers: Sequence[Answer], envelope: dict[str, Any]) -> Response:
        choices = [self.whole(answer, choice) for answer in answers for choice in answer.choices]
        document = envelope | {"choices": choices, "usage": responses.usage(answers)}
        return responses.json_response(document, headers=explanations.header(answers))

    def whole(self, answer: Answer, choice: CompletionOutput) -> dict[str, Any]:
        ids: list[int] = choice.token_ids
        text = choice.text
        token_ids: Sequence[int] = ids
        entries: Sequence[TokenLogprobs | None] = choice.logprobs or ()
        if self.body.echo:
            text = self.prompt_text(answer) + text
            token_ids = [*answer.request.prompt_token_ids, *ids]
            entries = [*self._prompt_entries(answer), *entries]
        formed: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": self.logprobs(token_ids, entries),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            formed["prompt_logprobs"] = responses.prompt_logprobs(self._prompt_entries(answer), self._tokenizer)
        if self.body.return_token_ids:
            formed |= {"token_ids": ids, "prompt_token_ids": answer.request.prompt_token_ids}
        return formed

    def logprobs(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int = 0
    ) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        return responses.completion_logprobs(token_ids, entries, self._tokenizer, self.body.logprobs, offset)

    def echoed(self, answer: Answer, choice: int) -> dict[str, Any]:
        """The first chunk of a choice that repeats its prompt."""
        entries = self._prompt_entries(answer)
        logprobs = self.logprobs(answer.request.prompt_token_ids, entries)
        return _chunk(choice, self.prompt_text(answer), logprobs)

    def _prompt_entries(self, answer: Answer) -> Sequence[TokenLogprobs | None]:
        return (answer.done.prompt_logprobs if answer.done else None) or ()


def _chunk(choice: int, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}


async def _events(
    service: Service, call: Call, answers: Sequence[Answer], form: Form, envelope: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    body: CompletionRequest = call.request
    options = body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    continuous = with_usage and options is not None and bool(options.continuous_usage_stats)
    plain = body.logprobs is None and not body.return_token_ids and not continuous
    chunks = CompletionChunks(envelope)
    offsets: dict[int, int] = {}
    n = body.n or 1

    def full(choice: dict[str, Any]) -> bytes:
        return chunks.full(choice, **({"usage": responses.usage(answers)} if continuous else {}))

    async with aclosing(service.run(call, answers)) as pieces:
        async for piece in pieces:
            answer = answers[piece.index // n]
            if piece.index not in offsets:
                offsets[piece.index] = 0
                if body.echo:
                    chunk = await service.in_thread(form.echoed, answer, piece.index)
                    offsets[piece.index] = _end(chunk)
                    yield full(chunk)
                if body.return_token_ids:
                    ids = {"prompt_token_ids": answer.request.prompt_token_ids, "token_ids": []}
                    yield full(_chunk(piece.index, "", None) | ids)
            if plain:
                if piece.text:
                    yield chunks.text(piece.index, piece.text)
            elif piece.text or piece.token_ids:
                chunk = _rich(form, piece, offsets[piece.index])
                offsets[piece.index] = _end(chunk) or offsets[piece.index]
                yield full(chunk)
            if piece.finish_reason is not None:
                end = {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
                yield full(_chunk(piece.index, "", None) | end)
    last = await explanations.of_answers(service, call, answers)
    if with_usage:
        last["usage"] = responses.usage(answers)
    if last:
        yield chunks.last(**last)


def _rich(form: Form, piece: ChoiceDelta, offset: int) -> dict[str, Any]:
    chunk = _chunk(piece.index, piece.text, form.logprobs(piece.token_ids, piece.logprobs or (), offset))
    if form.body.return_token_ids:
        chunk["token_ids"] = piece.token_ids
    return chunk


def _end(chunk: dict[str, Any]) -> int:
    """Where the text of the tokens in this chunk ends."""
    logprobs = chunk["logprobs"]
    if not logprobs or not logprobs["text_offset"]:
        return 0
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])
