"""Attention against float64 over blocks of whole panels, by AMX and by the generic kernel; the layout of panels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, QueryRange, StepLayout
from anaphora.attention.cpu import CpuAttention, KVWriter
from anaphora.attention.cpu_plan import SEGMENT_TOKENS
from anaphora.kernels.cpu.attention_amx import KEY_BLOCK, PANEL
from anaphora.types.batch import BlockCopy, PrefixGroup
from tests.support.amx import on_and_off

HEADS = 6
SHAPES = {
    "usual": KVLayout(3, 64, 64),
    "one head for all": KVLayout(1, 32, 32),
    "an odd half": KVLayout(2, 96, 96),
    "large": KVLayout(2, 256, 128),
    "values are smaller": KVLayout(2, 64, 32),
}
OPTIONS = {
    "plain": LayerOptions(scale=0.3),
    "all": LayerOptions(scale=0.3, window=KEY_BLOCK + 3, softcap=3.0, sinks=torch.linspace(-1, 2, HEADS)),
    "a small window": LayerOptions(scale=0.3, window=5),
}
LENGTHS = (
    *(1, 2, PANEL - 1, PANEL, PANEL + 1, 63, 64, 65, KEY_BLOCK - 1, KEY_BLOCK, KEY_BLOCK + 1),
    *(KEY_BLOCK + PANEL + 1, SEGMENT_TOKENS, SEGMENT_TOKENS + 1),
)


class World:
    """A backend over a poisoned pool, whose sequences lie in every second block."""

    def __init__(self, layout: KVLayout, block_size: int = PANEL, blocks: int = 400) -> None:
        self.layout = layout
        self.block_size = block_size
        self.backend = CpuAttention([layout], blocks, block_size, torch.bfloat16, torch.device("cpu"))
        self.backend.pools[0].fill_(torch.nan)
        self.free = iter(range(1, blocks, 2))
        self.tables: list[list[int]] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def sequence(self, length: int, like: int | None = None, shared: int = 0, large: float = 1.0) -> int:
        """A random one; its first ``shared`` tokens, whole blocks, are those of another. Its number."""
        heads = self.layout.heads
        keys = torch.randn(heads, length, self.layout.key_size).bfloat16() * large
        values = torch.randn(heads, length, self.layout.value_size).bfloat16()
        table = [next(self.free) for _ in range(-(-length // self.block_size))]
        if like is not None:
            keys[:, :shared], values[:, :shared] = self.keys[like][:, :shared], self.values[like][:, :shared]
            table[: shared // self.block_size] = self.tables[like][: shared // self.block_size]
        self.keys.append(keys)
        self.values.append(values)
        self.tables.append(table)
        return len(self.tables) - 1

    def slots(self, number: int, start: int, end: int) -> list[int]:
        size = self.block_size
        return [self.tables[number][p // size] * size + p % size for p in range(start, end)]

    def run(
        self, spans: dict[int, tuple[int, int]], options: LayerOptions, groups: tuple[PrefixGroup, ...] = ()
    ) -> None:
        """One step over positions of sequences, checked against float64."""
        ranges, slots, row = [], [], 0
        for number, (start, end) in spans.items():
            ranges.append(QueryRange(number, row, end - start, start, self.tables[number]))
            slots += self.slots(number, start, end)
            row += end - start
        query = torch.randn(HEADS, row, self.layout.key_size).bfloat16()
        key, value = (
            torch.cat([every[number][:, start:end] for number, (start, end) in spans.items()], 1)
            for every in (self.keys, self.values)
        )
        self.backend.plan(StepLayout(torch.tensor(slots), tuple(ranges), groups))
        out = self.backend.run(0, query, key, value, options)
        for found in ranges:
            number, rows = found.slot, slice(found.row, found.row + found.length)
            expected = exact(self.keys[number], self.values[number], query[:, rows], found.start, options)
            # Weights and output are rounded to 8 bits.
            assert float((out[rows] - expected).abs().max()) < 2**-7 * 4, (number, found.start)


def exact(keys: Tensor, values: Tensor, query: Tensor, start: int, options: LayerOptions) -> Tensor:
    """``query`` ``[H, M, D]`` at positions from ``start`` on, in float64; ``[M, H, Dv]``."""
    keys, values = (x.double().repeat_interleave(HEADS // x.shape[0], 0) for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * options.scale
    if options.softcap:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    position = torch.arange(start, start + query.shape[1])[:, None]
    distance = position - torch.arange(keys.shape[1])
    scores = scores.masked_fill((distance < 0) | (distance >= (options.window or len(distance[0]) + 1)), -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        return (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ values).transpose(0, 1)
    return (scores.softmax(-1) @ values).transpose(0, 1)


@on_and_off
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", SHAPES.values(), ids=SHAPES)
def test_rows_of_every_length_alone(layout: KVLayout, options: LayerOptions, threads: int, amx_used: bool) -> None:
    torch.manual_seed(0)
    world = World(layout)
    for length in LENGTHS:
        number = world.sequence(length)
        if length > 1:
            world.run({number: (0, length - 1)}, options)
    world.run({number: (length - 1, length) for number, length in enumerate(LENGTHS)}, options)


@on_and_off
@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_beside_rows_in_nested_groups(
    block_size: int, options: LayerOptions, threads: int, amx_used: bool
) -> None:
    torch.manual_seed(1)
    world = World(SHAPES["usual"], block_size)
    shared, more = 144, 96
    root = world.sequence(shared + 60)
    world.run({root: (0, shared + 59)}, options)
    others = [world.sequence(shared + n, root, shared if n % 2 else more) for n in (1, 20, 33, 70, 75)]
    for number, n in zip(others, (1, 20, 33, 70, 75), strict=True):
        first = shared if n % 2 else more
        if first < shared + n - 1:
            world.run({number: (first, shared + n - 1)}, options)
    chunk = world.sequence(301)
    world.run({chunk: (0, 77)}, options)
    rows = {number: (len(world.keys[number][0]) - 1, len(world.keys[number][0])) for number in (root, *others)}
    deep = (root, *(number for number, n in zip(others, (1, 20, 33, 70, 75), strict=True) if n % 2))
    groups = (
        PrefixGroup(more // block_size, shared // block_size, deep),
        PrefixGroup(0, more // block_size, (root, *others)),
    )
    world.run({**rows, chunk: (77, 301)}, options, groups)


@on_and_off
def test_scores_that_grow_along_the_keys(amx_used: bool) -> None:
    """Each block's largest is far above the last one's, so that sums are rescaled, and weights are as exact."""
    torch.manual_seed(2)
    world = World(SHAPES["usual"])
    number = world.sequence(4 * KEY_BLOCK)
    growth = torch.linspace(0.0, 3.0, 4 * KEY_BLOCK)[None, :, None]
    world.keys[number] = (world.keys[number] * growth).bfloat16()
    world.run({number: (0, 4 * KEY_BLOCK - 40)}, OPTIONS["plain"])
    world.run({number: (4 * KEY_BLOCK - 40, 4 * KEY_BLOCK)}, OPTIONS["plain"])


@on_and_off
def test_only_the_tokens_of_the_step_are_written(amx_used: bool) -> None:
    torch.manual_seed(3)
    world = World(SHAPES["usual"])
    number = world.sequence(3 * PANEL)
    world.run({number: (0, 5)}, OPTIONS["plain"])
    pool = world.backend.pools[0]
    assert int((~pool.isnan()).sum()) == 5 * world.layout.width
    before = pool.clone()
    world.run({number: (5, 20)}, OPTIONS["plain"])
    assert int((~pool.isnan()).sum()) == 20 * world.layout.width
    assert torch.equal(pool[~before.isnan()], before[~before.isnan()])


@on_and_off
@pytest.mark.parametrize("filled", [1, PANEL - 1, PANEL, PANEL + 3])
def test_a_copy_is_as_good_as_its_source(filled: int, amx_used: bool) -> None:
    torch.manual_seed(4)
    world = World(SHAPES["usual"], 2 * PANEL)
    first = world.sequence(filled + 9)
    world.run({first: (0, filled)}, OPTIONS["plain"])
    second = world.sequence(filled + 9)
    for every in (world.keys, world.values):
        every[second][:, :filled] = every[first][:, :filled]
    source, target = world.tables[first][0], world.tables[second][0]
    world.backend.copy_blocks([BlockCopy(source=source, target=target, filled=filled)])
    world.run({first: (filled, filled + 1), second: (filled, filled + 9)}, OPTIONS["plain"])


@pytest.mark.parametrize("layout", SHAPES.values(), ids=SHAPES)
def test_new_tokens_are_written_as_panels(layout: KVLayout, threads: int) -> None:
    """The layout that ``attention_amx.py`` draws, in tokens, heads and elements. Writing uses no AMX instruction."""
    torch.manual_seed(5)
    pool = torch.full((6 * PANEL, layout.width), torch.nan, dtype=torch.bfloat16)
    slots = torch.randperm(len(pool))[:70]
    key, value = (torch.randn(layout.heads, 70, size).bfloat16() for size in (layout.key_size, layout.value_size))
    KVWriter(slots).write(layout, pool, key, value, True)
    panels = pool.view(-1, PANEL * layout.width)
    cut = PANEL * layout.heads * layout.key_size
    # [panels, heads, pairs of elements, tokens, 2] and [panels, heads, columns of 16 values, pairs of tokens, 16, 2]
    keys = panels[:, :cut].view(6, layout.heads, -1, PANEL, 2)
    values = panels[:, cut:].view(6, layout.heads, -1, PANEL // 2, 16, 2)
    keys = keys.permute(1, 0, 3, 2, 4).reshape(layout.heads, 6 * PANEL, layout.key_size)
    values = values.permute(1, 0, 3, 5, 2, 4).reshape(layout.heads, 6 * PANEL, layout.value_size)
    assert torch.equal(keys[:, slots], key)
    assert torch.equal(values[:, slots], value)
    assert int((~pool.isnan()).sum()) == 70 * layout.width
