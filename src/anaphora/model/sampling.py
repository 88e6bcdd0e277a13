"""The batched sampler. What a row gets depends on its own logits and sequence alone, never on the rows beside it.

Order of processing, as in vLLM: allowed tokens and logit_bias, min_tokens, penalties (repetition over prompt and
answer; frequency and presence over the answer), temperature, min_p, top_k, top_p, then the draw. Log-probabilities
are those of the raw logits, before any of it.

The draw is Gumbel-max: the token with the largest ``logit + noise``. The noise of a token is computed, not taken from
a stream: SplitMix64 over (seed + choice, position) gives each row an odd multiplier and an offset, 32 bits each;
``token id * multiplier + offset``, mixed by the two-round 32-bit finaliser "lowbias32" (constants 0x21f0aaad and
0x735a2d97), gives the token's uniform number, and ``-log(-log(1 - u))`` its noise. Position counts the generated
tokens, so a seeded request draws the same tokens alone, in any batch, on any slot and after a preemption.

Reductions over the vocabulary go through softmax kernels, which work row by row; ``sum`` and ``logsumexp`` split a
lone long row over threads and so round differently than in a batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anaphora.attention.transfer import to_device
from anaphora.errors import StepFailed
from anaphora.types.batch import Join, TokenLogprobs
from anaphora.types.sampling import MAX_LOGPROBS, SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy, as in vLLM: dividing by them would overflow."""

_NUCLEUS_GUESSES = (64, 1024)
"""How many of the most likely tokens are looked at for top_p before the whole row is sorted."""

_CHUNK = {"cpu": 2**16, "cuda": 2**22}
"""Scores that are drawn from at once: on a CPU what its second-level cache holds, on a GPU what keeps it busy."""

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class _History:
    """Which tokens a sequence holds, ``[V]`` each: how often each was generated, and whether it occurs at all."""

    counts: Tensor
    seen: Tensor

    def add(self, token: Tensor) -> None:
        """``token`` ``[1]`` int64."""
        self.counts.index_add_(0, token, torch.ones_like(token, dtype=self.counts.dtype))
        self.seen.index_fill_(0, token, True)

    def penalise(self, scores: Tensor, sampling: SamplingParams) -> None:
        """Repetition, frequency and presence penalty on one row ``[V]``, in place."""
        if (factor := sampling.repetition_penalty) != 1:
            scores.copy_(torch.where(self.seen, torch.where(scores > 0, scores / factor, scores * factor), scores))
        if sampling.frequency_penalty:
            scores -= sampling.frequency_penalty * self.counts
        if sampling.presence_penalty:
            scores -= sampling.presence_penalty * (self.counts > 0)


@dataclass(slots=True)
class _Row:
    """What the sampler knows of the sequence in one slot. Tensors exist only where the parameters need them.

    ``shift`` ``[V]`` is logit_bias, with -inf for tokens that are not allowed; ``enders`` are the ids that may not be
    chosen while fewer than min_tokens are generated.
    """

    sampling: SamplingParams
    key: int
    generated: int
    shift: Tensor | None = None
    enders: Tensor | None = None
    history: _History | None = None

    @property
    def draws(self) -> bool:
        return self.sampling.temperature >= GREEDY_BELOW

    @property
    def is_greedy(self) -> bool:
        """All that is asked for is the most likely token; of equally likely ones, the first."""
        return not self.draws and self.is_plain and self.sampling.logprobs is None

    @property
    def is_plain(self) -> bool:
        return self.shift is None and self.history is None and self.banned is None

    @property
    def banned(self) -> Tensor | None:
        return self.enders if self.generated < self.sampling.min_tokens else None


