"""Loads a model folder and replaces its attention: checks, weights, probe, fused kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anaphora.attention.base import IMPLEMENTATION, KVLayout, LayerOptions
from anaphora.attention.latent import Absorbed, LatentTap
from anaphora.checkpoint.quantized import dequantize_warning, is_float8
from anaphora.checkpoint.weights import choose_dtype, load_weights, random_model, read_config
from anaphora.config import ModelConfig
from anaphora.errors import ModelError
from anaphora.model.compatibility import check_config, context_length_of
from anaphora.model.probe import base_of, forward_arguments, probe_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for paged attention.

    ``layouts`` by layer. ``absorbed`` and ``tap`` are set where latents are cached. ``context_length`` is in tokens.
    ``arguments`` go to every forward pass besides token ids and positions.
    """

    model: Any
    layouts: tuple[KVLayout, ...]
    absorbed: dict[int, Absorbed]
    tap: LatentTap | None
    arguments: dict[str, Any]
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    weights_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelEstimate:
    """What config.json alone shows of a model. ``layouts`` are empty if only the weights can tell."""

    dtype: torch.dtype
    weights_bytes: int
    layouts: tuple[KVLayout, ...]


def estimate(settings: ModelConfig, device: torch.device) -> ModelEstimate:
    """Describe the model without reading its weights. Raises ModelError as ``load_model`` does."""
    folder = Path(str(settings.model))
    config = read_config(folder, settings.trust_remote_code)
    check_config(config, folder)
    context_length_of(config, folder, settings.max_model_len)
    dtype, _ = choose_dtype(settings.dtype, config, folder, device)
    model = random_model(config, dtype, IMPLEMENTATION, settings.trust_remote_code, torch.device("meta"))
    weights = sum(tensor.nbytes for tensor in model.parameters())
    try:
        layouts = probe_model(model, folder).in_order()
    except ModelError:  # code that looks at values; another reason is raised again once the weights are loaded
        layouts = ()
    return ModelEstimate(dtype, weights, layouts)


def load_model(settings: ModelConfig, device: torch.device) -> LoadedModel:
    """Load ``settings.model``, a local folder. Raises ModelError, which names the model and the reason."""
    folder = Path(str(settings.model))
    config = read_config(folder, settings.trust_remote_code)
    check_config(config, folder)
    context_length = context_length_of(config, folder, settings.max_model_len)
    dtype, warnings = choose_dtype(settings.dtype, config, folder, device)
    if settings.load_format == "dummy":
        model = random_model(config, dtype, IMPLEMENTATION, settings.trust_remote_code, device)
    else:
        model = load_weights(folder, config, dtype, IMPLEMENTATION, settings, device)
        if is_float8(config):
            warnings.append(dequantize_warning(dtype))
    probe = probe_model(model, folder)
    loaded = LoadedModel(
        model=model,
        layouts=probe.in_order(),
        absorbed=probe.absorbed,
        tap=probe.tap,
        arguments=forward_arguments(model, probe.tap),
        vocab_size=probe.vocab_size,
        context_length=context_length,
        dtype=dtype,
        weights_bytes=sum(tensor.nbytes for tensor in _tensors(model)),
        warnings=tuple(warnings),
    )
    _fuse(loaded, probe.options, device)
    return loaded


def _fuse(loaded: LoadedModel, options: dict[int, LayerOptions], device: torch.device) -> None:
    """Replaces parts of the model by fused kernels, where they pass the parity check."""
    base = base_of(loaded.model)
    if device.type == "cpu":
        from anaphora.kernels.cpu import amx
        from anaphora.model.fuse import cpu, cpu_decoder

        fused = amx.AMX and cpu_decoder.fuse(base, options, loaded.layouts)
        count = 0 if fused else cpu.fuse_norm_rope(base, loaded.arguments)
        logger.info("fused: %s", "all decoder layers" if fused else f"{count} RMSNorms and rotary embeddings")
        # With the fused decoder a row's logits do not depend on the batch; the LM head must keep that.
        cpu.pack_linear_layers(loaded.model, row_invariant=fused)
    else:
        from anaphora.model.fuse import gpu

        logger.info("fused: %d parts of the layers", gpu.fuse(base, loaded.arguments, options))


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
