"""Plugs attention into transformers' models: the backend interface, and the function that every layer calls.

A backend owns the pool of KV blocks. It plans once a step and runs once a layer; the model's own code does the rest.
``route`` sets who handles the layers' calls: the loader routes them to a probe, the runner to ``PagedLayers``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from anaphora.attention.latent import Absorbed, LatentTap
from anaphora.errors import ConfigError, ModelError
from anaphora.types.batch import BlockCopy, PrefixGroup

IMPLEMENTATION = "anaphora"
"""The name under which transformers knows our attention (``attn_implementation``)."""

FLOAT8 = torch.float8_e4m3fn
"""Dtype of a float8 pool: one byte per element, and a scale for each token and head."""

_BACKENDS = {"cpu": "anaphora.attention.cpu:CpuAttention", "cuda": "anaphora.attention.gpu:TritonAttention"}

_WITHOUT_EFFECT = frozenset(("dropout", "position_ids", "use_cache", "position_embeddings", "cache", "past_key_values"))


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one layer caches of a token: keys of ``heads`` × ``key_size`` and values of ``heads`` × ``value_size``.

    With ``latent`` there is one head and the values are the first ``value_size`` elements of the key.
    """

    heads: int
    key_size: int
    value_size: int
    latent: bool = False

    @property
    def width(self) -> int:
        """Elements of one token."""
        return self.heads * (self.key_size + (0 if self.latent else self.value_size))

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token in a pool of ``dtype``.

        In float8 a float32 scale comes with each head's key and value, and the whole is a multiple of 16 bytes.
        """
        if dtype != FLOAT8:
            return self.width * dtype.itemsize
        return -(-(self.width + 4 * self.heads * (1 if self.latent else 2)) // 16) * 16


@dataclass(frozen=True, slots=True, eq=False)
class LayerOptions:
    """How one layer attends. ``window``: a token sees itself and the ``window - 1`` before it.

    ``softcap`` c turns a score s into c·tanh(s/c). ``sinks`` ``[H]`` are scores of a key that has no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class QueryRange(NamedTuple):
    """Rows ``row`` to ``row + length - 1`` of the flat batch: positions from ``start`` on of the sequence in ``slot``.

    ``blocks`` is its block table; it may extend beyond position ``start + length - 1``. ``prompt``: the rows belong
    to a prompt. A backend that sums chunks and single rows in different orders sums even a single prompt row like a
    chunk, so a prompt of which only the last token is computed gets the same logits, to the bit, as one computed whole.
    """

    slot: int
    row: int
    length: int
    start: int
    blocks: Sequence[int]
    prompt: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Where a step's rows belong. ``slot_mapping`` ``[T]`` int64: the token slot of each row in the pool."""

    slot_mapping: Tensor
    queries: tuple[QueryRange, ...]
    groups: tuple[PrefixGroup, ...] = ()


class AttentionBackend(Protocol):
    """Paged attention on one kind of device. Built with ``(layouts, num_blocks, block_size, dtype, device)``."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the filled token slots of blocks, in all layers."""
        ...

    def plan(self, layout: StepLayout) -> None:
        """Set the layout of the next step. The plan may be made here or by the first layer that needs it."""
        ...

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor | None, options: LayerOptions) -> Tensor:
        """Write this layer's keys and values, then attend over the block tables.

        ``query`` ``[H, T, D]``, ``key`` and ``value`` ``[Hkv, T, D]`` (``value`` None: latent); returns ``[T, H, Dv]``.
        """
        ...


def backend_class(device_type: str) -> Callable[..., AttentionBackend]:
    """The backend for a device type such as ``cpu``; imported only when asked for."""
    if device_type not in _BACKENDS:
        raise ConfigError(f"there is no attention for {device_type!r} devices; there is for {', '.join(_BACKENDS)}")
    module, _, name = _BACKENDS[device_type].partition(":")
    backend: Callable[..., AttentionBackend] = getattr(importlib.import_module(module), name)
    return backend


class LayerCalls(Protocol):
    """Handles the attention calls of a model's layers."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """``query`` ``[1, H, T, D]``, ``key`` and ``value`` ``[1, Hkv, T, D]``; returns ``[1, T, H, Dv]``."""
        ...


_calls: ContextVar[LayerCalls] = ContextVar("anaphora_layer_calls")


@contextmanager
def route(calls: LayerCalls) -> Iterator[None]:
    """Send the attention calls of every layer that runs inside to ``calls``."""
    token = _calls.set(calls)
    try:
        yield
    finally:
        _calls.reset(token)


def routed() -> LayerCalls:
    """Returns the LayerCalls that attention calls are routed to in this context."""
    return _calls.get()


def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
    """Call the LayerCalls that calls are routed to; shapes as in ``LayerCalls.attend``."""
    return routed().attend(module, query, key, value, options)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that is registered with transformers."""
    scale = options.pop("scaling", None)
    known = LayerOptions(
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window=options.pop("sliding_window", None),
        softcap=options.pop("softcap", None),
        sinks=options.pop("s_aux", None),
    )
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} passes an attention mask of its own, which paged attention ignores")
    if unknown := sorted(name for name, given in options.items() if not _harmless(name, given)):
        raise ModelError(f"{type(module).__name__} attends with {', '.join(unknown)}, which is not supported")
    return attend(module, query, key, value, known), None


def _harmless(name: str, given: Any) -> bool:
    """Whether an argument can be ignored: not set, known to have no effect, or a request for extra outputs."""
    if name == "is_causal":
        return given is not False
    return given is None or given is False or name in _WITHOUT_EFFECT or name.startswith("output_")


AttentionInterface.register(IMPLEMENTATION, _attention)


class PagedLayers:
    """Handles the layers' calls with a backend; latent layers (those in ``absorbed``) attend in latent space."""

    def __init__(self, backend: AttentionBackend, absorbed: Mapping[int, Absorbed], tap: LatentTap | None) -> None:
        self.backend = backend
        self._absorbed = absorbed
        self._tap = tap

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        layer: int = module.layer_idx
        absorbed = self._absorbed.get(layer)
        if absorbed is None or self._tap is None:
            return self.backend.run(layer, query[0], key[0], value[0], options)[None]
        latents = self._tap.take(layer)[0]
        return absorbed.output(self.backend.run(layer, absorbed.query(query[0]), latents, None, options))[None]
