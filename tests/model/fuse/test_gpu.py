"""Layers with fused kernels (interpreted where there is no GPU) do what transformers' own do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anaphora.attention.base import LayerOptions, route
from tests.support.checkpoints import FAMILIES, make_config, make_model

pytest.importorskip("triton", reason="the fused kernels need triton")

from anaphora.attention.base import IMPLEMENTATION
from anaphora.attention.latent import LatentTap
from anaphora.kernels.triton import norm_rope_silu
from anaphora.model.fuse import gpu
from anaphora.model.probe import base_of, forward_arguments

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if DEVICE.type == "cuda" else [torch.float32]
PARTS = {
    "llama": "attention mlp sums",
    "smollm2": "attention mlp sums",
    "mistral": "attention mlp sums",
    "qwen2": "attention mlp sums",
    "qwen3": "attention mlp sums",
    "qwen3_moe": "attention sums",
    "gemma2": "attention",
    "glm4": "",
    "glm4_moe_lite": "sums",
    "gpt_oss": "attention sums",
}
"""What is replaced in the last layer of each family."""


class Sees:
    """Attention over the rows of the batch, so that each of query, key and value matters; notes the options."""

    def __init__(self) -> None:
        self.options: dict[int, LayerOptions] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self.options[module.layer_idx] = options
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        scores = (query @ key.transpose(-1, -2)).float() * options.scale
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return (scores.masked_fill(~causal, -torch.inf).softmax(-1).to(value.dtype) @ value).transpose(1, 2)


def make(family: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    model = make_model(make_config(family)).to(DEVICE, dtype).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    latent = getattr(model.config, "kv_lora_rank", None)
    return model, forward_arguments(model, LatentTap() if latent else None)


def logits(model: Any, arguments: dict[str, Any], rows: int = 21) -> tuple[Tensor, Sees]:
    tokens = torch.arange(rows, device=DEVICE)[None] * 7 % 300
    sees = Sees()
    with torch.no_grad(), route(sees):
        out = model(tokens, position_ids=torch.arange(5, 5 + rows, device=DEVICE)[None], **arguments)
    return out.logits[0].float(), sees


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family: str, dtype: torch.dtype) -> None:
    model, arguments = make(family, dtype)
    expected, sees = logits(model, arguments)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert gpu.fuse(base_of(model), arguments, sees.options) > 0
    found, _ = logits(model, arguments)
    gap = ((found - expected).norm() / expected.norm()).item()
    assert gap < (1e-4 if dtype == torch.float32 else 5e-2)
    last = base_of(model).layers[-1]
    replaced = {"attention": last.self_attn, "mlp": last.mlp, "sums": last}
    assert " ".join(name for name, module in replaced.items() if "forward" in vars(module)) == PARTS[family]
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_joined_weights_are_held_once() -> None:
    model, arguments = make("qwen2", torch.float32)
    _, sees = logits(model, arguments)
    gpu.fuse(base_of(model), arguments, sees.options)
    attention = base_of(model).layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert len({part.weight.untyped_storage().data_ptr() for part in parts}) == 1
    assert len({part.bias.untyped_storage().data_ptr() for part in parts}) == 1


FAULTS = {"norm_rope": "attention", "silu_and_mul": "mlp", "rms_norm": "sums"}


@pytest.mark.parametrize("kernel", FAULTS)
def test_a_part_that_gives_something_else_is_left_as_it_was(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does nothing stands for one that does another family's arithmetic."""
    model, arguments = make("qwen3", torch.float32)
    expected, sees = logits(model, arguments)
    real = getattr(norm_rope_silu, kernel)

    class Broken:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(*args: Any, **kwargs: Any) -> None:
                if kernel != "rms_norm":
                    args[0].zero_() if kernel == "norm_rope" else args[1].zero_()
                else:
                    real[grid](*args, **kwargs)
                    if args[7]:
                        args[2].zero_()

            return launch

    monkeypatch.setattr(norm_rope_silu, kernel, Broken())
    gpu.fuse(base_of(model), arguments, sees.options)
    last = base_of(model).layers[-1]
    part: nn.Module = {"attention": last.self_attn, "mlp": last.mlp, "sums": last}[FAULTS[kernel]]
    assert "forward" not in vars(part)
    monkeypatch.undo()
    found, _ = logits(model, arguments)
    assert (found - expected).norm() / expected.norm() < 1e-4


def test_a_model_of_another_build_keeps_its_layers() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([nn.Linear(4, 4)])

    odd = Odd()
    before = copy.deepcopy(odd.state_dict())
    assert gpu.fuse(odd, {}, {}) == 0
    assert all(torch.equal(before[name], value) for name, value in odd.state_dict().items())
