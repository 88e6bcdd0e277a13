"""Paged attention on the CPU: the reference for the others, and fast where torch's flash kernel is.

The pool of a layer is one matrix, a row a token slot: its keys, then its values (latents: keys only, which hold the
values). Chunks of several tokens attend to what was there before and, causally, to themselves, with windows and
softcap in query blocks with a mask. Single tokens attend to what they share in products that they share, as
``parts.py`` plans it, and to what is their own in a compiled kernel (``native.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, QueryRange, StepLayout
from anaphora.attention.parts import DecodePlan, Part, Stretch, additive, plan_decode
from anaphora.attention.rows import RowAttention, RowWriter
from anaphora.attention.shared import attend, merge
from anaphora.types import BlockCopy

QUERY_BLOCK = 256
"""Rows of a chunk that go through a masked product at once."""

MIN_SPLIT_TOKENS = 256
"""Keys are split over the threads down to this many."""

Shared = tuple[Tensor, Tensor]
"""Outputs of rows that attend together, and their logs."""


class CpuAttention:
    """AttentionBackend on the CPU. ``dtype`` is that of the pool; products are in the wider of it and the model's."""

    def __init__(
        self, layouts: Sequence[KVLayout], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layouts = layouts
        self._block_size = block_size
        # Not filled: the system gives memory to a page when it is first written.
        self._pools = [torch.empty(num_blocks * block_size, x.width, dtype=dtype, device=device) for x in layouts]
        self._layout: StepLayout | None = None
        self._chunks: list[tuple[QueryRange, Stretch]] = []
        self._decodes = False
        self._complete = False  # whether every row of the batch is some sequence's
        self._writer: RowWriter | None = None
        self._plans: dict[tuple[int | None, torch.dtype], tuple[DecodePlan, RowAttention]] = {}
        self._masks: dict[tuple[int, int, int, int | None, torch.dtype], Tensor] = {}

    @property
    def pools(self) -> list[Tensor]:
        """One ``[token slots, width]`` a layer."""
        return self._pools

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        size = self._block_size
        for copy in copies:
            source, target = copy.source * size, copy.target * size
            for pool in self._pools:
                pool[target : target + copy.filled] = pool[source : source + copy.filled]

    def plan(self, layout: StepLayout) -> None:
        self._layout = layout
        self._chunks = [(q, Stretch.of(self._table(q))) for q in layout.queries if q.length > 1]
        self._decodes = any(q.length == 1 for q in layout.queries)
        self._complete = sum(q.length for q in layout.queries) == len(layout.slot_mapping)
        self._writer = RowWriter(layout.slot_mapping)
        self._plans.clear()
        self._masks.clear()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        assert self._layout is not None
        assert self._writer is not None
        layout, pool = self._layouts[layer], self._pools[layer]
        self._writer.write(layout, pool, key, value)
        make = query.new_empty if self._complete else query.new_zeros
        out = make(query.shape[1], query.shape[0], layout.value_size)
        if self._decodes:
            plan, rows = self._decode_plan(options.window, torch.promote_types(query.dtype, pool.dtype))
            shared = [self._part(layout, part, query, pool, options) for part in plan.parts]
            rows.attend(layout, pool, query, shared, options, out)
        for chunk, keys in self._chunks:
            span = slice(chunk.row, chunk.row + chunk.length)
            tokens = keys.read(pool, self._block_size)[: chunk.start + chunk.length]
            out[span] = self._chunk(layout, chunk.start, query[:, span], tokens, options)
        return out

    def _table(self, query: QueryRange) -> Sequence[int]:
        return query.blocks[: -(-(query.start + query.length) // self._block_size)]

    def _decode_plan(self, window: int | None, dtype: torch.dtype) -> tuple[DecodePlan, RowAttention]:
        found = self._plans.get((window, dtype))
        if found is None:
            assert self._layout is not None
            plan = plan_decode(self._layout, self._block_size, window, dtype)
            found = self._plans[window, dtype] = (plan, RowAttention(plan, self._block_size))
        return found

    # --- Several tokens of one sequence ---------------------------------------------------------------------------

    def _chunk(self, layout: KVLayout, start: int, query: Tensor, tokens: Tensor, options: LayerOptions) -> Tensor:
        """``query`` ``[H, M, D]`` at positions from ``start`` on, ``tokens`` ``[start + M, W]``; ``[M, H, Dv]``."""
        query, tokens = _common(query, tokens)
        keys, values = _heads(layout, tokens)
        query = query.reshape(layout.heads, -1, *query.shape[1:])
        if options.window is not None or options.softcap:
            outs, logs = self._chunk_masked(start, query, keys, values, options)
            parts = [(outs, logs)]
        else:
            own = (query, _over(keys[:, start:], query), _over(values[:, start:], query))
            parts = [attend(*own, options, causal=True)]
            if start:
                flat = query.flatten(1, 2)[:, None]
                out, logs = attend(flat, keys[:, None, :start], values[:, None, :start], options)
                parts.append((out.view(*query.shape[:3], -1), logs.view(query.shape[:3])))
        if len(parts) == 1 and options.sinks is None:
            merged = parts[0][0].flatten(0, 1)
        else:
            outs = torch.stack([out.flatten(0, 1) for out, _ in parts])
            merged = merge(outs, torch.stack([logs.flatten(0, 1) for _, logs in parts]), options.sinks)
        return merged[..., : layout.value_size].transpose(0, 1)

    def _chunk_masked(
        self, start: int, query: Tensor, keys: Tensor, values: Tensor, options: LayerOptions
    ) -> tuple[Tensor, Tensor]:
        """``query`` ``[Hkv, G, M, D]`` in blocks, each over the keys that any of its rows sees."""
        outs, logs = [], []
        for begin in range(0, query.shape[2], QUERY_BLOCK):
            block = query[:, :, begin : begin + QUERY_BLOCK]
            position = start + begin
            end = position + block.shape[2]
            low = max(0, position + 1 - options.window) if options.window else 0
            mask = self._mask(position - low, block.shape[2], end - low, options.window, query.dtype)
            out, log = attend(
                block, _over(keys[:, low:end], block), _over(values[:, low:end], block), options, mask=mask
            )
            outs.append(out)
            logs.append(log)
        return torch.cat(outs, 2), torch.cat(logs, 2)

    def _mask(self, offset: int, rows: int, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Added to scores ``[rows, keys]`` where row r stands at key ``offset + r``."""
        name = (offset, rows, keys, window, dtype)
        if name not in self._masks:
            distance = torch.arange(offset, offset + rows)[:, None] - torch.arange(keys)
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            self._masks[name] = additive(seen, dtype)
        return self._masks[name]

    # --- Single tokens of many sequences --------------------------------------------------------------------------

    def _part(self, layout: KVLayout, part: Part, query: Tensor, pool: Tensor, options: LayerOptions) -> Shared:
        """All rows of a part over the same keys, cut in P pieces: ``[P, Hkv, G · R, Dv]`` and ``[P, Hkv, G · R]``."""
        if part.rows is not None:
            query = query[:, part.rows]
        query, tokens = _common(query, part.keys.read(pool, self._block_size))
        group = query.shape[0] // layout.heads
        pieces = 1 if part.mask is not None else _pieces(layout.heads, len(tokens))
        keys, values = _heads(layout, tokens.view(pieces, -1, tokens.shape[1]))
        flat = query.reshape(1, layout.heads, -1, query.shape[2]).expand(pieces, -1, -1, -1)
        mask = None if part.mask is None else part.mask.repeat(group, 1)
        out, logs = attend(flat, keys, values, options, mask=mask)
        return out, logs if part.blind is None else logs.masked_fill(part.blind.repeat(group), -torch.inf)


def _heads(layout: KVLayout, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values ``[..., Hkv, N, D]`` of ``tokens`` ``[..., N, W]``, as views; latents are both."""
    if layout.latent:
        keys = tokens.unsqueeze(-3)
        return keys, keys
    cut = layout.heads * layout.key_size
    shape = tokens.shape[:-1]
    keys = tokens[..., :cut].view(*shape, layout.heads, layout.key_size)
    values = tokens[..., cut:].view(*shape, layout.heads, layout.value_size)
    return keys.transpose(-3, -2), values.transpose(-3, -2)


def _over(x: Tensor, query: Tensor) -> Tensor:
    """``[Hkv, N, D]`` seen by each of the heads that share it, as ``query`` ``[Hkv, G, M, D]`` has them."""
    return x[:, None].expand(-1, query.shape[1], -1, -1)


def _common(query: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider dtype of the two."""
    dtype = torch.promote_types(query.dtype, tokens.dtype)
    return query.to(dtype), tokens.to(dtype)


def _pieces(heads: int, tokens: int) -> int:
    """In how many equal pieces the keys keep all threads busy."""
    threads = torch.get_num_threads()
    for pieces in range(1, threads + 1):
        if tokens % pieces == 0 and tokens // pieces >= MIN_SPLIT_TOKENS and heads * pieces % threads == 0:
            return pieces
    return 1
