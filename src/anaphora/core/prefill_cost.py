"""Prefill cost: seconds per token by length of context, measured on the engine's own steps."""

from __future__ import annotations

from collections.abc import Iterable

BUCKET = 512
"""Tokens of context for which prefill is taken to cost the same per token."""


class PrefillCost:
    """Estimates how long it would have taken to compute the tokens that were cached.

    The time of a step is spread evenly over the prompt positions that it computed; if it had decode rows, the time of a
    pure decode step is subtracted first. Positions that were never computed cost as much as the nearest measured ones.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._decode_s = 0.0

    def observe(self, seconds: float, prefills: Iterable[tuple[int, int]], decodes: int) -> float:
        """Record a step of ``seconds`` with prompt chunks (start, length) and ``decodes`` decode rows.

        Returns the part of the seconds that was prefill.
        """
        chunks = list(prefills)
        if not chunks:
            self._decode_s = seconds if not self._decode_s else 0.9 * self._decode_s + 0.1 * seconds
            return 0.0
        own = max(seconds - self._decode_s, 0.0) if decodes else seconds
        each = own / sum(length for _, length in chunks)
        for start, length in chunks:
            for bucket, tokens in _buckets(start, start + length):
                self._seconds[bucket] = self._seconds.get(bucket, 0.0) + each * tokens
                self._tokens[bucket] = self._tokens.get(bucket, 0) + tokens
        return own

    def price(self, start: int, end: int) -> float:
        """Return the seconds to compute positions ``start`` to ``end - 1``; 0 if nothing was measured yet."""
        if not self._tokens:
            return 0.0
        total = 0.0
        for bucket, tokens in _buckets(start, end):
            nearest = min(self._tokens, key=lambda b: abs(b - bucket)) if bucket not in self._tokens else bucket
            total += tokens * self._seconds[nearest] / self._tokens[nearest]
        return total


def _buckets(start: int, end: int) -> Iterable[tuple[int, int]]:
    """Yield (bucket, number of positions in it) for the positions ``start`` to ``end - 1``."""
    while start < end:
        stop = min(end, (start // BUCKET + 1) * BUCKET)
        yield start // BUCKET, stop - start
        start = stop
