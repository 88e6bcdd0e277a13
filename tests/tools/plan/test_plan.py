"""Plan computes from what was measured, says which is which, and agrees with the stored rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anaphora import cli
from anaphora.errors import ConfigError
from anaphora.tools.plan import PlanOptions, calibration, command
from anaphora.tools.plan.calibration import Calibration, between
from anaphora.tools.plan.estimate import Workload, cost, estimate

BASE_MS, TOKEN_MS, SHARED_MS = 5.0, 2e-5, 1e-3


def card(**changes: Any) -> dict[str, Any]:
    """A card whose step costs a base, something a token of each sequence, and something a shared token."""
    decode = [
        [batch, shared, own, BASE_MS + 0.01 * batch + TOKEN_MS * batch * own + SHARED_MS * shared * (batch > 1)]
        for shared, own in ((0, 256), (0, 2560), (2304, 256))
        for batch in (1, 16, 256, 1024)
        if batch > 1 or not shared
    ]
    return {
        "model": {"max_position_embeddings": 32768},
        "block_bytes": 2**21,
        "block_size": 16,
        "blocks": 48000,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 16384,
        "prefill": [[128, 0, 30000.0], [2048, 0, 40000.0], [128, 2304, 25000.0], [2048, 2304, 35000.0]],
        "decode": decode,
    } | changes


def published(**rows: float) -> dict[str, Any]:
    measured = [
        {"card": "h200", "caching": name == "on", "shared": 2300, "own": 120, "out": 200}
        | {"requests": 512, "requests_per_s": rate, "hit_rate": 0.9504 if name == "on" else 0.0}
        for name, rate in rows.items()
    ]
    small = card(blocks=2000, max_num_seqs=256)
    return {
        "source": "test.json",
        "machine": {"device": "a GPU"},
        "versions": {},
        "commit": "c",
        "calibration": {"h200": card(), "24g": small},
        "measured": measured,
    }


def test_between_points_lie_straight_lines() -> None:
    points = [(1.0, 1.0), (2.0, 3.0), (4.0, 2.0)]
    assert [between(points, at) for at in (0, 1, 1.5, 3, 4)] == [1, 1, 2, 2.5, 2]
    assert between(points[:2], 3) == 5
    assert between(points, 9) == 2  # never below the last that was measured


@pytest.mark.parametrize("batch", [1, 16, 100, 600, 1024])
@pytest.mark.parametrize("own", [100, 256, 1000, 5000])
def test_steps_of_a_linear_card_come_out_exactly(batch: int, own: int) -> None:
    found = Calibration.of(card())
    assert 1000 * found.step_s(batch, 0, own) == pytest.approx(BASE_MS + 0.01 * batch + TOKEN_MS * batch * own)
    if batch > 15:
        extra = 1000 * (found.step_s(batch, 3000, own) - found.step_s(batch, 0, own))
        assert extra == pytest.approx(3000 * SHARED_MS)


def test_prefill_lies_between_its_neighbours() -> None:
    found = Calibration.of(card())
    assert found.prefill_s(2048, 0) == pytest.approx(2048 / 40000)
    assert 120 / 30000 < found.prefill_s(120, 1000) < 120 / 25000
    assert found.prefill_s(2048, 1152) == pytest.approx(2048 * (1 / 40000 + 1 / 35000) / 2)


def test_blocks_limit_the_sequences() -> None:
    small, workload = Calibration.of(card(blocks=2000)), Workload(2300, 120, 200)
    off, on = (estimate(small, workload, caching=caching) for caching in (False, True))
    assert off.sequences == 2000 // 164
    assert on.sequences == (2000 - 143) // (164 - 143)
    assert (off.hit_rate, on.hit_rate) == (0, 2300 / 2420)
    assert on.requests_per_s > 3 * off.requests_per_s
    with pytest.raises(ConfigError, match="33420 tokens together, and this card and model take at most 32000"):
        estimate(small, Workload(33000, 220, 200), caching=True)


def test_hours_and_gpus_follow_from_the_rate() -> None:
    found = cost(10.0, 864_000, 2.5, 3.0)
    assert (found.gpu_hours_a_day, found.price_a_day, found.price_a_month) == pytest.approx((24, 72, 2160))
    assert found.gpus_at_peak == 3


def test_what_was_measured_stands_for_what_is_computed() -> None:
    found = command.figures(published(off=11.0, on=99.0), PlanOptions(gpu_hour_price=2.0))
    assert (found["off"]["requests_per_s"], found["on"]["requests_per_s"]) == (11.0, 99.0)
    assert found["on"]["basis"] == {"hit_rate": "measured", "requests_per_s": "measured", "the rest": "computed"}
    assert found["cost_ratio"] == pytest.approx(9)
    found = command.figures(published(off=11.0, on=99.0), PlanOptions(own=121))
    assert found["on"]["basis"]["requests_per_s"] == "computed"
    assert found["on"]["price_a_day"] is None
    assert found["on"]["basis"]["the rest"] == "computed"
    found = command.figures(published(off=11.0, on=99.0), PlanOptions(shared=9000))
    basis = {"hit_rate": "computed", "requests_per_s": "extrapolated", "the rest": "extrapolated"}
    assert found["off"]["basis"] == found["on"]["basis"] == basis
    found = command.figures(published(off=11.0, on=99.0), PlanOptions(card="24g"))
    assert found["on"]["basis"]["requests_per_s"] == "computed"


def test_the_command_prints_both_sides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "read", lambda: published(off=11.0))
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "--gpu-hour-price", "3", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "hit rate in tokens" in text
    assert "measured / computed" in text
    assert "price a month" in text
    assert json.loads(out.read_text())["off"]["requests_per_s"] == 11.0
    monkeypatch.setattr(command, "read", lambda: published() | {"calibration": {"h200": card()}})
    assert cli.main(["plan", "--card", "24g"]) == 2
    assert "test.json has no calibration of card 24g, but h200" in capsys.readouterr().err
    assert cli.main(["plan", "--json", str(tmp_path)]) == 2
    assert "cannot write --json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--own", "0"], "--own must be from 1 to 1,000,000,000, got 0"),
        (["--shared", "-5"], "--shared: '-5' is not a number of tokens"),
        (["--shared", "9" * 400], "is not a number of tokens"),
        (["--shared", "40000"], "prompt and answer have 40320 tokens together"),
        (["--per-day", "0"], "--per-day must be from 1 to"),
        (["--per-day", "9" * 15], "--per-day must be from 1 to 1,000,000,000,000, got 999999999999999"),
        (["--peak-factor", "0.5"], "--peak-factor must be from 1 to 86,400, got 0.5"),
        (["--peak-factor", "nan"], "--peak-factor must be from 1 to 86,400, got nan"),
        (["--peak-factor", "1e308"], "--peak-factor must be from 1 to 86,400, got 1e+308"),
        (["--gpu-hour-price", "-1"], "--gpu-hour-price must be from 0 to 1,000,000, got -1.0"),
        (["--gpu-hour-price", "nan"], "--gpu-hour-price must be from 0 to 1,000,000, got nan"),
        (["--gpu-hour-price", "inf"], "--gpu-hour-price must be from 0 to 1,000,000, got inf"),
        (["--card", "a100"], "--card: invalid choice: 'a100'"),
        (["--json", ""], "cannot write --json"),
    ],
)
def test_bad_settings_are_refused_by_flag(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *flags]) == 2
    assert words in capsys.readouterr().err


def test_small_amounts_keep_two_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--per-day", "100", "--gpu-hour-price", "-0"]) == 0
    text = capsys.readouterr().out
    hours, price = (next(line.split() for line in text.splitlines() if name in line) for name in ("hours", "price a d"))
    assert 0 < float(hours[-2]) < float(hours[-3]) < 0.01
    assert price[-3:-1] == ["0.00", "0.00"]


def test_the_page_shows_what_the_command_prints(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = (repository / "docs" / "plan.md").read_text("utf-8")
    line = next(line for line in page.splitlines() if line.startswith("    anaphora plan "))
    assert cli.main(line.split()[1:]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert page.split("```\n")[1].splitlines() == printed


def test_without_a_calibration_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no calibration to compute with .*--publish puts it there"):
        calibration.read(tmp_path / "absent.json")


def test_no_torch_is_loaded() -> None:
    code = "import sys, anaphora.tools.plan; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- What is stored ---------------------------------------------------------------------------------------------------

ROWS = {"off_256": 256, "on_256": 256, "on_512": 512, "on_1024": 1024, "card24_off": None, "card24_on": None}


def newest(repository: Path) -> dict[str, Any]:
    """The result that the package's calibration was taken from."""
    if not calibration.PATH.is_file():
        pytest.skip("no calibration is published yet")
    found: dict[str, Any] = json.loads(
        (repository / "benchmarks" / "results" / calibration.read()["source"]).read_text()
    )
    return found


def test_the_package_holds_what_the_result_says(repository: Path) -> None:
    stored, kept = newest(repository), calibration.read()
    assert all(kept[name] == stored[name] for name in ("machine", "versions", "commit", "calibration"))
    rates = {row["requests_per_s"] for row in stored["rows"] if row["name"] in ROWS}
    assert {row["requests_per_s"] for row in kept["measured"]} == rates


@pytest.mark.parametrize("name", ROWS)
def test_computed_figures_lie_within_15_percent_of_the_stored_rows(repository: Path, name: str) -> None:
    stored, card = newest(repository), "24g" if name.startswith("card24") else "h200"
    row = next((row for row in stored["rows"] if row["name"] == name), None)
    if row is None or card not in stored["calibration"]:
        pytest.skip(f"{name} or the calibration of {card} is not stored")
    which = Calibration.of(stored["calibration"][card])
    found = estimate(which, Workload(2300, 120, 200), caching="on" in name, sequences=ROWS[name])
    assert found.requests_per_s == pytest.approx(row["requests_per_s"], rel=0.15)
