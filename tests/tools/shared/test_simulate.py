"""The simulated caches against plain comparisons of token lists."""

from __future__ import annotations

import random

import pytest

from anaphora.cache.hashing import pack
from anaphora.tools.shared.simulate import LimitedCache, UnlimitedCache, full_block_hits, longest_shared_prefixes


def simulate(prompts: list[list[int]]) -> list[int]:
    """Cached tokens of each prompt: sets of whole prefixes in steps of 16 tokens, as plain as can be."""
    known: set[tuple[int, ...]] = set()
    hits = []
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(16, len(prompt) + 1, 16)]
        length = 0
        for prefix in prefixes:
            if prefix not in known or len(prefix) == len(prompt):
                break
            length = len(prefix)
        hits.append(length)
        known.update(prefixes)
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_the_unlimited_cache_finds_the_longest_prefix(seed: int) -> None:
    rng = random.Random(seed)
    cache, earlier = UnlimitedCache(), []
    for number in range(60):
        base = rng.choice(earlier)[: rng.randrange(400)] if earlier and rng.random() < 0.8 else []
        tokens = [*base, *(rng.randrange(3) for _ in range(rng.randrange(1, 300)))]
        best = max((_common(tokens, other) for other in earlier), default=0)
        found = cache.look(pack(tokens), number)
        assert found.tokens == best
        if best:
            assert _common(tokens, earlier[found.owner]) == best
        earlier.append(tokens)


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_a_limited_cache_evicts() -> None:
    prompts = [pack([n] * 160 + list(range(160))) for n in range(8)]
    small, large = LimitedCache(640), LimitedCache(4000)
    for cache, hits in ((small, 0), (large, 319)):
        for number, prompt in enumerate(prompts):
            cache.look(prompt, number)
        assert cache.look(prompts[0], 9) == hits
    assert LimitedCache(64).look(prompts[0], 0) == 0


def test_hits_of_full_blocks_are_those_of_a_plain_simulation() -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(2) for _ in range(rng.choice([15, 16, 32, 40]))] for _ in range(30)]
    prompts += [prompts[0] + [7] * 20, prompts[1] * 2, list(prompts[2])]
    assert full_block_hits(prompts, 16) == simulate(prompts)


def test_the_longest_shared_prefix_is_found_in_any_other_prompt() -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 8))] for _ in range(40)]
    expected = []
    for index, prompt in enumerate(prompts):
        others = [other for number, other in enumerate(prompts) if number != index]
        lengths = [n for n in range(len(prompt) + 1) if any(o[:n] == prompt[:n] and len(o) >= n for o in others)]
        expected.append(max(lengths))
    assert longest_shared_prefixes(prompts) == expected
