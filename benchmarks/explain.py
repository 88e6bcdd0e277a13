"""What it costs to explain every lookup: microseconds by reason, beside the lookup itself.

    python benchmarks/explain.py [--requests N] [--json FILE]

A cache without a model serves prompts of 2,300 shared and 120 own tokens with answers of 200, as the scheduler would,
in a pool that holds a third of what is new in them. Beside each lookup's own time (hash, match, admit) stands that of
its report and of the counts for other cache sizes; then what it takes to remember an evicted block. Medians, since
other programs run on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from anaphora.cache.ghosts import Evicted, Ghosts
from anaphora.cache.hashing import BlockHash, root_hash
from anaphora.cache.manager import CacheManager
from anaphora.tools.shared.machine import commit, machine, versions
from anaphora.types.reports import Reason

SHARED, OWN, ANSWER, BLOCK = 2300, 120, 200, 16
RATE = 100
"""Requests a second for which the share of one core is given."""


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(150_000) for _ in range(count)]


def serve(requests: int, seed: int = 1) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds of lookup, report and other sizes by reason."""
    chance = random.Random(seed)
    systems = [tokens(chance, SHARED) for _ in range(8)]
    blocks = requests * (OWN + ANSWER) // BLOCK // 3
    cache = CacheManager(blocks, BLOCK)
    root = root_hash("benchmark")
    earlier: list[list[int]] = []
    taken: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for step in range(requests):
        ids = [*chance.choice(systems), *tokens(chance, OWN)]
        kind = chance.random()
        if earlier and kind < 0.3:
            ids = [*chance.choice(earlier), *tokens(chance, OWN)]
        elif kind < 0.4:
            ids = tokens(chance, SHARED + OWN)
        elif earlier and kind < 0.5:
            ids = list(earlier[-1])
        began = time.perf_counter()
        table = cache.table(f"r{step}", ids, root)
        match = cache.match(table)
        looked_up = time.perf_counter()
        cache.at_sizes(table, match, len(ids))
        sized = time.perf_counter()
        admitted = cache.admit(table, match, len(ids) + 1)
        held = time.perf_counter()
        assert admitted is not None
        report = cache.explain(table, match, len(ids), admitted)
        explained = time.perf_counter()
        taken[report.reason].append((looked_up - began + held - sized, explained - held, sized - looked_up))
        answer = tokens(chance, ANSWER)
        compute(cache, table, admitted.tokens, ids, answer, step)
        earlier = [*earlier[-200:], [*ids, *answer]]
    cache.check([])
    return taken


def compute(cache: CacheManager, table: Any, first: int, ids: list[int], answer: list[int], step: int) -> None:
    cache.reserve(table, first, len(ids), step)
    cache.finish_step(step)
    cache.commit(table, len(ids), tail=True)
    table.append(answer, BLOCK)
    cache.reserve(table, len(ids), len(ids) + ANSWER - 1, step)
    cache.finish_step(step)
    cache.release(table, len(ids) + ANSWER - 1)


def remembering(blocks: int = 20_000) -> float:
    """Seconds to remember one evicted block, in a list that is full."""
    ghosts = Ghosts(blocks // 8)
    evicted = Evicted(0.0, "r", None)
    digests = [BlockHash(number.to_bytes(32, "little")) for number in range(blocks)]
    began = time.perf_counter()
    for digest in digests:
        ghosts.add(digest, evicted)
    return (time.perf_counter() - began) / blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    by_reason = serve(options.requests)
    rows = {}
    print(f"{'reason':10} {'lookups':>8} {'lookup µs':>10} {'report µs':>10} {'sizes µs':>9}   medians")
    for reason in Reason:
        if entries := by_reason.get(reason):
            lookup, report, sizes = (round(1e6 * statistics.median(column), 1) for column in zip(*entries, strict=True))
            rows[reason.value] = {
                "lookups": len(entries),
                "lookup_us": lookup,
                "report_us": report,
                "sizes_us": sizes,
            }
            print(f"{reason:10} {len(entries):8} {lookup:10} {report:10} {sizes:9}")
    total = sum(row["lookups"] for row in rows.values())
    mean = sum(row["lookups"] * (row["report_us"] + row["sizes_us"]) for row in rows.values()) / total
    block = 1e6 * min(remembering() for _ in range(5))
    share = RATE * mean / 1e6
    print(f"report and sizes: {mean:.1f} µs a lookup, {share:.2%} of a core at {RATE} requests/s")
    print(f"remembering an evicted block: {block:.2f} µs")
    if options.json:
        result = {"machine": machine(), "versions": versions(), "commit": commit(), "rows": rows}
        result |= {"explain_mean_us": round(mean, 1), "evicted_block_us": round(block, 2)}
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
