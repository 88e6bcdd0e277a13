"""Of model and workload: the real one, and one for a rehearsal on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """Lengths in tokens; ``part`` divides the numbers of requests in the rows' names, ``seconds`` is of a steady row.

    ``pools`` are pool sizes for the whole GPU and for the one limited to 24 GiB; None: as much as fits.
    """

    shared: int
    own: int
    answer: int
    long: int
    part: int
    budget: int
    small_budget: int
    seconds: float
    pools: tuple[int | None, int | None]
    shape: dict[str, Any]

    def count(self, named: int) -> int:
        return max(named // self.part, 1)


FULL = Size(2300, 120, 200, 16_000, 1, 16_384, 2048, 60.0, (None, None), {
    "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768,
    "tie_word_embeddings": False, "dtype": "bfloat16",
})  # fmt: skip
"""Qwen3-8B's shape."""

TINY = Size(70, 12, 6, 300, 64, 256, 64, 0.5, (2**22, 2**18), {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "dtype": "float32",
})  # fmt: skip
