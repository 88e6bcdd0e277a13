"""What prefill costs here: seconds a token by context, measured on the engine's own steps."""

from __future__ import annotations

from collections.abc import Iterable

BUCKET = 512  # tokens of context; prefill of a token costs about the same within one


class PrefillCost:
    """Marginal prefill time by position, from the steps that ran; prices the tokens that were not computed.

    A step's time, less that of a step of decode rows alone where it had some, is spread evenly over the positions
    that it computed. A position nobody has computed yet costs what the nearest measured one does.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._tokens: dict[int, int] = {}
        self._decode_s = 0.0

    def observe(self, seconds: float, prefills: Iterable[tuple[int, int]], decodes: int) -> float:
        """A step took ``seconds`` for chunks (start, length) and decode rows. Returns the prefill part of it."""
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
        """Seconds that computing positions ``start`` to ``end - 1`` would have taken; 0 before anything ran."""
        if not self._tokens:
            return 0.0
        total = 0.0
        for bucket, tokens in _buckets(start, end):
            nearest = min(self._tokens, key=lambda b: abs(b - bucket)) if bucket not in self._tokens else bucket
            total += tokens * self._seconds[nearest] / self._tokens[nearest]
        return total


def _buckets(start: int, end: int) -> Iterable[tuple[int, int]]:
    """(bucket, positions in it) for the positions ``start`` to ``end - 1``."""
    while start < end:
        stop = min(end, (start // BUCKET + 1) * BUCKET)
        yield start // BUCKET, stop - start
        start = stop
