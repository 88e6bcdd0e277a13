"""Checks config.json for unsupported features, and computes the context length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from anaphora.errors import ModelError

_LAYER_TYPES = ("full_attention", "sliding_attention")
_MLP_TYPES = ("dense", "sparse", "moe", "hash_moe")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_config(config: PreTrainedConfig, folder: Path) -> None:
    """Raise ModelError, with the reason, for a model that cannot be served."""
    name = f"{folder.name} ({config.model_type})"
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model; only decoder-only models can be served")
    towers = [key for key in ("vision_config", "audio_config", "encoder_config") if getattr(config, key, None)]
    if towers or config.get_text_config() is not config:
        raise ModelError(
            f"{name} is a multimodal model ({', '.join(towers) or 'nested text_config'}); "
            "only text models can be served"
        )
    if not getattr(config, "num_hidden_layers", 0):
        raise ModelError(f"{name} has no attention layers (num_hidden_layers is 0 or absent)")
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - set(_LAYER_TYPES) - set(_MLP_TYPES)):
        raise ModelError(
            f"{name} has layers of type {', '.join(unknown)}, whose state is not a KV cache by token; "
            f"only {' and '.join(_LAYER_TYPES)} can be served"
        )
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not has_own_code:
        _check_class(config, name)


def _check_class(config: PreTrainedConfig, name: str) -> None:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(f"{name} is not a causal language model that transformers knows")
    named = config.architectures or [model_class.__name__]
    if model_class.__name__ not in named:
        raise ModelError(f"{name} is a {', '.join(named)}; a {model_class.__name__} is needed to generate text")
    if not model_class.is_backend_compatible():
        raise ModelError(
            f"{name} cannot be served: its code in transformers ({model_class.__name__}) does not take another "
            "attention implementation (no attention layers, a state-space model, or old-style code)"
        )


def context_length_of(config: PreTrainedConfig, folder: Path, max_model_len: int | None) -> int:
    """The model's context length in tokens, RoPE scaling included.

    RoPE types whose angles depend on the length of the sequence would make cached keys wrong. For these the original
    length is the limit. Raises ModelError for a ``max_model_len`` above it, and if no length is known.
    """
    length = int(getattr(config, "max_position_embeddings", None) or 0)
    if length < 1:
        raise ModelError(f"the context length is not known: config.json of {folder} has no max_position_embeddings")
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        original = int(rope.get("original_max_position_embeddings") or length)
        factor = float(rope.get("factor") or 1.0)
        if kind in _LENGTH_DEPENDENT_ROPE:
            length = min(length, original)
            if max_model_len is not None and max_model_len > length:
                raise ModelError(
                    f"{folder.name} has RoPE scaling of type {kind}, which changes with the length of the sequence, "
                    f"so cached keys would be wrong beyond its original context length of {length} tokens; "
                    f"--max-model-len {max_model_len} is more than that"
                )
        elif kind == "yarn":
            length = max(length, int(original * factor))
        elif kind == "linear":
            length = int(length * factor)
    return length


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters; several where layer types have their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]
