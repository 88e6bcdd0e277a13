"""The CPU backend against dense attention in float64, with a needle key at every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, QueryRange, StepLayout, backend_class
from anaphora.attention.cpu import CpuAttention
from anaphora.attention.cpu_plan import SEGMENT_TOKENS
from anaphora.errors import ConfigError
from anaphora.types.batch import BlockCopy, PrefixGroup

HEADS, KV_HEADS, SIZE = 4, 2, 8
PLAIN = KVLayout(KV_HEADS, SIZE, SIZE)
OPTIONS = {
    "plain": LayerOptions(scale=0.4),
    "window": LayerOptions(scale=0.4, window=9),
    "softcap": LayerOptions(scale=0.4, softcap=2.0),
    "sinks": LayerOptions(scale=0.4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": LayerOptions(scale=0.4, window=9, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


@dataclass
class Text:
    """One sequence: its keys and values ``[Hkv, N, D]``, the queries of its last tokens ``[H, M, D]``, its blocks."""

    slot: int
    keys: Tensor
    values: Tensor
    queries: Tensor
    blocks: list[int]

    @property
    def start(self) -> int:
        return self.keys.shape[1] - self.queries.shape[1]


@dataclass
class World:
    """A backend over a pool full of not-a-number, and what has been put into it."""

    block_size: int = 4
    layout: KVLayout = PLAIN
    dtype: torch.dtype = torch.float32
    num_blocks: int = 400
    backend: CpuAttention = field(init=False)

    def __post_init__(self) -> None:
        make = backend_class("cpu")
        made = make([self.layout], self.num_blocks, self.block_size, self.dtype, torch.device("cpu"))
        assert isinstance(made, CpuAttention)
        self.backend = made
        self.backend.pools[0].fill_(torch.nan)

    def slots(self, text: Text, start: int, end: int) -> list[int]:
        size = self.block_size
        return [text.blocks[p // size] * size + p % size for p in range(start, end)]

    def fill(self, text: Text) -> None:
        """Put what came before the queries into the pool."""
        rows = torch.cat((text.keys, text.values)).transpose(0, 1).flatten(1)
        if self.layout.latent:
            rows = text.keys[0]
        self.backend.pools[0][self.slots(text, 0, text.start)] = rows[: text.start].to(self.dtype)

    def run(self, texts: Sequence[Text], options: LayerOptions, groups: Sequence[PrefixGroup] = ()) -> list[Tensor]:
        """The outputs ``[M, H, Dv]`` of each text's queries, all in one batch."""
        queries, slots, row = [], [], 0
        for text in texts:
            length = text.queries.shape[1]
            queries.append(QueryRange(text.slot, row, length, text.start, text.blocks))
            slots += self.slots(text, text.start, text.start + length)
            row += length
        self.backend.plan(StepLayout(torch.tensor(slots), tuple(queries), tuple(groups)))
        key = torch.cat([text.keys[:, text.start :] for text in texts], 1)
        value = None if self.layout.latent else torch.cat([text.values[:, text.start :] for text in texts], 1)
        out = self.backend.run(0, torch.cat([text.queries for text in texts], 1), key, value, options)
        return [out[q.row : q.row + q.length] for q in queries]


def make_text(
    slot: int, length: int, queries: int, blocks: list[int], like: Text | None = None, shared: int = 0
) -> Text:
    """A random text; its first ``shared`` tokens are those of ``like``."""
    generator = torch.Generator().manual_seed(slot)
    keys, values = (torch.randn(KV_HEADS, length, SIZE, generator=generator) for _ in range(2))
    if like is not None:
        keys[:, :shared], values[:, :shared] = like.keys[:, :shared], like.values[:, :shared]
    return Text(slot, keys, values, torch.randn(HEADS, queries, SIZE, generator=generator), blocks)


def dense(text: Text, options: LayerOptions, size: int = SIZE) -> Tensor:
    """The same in float64, over a dense mask, with the sink as one more key; ``[M, H, Dv]``."""
    heads = text.queries.shape[0] // text.keys.shape[0]
    keys, values = (x.double().repeat_interleave(heads, 0) for x in (text.keys, text.values))
    scores = text.queries.double() @ keys.transpose(1, 2) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    position = torch.arange(text.start, keys.shape[1])[:, None]
    distance = position - torch.arange(keys.shape[1])
    hidden = (distance < 0) | (distance >= (options.window or keys.shape[1] + 1))
    scores = scores.masked_fill(hidden, -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values)[..., :size].transpose(0, 1)


def check(found: Sequence[Tensor], texts: Sequence[Text], options: LayerOptions) -> None:
    for out, text in zip(found, texts, strict=True):
        assert float((out - dense(text, options)).abs().max()) < 1e-5, text.slot


def blocks(count: int, first: int, step: int = 1) -> list[int]:
    return [first + step * i for i in range(count)]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_mixed_batch(kind: str, block_size: int) -> None:
    world = World(block_size)
    count = 40 // block_size + 1
    chunk = make_text(0, 37, 14, blocks(count, 1))
    fresh = make_text(1, 11, 11, blocks(count, 150, -2))
    single = make_text(2, 23, 1, blocks(count, 200))
    first = make_text(3, 1, 1, blocks(1, 300))
    texts = [single, chunk, first, fresh]
    for text in texts:
        world.fill(text)
    check(world.run(texts, OPTIONS[kind]), texts, OPTIONS[kind])


