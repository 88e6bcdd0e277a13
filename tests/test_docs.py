"""The docs say what the code has: flags with their defaults, routes, metrics, miss reasons, workloads, links."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from anaphora import cli
from anaphora.advice import vllm_flags
from anaphora.observe.metrics import Metrics
from anaphora.observe.record import RequestRecord
from anaphora.server.routes import routes
from anaphora.tools.bench.options import WORKLOADS
from anaphora.types.batch import ModelInfo
from anaphora.types.outputs import EngineInfo
from anaphora.types.reports import Reason

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def section(page: str, heading: str = "") -> str:
    """The text under a heading of a page of the docs, up to the next one; the whole page without a heading."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    if not heading:
        return text
    return re.split(r"^## ", text.split(f"\n## {heading}", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def table(text: str) -> list[list[str]]:
    """The cells of all table rows whose first cell is code."""
    rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_the_flags_and_defaults_of_each_command(command: str) -> None:
    settings = {field.name: field for cls in cli.COMMANDS[command].settings() for field in fields(cls)}
    shown = [
        ([*action.option_strings], cli.default_text(settings[action.dest]))
        for action in cli.build_parser(command)._actions
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS
    ]
    documented = [(codes(flags), default) for flags, default, _ in table(section("flags.md", f"anaphora {command}"))]
    missing = [flag for flag in shown if flag not in documented]
    outdated = [flag for flag in documented if flag not in shown]
    assert (missing, outdated) == ([], [])
    assert len(documented) == len(shown)


def test_the_routes() -> None:
    service: Any = None  # the list of routes does not look at it
    served = {
        f"{method} {re.sub(r':path', '', route.path)}"
        for route in routes(service)
        for method in route.methods - {"HEAD"}
    }
    assert {code for row in table(section("api.md")) for code in codes(row[0])} == served


def registry() -> CollectorRegistry:
    model = ModelInfo("m", "i", 10, 64, 4, 16, 8, "float32", "float32", "cpu")
    metrics = Metrics(EngineInfo(model, 64), "m", {"block_size": "16"})
    metrics.count_dropped(lambda: 0)
    return metrics.registry


def test_the_metrics_with_type_and_labels() -> None:
    exported = set()
    for family in registry().collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        exported.add((name, family.type, frozenset(labels - {"block_size"})))
    documented = {(codes(name)[0], kind, frozenset(codes(labels))) for name, kind, labels, *_ in described_metrics()}
    assert documented == exported


def test_the_meaning_of_a_metric_is_its_help_text() -> None:
    helps = {
        family.name + ("_total" if family.type == "counter" else ""): family.documentation
        for family in registry().collect()
    }
    assert {codes(name)[0]: meaning for name, _, _, meaning in described_metrics()} == helps


def described_metrics() -> list[list[str]]:
    return [row for row in table(section("metrics.md")) if len(row) == 4]


def test_no_page_names_a_metric_that_is_not_there() -> None:
    known = {codes(row[0])[0] for row in described_metrics()}
    for page in PAGES:
        assert set(re.findall(r"\b(?:vllm|anaphora):[a-z_0-9]+", page.read_text("utf-8"))) <= known, page.name


def test_no_page_names_a_flag_that_is_not_there() -> None:
    known = {
        flag for name in cli.COMMANDS for action in cli.build_parser(name)._actions for flag in action.option_strings
    }
    data = vllm_flags._data()
    known |= {flag for kind in ("accepted", "absent") for group in data[kind] for flag in group["flags"]}
    known |= {"--enable-metrics", "--metrics", "--disable-radix-cache", "--no-cache-prompt"}  # SGLang's and llama.cpp's
    for page in PAGES:
        text = re.sub(r"^pip .*$", "", page.read_text("utf-8"), flags=re.MULTILINE)  # pip has flags of its own
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known, page.name


def test_the_fields_of_the_request_log() -> None:
    documented = [code for row in table(section("record.md", "The fields")) for code in codes(row[0])]
    assert documented == list(RequestRecord.__struct_fields__)


def test_the_miss_reasons_and_the_workloads() -> None:
    assert [codes(row[0]) for row in table(section("cache.md", "What you see"))] == [[str(r)] for r in Reason]
    assert [codes(row[0]) for row in table(section("benchmark.md", "Workloads"))] == [[name] for name in WORKLOADS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).is_file(), target


def test_the_make_targets_that_the_pages_name() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), flags=re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"\bmake ([a-z]+)(?=`|\n)", page.read_text("utf-8"))) <= targets, page.name
