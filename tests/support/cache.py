"""A CacheManager that computes and releases whole prompts, as the scheduler would, and a clock for it."""

from __future__ import annotations

from dataclasses import dataclass

from anaphora.cache.explain import AtSizes
from anaphora.cache.hashing import BlockHash, root_hash
from anaphora.cache.index import Match
from anaphora.cache.manager import CacheManager
from anaphora.cache.table import BlockTable
from anaphora.types.reports import CacheReport

ROOT = root_hash("m")
OTHER = root_hash("m", "another tenant")


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return the number of equal tokens at the start."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


class Clock:
    """A clock that shows ``now``, which the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Found:
    """What one prompt found in the cache, and the table that it used."""

    report: CacheReport
    sizes: AtSizes
    table: BlockTable


class Cache(CacheManager):
    """Runs prompts one at a time, unless the test starts and releases them itself."""

    steps = 0

    def start(self, request_id: str, ids: list[int], root: BlockHash = ROOT) -> Found:
        """Admit and compute a prompt; it keeps its blocks."""
        table = self.table(request_id, ids, root)
        match = self.match(table)
        sizes = self.at_sizes(table, match, len(ids)) or AtSizes(0, 0, 0)
        taken = self.admit(table, match, len(ids) + 1)
        assert taken is not None, f"no room for {request_id}"
        report = self.explain(table, match, len(ids), taken)
        self.compute(table, taken, len(ids))
        return Found(report, sizes, table)

    def compute(self, table: BlockTable, taken: Match, end: int) -> None:
        """Compute in one step what is missing before ``end``."""
        assert self.reserve(table, taken.tokens, end, self.steps) is not None
        self.finish_step(self.steps)
        self.steps += 1
        self.commit(table, end, tail=True)

    def run(self, request_id: str, ids: list[int], root: BlockHash = ROOT, answer: list[int] | None = None) -> Found:
        """Compute a prompt and an answer, and release it. The answer's last token is never computed."""
        found = self.start(request_id, ids, root)
        end = len(ids)
        if answer:
            found.table.append(answer, self.block_size)
            end += len(answer) - 1
            assert self.reserve(found.table, len(ids), end, self.steps) is not None
            self.finish_step(self.steps)
            self.steps += 1
        self.release(found.table, end)
        return found

    def ask(self, ids: list[int], root: BlockHash = ROOT) -> CacheReport:
        """Return what the prompt would find now."""
        table = self.table("asks", ids, root)
        return self.explain(table, self.match(table), len(ids))