class Sampler:
    """Chooses the next token of each slot. ``seed`` starts the generator that gives unseeded sequences their seeds."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: list[_Row | None] = [None] * max_num_seqs
        self._fresh_seeds = random.Random(seed)
        self._token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)

    def join(self, join: Join) -> None:
        """A sequence takes ``join.slot``. After a preemption its generated tokens are in ``join.token_ids``."""
        sampling = join.sampling
        key = self._fresh_seeds.getrandbits(64) if sampling.seed is None else sampling.seed + join.choice
        row = _Row(sampling, key, generated=len(join.token_ids) - join.num_prompt)
        if sampling.logit_bias or sampling.allowed_token_ids is not None:
            row.shift = self._shift(sampling)
        if row.generated < sampling.min_tokens:
            row.enders = self._enders(join)
        if sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty:
            row.history = self._history(join)
        self._rows[join.slot] = row

    def draw(self, logits: Tensor, slots: list[int]) -> Drawn:
        """Choose one token for each row and record it, without waiting for the device.

        ``logits`` is ``[R, V]``, row i for ``slots[i]``, and is left as it is. Where the logits of a row hold
        NaN or +inf and a token is to be chosen, ``read`` of what is returned raises; the slot must be joined again.
        """
        rows = [self._row(slot) for slot in slots]
        if logits.device.type == "cpu" or not all(row.is_greedy for row in rows):
            logits = logits.float()
        best, chosen = self._choose(self._processed(logits, rows), rows)
        for index, row in enumerate(rows):
            row.generated += 1
            if row.history is not None:
                row.history.add(chosen[index : index + 1])
        asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        report = None
        if asked:
            index = to_device(np.array(asked), logits.device)
            counts = [rows[i].sampling.logprobs or 0 for i in asked]
            report = Report(logits[index], chosen[index], counts)
        return Drawn(slots, chosen, best.isfinite(), [slots[i] for i in asked], report)

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], k: int) -> list[TokenLogprobs]:
        """Raw log-probabilities of the known next tokens: ``logits`` is ``[R, V]``, one next token a row."""
        return Report(logits, torch.tensor(next_token_ids, device=logits.device), [k] * len(next_token_ids)).read()

    def _row(self, slot: int) -> _Row:
        row = self._rows[slot]
        if row is None:
            raise StepFailed(f"slot {slot} is to be sampled, but no sequence has joined it")
        return row

    def _shift(self, sampling: SamplingParams) -> Tensor:
        if sampling.allowed_token_ids is None:
            shift = torch.zeros(self._vocab_size, device=self._device)
        else:
            shift = torch.full((self._vocab_size,), -torch.inf, device=self._device)
            shift[list(sampling.allowed_token_ids)] = 0.0
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), device=self._device)
            shift[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=self._device)
        return shift

    def _enders(self, join: Join) -> Tensor | None:
        """Ids that would end the sequence; None where nothing else is allowed, for then a ban leaves no token."""
        ids = {token for token in (*join.eos_token_ids, *join.sampling.stop_token_ids) if token < self._vocab_size}
        allowed = join.sampling.allowed_token_ids
        if not ids or (allowed is not None and ids.issuperset(allowed)):
            return None
        return torch.tensor(sorted(ids), device=self._device)

    def _history(self, join: Join) -> _History:
        tokens = torch.tensor(join.token_ids, dtype=torch.int64, device=self._device)
        seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        seen[tokens] = True
        counts = torch.bincount(tokens[join.num_prompt :], minlength=self._vocab_size)
        return _History(counts.float(), seen)

    def _processed(self, logits: Tensor, rows: list[_Row]) -> Tensor:
        """Masks, bias, min_tokens and penalties; the same tensor where no row asks for any."""
        if all(row.is_plain for row in rows):
            return logits
        scores = logits.clone()
        for line, row in zip(scores, rows, strict=True):
            if row.shift is not None:
                line += row.shift
            if row.banned is not None:
                line[row.banned] = -torch.inf
            if row.history is not None:
                row.history.penalise(line, row.sampling)
        return scores

    def _choose(self, scores: Tensor, rows: list[_Row]) -> tuple[Tensor, Tensor]:
        """``[R]`` each: the best score, and the best token or a draw."""
        best, chosen = scores.max(-1)
        drawing = [i for i, row in enumerate(rows) if row.draws]
        step = max(1, _CHUNK.get(scores.device.type, _CHUNK["cuda"]) // self._vocab_size)
        for first in range(0, len(drawing), step):
            chunk = drawing[first : first + step]
            index = to_device(np.array(chunk), scores.device)
            chosen[index] = self._draw(scores[index], [rows[i] for i in chunk])
        return best, chosen

    def _draw(self, scores: Tensor, rows: list[_Row]) -> Tensor:
        """Temperature, min_p, top_k, top_p, noise. ``scores`` is a copy and is overwritten."""
        scores /= _column(scores, [row.sampling.temperature for row in rows])
        limits = [(row.sampling.min_p, row.sampling.top_k, row.sampling.top_p) for row in rows]
        _limit(scores, [p if p > 0 else None for p, _, _ in limits], _outside_min_p)
        _limit(scores, [k if 0 < k < self._vocab_size else None for _, k, _ in limits], _outside_top_k)
        _limit(scores, [p if p < 1 else None for _, _, p in limits], _outside_top_p)
        words = np.array([row_words(row.key, row.generated) for row in rows], np.int32)
        scores += gumbel_noise(to_device(words, scores.device), self._token_ids)
        return scores.max(-1).indices  # several times faster than argmax on a CPU


class Drawn:
    """Tokens on their way from the device: ``tokens`` ``[R]`` int64 there, in the order of ``slots``."""

    def __init__(
        self, slots: list[int], tokens: Tensor, finite: Tensor, asked: list[int], report: Report | None
    ) -> None:
        self.tokens = tokens
        self.slots = slots
        self._asked = asked
        self._report = report
        self._columns = [column.to("cpu", non_blocking=True) for column in (tokens, finite)]
        self._arrived = None
        if tokens.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """Wait, and return the R tokens and the log-probabilities by slot, where asked for.

        Raises StepFailed, naming the slots, where the logits were not finite.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, finite = (column.tolist() for column in self._columns)
        if not all(finite):
            failed = [slot for slot, good in zip(self.slots, finite, strict=True) if not good]
            raise StepFailed(f"the model's logits are not finite for slots {failed}: no token can be chosen")
        entries = [] if self._report is None else self._report.read()
        return tokens, dict(zip(self._asked, entries, strict=True))


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return to_device(np.array(values, np.float32), like.device)[:, None]


