"""Prices of tokens and rents of machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anaphora.errors import ConfigError
from anaphora.tools.shared.money import TokenPrices, machine_hours, monthly, read_token_prices, rent
from anaphora.tools.shared.usage import Usage, usage_of

PRICES = TokenPrices(1.25, 0.625, 10.0)


def test_nothing_is_charged_twice() -> None:
    usage = usage_of({"usage": {"prompt_tokens": 262960, "cached_tokens": 257955, "completion_tokens": 1744}})
    assert usage is not None
    assert PRICES.price(usage) == pytest.approx(0.1849, abs=5e-5)


def test_included_and_separate_cached_tokens_cost_the_same() -> None:
    included = usage_of({"usage": {"prompt_tokens": 6074, "prompt_tokens_details": {"cached_tokens": 3456}}})
    separate = usage_of({"usage": {"input_tokens": 2618, "cache_read_input_tokens": 3456}})
    assert included is not None
    assert separate is not None
    assert PRICES.price(included) == PRICES.price(separate) == pytest.approx((2618 * 1.25 + 3456 * 0.625) / 1e6)


def test_written_tokens_have_their_own_price() -> None:
    assert TokenPrices(3.0, 0.3, 15.0, 3.75).price(Usage(1000, 600, 100, 10)) == pytest.approx(
        (300 * 3 + 600 * 0.3 + 100 * 3.75 + 10 * 15) / 1e6
    )


def test_price_files(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"in": 1, "cached": 0.1, "out": 2}))
    assert read_token_prices(str(path)) == {"*": TokenPrices(1, 0.1, 2)}
    path.write_text(json.dumps({"a": {"in": 1}, "*": {"input": 2, "cached": 1}}))
    assert read_token_prices(str(path)) == {"a": TokenPrices(1, 1), "*": TokenPrices(2, 1)}
    for wrong in ("[]", "{", json.dumps({"a": {"cached": 1}}), json.dumps({"in": -1})):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="--prices"):
            read_token_prices(str(path))


def test_rent_follows_from_the_rate() -> None:
    hours = machine_hours(864_000, 10.0)
    assert hours == pytest.approx(24)
    assert rent(hours, 3.0) == pytest.approx(72)
    assert monthly(rent(hours, 3.0)) == pytest.approx(2160)
    assert rent(hours, None) is monthly(None) is None
