"""Checkpoints with float8 weights, as GLM and Qwen publish them: they are dequantised while they are read."""

from __future__ import annotations

from typing import Any

import torch
from transformers import FineGrainedFP8Config, PreTrainedConfig


def is_float8(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint's weights are float8 with one scale per block of a weight matrix."""
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "fp8"


def dequantize_arguments(config: PreTrainedConfig) -> dict[str, Any]:
    """Arguments with which ``from_pretrained`` dequantises the weights; none if they are not float8."""
    return {"quantization_config": FineGrainedFP8Config(dequantize=True)} if is_float8(config) else {}


def dequantize_warning(dtype: torch.dtype) -> str:
    """Tells the user how much more memory the dequantised weights take."""
    return f"the float8 weights are dequantised to {str(dtype).removeprefix('torch.')}, which takes twice the memory"
