"""Token usage in every vendor's convention."""

from __future__ import annotations

from typing import Any

import pytest

from anaphora.tools.shared.usage import Usage, usage_of


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
