"""Settings of LLM and values of SamplingParams: which are taken, and how others are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import anaphora
from anaphora import SamplingParams
from anaphora import llm as llm_module
from anaphora.config import CacheConfig, ModelConfig, SchedulerConfig, engine_config
from anaphora.errors import ConfigError, InvalidRequest
from anaphora.llm import Settings
from tests.support.llm import WINDOW, Make


def test_settings_are_the_fields_of_the_configuration() -> None:
    fields = {f.name for cls in (ModelConfig, CacheConfig, SchedulerConfig) for f in dataclasses.fields(cls)}
    assert set(Settings.__annotations__) == fields - {"model"}


def test_settings_reach_their_places() -> None:
    config = engine_config(
        {
            "seed": 4,
            "max_model_len": 100,
            "served_model_name": "mine",
            "block_size": 8,
            "kv_cache_memory_bytes": "2M",
            "gpu_memory_utilization": 1,
            "max_num_seqs": 3,
        }
    )
    assert config.model == ModelConfig(seed=4, max_model_len=100, served_model_name=("mine",))
    assert config.cache == CacheConfig(block_size=8, kv_cache_memory_bytes=2 * 2**20, gpu_memory_utilization=1)
    assert config.scheduler == SchedulerConfig(max_num_seqs=3)


@pytest.mark.parametrize(
    ("settings", "about"),
    [
        ({"max_model_length": 1}, "max_model_length.*did you mean max_model_len"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"dtype": "int8"}, "dtype must be one of .*bfloat16"),
        ({"dtype": 16}, "dtype must be of type str"),
        ({"block_size": "16"}, "block_size must be of type int"),
        ({"block_size": True}, "block_size must be of type int"),
        ({"block_size": 0}, "block-size"),
        ({"gpu_memory_utilization": "0.9"}, "of type float"),
        ({"enable_prefix_caching": 1}, "of type bool"),
        ({"kv_cache_memory_bytes": "much"}, "much"),
        ({"max_model_len": "long"}, "long"),
        ({"max_model_len": 100.5}, "max_model_len must be of type int"),
        ({"chat_template": 5}, "chat_template must be of type str"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], about: str) -> None:
    with pytest.raises(ConfigError, match=about):
        engine_config(settings)


def test_what_was_changed_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    llm = make(max_model_len=10**6)
    assert llm.info.max_model_len == WINDOW
    assert "1000000" in caplog.text


def test_the_package_exports_llm() -> None:
    assert anaphora.LLM is llm_module.LLM


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("n", None),
            ("min_tokens", None),
            ("top_k", None),
            ("stop", 5),
            ("stop_token_ids", 5),
            ("stop_token_ids", "a"),
        ),
        *(("logit_bias", [1]), ("allowed_token_ids", 5), ("allowed_token_ids", "a")),
    ],
)
def test_sampling_values_of_a_wrong_kind_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_served_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="served_model_name must be text"):
        engine_config({"served_model_name": 5})


def test_none_stands_for_no_stop_and_no_bias() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()  # type: ignore[arg-type]
