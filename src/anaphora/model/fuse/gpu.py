"""On a GPU: decoder layers with a third of the launches, by the kernels of ``kernels.py``.

Query, key and value projections become one product, those of gate and up another; what lies between the products is
one kernel each. A part of a layer is replaced only if the layer then gives the same on random numbers, to rounding;
so a family whose code differs keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from anaphora.attention.base import LayerOptions, attend, route
from anaphora.attention.gpu_tiles import next_power_of_2
from anaphora.kernels.triton import norm_rope_silu
from anaphora.kernels.triton.compile_watch import COMPILE_WATCH
from anaphora.model.fuse.parity import close, positions

ROWS = 8
"""Of the batch on which a layer is compared with itself."""


_BASE = ("embed_tokens", "layers", "norm")
"""What a model without its head consists of, where its layers are looked at."""


@torch.no_grad()
@COMPILE_WATCH.expected()
def fuse(base: nn.Module, arguments: Mapping[str, Any], options: Mapping[int, LayerOptions]) -> int:
    """Replace parts of the layers of ``base`` in place; how many were replaced.

    ``arguments`` are what a forward takes beside token ids and positions, ``options`` how each layer attends.
    """
    model: Any = base
    calls = _observe(model, arguments) if all(hasattr(model, name) for name in _BASE) else []
    count = sum(_fuse_norm(module) for module in model.modules())
    for index, call in enumerate(calls):
        layer = model.layers[index]
        following = model.layers[index + 1] if index + 1 < len(calls) else model
        count += call.keeps(layer, _fuse_attention(layer, options[index]))
        count += call.keeps(layer, _fuse_mlp(layer))
        count += call.keeps(layer, _fuse_sums(layer, following))
    return count


# --- What is compared -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """Of a decoder layer: what it was given, what it asked of attention, and what came out."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Tensor
    asked: list[Tensor]

    def keeps(self, layer: nn.Module, undo: Callable[[], None] | None) -> bool:
        """Whether the layer, changed, still does the same; if not, the change is undone."""
        if undo is None:
            return False
        echo = _Echo()
        with route(echo):
            out = layer(*self.args, **self.kwargs)
        given = self.args[0] if self.args else self.kwargs["hidden_states"]
        same = all(close(a, b) for a, b in zip(echo.asked, self.asked, strict=True))
        if same and close(out - given, self.out - given, given):
            return True
        undo()
        return False


@dataclass(eq=False)
class _Echo:
    """Answers the layers' calls with something of query and value, and notes what they were."""

    asked: list[Tensor] = field(default_factory=list)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self.asked += [query.clone(), key.clone(), value.clone()]
        size = min(query.shape[3], value.shape[3])
        answer = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        answer[..., :size] += query[..., :size]
        return answer.transpose(1, 2)


def _observe(model: Any, arguments: Mapping[str, Any]) -> list[_Call]:
    """One pass of a few random tokens; what each layer did in it."""
    calls: list[_Call] = []
    echo = _Echo()

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        calls.append(_Call(args, dict(kwargs), out, list(echo.asked)))
        echo.asked.clear()

    device = model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.embed_tokens.num_embeddings, (1, ROWS), generator=generator).to(device)
    with _hooks([layer.register_forward_hook(note, with_kwargs=True) for layer in model.layers]), route(echo):
        model(tokens, position_ids=positions(model, ROWS).to(device), **arguments)
    return calls if all(isinstance(call.out, Tensor) for call in calls) else []


@contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- What is replaced -------------------------------------------------------------------------------------------------


class FusedNorm:
    """An RMS norm over the last dimension in one kernel, which may take the sum before it along."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._block = next_power_of_2(len(weight))
        self._ready: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self._ready is not None and self._ready[0] is x:
            normed = self._ready[1]
            self._ready = None
            return normed
        return self._launch(x.contiguous(), None)

    def add(self, x: Tensor, residual: Tensor) -> None:
        """``x += residual``, in place; the norm of the sum is kept for the call that brings ``x``."""
        self._ready = (x, self._launch(x, residual))

    def _launch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        out = torch.empty_like(x)
        size = x.shape[-1]
        norm_rope_silu.rms_norm[(x.numel() // size,)](
            x, x if residual is None else residual, out, self.weight, self.eps, size, self._block, residual is not None,
            num_warps=min(16, max(1, self._block // 512)),
        )  # fmt: skip
        return out


def _fuse_norm(module: Any) -> bool:
    """Whether the module is an RMS norm, which is now one kernel."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if not type(module).__name__.endswith("RMSNorm") or eps is None or weight is None or weight.dim() != 1:
        return False
    norm = FusedNorm(weight.detach(), eps)
    sample = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    if not close(norm(sample), module(sample)):
        return False
    module.forward = norm
    return True


