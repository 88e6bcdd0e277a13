"""Tile sizes of the GPU's attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from anaphora.attention.base import KVLayout


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One launch: query rows and keys of a tile (BLOCK_M and BLOCK_N), warps, software pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def next_power_of_2(size: int) -> int:
    """The smallest power of two not below ``size``; triton's own takes as long as a launch."""
    return 1 << (size - 1).bit_length()


@cache
def tile_configs(layout: KVLayout, queries_per_kv: int, itemsize: int) -> tuple[TileConfig, TileConfig]:
    """Configs of small and large tiles for a layer and elements of ``itemsize`` bytes.

    They are the fastest of those tried on a Hopper GPU (``benchmarks/attention.py --tune``). Both kernels run at the
    same time, so neither may fill an SM's shared memory alone.
    """
    least = max(16, next_power_of_2(queries_per_kv))
    if itemsize > 2:
        return TileConfig(least, 16, 4, 1), TileConfig(max(32, least), 16, 4, 1)
    if layout.key_size > 256:
        return TileConfig(least, 32, 4, 2), TileConfig(max(64, least), 32, 8, 2)
    if layout.key_size > 128:
        return TileConfig(least, 64, 4, 2), TileConfig(max(64, least), 64, 4, 2)
    return TileConfig(least, 32, 1, 3), TileConfig(max(128, least), 64, 4, 3)


@cache
def split_in_two(size: int) -> tuple[int, int]:
    """The widths of the two tiles that hold a vector of ``size``: the largest power of two within it, and the rest.

    The second is a power of two that holds the rest, at least 16; 0 if nothing is left.
    """
    first = 1 << (size.bit_length() - 1)
    return first, max(16, next_power_of_2(size - first)) if size > first else 0
