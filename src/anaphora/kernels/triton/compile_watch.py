"""Watches which kernels Triton makes ready. Each takes as long as many steps, so a runner makes all while it loads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

logger = logging.getLogger(__name__)


class Compilations:
    """``unexpected`` counts those outside of ``expected``; each is a warning in the log too."""

    def __init__(self) -> None:
        self.unexpected = 0
        self._loading = 0
        self._before = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._note

    @contextmanager
    def expected(self) -> Iterator[None]:
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1

    def _note(self, *args: Any, **kwargs: Any) -> Any:
        if not self._loading:
            self.unexpected += 1
            name = str(kwargs.get("repr", "a kernel")).partition("[")[0]
            logger.warning("%s was compiled while serving: the warm-up has missed it, and this step was slow", name)
        return None if self._before is None else self._before(*args, **kwargs)


COMPILATIONS = Compilations()
