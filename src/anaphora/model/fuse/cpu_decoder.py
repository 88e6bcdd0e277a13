"""Fuses all decoder layers of a model into one module on a CPU with AMX: a step is one call of ``decoder_amx.py``.

Only where every layer is of the usual kind and passes the parity check; other models keep their own code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anaphora.attention.base import KVLayout, LayerOptions, PagedLayers, QueryRange, StepLayout, routed
from anaphora.attention.cpu import CpuAttention
from anaphora.kernels.cpu import decoder_amx, gemm_amx, launch
from anaphora.kernels.cpu.amx import TILE_CONFIGS
from anaphora.model.fuse.packed_linear import Memory, pack
from anaphora.model.fuse.parity import Call, observable, observe

SAMPLE_ROWS = 40
"""Sample tokens of the parity check: more rows than the kernel's row group, and not a multiple of it."""


@torch.no_grad()
def fuse(base: nn.Module, options: Mapping[int, LayerOptions], layouts: Sequence[KVLayout]) -> bool:
    """Replaces the layers of ``base`` by one module, in place; returns whether it did.

    ``options`` and ``layouts`` are how each layer attends and what it caches.
    """
    model: Any = base
    if not observable(base):
        return False
    layers = list(model.layers)
    chosen = [options[index] for index in range(len(layouts))]
    if len(layers) != len(layouts) or any(x.sinks is not None for x in chosen):
        return False
    if not all(map(_usual, layers)) or len({_shape(layer) for layer in layers}) > 1:
        return False
    fused = FusedDecoder(layers[0], chosen)
    if not _matches(model, fused, layouts):
        return False
    for index, layer in enumerate(layers):
        fused.put(index, layer)
        for parameter in layer.parameters():  # so that at most one layer is held twice
            parameter.data = parameter.data.new_empty(0)
    model.layers = nn.ModuleList([fused])
    return True


