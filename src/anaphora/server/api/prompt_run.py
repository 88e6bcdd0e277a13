"""Runs prompts through the engine: detokenizes its updates and accounts for each request."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from anaphora.errors import StepFailed
from anaphora.observe.record import RequestRecord, add_block_hashes, salt_digest
from anaphora.server.api import prompt_positions
from anaphora.server.api.engine_requests import engine_requests
from anaphora.server.api.prompts import Prompt
from anaphora.server.api.protocol import ChatRequest, CompletionRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.service import Service
from anaphora.text.output_processor import ChoiceDelta, OutputProcessor
from anaphora.text.tokenizer import Tokenizer
from anaphora.types.outputs import CompletionOutput, FinishReason, PromptDone, SequenceUpdate
from anaphora.types.request import Request


class PromptRun:
    """One prompt on its way through the engine: ``deltas`` runs it, the other attributes hold its state so far.

    Args:
        request: the engine request.
        prompt: its text and token ids.
        tokenizer: the model's.
        first_choice: number of its first choice; choices are numbered through all prompts of a body.
        body: the body that the prompt is from; None if the prompt is only computed.
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
        self._processor = OutputProcessor(request, tokenizer, prompt.text, first_choice)
        self._last_times: dict[int, float] = {}
        self._unix_time = time.time()
        self._ttft: float | None = None

    @property
    def done(self) -> PromptDone | None:
        """Cache report, prompt times and prompt log-probabilities; None before the first token."""
        return self._processor.prompt_done

    @property
    def choices(self) -> list[CompletionOutput]:
        """The choices so far."""
        return self._processor.output().outputs

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were reused; 0 before the first token."""
        return self.done.cache.cached_tokens if self.done else 0

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, of all choices."""
        return self._processor.num_generated

    async def deltas(self, service: Service, fields: dict[str, Any]) -> AsyncGenerator[ChoiceDelta, None]:
        """Runs the request and yields what each update adds to a choice. Leaving early aborts the request.

        However it ends, ``service.request_finished`` is called once.

        Args:
            service: engine, and where the request is counted.
            fields: the fields of RequestRecord that the API request determines: route, model, block_size, body.
        """
        finish = "abort"
        try:
            async with aclosing(service.engine.generate(self.request)) as updates:
                async for update in updates:
                    delta = self._add(update, service)
                    if delta.stopped_by_string:
                        await service.engine.finish_choice(self.request.id, update.choice)
                    if delta.finish_reason is not None and self._processor.finished:
                        finish = self.choices[0].finish_reason or finish
                    yield delta
        except Exception as error:
            finish = "error"
            fields = fields | {"status": getattr(error, "status", 500), "error": str(error)}
            raise
        finally:
            service.request_finished(
                self._record(finish, fields),
                max_tokens=self.request.sampling.max_tokens or 0,
                longest=max(len(choice.token_ids) for choice in self.choices),
                complete=functools.partial(self._complete_record, service),
            )

    def _add(self, update: SequenceUpdate, service: Service) -> ChoiceDelta:
        if update.error is not None or update.finish_reason is FinishReason.ERROR:
            raise StepFailed(update.error or "the engine could not go on with this request")
        first = self.done is None
        delta = self._processor.update(update)
        if first and self.done is not None:
            service.prompt_done(len(self.request.prompt_token_ids), self.cached_tokens)
        if update.token_ids:
            if self._ttft is None:
                self._ttft = update.time - self.request.arrival
            if (last := self._last_times.get(update.choice)) is not None:
                service.token_gap(update.time - last)
            self._last_times[update.choice] = update.time
        return delta

    def _record(self, finish: str, fields: dict[str, Any]) -> RequestRecord:
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
            **fields,
        )
        if self.done is not None:
            cache = self.done.cache
            record.cached_tokens, record.reason, record.detail = cache.cached_tokens, cache.reason, cache.detail
            record.position, record.waited = cache.position, cache.waited
            record.queue_s, record.waited_s = self.done.queue_s, self.done.waited_s
            record.prefill_s = self.done.prefill_s
        return record

    def _complete_record(self, service: Service, record: RequestRecord) -> None:
        """Fills in the fields that take long; runs in the recorder's thread."""
        add_block_hashes(service.info.model.identity, self.request, record)
        if self.body is not None and self.done is not None:
            record.place = prompt_positions.first_miss(service.text, self.body, self.prompt, self.done.cache)


async def prepare_runs(service: Service, context: RequestContext) -> list[PromptRun]:
    """Returns the prompts of a body as runs that have not started. Raises InvalidRequest."""
    runs: list[PromptRun] = []
    for prompt, request in await service.in_thread(engine_requests, service, context):
        first_choice = len(runs) * request.sampling.n
        runs.append(PromptRun(request, prompt, service.text.tokenizer, first_choice, context.body))
    return runs


def run_prompts(
    service: Service, context: RequestContext, runs: Sequence[PromptRun]
) -> AsyncGenerator[ChoiceDelta, None]:
    """Starts the runs and yields their deltas as they come; an error in one ends all."""
    service.request_started()
    config = service.config
    recorded = None
    if config.record and config.record_prompts:
        recorded = {name: value for name, value in context.raw.items() if name != "cache_salt"}  # a secret
    fields: dict[str, Any] = {
        "model": service.names[0],
        "route": context.route,
        "client_id": context.client_id or "",
        "stream": bool(context.body.stream),
        "block_size": service.info.model.block_size,
        "body": recorded,
    }
    streams = [run.deltas(service, fields) for run in runs]
    return streams[0] if len(streams) == 1 else _merge(streams)


async def finish_runs(service: Service, context: RequestContext, runs: Sequence[PromptRun]) -> None:
    """Runs the prompts to their end."""
    async with aclosing(run_prompts(service, context, runs)) as deltas:
        async for _ in deltas:
            pass


async def _merge(streams: Sequence[AsyncGenerator[ChoiceDelta, None]]) -> AsyncGenerator[ChoiceDelta, None]:
    queue: asyncio.Queue[ChoiceDelta | BaseException | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[ChoiceDelta, None]) -> None:
        try:
            async for delta in stream:
                queue.put_nowait(delta)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
