"""From a folder to a model whose attention is ours: what is refused, and the probe that shows what layers cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    PreTrainedConfig,
)
from transformers import logging as transformers_logging

from anaphora.attention.base import IMPLEMENTATION, Absorbed, KVLayout, LatentTap, LayerOptions, route
from anaphora.config import ModelConfig
from anaphora.errors import ModelError

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_MLP_TYPES = ("dense", "sparse", "moe", "hash_moe")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model ready for paged attention. ``layouts`` by layer; ``absorbed`` and ``tap`` where latents are cached.

    ``window`` is the longest sequence in tokens, ``cache_keyword`` the name under which the model takes ``tap``.
    """

    model: Any
    layouts: tuple[KVLayout, ...]
    absorbed: dict[int, Absorbed]
    tap: LatentTap | None
    cache_keyword: str
    vocab_size: int
    window: int
    dtype: torch.dtype
    weights_bytes: int
    warnings: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """What every forward pass is given beside token ids and positions."""
        return {"use_cache": False} | ({} if self.tap is None else {self.cache_keyword: self.tap})


@dataclass(frozen=True, slots=True)
class Sketch:
    """What the config alone shows of a model. ``layouts`` are empty where only the weights tell."""

    dtype: torch.dtype
    weights_bytes: int
    layouts: tuple[KVLayout, ...]


def sketch(settings: ModelConfig, device: torch.device) -> Sketch:
    """The model without its weights. Raises ModelError as ``load_model`` does."""
    folder = Path(str(settings.model))
    config = _read_config(folder, settings.trust_remote_code)
    check_config(config, folder)
    rope_window(config, folder, settings.max_model_len)
    dtype, _ = _choose_dtype(settings.dtype, config, folder, device)
    model = _random_weights(config, dtype, settings.trust_remote_code, torch.device("meta"))
    weights = sum(tensor.nbytes for tensor in model.parameters())
    try:
        layouts = _probe(model, folder)[0].in_order()
    except ModelError:  # code that looks at values; if there is another reason, it comes up again with the weights
        layouts = ()
    return Sketch(dtype, weights, layouts)


def load_model(settings: ModelConfig, device: torch.device) -> LoadedModel:
    """Load ``settings.model``, a local folder. Raises ModelError, which names the model and the reason."""
    folder = Path(str(settings.model))
    config = _read_config(folder, settings.trust_remote_code)
    check_config(config, folder)
    window = rope_window(config, folder, settings.max_model_len)
    dtype, warnings = _choose_dtype(settings.dtype, config, folder, device)
    if settings.load_format == "dummy":
        model = _random_weights(config, dtype, settings.trust_remote_code, device)
    else:
        float8 = _is_float8(config)
        model = _load_weights(folder, dtype, settings, device, float8)
        if float8:
            warnings.append(f"the float8 weights are held in {str(dtype)[6:]}, which takes twice the memory")
    probe, tap, vocab_size = _probe(model, folder)
    weights = sum(tensor.nbytes for tensor in _tensors(model))
    loaded = LoadedModel(
        model,
        probe.in_order(),
        probe.absorbed,
        tap,
        _cache_keyword(model),
        vocab_size,
        window,
        dtype,
        weights,
        tuple(warnings),
    )
    _fuse(loaded, probe.options, device)
    return loaded


def _fuse(loaded: LoadedModel, options: dict[int, LayerOptions], device: torch.device) -> None:
    if device.type == "cpu":
        from anaphora.kernels.cpu.amx import AMX
        from anaphora.model.fuse import cpu

        if AMX:
            from anaphora.model.fuse import cpu_decoder

            cpu_decoder.stack(base_of(loaded.model), options, loaded.layouts)
        cpu.fuse(loaded.model)
    else:
        from anaphora.model.fuse import gpu

        gpu.fuse(base_of(loaded.model), loaded.arguments(), options)


def base_of(model: Any) -> nn.Module:
    """The model without its head."""
    base: nn.Module = getattr(model, model.base_model_prefix)
    return base


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# --- Before the weights are read --------------------------------------------------------------------------------------


def _read_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # transformers raises whatever the file leads to
        if "custom code" in str(error) and not trust_remote_code:
            raise ModelError(
                f"{folder} brings Python code of its own; if you trust it, run it with --trust-remote-code"
            ) from error
        raise ModelError(f"the config.json of {folder} cannot be used: {_reason(error)}") from error
    return config


