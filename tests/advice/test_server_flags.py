"""Each problem is reported with a fix, and applying the fix ends the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anaphora.advice.server_flags import ServerSettings, check_server_flags

GOOD = ServerSettings(exact=False, max_model_len=8192, max_num_seqs=64, pool_tokens=100_000, system_tokens=2000)


def test_good_settings_give_no_warning() -> None:
    assert check_server_flags(GOOD) == []
    assert check_server_flags(replace(GOOD, exact=True, block_size=256)) == []


@pytest.mark.parametrize(
    ("change", "words", "fixed"),
    [
        ({"prefix_caching": False}, "prefix caching is off", {"prefix_caching": True}),
        ({"block_size": 128, "system_tokens": 100}, "a block of 128 tokens is larger than the 100", {"block_size": 16}),
        ({"block_size": 128, "system_tokens": None}, "only whole blocks of 128", {"block_size": 16}),
        ({"kv_cache_dtype": "fp8_e4m3"}, "rounded", {"kv_cache_dtype": "auto"}),
        ({"scales_from_prompt": True}, "scales", {"scales_from_prompt": False}),
        ({"pool_tokens": 4096, "max_num_seqs": 2}, "0.50 requests of the full 8,192", {"max_model_len": 4096}),
        ({"max_num_seqs": 1000}, "100 tokens of the cache for each", {"max_num_seqs": 390}),
        ({"hash_algo": "xxhash"}, "same hash", {"hash_algo": "sha256"}),
        ({"replicas": 4}, "each of 4 replicas", {"replicas": 1}),
        ({"adapters": 3}, "3 adapters", {"adapters": 1}),
        ({"prompt_logprobs": 0.25}, "25% of the requests", {"prompt_logprobs": 0.0}),
        ({"gpu_memory_utilization": 0.5}, "50% of the GPU", {"gpu_memory_utilization": 0.9}),
        ({"reports_cached_tokens": False}, "nobody sees", {"reports_cached_tokens": True}),
        ({"chunked_prefill": False}, "delays all other requests", {"chunked_prefill": True}),
        ({"template": (("it prints the date", "take it out"),)}, "prints the date. Take it out", {"template": ()}),
    ],
)
def test_each_problem_and_its_fix(change: dict[str, Any], words: str, fixed: dict[str, Any]) -> None:
    bad = replace(GOOD, **change)
    (found,) = check_server_flags(bad)
    assert words in str(found)
    assert found.mend
    assert check_server_flags(replace(bad, **fixed)) == []


def test_a_block_larger_than_the_shared_prefix_costs_less_with_exact_reuse() -> None:
    (whole,) = check_server_flags(replace(GOOD, block_size=64, system_tokens=40))
    (exact,) = check_server_flags(replace(GOOD, block_size=64, system_tokens=40, exact=True))
    assert "never hits" in whole.problem
    assert "copies it" in exact.problem


def test_the_advised_numbers_are_the_limits() -> None:
    assert check_server_flags(replace(GOOD, pool_tokens=8192, max_num_seqs=32)) == []
    (few,) = check_server_flags(replace(GOOD, pool_tokens=8192, max_num_seqs=33))
    assert "--max-num-seqs 32" in few.mend
    (short,) = check_server_flags(replace(GOOD, pool_tokens=8191, max_num_seqs=1))
    assert "--max-model-len 8191" in short.mend
