"""What the loader makes of a model folder, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anaphora.attention.base import KVLayout
from anaphora.config import ModelConfig
from anaphora.errors import ModelError
from anaphora.model.fuse import cpu
from anaphora.model.loader import LoadedModel, load_model
from tests.support.checkpoints import COMMON, WINDOW, make_config, save, to_float8


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), **settings), torch.device("cpu"))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", KVLayout(2, 8, 8)),
        ("qwen3", KVLayout(2, 16, 16)),
        ("glm4_moe_lite", KVLayout(1, 40, 32, latent=True)),
    ],
)
def test_the_probe_finds_what_each_layer_caches(tmp_path: Path, family: str, layout: KVLayout) -> None:
    loaded = load(save(tmp_path, family))
    assert loaded.layouts == (layout,) * 3
    assert set(loaded.absorbed) == (set(range(3)) if layout.latent else set())
    assert (loaded.context_length, loaded.dtype) == (WINDOW, torch.float32)


def test_latents_are_an_eighth_of_what_they_expand_to() -> None:
    assert KVLayout(1, 576, 512, latent=True).width == 576
    assert KVLayout(20, 256, 256).width == 20 * 512


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no-such-type"}'])
def test_a_config_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path)


def test_code_in_a_folder_runs_only_when_trusted(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise RuntimeError('it ran')")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "modeling_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="--trust-remote-code"):
        load(tmp_path)


def test_weights_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes in ({"num_hidden_layers": 4}, {"intermediate_size": COMMON["intermediate_size"] * 2}):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match="layers"):
            load(tmp_path)


def test_broken_weights(tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=str(tmp_path)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("saved", "asked", "runs", "warns"),
    [
        (torch.bfloat16, "auto", torch.bfloat16, False),
        (torch.float32, "auto", torch.float32, False),
        (torch.float32, "bfloat16", torch.bfloat16, False),
        (torch.bfloat16, "float", torch.float32, False),
        (torch.float16, "auto", None, True),
        (torch.float32, "half", None, True),
    ],
)
def test_dtypes(tmp_path: Path, saved: torch.dtype, asked: str, runs: torch.dtype | None, warns: bool) -> None:
    loaded = load(save(tmp_path, dtype=saved), dtype=asked)
    assert loaded.dtype == loaded.model.dtype
    assert loaded.dtype in ((torch.bfloat16, torch.float32) if runs is None else (runs,))
    assert bool(loaded.warnings) is warns
    assert all("float16" in warning and "CPU" in warning for warning in loaded.warnings)


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    make_config("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        load(tmp_path)
    loaded = load(tmp_path, load_format="dummy")
    assert loaded.layouts == (KVLayout(2, 16, 16),) * 3
    assert loaded.weights_bytes > 0


@pytest.mark.parametrize("family", ["qwen3", "glm4", "qwen3_moe"])
def test_float8_checkpoints_are_widened_as_they_are_read(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "pack_linear_layers", lambda *_, **__: None)  # so that the weights can be seen
    folder = save(tmp_path, family, dtype=torch.bfloat16)
    exact = {name: weight.float() for name, weight in load(folder).model.named_parameters()}
    to_float8(folder)
    loaded = load(folder)
    assert loaded.dtype == torch.bfloat16
    assert any("float8 weights are dequantised to bfloat16" in warning for warning in loaded.warnings)
    gaps = {
        name: ((weight.float() - exact[name]).norm() / exact[name].norm()).item()
        for name, weight in loaded.model.named_parameters()
    }
    assert 0.01 < max(gaps.values()) < 0.04
    assert loaded.weights_bytes == load(save(tmp_path, family, dtype=torch.bfloat16)).weights_bytes
