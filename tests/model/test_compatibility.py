"""Models that are refused by their config.json alone, and the longest sequence of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from anaphora.errors import ModelError
from anaphora.model.compatibility import check_config, context_length_of
from tests.support.checkpoints import make_config

HERE = Path("some-model")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("T5Config", {}, "encoder-decoder"),
        ("LlavaConfig", {}, "multimodal"),
        (
            "Qwen3NextConfig",
            {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
            "linear",
        ),
        ("MambaConfig", {}, "linear_attention"),
        ("BloomConfig", {}, "does not take another attention"),
        ("BertConfig", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ("LlamaConfig", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForCausalLM is needed"),
        ("LlamaConfig", {"num_hidden_layers": 0}, "no attention layers"),
        ("ViTConfig", {}, "not a causal language model"),
    ],
)
def test_a_model_that_cannot_work_is_refused_before_its_weights(
    name: str, changes: dict[str, Any], reason: str
) -> None:
    config = getattr(transformers, name)(**changes)
    with pytest.raises(ModelError, match="some-model") as caught:
        check_config(config, HERE)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("rope", "window"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 1024),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, 2048),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}, 512),
    ],
)
def test_the_window_is_what_rotary_scaling_allows(rope: dict[str, Any], window: int) -> None:
    assert context_length_of(make_config("llama", rope_parameters=rope), HERE, None) == window


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_scaling_by_length_is_refused_beyond_the_original_window(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = make_config("llama", rope_parameters=rope)
    assert context_length_of(config, HERE, 512) == 512
    with pytest.raises(ModelError, match=f"{kind}.*512 tokens.*--max-model-len 600"):
        context_length_of(config, HERE, 600)


def test_a_window_that_is_nowhere_is_refused() -> None:
    config = transformers.PreTrainedConfig()
    with pytest.raises(ModelError, match="max_position_embeddings"):
        context_length_of(config, HERE, None)
