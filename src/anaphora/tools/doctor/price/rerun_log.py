"""Runs a log through the cache simulator, as it is or with repairs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from anaphora.cache.hashing import TOKEN_BYTES
from anaphora.tools.doctor.find.findings import Rewriter
from anaphora.tools.doctor.read.load_log import Log
from anaphora.tools.shared.simulate import LIMITED_BLOCK, Found, LimitedCache, UnlimitedCache


@dataclass(slots=True)
class Outcome:
    """What the cache reused. ``tokens`` and ``cached`` have one number a request; ``found`` the matches, if kept."""

    tokens: array[int] = field(default_factory=lambda: array("q"))
    cached: array[int] = field(default_factory=lambda: array("q"))
    found: list[Found] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Prompt tokens of all requests."""
        return sum(self.tokens)

    @property
    def hits(self) -> int:
        """Prompt tokens that were cached."""
        return sum(self.cached)

    @property
    def computed(self) -> int:
        """Prompt tokens that were not cached."""
        return self.total - self.hits

    @property
    def hit_rate(self) -> float:
        """Cached tokens over prompt tokens."""
        return self.hits / self.total if self.total else 0.0


def rerun(log: Log, rewriters: Sequence[Rewriter] = (), *, block_size: int = 1, keep_matches: bool = False) -> Outcome:
    """Runs all requests, rewritten by ``rewriters``, through a cache that never evicts.

    The cache reuses whole blocks of ``block_size`` tokens. ``keep_matches`` fills ``Outcome.found``.
    """
    for stage in rewriters:
        stage.reset()
    cache, outcome = UnlimitedCache(), Outcome()
    for prompt in log.prompts:
        runs = prompt.runs
        for stage in rewriters:
            runs = stage.apply(prompt, runs)
        pieces = prompt.pieces if runs is prompt.runs else log.store.join(text for _, text in runs)
        packed = log.store.packed(pieces)
        answer = b"" if prompt.answer is None else log.store.packed(log.store.pieces(prompt.answer))
        found = cache.look(packed, prompt.number, prompt.root, answer)
        length = len(packed) // TOKEN_BYTES
        outcome.tokens.append(length)
        usable = min(found.tokens, max(0, length - 1))
        outcome.cached.append(usable - usable % block_size)
        if keep_matches:
            outcome.found.append(found)
    return outcome


def rerun_limited(log: Log, capacity: int, block_size: int) -> Outcome:
    """Runs the log as it is through a cache of ``capacity`` tokens with the engine's own eviction.

    The cache reuses whole blocks of ``block_size`` tokens. With 1 it has blocks of LIMITED_BLOCK tokens and reuses
    single tokens of them.
    """
    cache, outcome = LimitedCache(capacity, block_size if block_size > 1 else LIMITED_BLOCK), Outcome()
    for prompt in log.prompts:
        packed = log.store.packed(prompt.pieces)
        outcome.tokens.append(len(packed) // TOKEN_BYTES)
        found = cache.look(packed, prompt.number, prompt.root)
        outcome.cached.append(found - found % block_size)
    return outcome
