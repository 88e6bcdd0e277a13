"""The parity check: what it takes for equal, and that a refused replacement leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anaphora.attention.base import LayerOptions
from anaphora.model.fuse.parity import EchoAttention, close, observe, replace_forward
from tests.support.checkpoints import make_config, make_model


def test_a_fault_in_one_row_is_seen_beside_a_row_that_is_a_thousand_times_as_large() -> None:
    """As the first token's hidden states are in many models."""
    torch.manual_seed(0)
    given, out = torch.randn(1, 20, 96).bfloat16(), torch.randn(1, 20, 96).bfloat16()
    given[0, 0] *= 1000
    assert close(out.clone(), out, given)
    wrong = out.clone()
    wrong[0, 7] *= 1.2
    assert not close(wrong, out, given)


@pytest.mark.parametrize("change", ["shape", "dtype", "not a number"])
def test_another_shape_or_dtype_or_not_a_number_is_not_equal(change: str) -> None:
    expected = torch.randn(1, 4, 8)
    wrong = {"shape": expected[:, :3], "dtype": expected.bfloat16(), "not a number": expected * torch.nan}[change]
    assert close(expected.clone(), expected)
    assert not close(wrong, expected)


def observed() -> tuple[Any, Any, list[Any]]:
    """A tiny model without its head, its last MLP, and the calls of the layer that the MLP is in."""
    base = make_model(make_config("llama")).requires_grad_(False).model
    base.set_attn_implementation("anaphora")
    layer = base.layers[-1]
    return base, layer.mlp, observe(base, {"use_cache": False}, [layer], EchoAttention(), 8)[layer]


def test_an_equal_replacement_is_kept() -> None:
    _, mlp, calls = observed()
    own = type(mlp).forward

    def forward(x: Tensor) -> Tensor:
        return own(mlp, x)

    assert replace_forward(mlp, forward, calls)
    assert mlp.forward is forward


def wrong_row(own: Any) -> Any:
    def forward(x: Tensor) -> Tensor:
        out: Tensor = own(x).clone()
        out[:, 5] *= 1.01
        return out

    return forward


def raises(own: Any) -> Any:
    def forward(x: Tensor, other: Tensor) -> Tensor:
        return own(x)

    return forward


def tuples(own: Any) -> Any:
    return lambda x: (own(x), None)


@pytest.mark.parametrize("make", [wrong_row, raises, tuples])
@pytest.mark.parametrize("replaced_before", [False, True])
def test_a_refused_replacement_leaves_the_module_as_it_was(make: Any, replaced_before: bool) -> None:
    _, mlp, calls = observed()
    own = mlp.forward
    if replaced_before:
        mlp.forward = own
    assert not replace_forward(mlp, make(own), calls)
    assert vars(mlp).get("forward") is (own if replaced_before else None)


def test_what_is_passed_to_attention_is_compared() -> None:
    """Scaled queries: EchoAttention's answer would show it too, so the key is changed, which only ``seen`` shows."""
    base, _, calls = observed()
    key = base.layers[-1].self_attn.k_proj
    own = key.forward
    assert not replace_forward(key, lambda x: own(x) * 1.01, calls)
    assert replace_forward(key, lambda x: own(x), calls)


def test_without_a_call_nothing_is_replaced() -> None:
    layer = nn.Linear(4, 4)
    assert not replace_forward(layer, layer.forward, [])
    assert "forward" not in vars(layer)


def test_attention_of_the_parity_check_can_be_viewed_as_a_model_views_it() -> None:
    """Some models (JetMoE, AFMoE) call ``view`` on the result, which needs contiguous memory."""
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    answer = EchoAttention().attend(None, query, key, key.clone(), LayerOptions(scale=1.0))
    assert answer.view(1, 3, 32).shape == (1, 3, 32)


def test_a_model_whose_code_fails_in_the_check_keeps_its_parts(caplog: pytest.LogCaptureFixture) -> None:
    base, mlp, _ = observed()

    def fail(*_: Any) -> Any:
        raise RuntimeError("view size is not compatible")

    mlp.forward = fail
    calls = observe(base, {"use_cache": False}, [mlp], EchoAttention(), 8)
    assert calls == {mlp: []}
    assert not replace_forward(mlp, nn.Identity(), calls[mlp])
    assert mlp.forward is fail
    assert "view size is not compatible" in caplog.text
