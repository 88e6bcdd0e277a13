"""Makes texts of an exact number of tokens, counted by the server's own tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence

from anaphora.errors import ConfigError

Count = Callable[[str], Awaitable[int]]

# Single tokens in most vocabularies. The tokens that remain are filled with the start of PHRASE, and if that does not
# give the right number, with FILLERS one at a time.
PHRASE = (" and", " so", " on", " as", " it", " was", " before", " and", " is", " now", " and", " not", " then")
FILLERS = (" now", " please", " again", ".", " too", "!", " x")
CHARACTERS_A_TOKEN = 4.3
TOKENS_A_PIECE = 1.35
MOST_FILLERS = 15
INTERPOLATIONS = 8


def estimate(text: str) -> int:
    """Estimates the tokens of an English text from its length, for servers without /tokenize."""
    return max(1, round(len(text) / CHARACTERS_A_TOKEN))


async def fit(pieces: Sequence[str], wanted: int, count: Count) -> str:
    """Returns the longest start of ``pieces`` with at most ``wanted`` tokens, filled up to exactly ``wanted``.

    ``count`` returns the tokens of the whole prompt with a text in it, so ``wanted`` includes the chat template.
    Raises ConfigError if the template alone needs more, or there are too few pieces.
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
    """Returns the length of the longest common prefix."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
