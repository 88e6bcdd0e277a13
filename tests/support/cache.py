"""A cache manager with one more verb: compute and release a whole prompt, as the scheduler would."""

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


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Found:
    """What one use of the cache found."""

    report: CacheReport
    sizes: AtSizes
    table: BlockTable


class Cache(CacheManager):
    """Prompts come one at a time unless they are started and released by hand."""

    steps = 0

    def start(self, key: str, ids: list[int], root: BlockHash = ROOT) -> Found:
        table = self.table(key, ids, root)
        match = self.match(table)
        sizes = self.at_sizes(table, match, len(ids)) or AtSizes(0, 0, 0)
        taken = self.admit(table, match, len(ids) + 1)
        assert taken is not None, f"no room for {key}"
        report = self.explain(table, match, len(ids), taken)
        self.compute(table, taken, len(ids))
        return Found(report, sizes, table)

    def compute(self, table: BlockTable, taken: Match, end: int) -> None:
        assert self.reserve(table, taken.tokens, end, self.steps) is not None
        self.finish_step(self.steps)
        self.steps += 1
        self.commit(table, end, tail=True)

    def run(self, key: str, ids: list[int], root: BlockHash = ROOT, answer: list[int] | None = None) -> Found:
        """Compute a prompt, let an answer follow, and release it. The answer's last token has no slot, as always."""
        found = self.start(key, ids, root)
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
        """What the prompt would find."""
        table = self.table("asks", ids, root)
        return self.explain(table, self.match(table), len(ids))