def nested(world: World, needle: int | None = None) -> tuple[list[Text], list[PrefixGroup]]:
    """Rows 0 and 1 share 24 tokens, row 2 the first 16 of them, row 3 nothing; ``needle`` draws all queries to it."""
    root = make_text(0, 31, 1, [*blocks(6, 1), 50, 51])
    texts = [
        root,
        make_text(1, 26, 1, [*blocks(6, 1), 60], root, 24),
        make_text(2, 29, 1, [*blocks(4, 1), 70, 75, 72, 73], root, 16),
        make_text(3, 27, 1, blocks(7, 80)),
    ]
    if needle is not None:
        for text in texts:
            text.queries[:] = 1.0
            text.keys[:, needle] = 4.0
    for text in texts:
        world.fill(text)
    return texts, [PrefixGroup(4, 6, (0, 1)), PrefixGroup(0, 4, (0, 1, 2))]


@pytest.mark.parametrize("kind", OPTIONS)
def test_nested_groups(kind: str) -> None:
    world = World()
    texts, groups = nested(world)
    found = world.run(texts, OPTIONS[kind], groups)
    check(found, texts, OPTIONS[kind])
    alone = world.run(texts, OPTIONS[kind])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, alone, strict=True))


BOUNDARIES = {
    "first of all": 0,
    "last of a block": 3,
    "first of a block": 4,
    "last shared by three": 15,
    "first shared by two": 16,
    "last shared": 23,
    "first own": 24,
    "last of the shortest": 25,
}


@pytest.mark.parametrize("needle", BOUNDARIES.values(), ids=BOUNDARIES)
def test_a_needle_at_each_boundary_of_groups(needle: int) -> None:
    world = World()
    texts, groups = nested(world, needle)
    found = world.run(texts, OPTIONS["plain"], groups)
    check(found, texts, OPTIONS["plain"])
    for out, text in zip(found, texts, strict=True):
        expected = text.values[:, needle].repeat_interleave(HEADS // KV_HEADS, 0)
        assert float((out[0] - expected).abs().max()) < 0.1
    # Without the needle's key the comparison above fails: it is seen only through the pool.
    world.backend.pools[0][world.slots(texts[0], needle, needle + 1)] = 0.0
    again = world.run(texts[:1], OPTIONS["plain"])[0]
    if needle < texts[0].start:
        assert float((again - dense(texts[0], OPTIONS["plain"])).abs().max()) > 0.1


@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize(("distance", "seen"), [(8, True), (9, False)])
def test_a_needle_at_the_edge_of_the_window(distance: int, seen: bool, length: int) -> None:
    world = World()
    text = make_text(0, 30, length, blocks(8, 1))
    text.queries[:] = 1.0
    needle = text.keys.shape[1] - 1 - distance
    text.keys[:, needle] = 4.0
    world.fill(text)
    out = world.run([text], OPTIONS["window"])[0]
    check([out], [text], OPTIONS["window"])
    gap = float((out[-1] - text.values[:, needle].repeat_interleave(2, 0)).abs().max())
    assert (gap < 0.1) is seen


def test_long_runs_are_read_in_place_and_scattered_blocks_are_gathered() -> None:
    world = World(num_blocks=800)
    count = SEGMENT_TOKENS // 4
    # A run, backwards; then scattered blocks; the last one unfilled.
    first = make_text(0, 4 * count + 22, 1, [*blocks(count, 200, -1), *blocks(6, 210, 7)])
    second = make_text(1, 4 * count * 2 + 1, 1, [*blocks(count, 300), *blocks(count, 430), 590])
    short = make_text(2, 5, 1, [595, 597])
    texts = [first, short, second]
    for text in texts:
        world.fill(text)
    for options in OPTIONS.values():
        check(world.run(texts, options), texts, options)


def test_a_long_shared_part_is_split_over_threads() -> None:
    world = World()
    root = make_text(0, 1030, 1, [*blocks(257, 1), 300])
    other = make_text(1, 1032, 1, [*blocks(256, 1), 301, 302], root, 1024)
    for text in (root, other):
        world.fill(text)
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            found = world.run([root, other], OPTIONS["sinks"], [PrefixGroup(0, 256, (0, 1))])
            check(found, [root, other], OPTIONS["sinks"])
    finally:
        torch.set_num_threads(threads)


def test_latents_are_keys_and_values_at_once() -> None:
    world = World(layout=KVLayout(1, SIZE, 5, latent=True))
    texts = []
    for slot, (length, queries) in enumerate(((21, 1), (26, 1), (19, 7))):
        text = make_text(slot, length, queries, blocks(7, 1 + 10 * slot))
        text.keys = text.values = text.keys[:1]
        texts.append(text)
        world.fill(text)
    for out, text in zip(world.run(texts, OPTIONS["sinks"]), texts, strict=True):
        assert out.shape[2] == 5
        assert float((out - dense(text, OPTIONS["sinks"], 5)).abs().max()) < 1e-5


@pytest.mark.parametrize(("model", "pool"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_in_bfloat16_to_rounding(model: torch.dtype, pool: torch.dtype) -> None:
    world = World(dtype=pool)
    texts, groups = nested(world)
    chunk = make_text(5, 37, 14, blocks(10, 100))
    world.fill(chunk)
    exact = [dense(text, OPTIONS["plain"]) for text in (*texts, chunk)]
    for text in (*texts, chunk):
        text.queries, text.keys, text.values = (x.to(model) for x in (text.queries, text.keys, text.values))
    for out, expected in zip(world.run([*texts, chunk], OPTIONS["plain"], groups), exact, strict=True):
        assert out.dtype == model
        assert float((out - expected).abs().max()) < 0.03


def test_copies_take_only_what_is_filled() -> None:
    world = World()
    pool = world.backend.pools[0]
    pool[4:8] = 1.0
    world.backend.copy_blocks([BlockCopy(source=1, target=3, filled=3)])
    assert (pool[12:15] == 1.0).all()
    assert pool[15].isnan().all()


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ConfigError, match="'tpu'"):
        backend_class("tpu")
