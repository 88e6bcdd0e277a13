"""Turns the engine's updates of one request into its output: text, log-probabilities and finish reasons."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.text.detokenizer import Detokenizer, Vocabulary
from anaphora.types.batch import TokenLogprobs
from anaphora.types.outputs import CompletionOutput, FinishReason, PromptDone, RequestOutput, SequenceUpdate
from anaphora.types.request import Request


@dataclass(slots=True)  # created once per token; a frozen dataclass takes three times as long to create
class ChoiceDelta:
    """What one update adds to one choice.

    ``text`` consists of whole characters and may lag behind the tokens. ``logprobs`` has one entry per token if the
    request asked for them. ``finish_reason`` ("stop", "length", "abort" or "error") is set in the last delta of the
    choice only; ``stop_reason`` is then the stop string or stop token id that ended it, or an error message.
    ``stopped_by_string`` is set if a stop string ended the choice: the engine does not check stop strings, so the
    caller must abort the choice there.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stopped_by_string: bool = False


class OutputProcessor:
    """Builds the output of one request from its SequenceUpdates, which must come in order.

    ``update`` returns deltas for streaming, ``output`` the whole answer so far. As in vLLM, a stop or end token counts
    as a token of its choice, but its text is left out unless ``include_stop_str_in_output`` is set. Tokens after a stop
    string are dropped from text, tokens and log-probabilities. An update for a finished choice (its step was already
    running) gives an empty delta.
    """

    def __init__(
        self, request: Request, tokenizer: Vocabulary, prompt_text: str | None = None, first_index: int = 0
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.prompt_text = prompt_text
        self.prompt_done: PromptDone | None = None
        """The cache report, prompt times and prompt log-probabilities; None before the first token."""
        self._detokenizers = [
            Detokenizer(tokenizer, sampling, prompt_token_ids=request.prompt_token_ids) for _ in range(sampling.n)
        ]
        wants_logprobs = sampling.logprobs is not None
        self._choices = [
            CompletionOutput(
                index=first_index + index,
                logprobs=[] if wants_logprobs else None,
                cumulative_logprob=0.0 if wants_logprobs else None,
            )
            for index in range(sampling.n)
        ]

    @property
    def finished(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def num_generated(self) -> int:
        """Returns the number of generated tokens of all choices: ``completion_tokens`` of ``usage``."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def update(self, update: SequenceUpdate) -> ChoiceDelta:
        """Adds the result of one step to one choice and returns the delta."""
        if update.prompt is not None:
            self.prompt_done = update.prompt
        choice = self._choices[update.choice]
        if choice.finish_reason is not None:
            return ChoiceDelta(index=choice.index)
        delta = self._delta(update, choice.index)
        choice.token_ids.extend(delta.token_ids)
        if choice.logprobs is not None and delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(e.logprob for e in delta.logprobs)
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        return delta

    def _delta(self, update: SequenceUpdate, index: int) -> ChoiceDelta:
        tokens = update.token_ids
        ends_by_token = update.finish_reason is FinishReason.STOP and bool(tokens)
        silent_end = ends_by_token and not self.request.sampling.include_stop_str_in_output
        shown = tokens[:-1] if silent_end else tokens
        piece = self._detokenizers[update.choice].add(shown, finished=update.finish_reason is not None)
        finish_reason = update.finish_reason.value if update.finish_reason is not None else None
        stop_reason: int | str | None = update.error if update.error is not None else update.stop_reason
        kept = len(tokens)
        if piece.stop is not None:
            kept, finish_reason, stop_reason = piece.tokens, FinishReason.STOP.value, piece.stop
        return ChoiceDelta(
            index=index,
            text=piece.text,
            token_ids=tokens[:kept],
            logprobs=None if update.logprobs is None else update.logprobs[:kept],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stopped_by_string=piece.stop is not None and update.finish_reason is None,
        )

    def output(self) -> RequestOutput:
        """Returns the output so far; its ``finished`` says whether it is complete."""
        for choice, detokenizer in zip(self._choices, self._detokenizers, strict=True):
            choice.text = detokenizer.text
        done = self.prompt_done
        prompt_logprobs = done.prompt_logprobs if done is not None else None
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.prompt_text,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=self._choices,
            finished=self.finished,
            num_cached_tokens=done.cache.cached_tokens if done is not None else 0,
            prompt_logprobs=list(prompt_logprobs) if prompt_logprobs is not None else None,
            cache=done.cache if done is not None else None,
        )
