"""Loads a model's default sampling parameters and end tokens, as vLLM does for ``--generation-config``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anaphora.errors import ConfigError, InvalidRequest
from anaphora.text.tokenizer import read_object
from anaphora.types.sampling import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Maps names in generation_config.json to fields of SamplingParams."""


class HasEosTokens(Protocol):
    """The part of a tokenizer that is used here."""

    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerationDefaults:
    """``sampling`` has defaults for SamplingParams; each of ``eos_token_ids`` ends an answer."""

    sampling: dict[str, Any]
    eos_token_ids: tuple[int, ...]


def load_defaults(folder: Path, generation_config: str, tokenizer: HasEosTokens) -> GenerationDefaults:
    """Loads the defaults of the model in ``folder``.

    ``generation_config``: ``auto`` uses the sampling parameters of the model's generation_config.json, ``vllm`` none,
    anything else is a folder or file to read instead. The end tokens are always the union of those in
    generation_config.json, config.json and the tokenizer. Raises ConfigError for an invalid file or value.
    """
    own = folder / "generation_config.json"
    chosen: dict[str, Any] = read_object(own) if own.is_file() else {}
    named: dict[str, Any] = chosen
    if generation_config == "vllm":
        chosen = {}
    elif generation_config != "auto":
        path = Path(generation_config).expanduser()
        path = path / "generation_config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"--generation-config: there is no {path}; use auto, vllm, or a folder that holds one")
        chosen = named = read_object(path)
    sampling = {ours: chosen[theirs] for theirs, ours in _NAMES.items() if chosen.get(theirs) is not None}
    try:
        SamplingParams(**sampling)
    except InvalidRequest as error:
        raise ConfigError(f"the generation config's defaults cannot be used: {error.message}") from error
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    text_config = config.get("text_config")
    entries = [named, config, text_config if isinstance(text_config, dict) else {}]
    ids = [token_id for entry in entries for token_id in _ids(entry.get("eos_token_id"))]
    return GenerationDefaults(sampling, tuple(dict.fromkeys([*ids, *tokenizer.eos_token_ids])))


def _ids(entry: Any) -> list[int]:
    listed = entry if isinstance(entry, list) else [entry]
    return [token_id for token_id in listed if isinstance(token_id, int) and not isinstance(token_id, bool)]
