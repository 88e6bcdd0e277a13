"""What logs report of tokens and money, by every vendor's convention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.shared.usage import Prices, Usage, read_prices, usage_of

PRICES = Prices(1.25, 0.625, 10.0)


@pytest.mark.parametrize(
    ("raw", "usage"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 5}, Usage(100, None, 0, 5)),
        ({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}, Usage(100, 60)),
        ({"prompt_tokens": 100, "prompt_tokens_details": None}, Usage(100, None)),
        ({"prompt_tokens": 100, "cached_tokens": 60}, Usage(100, 60)),
        ({"prompt_tokens": 100, "prompt_cache_hit_tokens": 60, "prompt_cache_miss_tokens": 40}, Usage(100, 60)),
        (
            {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 60}, "output_tokens": 4},
            Usage(100, 60, 0, 4),
        ),
        ({"input_tokens": 30, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 10}, Usage(100, 60, 10)),
        ({"inputTokens": 40, "cacheReadInputTokens": 60, "outputTokens": 3}, Usage(100, 60, 0, 3)),
        ({"promptTokenCount": 100, "cachedContentTokenCount": 60}, Usage(100, 60)),
        ({"prompt_tokens": 10, "cached_tokens": 60}, Usage(10, 10)),
        ({"prompt_tokens": "many"}, None),
    ],
)
def test_conventions(raw: dict[str, Any], usage: Usage | None) -> None:
    assert usage_of({"usage": raw}) == usage
    assert usage_of({"other": 1}, {"body": {"usage": raw}}) == usage


def test_nothing_is_charged_twice() -> None:
    usage = usage_of({"usage": {"prompt_tokens": 262960, "cached_tokens": 257955, "completion_tokens": 1744}})
    assert usage is not None
    assert PRICES.price(usage) == pytest.approx(0.1849, abs=5e-5)


def test_inside_and_beside_cost_the_same() -> None:
    inside = usage_of({"usage": {"prompt_tokens": 6074, "prompt_tokens_details": {"cached_tokens": 3456}}})
    beside = usage_of({"usage": {"input_tokens": 2618, "cache_read_input_tokens": 3456}})
    assert inside is not None
    assert beside is not None
    assert PRICES.price(inside) == PRICES.price(beside) == pytest.approx((2618 * 1.25 + 3456 * 0.625) / 1e6)


def test_written_tokens_have_their_own_price() -> None:
    assert Prices(3.0, 0.3, 15.0, 3.75).price(Usage(1000, 600, 100, 10)) == pytest.approx(
        (300 * 3 + 600 * 0.3 + 100 * 3.75 + 10 * 15) / 1e6
    )


def test_price_files(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"in": 1, "cached": 0.1, "out": 2}))
    assert read_prices(str(path)) == {"*": Prices(1, 0.1, 2)}
    path.write_text(json.dumps({"a": {"in": 1}, "*": {"input": 2, "cached": 1}}))
    assert read_prices(str(path)) == {"a": Prices(1, 1), "*": Prices(2, 1)}
    for wrong in ("[]", "{", json.dumps({"a": {"cached": 1}}), json.dumps({"in": -1})):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="--prices"):
            read_prices(str(path))
