"""Counts Triton compilations outside the warm-up. One takes as long as many steps, so a runner compiles at load."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton

logger = logging.getLogger(__name__)


class CompileWatch:
    """Hooks into Triton. ``unexpected`` counts compilations outside ``expected``; each is also logged as a warning."""

    def __init__(self) -> None:
        self.unexpected = 0
        self._nesting = 0
        self._previous_hook = triton.knobs.runtime.jit_post_compile_hook
        triton.knobs.runtime.jit_post_compile_hook = self._on_compile

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations inside are part of loading and are not counted."""
        self._nesting += 1
        try:
            yield
        finally:
            self._nesting -= 1

    def _on_compile(self, *args: Any, **kwargs: Any) -> Any:
        if not self._nesting:
            self.unexpected += 1
            name = str(kwargs.get("repr", "a kernel")).partition("[")[0]
            logger.warning("%s was compiled while serving: the warm-up missed it, and this step was slow", name)
        return None if self._previous_hook is None else self._previous_hook(*args, **kwargs)


COMPILE_WATCH = CompileWatch()
