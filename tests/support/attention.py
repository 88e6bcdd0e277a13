"""Steps of paged attention with needles at every boundary, a pool full of NaN, and the expected output in float64."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from anaphora.attention.base import AttentionBackend, KVLayout, LayerOptions, QueryRange, StepLayout
from anaphora.types.batch import PrefixGroup

NEEDLE = 8.0
"""Size of the values at the needles, where all others are of size 1."""


@dataclass(frozen=True)
class Shape:
    """The shape of a layer: ``heads`` query heads over the KV heads of ``layout``."""

    layout: KVLayout
    heads: int
    block_size: int = 16

    @property
    def group(self) -> int:
        return self.heads // self.layout.heads


@dataclass(frozen=True)
class Known:
    """A sequence: positions 0 to ``cached`` - 1 are in the pool, ``new`` more come with the step.

    The first ``shared`` blocks are those of sequence ``parent``.
    """

    cached: int
    new: int = 1
    parent: int | None = None
    shared: int = 0


@dataclass
class Step:
    """One step, ready to run: ``keys`` and ``values`` hold whole sequences ``[Hkv, N, D]`` in float64."""

    shape: Shape
    options: LayerOptions
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)
    queries: list[QueryRange] = field(default_factory=list)
    needles: list[set[int]] = field(default_factory=list)
    query: Tensor = field(default_factory=lambda: torch.empty(0))

    def slot(self, sequence: int, position: int) -> int:
        size = self.shape.block_size
        return self.tables[sequence][position // size] * size + position % size

    def expected(self, dropped: tuple[int, int] | None = None) -> Tensor:
        """``[T, H, Dv]`` float64; ``dropped`` (sequence, position) is a key that no row sees."""
        rows = [self._rows(index, dropped) for index in range(len(self.queries))]
        return torch.cat(rows)

    def _rows(self, index: int, dropped: tuple[int, int] | None) -> Tensor:
        query, options = self.queries[index], self.options
        own = self.query[:, query.row : query.row + query.length].double()
        end = query.start + query.length
        keys, values = (
            x[:, :end].repeat_interleave(self.shape.group, 0) for x in (self.keys[index], self.values[index])
        )
        scores = own @ keys.transpose(1, 2) * options.scale
        if options.softcap:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        row, key = torch.arange(query.start, end)[:, None], torch.arange(end)
        hidden = key > row
        if options.window is not None:
            hidden |= key <= row - options.window
        if dropped is not None and dropped[0] == index:
            hidden = hidden | (key == dropped[1])
        scores = scores.masked_fill(hidden, -torch.inf)
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks.double().cpu()[:, None, None].expand(-1, query.length, 1)), 2)
        weights = scores.softmax(-1)[..., :end]
        return (weights @ values).transpose(0, 1)


def make_step(shape: Shape, sequences: Sequence[Known], options: LayerOptions, seed: int = 0) -> Step:
    """Random keys and values; at each boundary a value that no result can do without."""
    generator = torch.Generator().manual_seed(seed)
    step = Step(shape, options)
    size, layout = shape.block_size, shape.layout
    free = (
        1 + torch.randperm(sum(-(-(s.cached + s.new) // size) for s in sequences) + 4, generator=generator)
    ).tolist()
    row = 0
    for index, sequence in enumerate(sequences):
        total = sequence.cached + sequence.new
        keys = torch.randn(layout.heads, total, layout.key_size, generator=generator)
        values = torch.randn(layout.heads, total, layout.value_size, generator=generator)
        needles = boundaries(sequence, size, options.window)
        for position in needles:
            values[:, position] *= NEEDLE
        if layout.latent:
            values = keys[..., : layout.value_size]
            for position in needles:
                values[:, position] *= NEEDLE / 4
        table: list[int] = []
        if sequence.parent is not None:
            same = sequence.shared * size
            table = step.tables[sequence.parent][: sequence.shared]
            keys[:, :same] = step.keys[sequence.parent][:, :same]
            values[:, :same] = step.values[sequence.parent][:, :same]
        table = table + [free.pop() for _ in range(-(-total // size) - len(table))]
        step.queries.append(QueryRange(index, row, sequence.new, sequence.cached, table))
        step.keys.append(keys)
        step.values.append(values)
        step.tables.append(table)
        step.needles.append(needles)
        row += sequence.new
    step.query = torch.randn(shape.heads, row, layout.key_size, generator=generator)
    return step


def boundaries(sequence: Known, size: int, window: int | None) -> set[int]:
    """First and last of some blocks, last shared and first own position, the window's edge, the last position."""
    last = sequence.cached + sequence.new - 1
    found = {0, size - 1, size, last, last // size * size}
    if sequence.parent is not None:
        found |= {sequence.shared * size - 1, sequence.shared * size}
    if window is not None:
        found |= {last + 1 - window, last - window}
    return {position for position in found if 0 <= position <= last}


def run(
    step: Step, backend: AttentionBackend, pool: Tensor, dtype: torch.dtype, groups: Sequence[PrefixGroup] = ()
) -> Tensor:
    """Fill ``pool`` ``[slots, width]`` with what is cached and not-a-number elsewhere, and run the step once."""
    poison(pool)
    for index, query in enumerate(step.queries):
        for position in range(query.start):
            vectors = [step.keys[index][:, position]]
            if not step.shape.layout.latent:
                vectors.append(step.values[index][:, position])
            pool[step.slot(index, position)] = token_row(vectors, pool)
    slots = [step.slot(i, q.start + at) for i, q in enumerate(step.queries) for at in range(q.length)]
    new = [
        torch.cat([x[i][:, q.start : q.start + q.length] for i, q in enumerate(step.queries)], 1).to(pool.device, dtype)
        for x in (step.keys, step.values)
    ]
    backend.plan(StepLayout(torch.tensor(slots, device=pool.device), tuple(step.queries), tuple(groups)))
    value = None if step.shape.layout.latent else new[1]
    with poisoned():
        return backend.run(0, step.query.to(pool.device, dtype), new[0], value, step.options)


def round_to_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter round float32 to float8 as a GPU does: it loses the carry up to a power of two."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(target) != "fp8e4nv":
            return convert(data, source, target, mode)
        return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def poison(pool: Tensor) -> None:
    """Fill a pool with not-a-number; one in float8 is bytes, and a byte of ones is none either."""
    pool.fill_(0xFF if pool.dtype == torch.uint8 else torch.nan)


def token_row(vectors: Sequence[Tensor], pool: Tensor) -> Tensor:
    """What ``pool`` holds of a token with these ``[heads, size]``: in float8 the elements, then a scale a head."""
    if pool.dtype != torch.uint8:
        return torch.cat([each.flatten() for each in vectors]).to(pool)
    scales = [scale_of(each) for each in vectors]
    elements = [
        (each.float() / scale[:, None]).to(torch.float8_e4m3fn) for each, scale in zip(vectors, scales, strict=True)
    ]
    row = torch.full((pool.shape[1],), 0xFF, dtype=torch.uint8)
    parts = torch.cat([each.flatten().view(torch.uint8) for each in (*elements, *scales)])
    row[: len(parts)] = parts
    return row.to(pool.device)


def scale_of(vectors: Tensor) -> Tensor:
    """Of vectors ``[..., size]`` in float8: the largest element becomes 448."""
    return vectors.float().abs().amax(-1).clamp(min=1e-20) / 448


def read_row(row: Tensor, layout: KVLayout) -> tuple[Tensor, Tensor]:
    """Key and value ``[heads, size]`` in float64 of a token in a float8 pool, whose ``row`` is bytes."""
    row = row.cpu()
    elements = row[: layout.width].view(torch.float8_e4m3fn).double()
    count = layout.heads * (1 if layout.latent else 2)
    scales = row[layout.width : layout.width + 4 * count].view(torch.float32).double()
    edge = layout.heads * layout.key_size
    keys = elements[:edge].view(layout.heads, -1) * scales[: layout.heads, None]
    if layout.latent:
        return keys, keys[:, : layout.value_size]
    return keys, elements[edge:].view(layout.heads, -1) * scales[layout.heads :, None]


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, uninitialised tensors hold NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(found: Tensor, expected: Tensor) -> float:
    """The worst relative error of a row and head; not-a-number counts as infinite."""
    found = found.double().cpu()
    worst = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    return worst if worst == worst else float("inf")
