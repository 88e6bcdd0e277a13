"""Texts of an exact number of tokens, counted by the server's own tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence

from anaphora.errors import ConfigError

Count = Callable[[str], Awaitable[int]]

# Single tokens in most vocabularies: what a long word would overshoot is filled up with the beginning of this phrase,
# and where that does not count as hoped, with one of the others at a time.
PHRASE = (" and", " so", " on", " as", " it", " was", " before", " and", " is", " now", " and", " not", " then")
FILLERS = (" now", " please", " again", ".", " too", "!", " x")
CHARACTERS_A_TOKEN = 4.3
TOKENS_A_PIECE = 1.35
MOST_FILLERS = 15
INTERPOLATIONS = 8


def estimate(text: str) -> int:
    """Tokens of an English text by its length, for servers that have no /tokenize."""
    return max(1, round(len(text) / CHARACTERS_A_TOKEN))


async def fit(pieces: Sequence[str], wanted: int, count: Count) -> str:
    """The longest beginning of ``pieces`` that has at most ``wanted`` tokens, filled up to exactly ``wanted``.

    ``count`` gives the tokens of the whole prompt around a text, so ``wanted`` includes what the template adds.
    Raises ConfigError where the template alone needs more, or the pieces are too few.
    """
    low, high = 0, len(pieces)
    around = tokens = await count("")
    if tokens > wanted:
        raise ConfigError(f"{wanted} tokens are too few: the prompt has {tokens} around an empty text")
    guess = round((wanted - around) / TOKENS_A_PIECE)
    for attempt in itertools.count():
        if low == high or tokens == wanted:
            break
        guess = min(max(guess, low + 1), high) if attempt < INTERPOLATIONS else (low + high + 1) // 2
        found = await count("".join(pieces[:guess]))
        if found <= wanted:
            low, tokens = guess, found
        else:
            high = guess - 1
        guess += round((wanted - found) * guess / max(1, found - around))
    if low == len(pieces) and wanted - tokens > MOST_FILLERS:
        raise ConfigError(f"the text has only {tokens} of {wanted} tokens")
    return await _fill("".join(pieces[:low]), wanted, tokens, count)


async def _fill(text: str, wanted: int, tokens: int, count: Count) -> str:
    phrase = "".join(PHRASE[: wanted - tokens])
    if phrase and tokens < (found := await count(text + phrase)) <= wanted:
        text, tokens = text + phrase, found
    while tokens < wanted:
        for filler in FILLERS:
            found = await count(text + filler)
            if tokens < found <= wanted:
                text, tokens = text + filler, found
                break
        else:
            return text
    return text


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the number of tokens that both begin with."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
