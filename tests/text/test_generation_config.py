from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anaphora.errors import ConfigError
from anaphora.text.generation_config import load_defaults


@dataclass
class Ends:
    eos_token_ids: tuple[int, ...] = (7,)


MODEL = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "do_sample": True, "max_new_tokens": 99}


def write(folder: Path, generation: Any = None, config: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def test_auto_uses_the_models_file(tmp_path: Path) -> None:
    folder = write(tmp_path, {**MODEL, "repetition_penalty": 1.05, "eos_token_id": 5})
    defaults = load_defaults(folder, "auto", Ends())
    assert defaults.sampling == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }
    assert set(defaults.eos_token_ids) == {5, 7}


def test_vllm_uses_no_file_but_keeps_the_end_tokens(tmp_path: Path) -> None:
    defaults = load_defaults(write(tmp_path, {**MODEL, "eos_token_id": [5, 6]}), "vllm", Ends())
    assert defaults.sampling == {}
    assert set(defaults.eos_token_ids) == {5, 6, 7}


def test_a_folder_or_file_is_read_instead(tmp_path: Path) -> None:
    model = write(tmp_path / "model", MODEL)
    other = write(tmp_path / "other", {"temperature": 0.1, "eos_token_id": 5})
    for place in (other, other / "generation_config.json"):
        defaults = load_defaults(model, str(place), Ends())
        assert defaults.sampling == {"temperature": 0.1}
        assert set(defaults.eos_token_ids) == {5, 7}
    with pytest.raises(ConfigError, match="--generation-config: there is no"):
        load_defaults(model, str(tmp_path / "absent"), Ends())


def test_end_tokens_are_the_union_without_repeats(tmp_path: Path) -> None:
    config = {"eos_token_id": [5, 8], "text_config": {"eos_token_id": 9}}
    folder = write(tmp_path, {"eos_token_id": [5, True, "x", None]}, config)
    assert sorted(load_defaults(folder, "auto", Ends((7, 5))).eos_token_ids) == [5, 7, 8, 9]


def test_a_model_without_either_file(tmp_path: Path) -> None:
    defaults = load_defaults(tmp_path, "auto", Ends())
    assert (defaults.sampling, defaults.eos_token_ids) == ({}, (7,))


@pytest.mark.parametrize("content", ["[1]", "{", '{"temperature": "hot"}', '{"top_p": 7}', '{"temperature": NaN}'])
def test_bad_files_and_values_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json|generation config's defaults"):
        load_defaults(tmp_path, "auto", Ends())