def check_config(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse what the config shows to be impossible."""
    name = f"{folder.name} ({config.model_type})"
    if config.is_encoder_decoder:
        raise ModelError(f"{name} is an encoder-decoder model; only decoders that read left to right can be served")
    towers = [key for key in ("vision_config", "audio_config", "encoder_config") if getattr(config, key, None)]
    if towers or config.get_text_config() is not config:
        raise ModelError(
            f"{name} is a multimodal model ({', '.join(towers) or 'nested text_config'}); "
            "only text models can be served"
        )
    if not getattr(config, "num_hidden_layers", 0):
        raise ModelError(f"{name} has no attention layers (num_hidden_layers is 0 or absent)")
    kinds = set(getattr(config, "layer_types", None) or ())
    if strange := sorted(kinds - set(_LAYER_TYPES) - set(_MLP_TYPES)):
        raise ModelError(
            f"{name} has layers of type {', '.join(strange)}, whose state is no KV cache by token; "
            f"only {' and '.join(_LAYER_TYPES)} can be served"
        )
    custom = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not custom:
        _check_class(config, name)


def _check_class(config: PreTrainedConfig, name: str) -> None:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise ModelError(f"{name} is no causal language model that transformers knows")
    named = config.architectures or [model_class.__name__]
    if model_class.__name__ not in named:
        raise ModelError(f"{name} is a {', '.join(named)}; a {model_class.__name__} is needed to generate text")
    if not model_class.is_backend_compatible():
        raise ModelError(
            f"{name} cannot be served: its code in transformers ({model_class.__name__}) does not take another "
            "attention (no attention layers, a state-space model, or code of the old kind)"
        )


def rope_window(config: PreTrainedConfig, folder: Path, max_model_len: int | None) -> int:
    """The longest sequence in tokens, rotary scaling included.

    Types that turn by other angles once a sequence is long would make cached keys wrong: there the original window
    is the limit, and a ``max_model_len`` above it is refused.
    """
    window = int(getattr(config, "max_position_embeddings", None) or 0)
    if window < 1:
        raise ModelError(f"the config.json of {folder} has no max_position_embeddings, so its window is not known")
    for rope in _rope_parameters(config):
        kind = rope.get("rope_type", "default")
        original = int(rope.get("original_max_position_embeddings") or window)
        factor = float(rope.get("factor") or 1.0)
        if kind in _LENGTH_DEPENDENT_ROPE:
            window = min(window, original)
            if max_model_len is not None and max_model_len > window:
                raise ModelError(
                    f"{folder.name} has rotary scaling of type {kind}, which changes with the length of the sequence, "
                    f"so cached keys would be wrong beyond its original window of {window} tokens; "
                    f"--max-model-len {max_model_len} is more than that"
                )
        elif kind == "yarn":
            window = max(window, int(original * factor))
        elif kind == "linear":
            window = int(window * factor)
    return window


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _choose_dtype(
    asked: str, config: PreTrainedConfig, folder: Path, device: torch.device
) -> tuple[torch.dtype, list[str]]:
    dtype = _DTYPES[asked] if asked != "auto" else _checkpoint_dtype(config, folder)
    if device.type == "cuda" or dtype in (torch.bfloat16, torch.float32):
        return dtype, []
    fast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    use = torch.bfloat16 if fast else torch.float32
    why = "which it multiplies fast" if fast else "because it has no fast bfloat16 either"
    return use, [f"{str(dtype).removeprefix('torch.')} is not fast on a CPU: running in {str(use)[6:]}, {why}"]


def _checkpoint_dtype(config: PreTrainedConfig, folder: Path) -> torch.dtype:
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    names = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (no mapping)
                    if (found := file.get_slice(key).get_dtype()) in names:
                        return names[found]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is no readable safetensors file: {_reason(error)}") from error
    return torch.float32


# --- The weights, and what they show ----------------------------------------------------------------------------------


def _random_weights(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool, device: torch.device) -> Any:
    """A model of this shape that knows nothing, for benchmarks."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=trust_remote_code
        )
    return model.eval().requires_grad_(False)


def _is_float8(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint's weights are float8 with a scale a block, as GLM and Qwen publish them."""
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == "fp8"


def _load_weights(folder: Path, dtype: torch.dtype, settings: ModelConfig, device: torch.device, float8: bool) -> Any:
    """``float8`` weights are widened to ``dtype`` as they are read. Several are read at once, each to ``device``."""
    more = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if float8 else {}
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                device_map=None if device.type == "cpu" else {"": device},
                attn_implementation=IMPLEMENTATION,
                trust_remote_code=settings.trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported, and refused below
                **more,
            )
    except Exception as error:  # transformers raises whatever the files lead to
        raise ModelError(f"{folder} cannot be loaded: {_reason(error)}") from error
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
    """No progress bar and no report: the loading info is looked at by us."""
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


class _Probe:
    """Answers the layers' calls for one token, whose attention is its own value, and notes who called."""

    def __init__(self, tap: LatentTap | None) -> None:
        self.tap = tap
        self.layouts: dict[int, KVLayout] = {}
        self.absorbed: dict[int, Absorbed] = {}
        self.options: dict[int, LayerOptions] = {}

    def in_order(self) -> tuple[KVLayout, ...]:
        """The layouts by layer."""
        return tuple(self.layouts[layer] for layer in sorted(self.layouts))

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
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


def _probe(model: Any, folder: Path) -> tuple[_Probe, LatentTap | None, int]:
    """Run one token and require that each layer attends through us, once."""
    config = model.config
    tap = LatentTap() if getattr(config, "kv_lora_rank", None) else None
    probe = _Probe(tap)
    name = f"{folder.name} ({config.model_type})"
    arguments = {"use_cache": False} | ({} if tap is None else {_cache_keyword(model): tap})
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
    try:
        with torch.inference_mode(), route(probe):
            logits = model(token, position_ids=token, logits_to_keep=1, **arguments).logits
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    except Exception as error:  # whatever the model's code leads to
        raise ModelError(f"{name} cannot be served: one token through it fails with {_reason(error)}") from error
    layers = range(config.num_hidden_layers)
    if sorted(probe.layouts) != list(layers):
        silent = sorted(set(layers) - set(probe.layouts))
        raise ModelError(f"{name} cannot be served: its layers {silent} do not attend through the attention interface")
    _check_options(config, probe, name)
    return probe, tap, int(logits.shape[-1])


def _check_options(config: PreTrainedConfig, probe: _Probe, name: str) -> None:
    """A window or a softcap that only the model's own mask or eager code knows would be lost."""
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


def _cache_keyword(model: Any) -> str:
    names = inspect.signature(base_of(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.400}" if text else type(error).__name__
