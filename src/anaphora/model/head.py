"""The language-model head: logits from hidden states that the base model has computed already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class LanguageModelHead:
    """Applies the head of ``model`` through the model's own forward.

    In some families the head is more than a matrix (a softcap, a factor), and only the model's code knows.
    """

    def __init__(self, model: Any, base: nn.Module) -> None:
        self._model = model
        self._base = base

    @contextmanager
    def over(self, outputs: Any) -> Iterator[None]:
        """Inside, the base model returns ``outputs`` instead of computing, so that the model only applies its head."""
        self._base.forward = lambda *args, **kwargs: outputs
        try:
            yield
        finally:
            del self._base.forward

    def logits(self, outputs: Any, hidden: Tensor) -> Tensor:
        """``hidden`` ``[1, R, hidden size]`` → logits ``[R, V]``; call it inside ``over(outputs)``."""
        outputs.last_hidden_state = hidden
        logits: Tensor = self._model(input_ids=None, use_cache=False).logits
        return logits[0]
