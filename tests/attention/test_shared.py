"""The merge of parts: one softmax, whatever the cut."""

from __future__ import annotations

from itertools import pairwise

import torch

from anaphora.attention.base import LayerOptions
from anaphora.attention.shared import attend, merge


def parts_of(cuts: list[int], options: LayerOptions) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 5, 8), torch.randn(3, 40, 8) * 3, torch.randn(3, 40, 8)
    edges = [0, *cuts, 40]
    found = [attend(query[None], key[None, :, a:b], value[None, :, a:b], options) for a, b in pairwise(edges)]
    return torch.cat([out for out, _ in found]), torch.cat([log for _, log in found])


def test_any_cut_gives_the_same() -> None:
    for options in (LayerOptions(scale=0.5), LayerOptions(scale=0.5, softcap=4.0)):
        whole = merge(*parts_of([], options))
        for cuts in ([1], [39], [7, 8, 30]):
            assert torch.allclose(merge(*parts_of(cuts, options)), whole, atol=1e-5)


def test_a_part_that_a_row_does_not_have_changes_nothing() -> None:
    outs, logs = parts_of([20], LayerOptions(scale=0.5))
    empty = torch.cat((logs, torch.full_like(logs[:1], -torch.inf)))
    assert torch.equal(merge(torch.cat((outs, torch.zeros_like(outs[:1]))), empty), merge(outs, logs))


def test_a_sink_enters_once() -> None:
    sinks = torch.tensor([0.0, 2.0, -3.0])
    whole = merge(*parts_of([], LayerOptions(scale=0.5)), sinks)
    assert torch.allclose(merge(*parts_of([5, 6], LayerOptions(scale=0.5)), sinks), whole, atol=1e-5)
    assert not torch.allclose(whole, merge(*parts_of([], LayerOptions(scale=0.5))), atol=1e-2)
