"""Paged attention on the CPU: the reference for the others, and fast where torch's flash kernel is.

The pool of a layer is one matrix, a row a token slot: its keys, then its values (latents: keys only, which hold the
values). Chunks of several tokens attend to what was there before and, causally, to themselves; single tokens attend
in the parts that ``parts.py`` plans. Windows and softcap go through query blocks with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anaphora.attention.base import KVLayout, LayerOptions, QueryRange, StepLayout
from anaphora.attention.parts import DecodePlan, Part, Stretch, Tail, additive, plan_decode
from anaphora.attention.shared import attend, merge
from anaphora.types import BlockCopy

QUERY_BLOCK = 256
"""Rows of a chunk that go through a masked product at once."""

MIN_SPLIT_TOKENS = 256
"""Keys are split over the threads down to this many."""


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
        self._plans: dict[tuple[int | None, torch.dtype], DecodePlan] = {}
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
        self._plans.clear()
        self._masks.clear()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        assert self._layout is not None
        layout, pool = self._layouts[layer], self._pools[layer]
        new = (key,) if value is None else (key, value)
        rows = torch.cat([x.transpose(0, 1).flatten(1) for x in new], dim=1)
        pool.index_copy_(0, self._layout.slot_mapping, rows.to(pool.dtype))
        out = query.new_zeros(query.shape[1], query.shape[0], layout.value_size)
        if self._decodes:
            dtype = torch.promote_types(query.dtype, pool.dtype)
            plan = self._decode_plan(options.window, dtype)
            single = self._decode(layout, plan, _pick(query, plan.rows).to(dtype), pool, options).to(query.dtype)
            if plan.rows is None:
                return single
            out.index_copy_(0, plan.rows, single)
        for chunk, keys in self._chunks:
            span = slice(chunk.row, chunk.row + chunk.length)
            tokens = keys.read(pool, self._block_size)[: chunk.start + chunk.length]
            out[span] = self._chunk(layout, chunk.start, query[:, span], tokens, options)
        return out

    def _table(self, query: QueryRange) -> Sequence[int]:
        return query.blocks[: -(-(query.start + query.length) // self._block_size)]

    def _decode_plan(self, window: int | None, dtype: torch.dtype) -> DecodePlan:
        plan = self._plans.get((window, dtype))
        if plan is None:
            assert self._layout is not None
            plan = self._plans[window, dtype] = plan_decode(self._layout, self._block_size, window, dtype)
        return plan

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

    def _decode(self, layout: KVLayout, plan: DecodePlan, query: Tensor, pool: Tensor, options: LayerOptions) -> Tensor:
        """``query`` ``[H, R, D]``, a row a sequence; ``[R, H, Dv]`` float32 or the dtype of ``query``."""
        found = [(p.rows, p.level, *self._part(layout, p, _pick(query, p.rows), pool, options)) for p in plan.parts]
        if (tail := plan.tail) is not None:
            found.append((tail.rows, tail.level, *self._tail(layout, tail, _pick(query, tail.rows), pool, options)))
        if len(found) == 1 and len(found[0][2]) == 1 and options.sinks is None:
            merged = found[0][2][0]
        else:
            merged = merge(*_stacked(found, plan.levels, query.shape[1]), options.sinks)
        return merged[..., : layout.value_size].transpose(0, 1)

    def _part(
        self, layout: KVLayout, part: Part, query: Tensor, pool: Tensor, options: LayerOptions
    ) -> tuple[Tensor, Tensor]:
        """All rows of a part over the same keys, cut in P pieces: ``[P, H, R, D]`` and ``[P, H, R]``."""
        tokens = part.keys.read(pool, self._block_size).to(query.dtype)
        heads, rows, size = query.shape
        pieces = 1 if part.mask is not None else _pieces(layout.heads, len(tokens))
        keys, values = _heads(layout, tokens.view(pieces, -1, tokens.shape[1]))
        flat = query.reshape(1, layout.heads, -1, size).expand(pieces, -1, -1, -1)
        mask = None if part.mask is None else part.mask.repeat(heads // layout.heads, 1)
        out, logs = attend(flat, keys, values, options, mask=mask)
        logs = logs.reshape(pieces, heads, rows)
        if part.blind is not None:
            logs = logs.masked_fill(part.blind, -torch.inf)
        return out.reshape(pieces, heads, rows, -1), logs

    def _tail(
        self, layout: KVLayout, tail: Tail, query: Tensor, pool: Tensor, options: LayerOptions
    ) -> tuple[Tensor, Tensor]:
        """Each row over its own gathered blocks: ``[1, H, R, D]`` and ``[1, H, R]``."""
        width = pool.shape[1]
        blocks = pool.view(-1, self._block_size * width).index_select(0, tail.index).view(-1, width)
        blocks.index_fill_(0, tail.unread, 0)
        heads, rows, size = query.shape
        keys, values = _heads(layout, blocks.to(query.dtype).view(rows, -1, width))
        own = query.view(layout.heads, -1, rows, size).permute(2, 0, 1, 3)
        out, logs = attend(own, keys, values, options, mask=tail.mask)
        outs = out.permute(1, 2, 0, 3).reshape(1, heads, rows, -1)
        return outs, logs.permute(1, 2, 0).reshape(1, heads, rows)


def _stacked(found: list[tuple[Tensor | None, int, Tensor, Tensor]], levels: int, rows: int) -> tuple[Tensor, Tensor]:
    """All parts of ``rows`` rows as the merge takes them; what a row does not have is -inf and zeros there."""
    if all(members is None for members, *_ in found):
        return torch.cat([out for *_, out, _ in found]), torch.cat([log for *_, log in found])
    pieces = max(len(out) for *_, out, _ in found)
    _, _, out, log = found[0]
    outs = out.new_zeros(levels * pieces, out.shape[1], rows, out.shape[3])
    logs = log.new_full((levels * pieces, log.shape[1], rows), -torch.inf)
    for members, level, out, log in found:
        place = slice(level * pieces, level * pieces + len(out))
        if members is None:
            outs[place], logs[place] = out, log
        else:
            outs[place].index_copy_(2, members, out)
            logs[place].index_copy_(2, members, log)
    return outs, logs


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


def _pick(query: Tensor, rows: Tensor | None) -> Tensor:
    return query if rows is None else query[:, rows]


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
