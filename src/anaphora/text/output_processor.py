"""From the engine's updates to the answer: text, log-probabilities and finish reasons of one request."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.text.detokenizer import Detokenizer, Vocabulary
from anaphora.types.batch import TokenLogprobs
from anaphora.types.outputs import CompletionOutput, FinishReason, PromptDone, RequestOutput, SequenceUpdate
from anaphora.types.request import Request


@dataclass(slots=True)  # one a token: freezing it would triple what making it costs
class ChoiceDelta:
    """What one update added to one choice; text is append-only whole characters and may lag behind the tokens.

    ``logprobs`` has one entry a token where the request asked for them. ``finish_reason`` ("stop", "length", "abort"
    or "error") comes once, with the last delta of the choice; ``stop_reason`` is then the stop string or the stop
    token's id that ended it, or the message of an error. ``stopped_by_string`` is true once, when a stop string ended
    the choice: the engine does not know of it yet, so the caller must end the choice there.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stopped_by_string: bool = False


class OutputProcessor:
    """Assembles the answer to one request from its SequenceUpdates, in the order in which they come.

    Used for streaming (the deltas) and for whole answers (``output``). A stop or end token counts among the tokens of
    its choice, as in vLLM, but its text is left out unless ``include_stop_str_in_output``. Tokens past a stop string
    are in neither text, tokens nor log-probabilities; an update for a choice that has already finished (a step was on
    its way) gives an empty delta.
    """

    def __init__(
        self, request: Request, tokenizer: Vocabulary, prompt_text: str | None = None, first_index: int = 0
    ) -> None:
        sampling = request.sampling
        self.request = request
        self.prompt_text = prompt_text
        self.prompt_done: PromptDone | None = None
        """The cache report, prompt times and prompt log-probabilities; there from the first token on."""
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
        """Tokens of all choices so far: the completion tokens of ``usage``."""
        return sum(len(choice.token_ids) for choice in self._choices)

    def update(self, update: SequenceUpdate) -> ChoiceDelta:
        """Take in what one step did for one choice; returns what it added."""
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
        """The answer as far as it has come; ``finished`` says whether it is complete."""
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
