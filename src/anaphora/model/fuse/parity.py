"""The parity check: a part of a model is replaced only if the outputs match those of transformers' own code.

    calls = observe(base, arguments, modules, attention, rows)    one pass of sample tokens
    replace_forward(module, forward, calls[layer])                replaces, repeats the calls, and keeps or restores

Every fused kernel gets into a model through this file, so a family whose code differs keeps its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anaphora.attention.base import LayerCalls, LayerOptions, route

logger = logging.getLogger(__name__)


def close(found: Tensor, expected: Tensor, residual: Tensor | None = None) -> bool:
    """Whether rows (the last dimension) are equal to within rounding on average, and each to three times that.

    ``residual`` was added to both and subtracted again, so its rounding is in both. Rows are compared one by one,
    since some tokens have hidden states a thousand times as large as others.
    """
    step = torch.finfo(expected.dtype).eps
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    gap = (found.float() - expected.float()).norm(dim=-1)
    allowed = max(3 * step, 1e-5) * expected.float().norm(dim=-1)
    if residual is not None:
        allowed = allowed + 0.75 * step * residual.float().norm(dim=-1)
    ratio = gap / allowed.clamp(min=torch.finfo(torch.float32).tiny)
    return bool(ratio.mean() <= 1 and ratio.max() <= 3)


def positions(model: Any, rows: int) -> Tensor:
    """``[1, rows]`` over the whole context length: some models rotate or scale differently at large positions."""
    length = int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or rows)
    return torch.linspace(0, length - 1, rows, dtype=torch.float64).long()[None]


@dataclass(eq=False)
class EchoAttention:
    """Returns a mix of value and query from attention calls, and keeps copies of query, key and value in ``seen``."""

    seen: list[Tensor] = field(default_factory=list)

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """Shapes as in ``LayerCalls.attend``."""
        self.seen += [query.clone(), key.clone(), value.clone()]
        size = min(query.shape[3], value.shape[3])
        answer = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        answer[..., :size] += query[..., :size]
        return answer.transpose(1, 2).contiguous()


@dataclass(eq=False)
class Call:
    """One call of a module: its inputs, its output, and what it passed to ``attention`` (if that is EchoAttention).

    With ``residual`` the output is the first input plus something, and only that is compared.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    seen: list[Tensor]
    attention: LayerCalls
    residual: bool

    @property
    def hidden(self) -> Tensor:
        """The module's first input, ``[1, T, hidden]`` for a layer."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()))
        hidden: Tensor = self.kwargs.get("hidden_states", first)
        return hidden

    def matches(self, run: Callable[..., Any] | None = None) -> bool:
        """Whether ``run`` (the module as it is now, if None) gives the same for the same inputs."""
        before = len(_seen(self.attention))
        try:
            with torch.no_grad(), route(self.attention):
                out = (self.module if run is None else run)(*self.args, **self.kwargs)
        except (TypeError, ValueError, RuntimeError):  # a replacement for another signature, or other shapes
            return False
        finally:
            seen = _seen(self.attention)[before:]
            del _seen(self.attention)[before:]
        found, expected = _tensor(out), _tensor(self.out)
        if isinstance(out, tuple) != isinstance(self.out, tuple) or found is None or expected is None:
            return False
        if len(seen) != len(self.seen) or not all(map(close, seen, self.seen)):
            return False
        if not self.residual or found.shape != expected.shape:
            return close(found, expected)
        return close(found - self.hidden, expected - self.hidden, self.hidden)


def observe(
    base: nn.Module, arguments: Mapping[str, Any], modules: Sequence[nn.Module], attention: LayerCalls, rows: int
) -> dict[nn.Module, list[Call]]:
    """Runs ``rows`` random tokens through a model without its head; returns the calls of each of ``modules``.

    ``arguments`` are what a forward takes besides token ids and positions. Layers of the model are compared without
    their residual. If the model's code fails on these tokens, no calls are returned, so that it keeps its own parts.
    """
    model: Any = base
    layers = set(model.layers)
    calls: dict[nn.Module, list[Call]] = {module: [] for module in modules}
    begun: dict[nn.Module, int] = {}

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        begun[module] = len(_seen(attention))

    def end(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen = _seen(attention)[begun[module] :]
        calls[module].append(Call(module, args, dict(kwargs), out, seen, attention, module in layers))

    device = model.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.embed_tokens.num_embeddings, (1, rows), generator=generator).to(device)
    handles = [module.register_forward_pre_hook(begin) for module in calls]
    handles += [module.register_forward_hook(end, with_kwargs=True) for module in calls]
    try:
        with torch.no_grad(), route(attention):
            model(tokens, position_ids=positions(model, rows).to(device), **arguments)
    except Exception as error:  # fused parts are optional: the model still works without them
        logger.warning("no part of the model is fused: its code failed on the tokens of the parity check (%s)", error)
        return {module: [] for module in modules}
    finally:
        for handle in handles:
            handle.remove()
    _seen(attention).clear()
    return calls


def observable(base: nn.Module) -> bool:
    """Whether a model without its head has the parts that ``observe`` needs."""
    return all(hasattr(base, name) for name in ("embed_tokens", "layers", "norm"))


def replace_forward(module: nn.Module, forward: Callable[..., Any], calls: Sequence[Call]) -> bool:
    """Replaces ``module.forward`` if all ``calls`` (of the module, or of the layer that it is in) then still match.

    Otherwise, and if ``calls`` is empty, the module is left as it was.
    """
    before = vars(module).get("forward")
    module.forward = forward
    if calls and all(call.matches() for call in calls):
        return True
    del module.forward
    if before is not None:
        module.forward = before
    return False


def _seen(attention: LayerCalls) -> list[Tensor]:
    return attention.seen if isinstance(attention, EchoAttention) else []


def _tensor(out: Any) -> Tensor | None:
    """A module's output, or the first of several."""
    found = out[0] if isinstance(out, tuple) and out else out
    return found if isinstance(found, Tensor) else None