def _fuse_attention(layer: Any, options: LayerOptions) -> Callable[[], None] | None:
    """One product for query, key and value; their norms and the rotary embedding in one kernel."""
    module = getattr(layer, "self_attn", None)
    parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
    size = getattr(module, "head_dim", None)
    if module is None or size is None or not all(type(part) is nn.Linear for part in parts):
        return None
    query, key, value = (part.out_features // size for part in parts)
    norms = [getattr(getattr(module, name, None), "forward", None) for name in ("q_norm", "k_norm")]
    normed = all(isinstance(norm, FusedNorm) for norm in norms)
    if key != value or any(norms) != normed or (normed and any(len(norm.weight) != size for norm in norms)):
        return None
    joint = _join(parts)
    if joint is None:
        return None
    weights = [norm.weight for norm in norms] if normed else [joint.weight, joint.weight]
    group = min(8, next_power_of_2(query + key))

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> tuple[Tensor, None]:
        rows = joint(hidden_states)[0]
        cos, sin = position_embeddings
        norm_rope_silu.norm_rope[(len(rows), -(-(query + key) // group))](
            rows, cos, sin, *weights, norms[0].eps if normed else 0.0, rows.stride(0), *cos.stride()[-2:],
            query, query + key, size, next_power_of_2(size // 2), normed, group,
        )  # fmt: skip
        heads = rows.view(len(rows), query + 2 * key, size).transpose(0, 1)[None]
        parted = heads[:, :query], heads[:, query : query + key], heads[:, query + key :]
        out = attend(module, *parted, options)
        return module.o_proj(out.reshape(1, len(rows), -1)), None

    return _replace(module, forward)


def _fuse_mlp(layer: Any) -> Callable[[], None] | None:
    """One product for gate and up, and their SiLU and product in one kernel."""
    module = getattr(layer, "mlp", None)
    gate, up, down = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    if module is None or not all(type(part) is nn.Linear for part in (gate, up, down)):
        return None
    joint = _join([gate, up])
    if joint is None:
        return None
    size = gate.out_features
    block = min(1024, next_power_of_2(size))

    def forward(x: Tensor) -> Tensor:
        both = joint(x)
        active = both.new_empty(*both.shape[:-1], size)
        norm_rope_silu.silu_and_mul[(both.numel() // (2 * size), -(-size // block))](both, active, size, block)
        out: Tensor = down(active)
        return out

    return _replace(module, forward)


def _fuse_sums(layer: Any, following: Any) -> Callable[[], None] | None:
    """The sums of the residual stream together with the norms behind them, that of what is ``following`` too."""
    names = ("input_layernorm", "post_attention_layernorm")
    first, second = (getattr(getattr(layer, name, None), "forward", None) for name in names)
    third = getattr(getattr(following, names[0], None) or getattr(following, "norm", None), "forward", None)
    if not all(isinstance(norm, FusedNorm) for norm in (first, second, third)):
        return None
    if sum(type(child).__name__.endswith("RMSNorm") for child in layer.children()) != len(names):
        return None
    attention, mlp = layer.self_attn, layer.mlp

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attended: Tensor = attention(hidden_states=first(hidden_states), **kwargs)[0]
        second.add(attended, hidden_states)
        out = mlp(second(attended))
        out = out[0] if isinstance(out, tuple) else out
        third.add(out, attended)
        return out

    return _replace(layer, forward)


def _replace(module: Any, forward: Callable[..., Any]) -> Callable[[], None]:
    """Give ``module`` another forward; returns what takes it away again."""
    module.forward = forward
    return lambda: delattr(module, "forward")


@dataclass(frozen=True, eq=False)
class _Joint:
    """Several linear layers of the same input as one; theirs are views of its weights."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def _join(layers: list[Any]) -> _Joint | None:
    biases = [layer.bias for layer in layers]
    if len({layer.in_features for layer in layers}) > 1 or len({bias is None for bias in biases}) > 1:
        return None
    return _Joint(_shared([layer.weight for layer in layers]), None if biases[0] is None else _shared(biases))


def _shared(parameters: list[Any]) -> Tensor:
    """One tensor of all of them, one behind the other; each becomes a view of its part."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
