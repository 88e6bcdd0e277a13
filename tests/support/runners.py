"""Runners for tests of the engine process, given by dotted path: a slow one, and some that fail."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from anaphora.config import EngineConfig
from anaphora.core.engine import Engine
from anaphora.errors import CacheInvariantError, ModelError
from anaphora.types.batch import Batch, Pending, Runner
from tests.support.engine import FakeRunner, load_fake

ENDLESS = 100_000
STEP_S = 0.005


def load_slow(config: EngineConfig) -> Runner:
    """Make a FakeRunner with steps slow enough that tests can act while a request runs."""
    return _slow(load_fake(config))


def load_endless(config: EngineConfig) -> Runner:
    """Make one that is as slow, with room for ENDLESS tokens: more than a test's time limit allows."""
    return _slow(
        FakeRunner(2 * ENDLESS // config.cache.block_size, config.cache.block_size, context_length=2 * ENDLESS)
    )


def _slow(runner: FakeRunner) -> Runner:
    submit = runner.submit

    def slowly(batch: Batch) -> Pending:
        time.sleep(STEP_S)
        return submit(batch)

    runner.submit = slowly  # type: ignore[method-assign]
    return runner


def load_for_ever(config: EngineConfig) -> NoReturn:
    print("loading", file=sys.stderr)
    while True:
        time.sleep(60)


def load_refused(config: EngineConfig) -> NoReturn:
    raise ModelError("the model 'sundial' has no attention", param="model")


def load_broken(config: EngineConfig) -> NoReturn:
    raise RuntimeError("the weights are upside down")


def load_exiting(config: EngineConfig) -> NoReturn:
    for line in range(40):
        print(f"layer {line} of 40", file=sys.stderr)
    print("out of luck")
    sys.stdout.flush()
    os._exit(7)


def load_with_failing_step(config: EngineConfig) -> Runner:
    def step(self: Engine) -> NoReturn:
        raise ZeroDivisionError("no tokens to divide by")

    Engine.step = step  # type: ignore[method-assign]
    return load_fake(config)


def load_with_failing_check(config: EngineConfig) -> Runner:
    def check(self: Engine) -> NoReturn:
        raise CacheInvariantError("3 free + 4 cached blocks are not 8")

    Engine.check = check  # type: ignore[method-assign]
    return load_fake(config)
