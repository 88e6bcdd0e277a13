"""Gumbel noise that is computed from (seed, position, token id) instead of drawn from a stream.

SplitMix64 over (key, position) gives each row an odd multiplier and an offset, 32 bits each.
``token id * multiplier + offset``, mixed by the two-round 32-bit finaliser "lowbias32" (constants 0x21f0aaad and
0x735a2d97), gives the token's uniform number u, and ``-log(-log(1 - u))`` its noise. So the noise of a token depends on
nothing else in the batch.
"""

from __future__ import annotations

from torch import Tensor

_MASK64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


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
    """31 random bits per token: ``words`` ``[R, 2]`` and ``token_ids`` ``[V]``, both int32, to ``[R, V]`` int32.

    Multiplications wrap at 32 bits. ``>>`` extends the sign, so the bits that it brings in are masked.
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

    The winner of a draw has a small uniform number, where float32 still resolves all 31 bits.
    """
    uniform = uniform_bits(words, token_ids).float()
    uniform.add_(0.5).mul_(2**-31).clamp_(max=1 - 2**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
