"""The batched sampler. A row's token depends on its own logits and sequence only, never on other rows of the batch.

Order of processing, as in vLLM: allowed tokens and logit_bias, min_tokens, penalties (repetition over prompt and
answer; frequency and presence over the answer), temperature, min_p, top_k, top_p, then sampling. Log-probabilities
are computed from the raw logits, before any of these steps.

Sampling is Gumbel-max: the token with the largest ``logit + noise``. ``gumbel.py`` computes the noise from (seed +
choice, number of generated tokens, token id), so a seeded request gets the same tokens alone, in any batch, in any slot
and after a preemption.

Reductions over the vocabulary use softmax kernels, which work row by row; ``sum`` and ``logsumexp`` split a single long
row over threads and so round differently than in a batch.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.transfer import HostCopy, to_device
from anaphora.errors import StepFailed
from anaphora.model.gumbel import gumbel_noise, row_words
from anaphora.model.logprobs import PendingLogprobs
from anaphora.model.token_filters import column, limit
from anaphora.types.batch import Join, TokenLogprobs
from anaphora.types.sampling import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing by them would overflow."""

_CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Scores sampled at once: on a CPU as many as fit the L2 cache, on a GPU as many as keep it busy."""


@dataclass(slots=True)
class _TokenHistory:
    """Tokens of a sequence, ``[V]`` each: how often each was generated, and whether it occurs at all."""

    counts: Tensor
    seen: Tensor

    def add(self, token: Tensor) -> None:
        """Count ``token`` ``[1]`` int64."""
        self.counts.index_add_(0, token, torch.ones_like(token, dtype=self.counts.dtype))
        self.seen.index_fill_(0, token, True)

    def penalise(self, scores: Tensor, sampling: SamplingParams) -> None:
        """Apply repetition, frequency and presence penalty to one row ``[V]``, in place."""
        if (factor := sampling.repetition_penalty) != 1:
            scores.copy_(torch.where(self.seen, torch.where(scores > 0, scores / factor, scores * factor), scores))
        if sampling.frequency_penalty:
            scores -= sampling.frequency_penalty * self.counts
        if sampling.presence_penalty:
            scores -= sampling.presence_penalty * (self.counts > 0)


@dataclass(slots=True)
class _SlotState:
    """The sampler's state of the sequence in one slot. Tensors exist only where the parameters need them.

    ``bias`` ``[V]`` is logit_bias, with -inf for tokens that are not allowed; ``end_ids`` are the token ids that must
    not be chosen while fewer than min_tokens are generated.
    """

    sampling: SamplingParams
    key: int
    generated: int
    bias: Tensor | None = None
    end_ids: Tensor | None = None
    history: _TokenHistory | None = None

    @property
    def is_random(self) -> bool:
        return self.sampling.temperature >= GREEDY_BELOW

    @property
    def is_greedy(self) -> bool:
        """Whether only the most likely token is asked for; of equally likely ones, the first."""
        return not self.is_random and self.is_unmodified and self.sampling.logprobs is None

    @property
    def is_unmodified(self) -> bool:
        """Whether the logits are used as they are."""
        return self.bias is None and self.history is None and self.banned is None

    @property
    def banned(self) -> Tensor | None:
        return self.end_ids if self.generated < self.sampling.min_tokens else None


class Sampler:
    """Chooses the next token of each slot. ``seed`` starts the generator that gives unseeded sequences their seeds."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._slots: list[_SlotState | None] = [None] * max_num_seqs
        self._fresh_seeds = random.Random(seed)
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def join(self, join: Join) -> None:
        """Give ``join.slot`` to a sequence. After a preemption its generated tokens are in ``join.token_ids``."""
        sampling = join.sampling
        key = self._fresh_seeds.getrandbits(64) if sampling.seed is None else sampling.seed + join.choice
        state = _SlotState(sampling, key, generated=len(join.token_ids) - join.num_prompt)
        if sampling.logit_bias or sampling.allowed_token_ids is not None:
            state.bias = self._bias(sampling)
        if state.generated < sampling.min_tokens:
            state.end_ids = self._end_ids(join)
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            state.history = self._history(join)
        self._slots[join.slot] = state

    def sample(self, logits: Tensor, slots: list[int]) -> SampledTokens:
        """Choose one token for each row and record it, without waiting for the device.

        ``logits`` is ``[R, V]``, row i for ``slots[i]``, and is not changed. Raises StepFailed for a slot without a
        sequence. Where a row's logits hold NaN or +inf, ``read`` of the result raises and the slot must be joined
        again.
        """
        rows = [self._state(slot) for slot in slots]
        if logits.device.type == "cpu" or not all(row.is_greedy for row in rows):
            logits = logits.float()
        best, chosen = self._choose(self._processed(logits, rows), rows)
        for index, row in enumerate(rows):
            row.generated += 1
            if row.history is not None:
                row.history.add(chosen[index : index + 1])
        asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        logprobs = None
        if asked:
            asking = to_device(np.array(asked), logits.device)
            counts = [rows[i].sampling.logprobs or 0 for i in asked]
            logprobs = PendingLogprobs(logits[asking], chosen[asking], counts)
        return SampledTokens(slots, chosen, best.isfinite(), [slots[i] for i in asked], logprobs)

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], k: int) -> list[TokenLogprobs]:
        """Raw log-probabilities of the known next tokens: ``logits`` is ``[R, V]``, one next token per row."""
        token_ids = torch.tensor(next_token_ids, device=logits.device)
        return PendingLogprobs(logits, token_ids, [k] * len(next_token_ids)).read()

    def _state(self, slot: int) -> _SlotState:
        state = self._slots[slot]
        if state is None:
            raise StepFailed(f"slot {slot} is to be sampled, but no sequence has joined it")
        return state

    def _bias(self, sampling: SamplingParams) -> Tensor:
        if sampling.allowed_token_ids is None:
            bias = torch.zeros(self._vocab_size, device=self._device)
        else:
            bias = torch.full((self._vocab_size,), -torch.inf, device=self._device)
            bias[list(sampling.allowed_token_ids)] = 0.0
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=self._device)
            bias[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self._device)
        return bias

    def _end_ids(self, join: Join) -> Tensor | None:
        """Token ids that would end the sequence; None if no others are allowed, since a ban would leave no token."""
        ids = {token for token in (*join.eos_token_ids, *join.sampling.stop_token_ids) if token < self._vocab_size}
        allowed = join.sampling.allowed_token_ids
        if not ids or (allowed is not None and ids.issuperset(allowed)):
            return None
        return torch.tensor(sorted(ids), device=self._device)

    def _history(self, join: Join) -> _TokenHistory:
        tokens = torch.tensor(join.token_ids, dtype=torch.int64, device=self._device)
        seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        seen[tokens] = True
        counts = torch.bincount(tokens[join.num_prompt :], minlength=self._vocab_size)
        return _TokenHistory(counts.float(), seen)

    def _processed(self, logits: Tensor, rows: list[_SlotState]) -> Tensor:
        """Apply bias, min_tokens and penalties; returns ``logits`` itself where no row asks for any."""
        if all(row.is_unmodified for row in rows):
            return logits
        scores = logits.clone()
        for line, row in zip(scores, rows, strict=True):
            if row.bias is not None:
                line += row.bias
            if row.banned is not None:
                line[row.banned] = -torch.inf
            if row.history is not None:
                row.history.penalise(line, row.sampling)
        return scores

    def _choose(self, scores: Tensor, rows: list[_SlotState]) -> tuple[Tensor, Tensor]:
        """``[R]`` each: the best score, and the token: the best one, or a random one where the row asks for that."""
        best, chosen = scores.max(-1)
        random_rows = [i for i, row in enumerate(rows) if row.is_random]
        step = max(1, _CHUNK.get(scores.device.type, _CHUNK["cuda"]) // self._vocab_size)
        for first in range(0, len(random_rows), step):
            chunk = random_rows[first : first + step]
            index = to_device(np.array(chunk), scores.device)
            chosen[index] = self._random(scores[index], [rows[i] for i in chunk])
        return best, chosen

    def _random(self, scores: Tensor, rows: list[_SlotState]) -> Tensor:
        """Temperature, min_p, top_k, top_p, noise. ``scores`` is a copy and is overwritten."""
        scores /= column(scores, [row.sampling.temperature for row in rows])
        params = [row.sampling for row in rows]
        limit(
            scores,
            min_p=[p.min_p if p.min_p > 0 else None for p in params],
            top_k=[p.top_k if 0 < p.top_k < self._vocab_size else None for p in params],
            top_p=[p.top_p if p.top_p < 1 else None for p in params],
        )
        words = np.array([row_words(row.key, row.generated) for row in rows], np.int32)
        scores += gumbel_noise(to_device(words, scores.device), self._token_ids)
        return scores.max(-1).indices  # several times faster than argmax on a CPU


class SampledTokens:
    """The tokens of a step: ``tokens`` ``[R]`` int64 on the device, in the order of ``slots``; ``read`` on the host."""

    def __init__(
        self, slots: list[int], tokens: Tensor, finite: Tensor, asked: list[int], logprobs: PendingLogprobs | None
    ) -> None:
        self.tokens = tokens
        self.slots = slots
        self._asked = asked
        self._logprobs = logprobs
        self._copy = HostCopy((tokens, finite))

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Wait for the device; returns the R tokens, and log-probabilities by slot where they were asked for.

        Raises StepFailed, naming the slots, where the logits were not finite.
        """
        tokens, finite = self._copy.read()
        if not all(finite):
            failed = [slot for slot, good in zip(self.slots, finite, strict=True) if not good]
            raise StepFailed(f"the model's logits are not finite for slots {failed}: no token can be chosen")
        entries = [] if self._logprobs is None else self._logprobs.read()
        return tokens, dict(zip(self._asked, entries, strict=True))
