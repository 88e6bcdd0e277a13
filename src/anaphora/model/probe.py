"""Runs one token through a model to see how each layer attends and what it caches."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from anaphora.attention.base import KVLayout, LayerOptions, route
from anaphora.attention.latent import Absorbed, LatentTap
from anaphora.checkpoint.weights import reason
from anaphora.errors import ModelError


class Probe:
    """Records the layers' attention calls for one token; the attention of one token is its own value.

    ``layouts``, ``options`` and ``absorbed`` are by layer. ``tap`` is None where no latents are cached.
    """

    def __init__(self, tap: LatentTap | None) -> None:
        self.tap = tap
        self.layouts: dict[int, KVLayout] = {}
        self.absorbed: dict[int, Absorbed] = {}
        self.options: dict[int, LayerOptions] = {}
        self.vocab_size = 0

    def in_order(self) -> tuple[KVLayout, ...]:
        """The layouts in the order of the layers."""
        return tuple(self.layouts[layer] for layer in sorted(self.layouts))

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        """Record a layer's call; shapes as in ``LayerCalls.attend``."""
        layer = getattr(module, "layer_idx", None)
        if layer is None or layer in self.layouts:
            raise ModelError(f"{type(module).__name__} attends more than once a layer (layer {layer})")
        if not getattr(module, "is_causal", True):
            raise ModelError(f"{type(module).__name__} looks at later tokens (is_causal is False)")
        self.options[layer] = options
        self.layouts[layer] = KVLayout(key.shape[1], key.shape[3], value.shape[3])
        if self.tap is not None:
            latents = self.tap.take(layer)
            rank = int(module.kv_lora_rank)
            self.layouts[layer] = KVLayout(1, latents.shape[3], rank, latent=True)
            self.absorbed[layer] = Absorbed.of(module)
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)


def probe_model(model: Any, folder: Path) -> Probe:
    """Run one token. Raises ModelError unless every layer attends exactly once through ``attention.base``."""
    config = model.config
    tap = LatentTap() if getattr(config, "kv_lora_rank", None) else None
    probe = Probe(tap)
    name = f"{folder.name} ({config.model_type})"
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.inference_mode(), route(probe):
            logits = model(token, position_ids=token, logits_to_keep=1, **forward_arguments(model, tap)).logits
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    except Exception as error:  # the model's code may raise anything
        raise ModelError(f"{name} cannot be served: one token through it fails with {reason(error)}") from error
    layers = range(config.num_hidden_layers)
    if sorted(probe.layouts) != list(layers):
        silent = sorted(set(layers) - set(probe.layouts))
        raise ModelError(f"{name} cannot be served: its layers {silent} do not attend through the attention interface")
    _check_options(config, probe, name)
    probe.vocab_size = int(logits.shape[-1])
    return probe


def _check_options(config: PreTrainedConfig, probe: Probe, name: str) -> None:
    """Refuse a window or softcap that the model applies in its own mask or eager code, which is not used here."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        used = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if used else "full_attention"] * len(probe.layouts)
    for layer, options in probe.options.items():
        if kinds[layer] == "sliding_attention" and options.window is None:
            raise ModelError(
                f"{name} cannot be served: layer {layer} does not pass its sliding window to the attention"
            )
        if getattr(config, "attn_logit_softcapping", None) and options.softcap is None:
            raise ModelError(f"{name} cannot be served: layer {layer} does not pass its softcap to the attention")


def base_of(model: Any) -> nn.Module:
    """The model without its language-model head."""
    base: nn.Module = getattr(model, model.base_model_prefix)
    return base


def forward_arguments(model: Any, tap: LatentTap | None) -> dict[str, Any]:
    """Arguments of every forward pass besides token ids and positions.

    ``tap`` takes the place of the KV cache, whose keyword is ``cache`` or ``past_key_values`` by version of
    transformers.
    """
    if tap is None:
        return {"use_cache": False}
    names = inspect.signature(base_of(model).forward).parameters
    return {"use_cache": False, "cache" if "cache" in names else "past_key_values": tap}
