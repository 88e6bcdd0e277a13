"""Answers as they come: engine updates become text, tokens and the books of each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from anaphora.errors import StepFailed
from anaphora.observe.record import RequestRecord, salt_digest
from anaphora.server.prompts import Prompt
from anaphora.text.detokenize import Detokenizer
from anaphora.text.tokenizer import Tokenizer
from anaphora.types import FinishReason, PromptDone, Request, SequenceUpdate, TokenLogprobs


class Engine(Protocol):
    """What is asked of the engine here."""

    def generate(self, request: Request) -> AsyncGenerator[SequenceUpdate, None]: ...
    async def finish_choice(self, request_id: str, choice: int) -> None: ...


class Observer(Protocol):
    """Who is told of a request's course."""

    def prompt_done(self, cache_prompt_tokens: int, cached_tokens: int) -> None: ...
    def token_gap(self, seconds: float) -> None: ...
    def finished(self, record: RequestRecord, request: Request, longest: int) -> None: ...


@dataclass(slots=True)
class Piece:
    """What one update adds to one choice. ``choice`` counts over all prompts of a body."""

    choice: int
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Choice:
    """One answer to one prompt, as far as it has come."""

    index: int
    detokenizer: Detokenizer
    shows_end: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    last_time: float | None = None

    @property
    def text(self) -> str:
        return self.detokenizer.text

    def take(self, update: SequenceUpdate) -> Piece:
        """Add an update's tokens, up to where a stop string ends the choice.

        A token that ends it (EOS, or one of stop_token_ids) counts but is not shown, unless ``shows_end``.
        """
        hide = update.finish_reason is FinishReason.STOP and not self.shows_end
        shown = update.token_ids[:-1] if hide else update.token_ids
        delta = self.detokenizer.add(shown, update.finish_reason is not None)
        count = len(update.token_ids) if delta.stop is None else delta.tokens
        tokens = update.token_ids[:count]
        logprobs = None if update.logprobs is None else update.logprobs[:count]
        self.token_ids += tokens
        if logprobs:
            self.logprobs += logprobs
        if delta.stop is not None:
            self.finish_reason, self.stop_reason = "stop", delta.stop
        elif update.finish_reason is not None:
            self.finish_reason, self.stop_reason = update.finish_reason.value, update.stop_reason
        return Piece(self.index, delta.text, tokens, logprobs, self.finish_reason, self.stop_reason)


class Answer:
    """One prompt's way through the engine: ``pieces`` runs it, the other attributes tell how far it has come.

    ``scores_only``: the prompt's log-probabilities are all that is wanted; what the engine generates is left out.
    """

    def __init__(
        self, request: Request, prompt: Prompt, tokenizer: Tokenizer, first_choice: int = 0, scores_only: bool = False
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.done: PromptDone | None = None
        sampling = request.sampling
        self.choices = [
            Choice(
                first_choice + n,
                Detokenizer(tokenizer, sampling, request.prompt_token_ids),
                sampling.include_stop_str_in_output,
            )
            for n in range(sampling.n)
        ]
        self._unix_time = time.time()
        self._ttft: float | None = None
        self._scores_only = scores_only

    @property
    def cached_tokens(self) -> int:
        return self.done.cache.cached_tokens if self.done else 0

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    async def pieces(self, engine: Engine, observer: Observer, about: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """Run the request. Leaving early aborts it; in every case ``observer`` hears how it ended, once.

        ``about`` holds what only the caller knows of RequestRecord: route, model, block_size, body.
        """
        finish = "abort"
        try:
            async with aclosing(engine.generate(self.request)) as updates:
                async for update in updates:
                    piece = self._take(update, observer)
                    if piece.stop_reason is not None and update.finish_reason is None:
                        await engine.finish_choice(self.request.id, update.choice)
                    if all(choice.finish_reason for choice in self.choices):
                        finish = self.choices[0].finish_reason or finish
                    yield piece
        except Exception:
            finish = "error"
            raise
        finally:
            longest = max(len(choice.token_ids) for choice in self.choices)
            observer.finished(self._record(finish, about), self.request, longest)

    def _take(self, update: SequenceUpdate, observer: Observer) -> Piece:
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            raise StepFailed(update.error or "the engine could not go on with this request")
        if update.prompt is not None and self.done is None:
            self.done = update.prompt
            observer.prompt_done(len(self.request.prompt_token_ids), self.cached_tokens)
        if self._ttft is None and update.token_ids:
            self._ttft = update.time - self.request.arrival
        choice = self.choices[update.choice]
        if choice.last_time is not None and update.token_ids:
            observer.token_gap(update.time - choice.last_time)
        choice.last_time = update.time
        if self._scores_only:
            choice.finish_reason = "length"
            return Piece(choice.index, "", finish_reason="length")
        return choice.take(update)

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


async def merge(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    """The pieces of several answers in the order in which they come; an error of one ends all."""
    queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Piece, None]) -> None:
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
