"""The GPU benchmark runs through, with a tiny model, and its figures say what happened."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from anaphora.tools.plan import calibration

pytestmark = pytest.mark.slow

NAMES = {
    "off_256", "on_256", "on_512", "on_1024", "on_256_unshared", "on_512_unshared", "on_1024_unshared", "steady_512",
    "steady_512_unshared", "tenants16_256", "tenants16_1024", "conversations", "no_reuse_off", "no_reuse_on",
    "ttft_cold", "ttft_hit", "single_stream", "sweep_10_off", "sweep_10_on", "sweep_20_off", "sweep_20_on",
    "sweep_30_off", "sweep_30_on", "card24_off", "card24_on", "card24_long16k_burst_090", "card24_long16k_burst_085",
    "fp8_on_512", "http_512", "ceilings", "calibration_h200", "calibration_24g",
}  # fmt: skip


@pytest.fixture
def h200(repository: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    return importlib.import_module("h200")


@pytest.fixture
def bench(h200: ModuleType, tmp_path: Path) -> Any:
    return h200.Bench(h200.TINY, tmp_path)


def test_every_row_has_a_name(h200: ModuleType, bench: Any) -> None:
    assert h200.order(bench).keys() == NAMES


def test_a_shared_prefix_is_hit_but_for_the_rounding_of_chance(h200: ModuleType, bench: Any) -> None:
    size, known = h200.TINY, h200.order(bench)
    on, off = known["on_256"](), known["off_256"]()
    assert (on["requests"], off["requests"]) == (4, 4)
    share = size.shared / (size.shared + size.own)
    assert share - 1e-3 < on["hit_rate"] < share + 0.02  # random tokens of two prompts may begin alike
    assert off["hit_rate"] == 0
    assert on["output_tokens_per_s"] == pytest.approx(on["requests_per_s"] * size.answer, rel=1e-2)
    whole = sum(on["step_parts"].values())
    assert whole == pytest.approx(on["step_ms"], rel=0.5)
    assert known["ttft_hit"]()["hit_rate"] > known["ttft_cold"]()["hit_rate"] == 0


def test_a_steady_row_counts_its_window_alone(h200: ModuleType, bench: Any) -> None:
    found = h200.order(bench)["steady_512"]()
    assert found["seconds"] == pytest.approx(h200.TINY.seconds, abs=0.3)
    assert found["requests"] > 8
    assert 0.5 < found["hit_rate"] < 1
    assert found["output_tokens_per_s"] < 12 * found["requests_per_s"]


def test_conversations_reuse_their_own_turns(h200: ModuleType, bench: Any) -> None:
    found = h200.order(bench)["conversations"]()
    assert found["requests"] == 2 * 5
    assert found["hit_rate"] > h200.TINY.shared / (h200.TINY.shared + h200.TINY.own)


def test_long_prompts_on_a_small_card_all_end(h200: ModuleType, bench: Any) -> None:
    found = h200.order(bench)["card24_long16k_burst_090"]()
    assert found["requests"] == 2
    assert found["pool_tokens"] == 31 * 16
    assert found["pool_tokens"] < 2 * h200.TINY.long


def test_results_are_stored_row_by_row_published_and_planned_with(
    h200: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, published = tmp_path / "result.json", tmp_path / "calibration.json"
    names = ["ceilings", "on_512", "calibration_h200", "calibration_24g", "fp8_on_512"]

    def run(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["h200.py", "--out", str(out), *more])
        h200.main()
        return capsys.readouterr().out

    assert all(f"  {name}: " in run("--tiny", "--rows", name, "--commit", "c") for name in names)
    stored = json.loads(out.read_text())
    assert stored.keys() >= {"machine", "versions", "commit", "ceilings", "calibration", "rows", "engines"}
    assert [row["name"] for row in stored["rows"]] == ["on_512", "fp8_on_512"]
    assert run("--tiny", "--rows", *names) == ""  # all there already
    monkeypatch.setattr(h200, "CALIBRATION", published)
    run("--publish", str(out))
    kept = calibration.read(published)
    assert kept["calibration"] == stored["calibration"]
    card = calibration.Calibration.of(kept["calibration"]["h200"])
    assert card.step_s(8, 70, 20) > 0
    with pytest.raises(SystemExit, match="no row on_511"):
        run("--rows", "on_511")


def test_clients_read_a_stub_to_its_end(h200: ModuleType) -> None:
    server = importlib.import_module("card.server")
    found = server.stub(6, 5)
    assert found["output_tokens_per_s"] == pytest.approx(5 * found["requests_per_s"], rel=1e-2)
