"""Anaphora: a language-model engine and server whose centre is automatic prefix caching.

The public names load on first use, so that ``import anaphora`` is quick and needs no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anaphora.llm import LLM
    from anaphora.types.outputs import CompletionOutput, RequestOutput
    from anaphora.types.sampling import SamplingParams

    __version__: str

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "anaphora.llm",
    "SamplingParams": "anaphora.types.sampling",
    "RequestOutput": "anaphora.types.outputs",
    "CompletionOutput": "anaphora.types.outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.metadata.version("anaphora")
    elif name in _HOMES:
        value = getattr(_home(name), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _home(name: str) -> ModuleType:
    try:
        return importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "anaphora":
            raise
        raise ImportError(f"{name} needs {error.name}: run pip install '.[serve]' in Anaphora's folder") from error


def __dir__() -> list[str]:
    return sorted(__all__)
