"""Reads a model folder through transformers: config.json, the dtype to run in, and the weights (or random ones)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers import logging as transformers_logging

from anaphora.checkpoint.quantized import dequantize_arguments
from anaphora.config import ModelConfig
from anaphora.errors import ModelError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """Read config.json. Raises ModelError if it is unusable, or needs code that is not trusted."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers may raise anything
        if "custom code" in str(error) and not trust_remote_code:
            raise ModelError(
                f"{folder} brings Python code of its own; if you trust it, run it with --trust-remote-code"
            ) from error
        raise ModelError(f"the config.json of {folder} cannot be used: {reason(error)}") from error
    return config


def choose_dtype(
    asked: str, config: PreTrainedConfig, folder: Path, device: torch.device
) -> tuple[torch.dtype, list[str]]:
    """The dtype to run in, and warnings where it differs from the one asked for (``auto``: the checkpoint's)."""
    dtype = _DTYPES[asked] if asked != "auto" else _checkpoint_dtype(config, folder)
    if device.type == "cuda" or dtype in (torch.bfloat16, torch.float32):
        return dtype, []
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    use = torch.bfloat16 if fast else torch.float32
    why = "which is fast on this one" if fast else "because this one has no fast bfloat16 either"
    return use, [f"{str(dtype).removeprefix('torch.')} is not fast on a CPU: running in {str(use)[6:]}, {why}"]


def _checkpoint_dtype(config: PreTrainedConfig, folder: Path) -> torch.dtype:
    """The dtype that config.json names, else that of the first tensor of a known dtype."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    if (found := file.get_slice(key).get_dtype()) in _SAFETENSORS_DTYPES:
                        return _SAFETENSORS_DTYPES[found]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is not a readable safetensors file: {reason(error)}") from error
    return torch.float32


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype, attention: str, trust_remote_code: bool, device: torch.device
) -> Any:
    """A model of this shape with random weights, for benchmarks. ``attention`` as in ``load_weights``."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust_remote_code
        )
    return model.eval().requires_grad_(False)


def load_weights(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str,
    settings: ModelConfig,
    device: torch.device,
) -> Any:
    """The model with its weights in ``dtype`` on ``device``; float8 weights are dequantised while they are read.

    ``attention`` is a name in transformers' AttentionInterface. Raises ModelError for files that cannot be read and
    for missing or misshapen weights.
    """
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map=None if device.type == "cpu" else {"": device},
                attn_implementation=attention,
                trust_remote_code=settings.trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # report them instead of raising; they are refused below
                **dequantize_arguments(config),
            )
    except Exception as error:  # transformers may raise anything
        raise ModelError(f"{folder} cannot be loaded: {reason(error)}") from error
    model, info = loaded
    missing, wrong = sorted(info.get("missing_keys") or ()), list(info.get("mismatched_keys") or ())
    if missing or wrong:
        some = ", ".join(str(key) for key in (missing or wrong)[:3])
        raise ModelError(
            f"the weights in {folder} are not complete: {len(missing)} missing, "
            f"{len(wrong)} of another shape ({some} …)"
        )
    return model.eval().requires_grad_(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bar and loading report; ``load_weights`` checks the loading info itself."""
    logging: Any = transformers_logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """An exception of another library as one line of at most 400 characters and its class."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.400}" if text else type(error).__name__
