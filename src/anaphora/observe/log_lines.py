"""Lines of the server's log: one at the start, one per request, and one every few seconds under load."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from anaphora.observe.record import RequestRecord
from anaphora.types.outputs import EngineInfo, EngineStats
from anaphora.types.reports import is_hit

logger = logging.getLogger("anaphora.server")

RECENT_REQUESTS = 1000
HIT_DETAIL = "all that was there; the rest is new"


def describe_pool(info: EngineInfo) -> str:
    """Returns the line about memory and the KV cache. Block 0 is the null block, which holds no tokens."""
    model = info.model
    tokens = (model.num_blocks - 1) * model.block_size
    parts = {
        "weights": model.weights_bytes,
        "activations": model.activation_bytes,
        "CUDA graphs": model.graph_bytes,
        "KV blocks": model.num_blocks * model.bytes_per_block,
    }
    memory = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items() if size)
    return (
        f"memory: {memory}; "
        f"KV cache: num_gpu_blocks={model.num_blocks}, block_size={model.block_size}, {tokens:,} tokens fit "
        f"({model.bytes_per_block / 2**10:,.0f} KiB a block); "
        f"{tokens / info.max_model_len:.2f} requests of the full {info.max_model_len:,} tokens fit at once"
    )


def describe_request(record: RequestRecord) -> str:
    """Returns the line of a finished request: what was reused and why not more, its times, how it ended."""
    cached = f"{record.cached_tokens or 0} cached"
    if record.reason:
        detail = record.detail or (HIT_DETAIL if record.reason == "hit" else "")
        cached += f" ({record.reason}{': ' + detail if detail else ''})"
    name = f"{record.id} ({record.client_id!r})" if record.client_id else record.id
    first = "no token" if record.ttft_s is None else f"first token {record.ttft_s:.3f} s"
    return (
        f"{name}: prompt {_tokens(record.prompt_tokens)}, {cached}; queue {record.queue_s:.3f} s"
        f"{f' (for a prefix {record.waited_s:.3f} s)' if record.waited else ''}, prefill {record.prefill_s:.3f} s, "
        f"{first}; output {_tokens(record.output_tokens)} in {record.total_s:.3f} s, {record.finish}"
    )


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


class HitRates:
    """Hit rates over the last ``last`` requests. A request counts once, at its first token."""

    def __init__(self, last: int = RECENT_REQUESTS) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=last)

    def add(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a prompt."""
        self._recent.append((prompt_tokens, cached_tokens))

    def describe(self, stats: EngineStats) -> str:
        """Returns the line under load: hit rates in tokens and requests, recent and since the start, and the queues."""
        recent = self._recent
        tokens = _share(sum(c for _, c in recent), sum(p for p, _ in recent))
        requests = _share(sum(is_hit(p, c) for p, c in recent), len(recent))
        in_use = _share(stats.referenced_blocks, stats.total_blocks)
        return (
            f"hit rate of the last {len(recent):,} requests: {tokens} of prompt tokens, {requests} of requests; "
            f"since the start: {_share(stats.hits, stats.queries)} of tokens, "
            f"{_share(stats.requests_hit, stats.requests)} of requests; running {stats.running}, "
            f"waiting {stats.waiting}, KV cache in use {in_use}, "
            f"kept for reuse {_share(stats.idle_cached_blocks, stats.total_blocks)}"
        )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "–"


class Timer(Protocol):
    """A scheduled callback."""

    def cancel(self) -> None:
        """Drops the callback."""


class LoadLog:
    """Logs a line every ``interval`` seconds while there is work, and once after it. Has no timer when idle.

    Args:
        interval: seconds.
        call_later: ``call_later(seconds, function)``, as the event loop has it.
        busy: whether there is work.
        describe: returns the line.
    """

    def __init__(
        self,
        interval: float,
        call_later: Callable[[float, Callable[[], None]], Timer],
        busy: Callable[[], bool],
        describe: Callable[[], str],
    ) -> None:
        self._interval = interval
        self._call_later = call_later
        self._busy = busy
        self._describe = describe
        self._timer: Timer | None = None

    def touch(self) -> None:
        """Starts the timer; called when a request begins."""
        if self._timer is None:
            self._timer = self._call_later(self._interval, self._tick)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        logger.info("%s", self._describe())
        if self._busy():
            self.touch()
