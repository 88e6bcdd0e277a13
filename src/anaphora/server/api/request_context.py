"""RequestContext: one API request on its way through the routes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from anaphora.server.api.protocol import ChatRequest


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One validated API request.

    Args:
        body: the parsed body, one of the classes of api.protocol.
        raw: the body as plain JSON values.
        route: the path.
        arrival: time.monotonic() when the body was complete.
        client_id: the id that the client gave, in the body or as X-Request-Id.
    """

    body: Any
    raw: dict[str, Any]
    route: str
    arrival: float
    client_id: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    uuid: str = field(default_factory=lambda: uuid4().hex)

    def public_id(self, prefix: str) -> str:
        """Returns the id in the response: the client's own if it gave one."""
        return f"{prefix}-{self.client_id or self.uuid}"

    @property
    def engine_id(self) -> str:
        """The engine's id of the request. Not the client's: two running requests may have the same one."""
        return f"{'chatcmpl' if isinstance(self.body, ChatRequest) else 'cmpl'}-{self.uuid}"
