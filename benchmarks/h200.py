"""Measures the engine on one GPU: Qwen3-8B's shape with random weights, many requests with a common prefix.

    python benchmarks/h200.py [--rows NAME ...] [--again] [--tiny] [--out FILE] [--commit ID]
    python benchmarks/h200.py --publish FILE

Rows that are stored already are skipped, and each row is stored as soon as it is measured. Besides the rows there are
``ceilings`` (of the GPU), ``calibration_h200`` and ``calibration_24g`` (what anaphora plan computes with). A row's
requests are all sent at once: a system prompt of 2,300 tokens, 120 of their own, answers of 200. ``off`` runs without
the cache, ``_unshared`` reads a shared prefix once per sequence instead of once per step, ``card24`` has 24 GiB.
``--tiny`` is a dry run on any machine. ``--publish`` copies the calibration of a result to where plan reads it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from card.calibration import calibrate
from card.engines import CARD24, WHOLE, Bench
from card.rows import rows
from card.server import http
from card.sizes import FULL, TINY

from anaphora.tools.plan.calibration import PATH as CALIBRATION

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"device": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        import triton

        found["triton"] = triton.__version__
    return found


def ceilings() -> dict[str, float]:
    """Of the GPU: bytes read and written by a copy, and bf16 operations of a matrix product, each a second."""
    if not torch.cuda.is_available():
        return {"copy_bytes_per_s": 0.0, "bf16_flop_per_s": 0.0}
    from triton.testing import do_bench

    source = torch.randn(2**30, device="cuda").to(torch.bfloat16)
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = do_bench(lambda: a @ b, return_mode="median")
    return {"copy_bytes_per_s": 4 * 2**30 / copy * 1000, "bf16_flop_per_s": 2 * 8192**3 / product * 1000}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def order(bench: Bench) -> dict[str, Callable[[], dict[str, Any]]]:
    """All that can be measured, by name and in order: what needs the same runner together."""
    known = rows(bench)
    whole = {name: work for name, work in known.items() if not name.startswith(("card24", "fp8"))}
    first = {"ceilings": ceilings} | dict(list(whole.items())[:5])
    return (
        first
        | {"calibration_h200": partial(calibrate, bench, WHOLE)}
        | {name: work for name, work in whole.items() if name not in first}
        | {"card24_on": known["card24_on"], "card24_off": known["card24_off"]}
        | {"calibration_24g": partial(calibrate, bench, CARD24)}
        | known
        | {"http_512": partial(http, bench, 512)}
    )


def is_stored(stored: dict[str, Any], name: str) -> bool:
    section, _, card = name.partition("_")
    if section == "calibration":
        return card in stored.get("calibration", {})
    return name in stored if name == "ceilings" else any(row["name"] == name for row in stored["rows"])


def store(stored: dict[str, Any], name: str, found: dict[str, Any], path: Path) -> None:
    section, _, card = name.partition("_")
    if section == "calibration":
        stored.setdefault("calibration", {})[card] = found
    elif name == "ceilings":
        stored["ceilings"] = found
    else:
        others = [row for row in stored["rows"] if row["name"] != name]
        if name == "http_512" and (engine := next((r for r in others if r["name"] == "on_512"), None)):
            found["against_on_512"] = round(found["requests_per_s"] / engine["requests_per_s"], 4)
        stored["rows"] = [*others, {"name": name, "commit": stored["commit"]} | found]
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(stored, indent=1) + "\n")
    fresh.replace(path)


def measure(options: argparse.Namespace, folder: Path) -> None:
    path: Path = options.out
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
    bench = Bench(TINY if options.tiny else FULL, folder)
    known = order(bench)
    failed: list[str] = []
    if strange := sorted(set(options.rows or ()) - known.keys()):
        raise SystemExit(f"there is no row {', '.join(strange)}; the rows are {', '.join(known)}")
    stored |= {"machine": machine(), "versions": versions(), "commit": options.commit or commit()}
    for name, work in known.items():
        if (options.rows and name not in options.rows) or (is_stored(stored, name) and not options.again):
            continue
        began = time.monotonic()
        try:
            found = work()
        except Exception:  # the other rows are worth their time
            traceback.print_exc()
            failed.append(name)
            bench.release()
            continue
        if bench.made:
            made = {"load_seconds": bench.load_seconds} | dataclasses.asdict(bench.made)
            stored.setdefault("engines", {})[bench.kind] = made
        store(stored, name, found, path)
        shown = found if len(str(found)) < 2000 else {"cells": len(found["prefill"]) + len(found["decode"])}
        print(f"{time.monotonic() - began:6.1f} s  {name}: {json.dumps(shown)}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


PLANNED = {
    "off_256": ("h200", False),
    "on_256": ("h200", True),
    "on_512": ("h200", True),
    "on_1024": ("h200", True),
    "card24_off": ("24g", False),
    "card24_on": ("24g", True),
}
"""Rows that plan shows where it is asked for just their workload: card, and whether there is a cache."""


def measured(row: dict[str, Any]) -> dict[str, Any]:
    card, caching = PLANNED[row["name"]]
    kept = {name: row[name] for name in ("requests", "requests_per_s", "hit_rate")}
    return {"card": card, "caching": caching, "shared": FULL.shared, "own": FULL.own, "out": FULL.answer} | kept


def publish(path: Path) -> None:
    """Copy what plan needs of a result into the package."""
    stored = json.loads(path.read_text())
    if not stored.get("calibration"):
        raise SystemExit(f"{path} has no calibration")
    kept = {"source": path.name} | {name: stored[name] for name in ("machine", "versions", "commit", "calibration")}
    kept["measured"] = [measured(row) for row in stored["rows"] if row["name"] in PLANNED]
    CALIBRATION.write_text(json.dumps(kept, indent=1) + "\n")
    print(f"{CALIBRATION} now holds the calibration of {path.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="which to measure (all)")
    parser.add_argument("--again", action="store_true", help="measure rows that are stored already")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal with a tiny model")
    parser.add_argument("--out", type=Path, default=RESULTS / f"h200-{date.today()}.json")
    parser.add_argument("--commit", help="commit of the code, if this is not a git repository")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="make this result's calibration that of plan")
    options = parser.parse_args()
    if options.publish:
        publish(options.publish)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(folder))


if __name__ == "__main__":
    main()
