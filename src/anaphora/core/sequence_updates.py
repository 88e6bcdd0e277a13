"""What the engine reports about a sequence after a step: its new token, why it ended, how its prompt went."""

from __future__ import annotations

from anaphora.core.sequence import Sequence
from anaphora.types.batch import TokenLogprobs
from anaphora.types.outputs import FinishReason, PromptDone, SequenceUpdate


def append_sampled(
    sequence: Sequence, token: int, logprobs: TokenLogprobs | None, now: float, block_size: int
) -> SequenceUpdate:
    """Append a sampled token to its sequence (unless ``max_tokens`` is 0) and return the update to send.

    ``finish_reason`` of the update says whether the sequence has ended with it. The first update of a request's
    choice 0 contains its PromptDone.
    """
    prompt = None if sequence.prompt_done or sequence.choice else _prompt_done(sequence, now)
    sequence.prompt_done = True
    tokens: tuple[int, ...] = (token,) if sequence.max_tokens else ()
    sequence.token_ids += tokens
    sequence.table.append(tokens, block_size)
    reason, stop_token = _check_stop(sequence)
    return SequenceUpdate(
        sequence.request.id,
        sequence.choice,
        tokens,
        now,
        logprobs=(logprobs,) if logprobs and tokens else None,
        prompt=prompt,
        finish_reason=reason,
        stop_reason=stop_token,
    )


def _check_stop(sequence: Sequence) -> tuple[FinishReason | None, int | None]:
    """Return why the sequence ends after its last token, or None, and which of ``stop_token_ids`` ended it."""
    request = sequence.request
    if sequence.num_generated:
        last = sequence.token_ids[-1]
        if last in request.sampling.stop_token_ids:
            return FinishReason.STOP, last
        if last in request.eos_token_ids and not request.sampling.ignore_eos:
            return FinishReason.STOP, None
    return (FinishReason.LENGTH if sequence.num_generated >= sequence.max_tokens else None), None


def _prompt_done(sequence: Sequence, now: float) -> PromptDone:
    report, scheduled = sequence.report, sequence.first_scheduled
    assert report is not None
    assert scheduled is not None
    arrival = sequence.request.arrival
    wanted = sequence.request.sampling.prompt_logprobs is not None
    logprobs = (None, *sequence.prompt_logprobs) if wanted else None
    return PromptDone(report, max(scheduled - arrival, 0.0), sequence.waited_s, now - scheduled, logprobs)


def error_update(sequence: Sequence, error: str, now: float) -> SequenceUpdate:
    """Return the last update of a sequence that cannot be computed."""
    return SequenceUpdate(sequence.request.id, sequence.choice, (), now, finish_reason=FinishReason.ERROR, error=error)
