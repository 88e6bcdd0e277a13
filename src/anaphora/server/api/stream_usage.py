"""What ``stream_options`` asks for: token counts at the end of a stream, or in every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anaphora.server.api import cache_explanations, response_parts
from anaphora.server.api.prompt_run import PromptRun
from anaphora.server.api.protocol import GenerationRequest
from anaphora.server.api.request_context import RequestContext
from anaphora.server.service import Service


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """``at_end``: the last chunk has the usage. ``in_every_chunk``: all have it; vLLM's continuous_usage_stats."""

    at_end: bool
    in_every_chunk: bool

    @classmethod
    def of(cls, body: GenerationRequest) -> UsageOptions:
        """Returns the options of a body."""
        options = body.stream_options
        at_end = options is not None and bool(options.include_usage)
        return cls(at_end, at_end and options is not None and bool(options.continuous_usage_stats))

    def chunk_fields(self, runs: Sequence[PromptRun]) -> dict[str, Any]:
        """Returns the fields that a chunk has in addition to ``choices``."""
        return {"usage": response_parts.usage(runs)} if self.in_every_chunk else {}

    async def last_fields(self, service: Service, context: RequestContext, runs: Sequence[PromptRun]) -> dict[str, Any]:
        """Returns the fields of the chunk after the last choice; empty if the request asks for none."""
        fields = await cache_explanations.body_field(service, context, runs)
        return fields | {"usage": response_parts.usage(runs)} if self.at_end else fields