def _limit(scores: Tensor, values: list[Any], outside: Callable[[Tensor, list[Any]], Tensor]) -> None:
    """In the rows whose value is not None, set to -inf what is ``outside(scores of these rows, their values)``."""
    index = [i for i, value in enumerate(values) if value is not None]
    if len(index) == len(values):
        scores.masked_fill_(outside(scores, values), -torch.inf)
    elif index:
        some = to_device(np.array(index), scores.device)
        part = scores[some]
        scores[some] = part.masked_fill_(outside(part, [values[i] for i in index]), -torch.inf)


def _outside_min_p(scores: Tensor, values: list[float]) -> Tensor:
    """Tokens less than ``min_p`` times as likely as the most likely one."""
    return scores < scores.amax(-1, keepdim=True) + _column(scores, values).log()


def _outside_top_k(scores: Tensor, values: list[int]) -> Tensor:
    """All but the ``top_k`` most likely tokens and those that tie with the last of them."""
    best = scores.topk(max(values), dim=-1).values
    last = to_device(np.array(values), scores.device)[:, None] - 1
    return scores < best.gather(-1, last)


def _outside_top_p(scores: Tensor, values: list[float]) -> Tensor:
    """All but the fewest most likely tokens whose mass reaches ``top_p``, and those that tie with the last of them."""
    probs = scores.softmax(-1)
    wanted = _column(scores, values)
    vocab_size = probs.shape[-1]
    least, enough = _nucleus_edge(probs, wanted, min(_NUCLEUS_GUESSES[0], vocab_size))
    for candidates in (*_NUCLEUS_GUESSES[1:], vocab_size):
        short = (~enough[:, 0]).nonzero()[:, 0]
        if not len(short):
            break
        least[short], enough[short] = _nucleus_edge(probs[short], wanted[short], min(candidates, vocab_size))
    return probs < least


def _nucleus_edge(probs: Tensor, wanted: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """``[R, 1]``: the smallest probability in the nucleus, and whether the candidates were enough to find it."""
    best = probs.topk(candidates, dim=-1).values
    mass = best.cumsum(-1)
    inside = 1 + (mass[:, :-1] < wanted).sum(-1, keepdim=True)
    return best.gather(-1, inside - 1), mass[:, -1:] >= wanted


def _mix64(value: int) -> int:
    """The output function of SplitMix64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def row_words(key: int, position: int) -> tuple[int, int]:
    """Odd multiplier and offset of a row's noise as signed 32-bit numbers."""
    mixed = _mix64((_mix64((key + _GOLDEN) & _MASK64) + (position + 1) * _GOLDEN) & _MASK64)
    low, high = (mixed & 0xFFFFFFFF) | 1, mixed >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


def uniform_bits(words: Tensor, token_ids: Tensor) -> Tensor:
    """31 random bits a token: ``words`` ``[R, 2]`` and ``token_ids`` ``[V]``, both int32, to ``[R, V]`` int32.

    Products wrap at 32 bits. ``>>`` carries the sign, so the bits that it brings in are masked away.
    """
    bits = token_ids * words[:, :1]
    bits += words[:, 1:]
    bits ^= (bits >> 16) & 0xFFFF
    bits *= 0x21F0AAAD
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= 0x735A2D97
    bits ^= (bits >> 15) & 0x1FFFF
    return bits.bitwise_and_(0x7FFFFFFF)


def gumbel_noise(words: Tensor, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise ``[R, V]`` float32, finite everywhere.

    The winner of a draw has a small uniform number, and there float32 keeps all 31 bits' worth of resolution.
    """
    uniform = uniform_bits(words, token_ids).float()
    uniform.add_(0.5).mul_(2**-31).clamp_(max=1 - 2**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


class Report:
    """Log-probability, rank and the ``counts[i]`` most likely tokens for each row of ``logits`` ``[R, V]``.

    The same number of candidates is always taken, so that what is reported among ties depends on no other row.
    """

    def __init__(self, logits: Tensor, token_ids: Tensor, counts: list[int]) -> None:
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, token_ids[:, None])
        ranks = (logprobs > own).sum(-1) + 1
        best = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
        columns = (token_ids, own[:, 0], ranks, best.indices, best.values)
        self._columns = [column.to("cpu", non_blocking=True) for column in columns]
        self._counts = counts
        self._arrived = None
        if logits.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[TokenLogprobs]:
        """Wait for them; equally likely tokens come in the order of their ids."""
        if self._arrived is not None:
            self._arrived.synchronize()
        entries = []
        for count, *row in zip(self._counts, *(column.tolist() for column in self._columns), strict=True):
            token, value, rank, ids, values = row
            top = sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
            entries.append(TokenLogprobs(token, value, rank, tuple(top[:count])))
        return entries
