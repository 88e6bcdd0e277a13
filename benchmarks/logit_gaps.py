"""Measures how logits change with the way they are computed, at the size of ``h200.py``'s model and prompts.

    python benchmarks/logit_gaps.py [--tiny] [--out FILE] [--commit ID]

The same tokens are computed with and without a cached prefix, shared-prefix attention, and CUDA graphs. A gap is the
largest difference of two logits of a row, as a share of the standard deviation of the row's logits. For the effect of
rounding alone, the same row is computed in a smaller batch, whose GEMMs use other tiles. Plain random weights would
average all values equally, so attention is sharpened first: queries times 4, values times 8; then a difference in the
last bit of one layer grows through the rest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from card.engines import WHOLE, Bench
from card.sizes import FULL, TINY
from h200 import RESULTS, commit, machine, versions
from torch import Tensor

from anaphora.types.batch import Batch, Chunk, Join, PrefixGroup
from anaphora.types.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
MOST_SEQUENCES = 64


def sharpen(model: torch.nn.Module) -> None:
    """Let attention pick a few keys, and what it picks count."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "v_proj.weight")):
                weight.mul_(4 if "q_norm" in name else 8)


class Steps:
    """Steps of sequences that begin alike, made by hand; logits by row."""

    def __init__(self, bench: Bench) -> None:
        self._runner = bench.runner(WHOLE)
        sharpen(self._runner._model)
        self._size = self._runner.info.block_size
        self.shared = bench.size.shared // self._size * self._size
        count = min(MOST_SEQUENCES, bench.settings(WHOLE).scheduler.max_num_seqs)
        self.prompts = [bench.text(bench.size.own) for _ in range(count)]
        self.prefix = bench.text(self.shared)
        self._own = -(-(bench.size.own + 1) // self._size)
        self._logits = torch.empty(0)
        sample = self._runner._sampler.sample

        def keep(logits: Tensor, slots: list[int]) -> Any:
            self._logits = logits.float().cpu()
            return sample(logits, slots)

        self._runner._sampler.sample = keep  # type: ignore[method-assign]

    def _join(self, slot: int, first_block: int) -> Join:
        """The prefix lies in the blocks from ``first_block`` on, what is the sequence's own behind all prefixes."""
        count = self.shared // self._size
        own = 1 + 2 * count + slot * self._own
        table = (*range(first_block, first_block + count), *range(own, own + self._own))
        tokens = (*self.prefix, *self.prompts[slot])
        return Join(slot, GREEDY, 0, tokens, len(tokens), (), table)

    def run(self, joins: list[Join], chunks: list[Chunk], groups: tuple[PrefixGroup, ...] = ()) -> Tensor:
        self._runner.submit(Batch(0, tuple(joins), (), tuple(chunks), groups)).result()
        return self._logits

    def prompt(self, slot: int, start: int) -> Chunk:
        tokens = (*self.prefix, *self.prompts[slot])[start:]
        return Chunk(slot, start, len(tokens), tokens, start, (), True)

    def cold(self) -> Tensor:
        """The first sequence, computed whole; its prefix is then in the first blocks."""
        return self.run([self._join(0, 1)], [self.prompt(0, 0)])

    def cached(self) -> Tensor:
        """All sequences over the prefix of the first."""
        slots = range(len(self.prompts))
        return self.run([self._join(slot, 1) for slot in slots], [self.prompt(slot, self.shared) for slot in slots])

    def decode(self, share: bool, graphs: bool, most: int = MOST_SEQUENCES) -> Tensor:
        """One more token of each (the first ``most``), the same every time."""
        at = self.shared + len(self.prompts[0])
        slots = range(min(most, len(self.prompts)))
        chunks = [Chunk(slot, at, 1, (slot + 1,), at, (), True) for slot in slots]
        groups = (PrefixGroup(0, self.shared // self._size, tuple(slots)),) if share else ()
        kept = self._runner._graphs
        if not graphs:
            self._runner._graphs = None
        try:
            return self.run([], chunks, groups)
        finally:
            self._runner._graphs = kept


def compare(found: Tensor, expected: Tensor) -> dict[str, float]:
    gaps = (found - expected).abs().amax(-1)
    best = expected.argmax(-1, keepdim=True)
    margins = (expected.gather(-1, best) - expected.gather(-1, found.argmax(-1, keepdim=True)))[:, 0]
    spread = expected.std(-1)
    return {
        "rows": len(gaps),
        "largest_gap": float(f"{(gaps / spread).max().item():.3g}"),
        "mean_gap": float(f"{(gaps / spread).mean().item():.3g}"),
        "other_token": int((margins > 0).sum()),
    }


def measure(steps: Steps) -> dict[str, dict[str, float]]:
    cold, cached = steps.cold(), steps.cached()
    plain = steps.decode(share=False, graphs=False)
    return {
        "cached_against_cold": compare(cached[:1], cold),
        "shared_against_apart": compare(steps.decode(share=True, graphs=False), plain),
        "graph_against_eager": compare(steps.decode(share=False, graphs=True), plain),
        "shared_in_a_graph_against_apart_in_eager": compare(steps.decode(share=True, graphs=True), plain),
        "smaller_batch": compare(steps.decode(share=False, graphs=False, most=8), plain[:8]),
        "the_same_again": compare(steps.decode(share=False, graphs=False), plain),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with a tiny model")
    parser.add_argument("--out", type=Path, default=RESULTS / f"logit-gaps-{date.today()}.json")
    parser.add_argument("--commit", help="commit of the code, if this is not a git repository")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Steps(Bench(TINY if options.tiny else FULL, Path(folder))))
    stored = {"machine": machine(), "versions": versions(), "commit": options.commit or commit(), "gaps": found}
    options.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
