from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.servers import ScriptedServer, scripted


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ScriptedServer]:
    async with scripted(tmp_path / "model") as server:
        yield server
