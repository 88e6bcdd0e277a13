"""RMSNorm and rotary embedding by compiled kernels: replaced in the families where they fit, refused where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from anaphora.attention.base import IMPLEMENTATION, route
from anaphora.attention.latent import LatentTap
from anaphora.model.fuse import cpu
from anaphora.model.fuse.parity import EchoAttention
from anaphora.model.probe import base_of, forward_arguments
from tests.support.checkpoints import FAMILIES, make_config, make_model

ROPE = {name: name not in ("glm4", "gpt_oss") for name in FAMILIES}
"""Whether a family rotates both halves of whole heads by one table; GLM-4 and gpt-oss do not."""


def make(family: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    model = make_model(make_config(family)).to(dtype).requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    return model, forward_arguments(model, LatentTap() if getattr(model.config, "kv_lora_rank", None) else None)


def logits(model: Any, arguments: dict[str, Any]) -> Tensor:
    tokens = torch.arange(21)[None] * 7 % 300
    with torch.no_grad(), route(EchoAttention()):
        return model(tokens, position_ids=torch.arange(5, 26)[None], **arguments).logits[0].float()


def replaced(model: Any) -> tuple[int, int]:
    """How many norms and attention modules have another forward."""
    changed = [module for module in base_of(model).modules() if "forward" in vars(module)]
    norms = [module for module in changed if type(module).__name__.endswith("RMSNorm")]
    return len(norms), len(changed) - len(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family(family: str, dtype: torch.dtype) -> None:
    model, arguments = make(family, dtype)
    expected = logits(model, arguments)
    count = cpu.fuse_norm_rope(base_of(model), arguments)
    norms, attentions = replaced(model)
    assert count == norms + attentions
    assert norms >= 2 * len(base_of(model).layers) + 1
    assert attentions == (len(base_of(model).layers) if ROPE[family] else 0)
    gap = (logits(model, arguments) - expected).norm() / expected.norm()
    assert gap < (1e-4 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("part", ["RMSNorm", "RotaryEmbedding"])
def test_a_kernel_with_one_wrong_row_is_refused(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, arguments = make("qwen3", torch.bfloat16)
    expected = logits(model, arguments)
    real = getattr(cpu, part).__call__

    def wrong(self: Any, *args: Tensor) -> Any:
        out = real(self, *args)
        if part == "RMSNorm":
            out[0, 5] *= 1.2
        else:
            out[0][0, :, 5] *= 1.2
        return out

    monkeypatch.setattr(getattr(cpu, part), "__call__", wrong)
    cpu.fuse_norm_rope(base_of(model), arguments)
    norms, attentions = replaced(model)
    assert (norms if part == "RMSNorm" else attentions) == 0
    assert (attentions if part == "RMSNorm" else norms) > 0
    monkeypatch.undo()
    assert (logits(model, arguments) - expected).norm() / expected.norm() < 5e-2
