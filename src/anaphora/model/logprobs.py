"""Log-probabilities that a request asked for, computed on the device and read together with the step's tokens."""

from __future__ import annotations

from torch import Tensor

from anaphora.attention.transfer import HostCopy
from anaphora.types.batch import TokenLogprobs
from anaphora.types.sampling import MAX_LOGPROBS


class PendingLogprobs:
    """Log-probability, rank and the ``counts[i]`` most likely tokens for each row of ``logits`` ``[R, V]``.

    The same number of candidates is always taken, so the order of ties does not depend on other rows.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, counts: list[int]) -> None:
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, token_ids[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        best = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
        self._counts = counts
        self._copy = HostCopy((token_ids, own[:, 0], ranks, best.indices, best.values))

    def read(self) -> list[TokenLogprobs]:
        """Wait for the device; returns one entry per row, in which equally likely tokens come in order of their ids."""
        entries = []
        for count, *row in zip(self._counts, *self._copy.read(), strict=True):
            token, value, rank, ids, values = row
            top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            entries.append(TokenLogprobs(token, value, rank, tuple(top[:count])))
        return entries
