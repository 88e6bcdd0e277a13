"""The figures in the tables on the GPU are those of the stored results: a row's name is the code in its first cell."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"

Row = dict[str, Any]


def stored(name: str) -> dict[str, Any]:
    """The result of that name which the page links."""
    link = re.search(rf"\.\./(benchmarks/results/{name}-[\d-]+\.json)", PAGE.read_text("utf-8"))
    assert link, name
    found: dict[str, Any] = json.loads((ROOT / link[1]).read_text("utf-8"))
    return found


H200 = stored("h200")
ROWS: dict[str, Row] = {row["name"]: row for row in H200["rows"]}
GAPS: dict[str, Row] = stored("logit-gaps")["gaps"]
CACHES: dict[str, Row] = stored("float8-cache")["caches"]
ENTRIES = ROWS | GAPS | CACHES
CALIBRATION = H200["calibration"]["h200"]


def gemm_ms(row: Row) -> float:
    """Milliseconds of a decode step's GEMMs at the measured ceiling: two operations per weight and row."""
    model = CALIBRATION["model"]
    hidden, head = model["hidden_size"], model["head_dim"]
    width = 2 * (model["num_attention_heads"] + model["num_key_value_heads"]) * head + 3 * model["intermediate_size"]
    weights = hidden * (model["num_hidden_layers"] * width + model["vocab_size"])
    return float(1000 * row["requests"] * 2 * weights / H200["ceilings"]["bf16_flop_per_s"])


def own_kv_ms(row: Row) -> float:
    """Milliseconds to read the KV of 120 own tokens and half an answer of each sequence at the ceiling of a copy."""
    token = CALIBRATION["block_bytes"] / CALIBRATION["block_size"]
    return float(1000 * row["requests"] * (120 + 100) * token / H200["ceilings"]["copy_bytes_per_s"])


def fixed(field: str, digits: int) -> Callable[[Row], str]:
    return lambda row: f"{row[field]:,.{digits}f}"


def part(field: str) -> Callable[[Row], str]:
    return lambda row: f"{row['step_parts'][field]:.1f}"


SHOWN: dict[str, Callable[[Row], str]] = {
    "requests": fixed("requests", 0),
    "requests/s": fixed("requests_per_s", 1),
    "here": lambda row: f"{row.get('turns_per_s') or row.get('itl_ms') or row['ttft_ms']:.2f}",
    "times off": lambda row: f"{row['requests_per_s'] / ROWS['off_256']['requests_per_s']:.1f}",
    "without it, requests/s": lambda row: f"{ROWS[row['name'] + '_unshared']['requests_per_s']:.1f}",
    "ratio": lambda row: f"{row['requests_per_s'] / ROWS[row['name'] + '_unshared']['requests_per_s']:.2f}",
    "hit rate": lambda row: f"{row['hit_rate']:.1%}",
    "step, ms": fixed("step_ms", 1),
    "TTFT, ms": lambda row: f"{row['ttft_ms']:,.{0 if row['ttft_ms'] > 100 else 1}f}",
    "prefill, ms": fixed("prefill_ms", 0),
    "ITL, ms": fixed("itl_ms", 1),
    "preemptions": fixed("preemptions", 0),
    "pool, tokens": fixed("pool_tokens", 0),
    "GPU, ms": part("gpu_ms"),
    "submit, ms": part("submit_ms"),
    "other host, ms": part("other_ms"),
    "GPU idle": lambda row: f"{row['gpu_idle_share']:.1%}",
    "GEMM, ms": lambda row: f"{gemm_ms(row):.1f}",
    "own KV, ms": lambda row: f"{own_kv_ms(row):.1f}",
    "largest gap": fixed("largest_gap", 3),
    "mean gap": fixed("mean_gap", 3),
    "other token": lambda row: f"{row['other_token']} of {row['rows']}",
    "error, median": fixed("logprob_error_median", 4),
    "error, rms": fixed("logprob_error_rms", 4),
    "same most likely token": lambda row: f"{row['same_likeliest_token']:.1%}",
}
"""How the column of that heading shows a row; other columns are words, or figures of others."""


def tables(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Row by row of all tables: the code in the first cell, and the cells by heading."""
    headings: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        elif name := re.search(r"`([^`]+)`", cells[0]):
            yield name[1], dict(zip(headings, cells, strict=True))


def gpu_section() -> str:
    return (ROOT / "README.md").read_text("utf-8").split("### On one H200\n")[1].split("\n#")[0]


@pytest.mark.parametrize("text", [PAGE.read_text("utf-8"), gpu_section()], ids=["page", "README"])
def test_each_figure_is_the_stored_one(text: str) -> None:
    checked = 0
    for name, cells in tables(text):
        for heading in cells.keys() & SHOWN.keys():
            if cells[heading] not in ("", "–"):
                assert cells[heading] == SHOWN[heading](ENTRIES[name]), (name, heading)
                checked += 1
    assert checked > 5


def test_the_page_has_every_stored_row() -> None:
    named = {name for name, _ in tables(PAGE.read_text("utf-8"))}
    unshared = {name for name in ROWS if name.endswith("_unshared")}  # in a column beside their row
    assert named >= (ROWS.keys() - unshared) | GAPS.keys() | CACHES.keys()


def test_the_page_names_the_commit_of_every_row() -> None:
    text = PAGE.read_text("utf-8")
    assert all(row["commit"][:7] in text for row in ROWS.values())
    assert all(version in text for version in H200["versions"].values())


def test_the_figures_of_the_cpu_are_the_stored_ones() -> None:
    text = (ROOT / "docs" / "benchmark.md").read_text("utf-8")
    link = re.search(r"\.\./(benchmarks/results/cpu-[\d-]+\.json)", text)
    assert link
    rows: dict[str, Row] = json.loads((ROOT / link[1]).read_text("utf-8"))["rows"]
    for name, row in rows.items():
        if "on" not in row:
            continue
        off, on = row.get("off"), row["on"]
        cells = [f"{side['requests_per_s']:.2f}" if side else "–" for side in (off, on)]
        cells.append(f"{on['requests_per_s'] / off['requests_per_s']:.2f}" if off else "–")
        cells += [f"{side['prefill_mean_s']:.2f}" if side else "–" for side in (off, on)]
        cells += [f"{1000 * side['itl_p50_s']:.0f}" if side else "–" for side in (off, on)]
        assert f"| `{name}` | {' | '.join(cells)} | {on['hit_rate']:.1%} |" in text
    alone, server = rows["alone"], rows["server"]
    assert f"cold {alone['ttft_cold_s']:.2f} s, hit {alone['ttft_hit_s']:.2f} s" in text
    assert f"ready after {server['ready_s']:.1f} s" in text
    first, *_, last = rows["sweep"]["sweep"]
    for side, after in (("on", " times as long with the cache on"), ("off", " times with it off")):
        ratio = last[side]["prefill_p50_s"] / first[side]["prefill_p50_s"]
        assert f"{ratio:.2f}{after}" in text.replace("\n", " ")
