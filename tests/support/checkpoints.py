"""Tiny random checkpoints of every family, whose attention matters: at the usual initializer range of 0.02, zeroing all
of it moves the logits by 0.002 and any comparison passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from tests.support.tokenizers import write_tokenizer

VOCAB = 320
WINDOW = 1024
SLIDING = 20
"""Sliding window of the families that have one: shorter than the prompts that tests use."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB - 1,
    "pad_token_id": None,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
_LATENT = {
    "num_key_value_heads": 6,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_GEMMA = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "sliding_window": SLIDING,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "mistral": ("MistralConfig", {"sliding_window": SLIDING, "head_dim": 8}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, **_MOE}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "glm4": ("Glm4Config", {"head_dim": 8, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _LATENT),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def make_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The tiny config of one of FAMILIES."""
    name, special = FAMILIES[family]
    make: Callable[..., PreTrainedConfig] = getattr(transformers, name)
    return make(**(COMMON | special | changes))


def make_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """A random model in float32: sinks and biases are not left at zero, norms not at one."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.normal_(0.0, 1.0)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def to_float8(folder: Path, block: int = 8) -> None:
    """Turn the projections of a checkpoint to float8 with a scale for each ``block`` × ``block``, in place."""
    path = folder / "model.safetensors"
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        weights[name] = weight
        if name.endswith("_proj.weight"):
            tiles = weight.float().unflatten(1, (-1, block)).unflatten(0, (-1, block))
            scale = tiles.abs().amax((1, 3)) / 448
            rounded = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
            weights[name] = rounded.flatten(2, 3).flatten(0, 1).contiguous()
            weights[f"{name}_scale_inv"] = scale
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (folder / "config.json").write_text(json.dumps(config))


def save(
    folder: Path, family: str = "llama", *, seed: int = 0, dtype: torch.dtype | None = None, **changes: Any
) -> Path:
    """Write a tiny checkpoint with a tokenizer into ``folder``; ``dtype`` other than float32 converts it."""
    model = make_model(make_config(family, **changes), seed)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return folder
