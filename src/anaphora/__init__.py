"""Anaphora: an engine and server for language models, built around automatic prefix caching.

Public names are imported on first use (PEP 562), so ``import anaphora`` is fast and needs no torch.
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

_MODULES = {
    "LLM": "anaphora.llm",
    "SamplingParams": "anaphora.types.sampling",
    "RequestOutput": "anaphora.types.outputs",
    "CompletionOutput": "anaphora.types.outputs",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.metadata.version("anaphora")
    elif name in _MODULES:
        value = getattr(_import_module(name), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "anaphora":
            raise
        raise ImportError(f"{name} needs {error.name}: run pip install '.[serve]' in Anaphora's folder") from error


def __dir__() -> list[str]:
    return sorted(__all__)