def _usual(layer: Any) -> bool:
    """Whether the layer has the parts that the kernel knows, in bfloat16, and of sizes that fill tiles."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    linear: list[Any] = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    linear += [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    inner = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if any(type(part) is not nn.Linear or part.weight.dtype != torch.bfloat16 for part in linear):
        return False
    if any(part.bias is not None for part in linear[4:]) or len({part.bias is None for part in linear[:3]}) > 1:
        return False
    sizes = [size for part in linear for size in part.weight.shape]
    head = getattr(attention, "head_dim", 0)
    if head not in range(32, 257, 32) or any(size % 32 for size in sizes) or (inner[0] is None) != (inner[1] is None):
        return False
    return all(hasattr(norm, "variance_epsilon") for norm in [*norms, *(x for x in inner if x is not None)])


def _shape(layer: Any) -> tuple[Any, ...]:
    """The shape of a layer; it must be the same in all layers."""
    attention, mlp = layer.self_attn, layer.mlp
    linear = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj)
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [x for x in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)) if x is not None]
    return *(part.weight.shape for part in linear), *{norm.variance_epsilon for norm in norms}, len(norms)


def _matches(model: Any, fused: FusedDecoder, layouts: Sequence[KVLayout]) -> bool:
    """The parity check: each layer against the fused decoder in its place, with real attention over a small pool."""
    size = 16
    blocks = range(1, 1 + -(-SAMPLE_ROWS // size))
    backend = CpuAttention(layouts, blocks.stop, size, torch.bfloat16, torch.device("cpu"))
    slots = torch.arange(size, size + SAMPLE_ROWS)
    backend.plan(StepLayout(slots, (QueryRange(0, 0, SAMPLE_ROWS, 0, blocks),)))
    layers = list(model.layers)
    calls = observe(model, {"use_cache": False}, layers, PagedLayers(backend, {}, None), SAMPLE_ROWS)
    return all(len(calls[layer]) == 1 and fused.matches(index, calls[layer][0]) for index, layer in enumerate(layers))


class FusedDecoder(nn.Module):
    """All layers as one module. Takes what a layer takes and returns the last layer's hidden states."""

    def __init__(self, layer: Any, options: Sequence[LayerOptions]) -> None:
        """For layers of the shape of ``layer``, which passes ``_usual``; ``put`` then adds their weights."""
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._options = options
        self._hidden_size = attention.q_proj.in_features
        self._inner_size = mlp.gate_proj.out_features
        self.head_size = attention.head_dim
        self._heads = attention.q_proj.out_features // self.head_size
        self._kv_heads = attention.k_proj.out_features // self.head_size
        self._layers = np.zeros(len(options), decoder_amx.LAYER)
        self._kept: list[list[Tensor]] = [[] for _ in options]
        given = {
            "hidden_size": self._hidden_size,
            "inner_size": self._inner_size,
            "heads": self._heads,
            "kv_heads": self._kv_heads,
            "head_size": self.head_size,
            "tiles": TILE_CONFIGS.ctypes.data,
            "eps": layer.input_layernorm.variance_epsilon,
        }
        self._memory = Memory()
        brought = launch.fields_from(decoder_amx.DECODE, "phases")[:-1]
        self._call = launch.Call(decoder_amx.decode, decoder_amx.DECODE, brought, given)

    def put(self, index: int, layer: Any) -> None:
        """Packs the weights of a layer; None drops them."""
        found = {} if layer is None else _weights(layer)
        self._kept[index] = [weight for weight in found.values() if weight is not None]
        for name, weight in found.items():
            self._layers[index][name] = 0 if weight is None else weight.data_ptr()

    def matches(self, index: int, call: Call) -> bool:
        """Whether this module, in place of layer ``index``, reproduces the recorded call of that layer."""
        angles = call.kwargs.get("position_embeddings", ())
        if (
            not call.args
            or not angles
            or any(x.dtype != torch.bfloat16 or x.shape[-1] != self.head_size for x in angles)
        ):
            return False
        self.put(index, call.module)
        try:
            return call.matches(lambda hidden, *_, **__: self.run(hidden, angles, range(index, index + 1)))
        finally:
            self.put(index, None)

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        """``hidden_states`` ``[1, T, hidden]`` through all layers, which attend where calls are routed to."""
        return self.run(hidden_states, position_embeddings, range(len(self._layers)))

    def run(self, hidden_states: Tensor, angles: tuple[Tensor, Tensor], layers: range) -> Tensor:
        """Through some of the layers."""
        rows, wide = hidden_states.shape[1], self._heads * self.head_size
        padded = -(-rows // gemm_amx.GROUP_ROWS) * gemm_amx.GROUP_ROWS
        hidden = torch.empty(1, rows, self._hidden_size, dtype=torch.bfloat16)
        hidden.copy_(hidden_states)
        cosines, sines = (x.expand(1, rows, -1).contiguous() for x in angles)
        phases = np.zeros((len(layers) * decoder_amx.PHASES, decoder_amx.PHASE_BYTES // 8), np.int64)
        scratch = decoder_amx.scratch_bytes(self.head_size)
        workers = launch.threads()
        sizes = (self._hidden_size, wide, wide, self._inner_size)
        normed, query, attended, active, scratches = self._memory.addresses(
            *(2 * padded * size for size in sizes), workers * scratch
        )
        calls = routed()
        assert isinstance(calls, PagedLayers)
        assert isinstance(calls.backend, CpuAttention)
        attends, token_slots = calls.backend.records(layers, self._options, self._heads, query, attended)
        self._call(
            workers, phases.ctypes.data, self._layers.ctypes.data + layers.start * self._layers.itemsize,
            attends.ctypes.data, len(layers), rows, hidden.data_ptr(), normed, query, attended, active,
            cosines.data_ptr(), sines.data_ptr(), token_slots, scratches, scratch,
        )  # fmt: skip
        return hidden


def _weights(layer: Any) -> dict[str, Tensor | None]:
    """The weights whose addresses a ``decoder_amx.LAYER`` record holds, by field."""

    def floats(part: Any) -> Tensor | None:
        return None if part is None else part.detach().float().contiguous()

    attention, mlp = layer.self_attn, layer.mlp
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    biases = [part.bias for part in qkv if part.bias is not None]
    halves = [part.weight.view(-1, 16, part.in_features) for part in (mlp.gate_proj, mlp.up_proj)]
    query_norm, key_norm = (getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm"))
    return {
        "input_norm": floats(layer.input_layernorm.weight),
        "qkv": pack(torch.cat([part.weight for part in qkv])),
        "qkv_bias": floats(torch.cat(biases) if biases else None),
        "query_norm": floats(query_norm),
        "key_norm": floats(key_norm),
        "out": pack(attention.o_proj.weight),
        "out_bias": floats(attention.o_proj.bias),
        "post_norm": floats(layer.post_attention_layernorm.weight),
        "gate_up": pack(torch.stack(halves, 1).flatten(0, 2)),
        "down": pack(mlp.down_proj.weight),
    }
