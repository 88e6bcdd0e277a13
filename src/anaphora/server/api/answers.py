"""Answers as they come: engine updates become text, tokens and the books of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from anaphora.errors import StepFailed
from anaphora.observe.record import RequestRecord, salt_digest
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.text.output_processor import ChoiceDelta, RequestAssembler
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import CompletionOutput, FinishReason, PromptDone, SequenceUpdate
from anaphora.types.request import Request


class Engine(Protocol):
    """What is asked of the engine here."""

    def generate(self, request: Request) -> AsyncGenerator[SequenceUpdate, None]: ...
    async def finish_choice(self, request_id: str, choice: int) -> None: ...


class Observer(Protocol):
    """Who is told of a request's course."""

    def prompt_done(self, cache_prompt_tokens: int, cached_tokens: int) -> None: ...
    def token_gap(self, seconds: float) -> None: ...
    def finished(self, record: RequestRecord, answer: Answer) -> None: ...


class Answer:
    """One prompt's way through the engine: ``pieces`` runs it, the other attributes tell how far it has come.

    Its choices are numbered from ``first_choice``, so that they count over all prompts of a ``body``, which is None
    where it is not answered itself.
    """

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        tokenizer: Tokenizer,
        first_choice: int = 0,
        body: ChatRequest | CompletionRequest | None = None,
    ) -> None:
        self.body = body
        self.request = request
        self.prompt = prompt
        self._assembler = RequestAssembler(request, tokenizer, prompt.text, first_choice)
        self._last_times: dict[int, float] = {}
        self._unix_time = time.time()
        self._ttft: float | None = None

    @property
    def done(self) -> PromptDone | None:
        """The cache report, prompt times and prompt log-probabilities; there from the first token on."""
        return self._assembler.prompt_done

    @property
    def choices(self) -> list[CompletionOutput]:
        return self._assembler.output().outputs

    @property
    def cached_tokens(self) -> int:
        return self.done.cache.cached_tokens if self.done else 0

    @property
    def completion_tokens(self) -> int:
        return self._assembler.num_generated

    async def pieces(
        self, engine: Engine, observer: Observer, about: dict[str, Any]
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Run the request. Leaving early aborts it; in every case ``observer`` hears how it ended, once.

        ``about`` holds what only the caller knows of RequestRecord: route, model, block_size, body.
        """
        finish = "abort"
        try:
            async with aclosing(engine.generate(self.request)) as updates:
                async for update in updates:
                    piece = self._take(update, observer)
                    if piece.stopped_by_string:
                        await engine.finish_choice(self.request.id, update.choice)
                    if piece.finish_reason is not None and self._assembler.finished:
                        finish = self.choices[0].finish_reason or finish
                    yield piece
        except Exception as error:
            finish = "error"
            about = about | {"status": getattr(error, "status", 500), "error": str(error)}
            raise
        finally:
            observer.finished(self._record(finish, about), self)

    def _take(self, update: SequenceUpdate, observer: Observer) -> ChoiceDelta:
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            raise StepFailed(update.error or "the engine could not go on with this request")
        first = self.done is None
        piece = self._assembler.update(update)
        if first and self.done is not None:
            observer.prompt_done(len(self.request.prompt_token_ids), self.cached_tokens)
        if update.token_ids:
            if self._ttft is None:
                self._ttft = update.time - self.request.arrival
            if (last := self._last_times.get(update.choice)) is not None:
                observer.token_gap(update.time - last)
            self._last_times[update.choice] = update.time
        return piece

    def _record(self, finish: str, about: dict[str, Any]) -> RequestRecord:
        record = RequestRecord(
            time=self._unix_time,
            id=self.request.id,
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=self.completion_tokens,
            n=self.request.sampling.n,
            ttft_s=self._ttft,
            total_s=time.monotonic() - self.request.arrival,
            finish=finish,
            salt=salt_digest(self.request.cache_salt),
            **about,
        )
        if self.done is not None:
            cache = self.done.cache
            record.cached_tokens, record.reason, record.detail = cache.cached_tokens, cache.reason, cache.detail
            record.position, record.waited = cache.position, cache.waited
            record.queue_s, record.waited_s = self.done.queue_s, self.done.waited_s
            record.prefill_s = self.done.prefill_s
        return record


async def merge(streams: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    """The pieces of several answers in the order in which they come; an error of one ends all."""
    queue: asyncio.Queue[ChoiceDelta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async for piece in stream:
                queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
