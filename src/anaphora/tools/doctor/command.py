"""Runs ``anaphora doctor`` and ``anaphora explain``: from the options to the exit code."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from anaphora.errors import ConfigError
from anaphora.tools.doctor.live import examine_server
from anaphora.tools.doctor.options import DoctorOptions, ExplainOptions
from anaphora.tools.doctor.price.compare_baseline import compare
from anaphora.tools.doctor.price.diagnose import Diagnosis, diagnose
from anaphora.tools.doctor.read.load_log import Log, load_log
from anaphora.tools.doctor.show import compare_bodies, diagnosis_terminal
from anaphora.tools.doctor.show.diagnosis_json import as_json
from anaphora.tools.doctor.show.diagnosis_page import render_page
from anaphora.tools.doctor.show.fixed_log import write_fixed_log
from anaphora.tools.doctor.show.prompt_starts import show_prompt_starts
from anaphora.tools.shared.console import LogConsole
from anaphora.tools.shared.money import read_token_prices
from anaphora.tools.shared.output_file import write_json, write_text
from anaphora.tools.shared.tokenizer_and_template import load_tokenizer_and_template


def main(options: DoctorOptions) -> int:
    """Examines a log or a server, prints the result and writes the files that are asked for.

    Returns 1 if the hit rate is below ``min_hit_rate`` or has fallen since ``baseline``, 2 if a server stopped
    answering, else 0. Raises ConfigError if a file cannot be read or written.
    """
    for name in (options.json, options.html, options.fix):
        if name and Path(name).is_dir():
            raise ConfigError(f"{name} is a folder: name a file")
    if options.is_server:
        return _server(options)
    prices = read_token_prices(options.prices) if options.prices else {}
    if options.heads:
        show_prompt_starts(_load(options, lambda *_: None), LogConsole())
        return 0
    diagnosis = examine(options)
    data = as_json(diagnosis, options, prices)
    if options.baseline:
        data["baseline"] = compare(examine(dataclasses.replace(options, log=options.baseline)), diagnosis)
    diagnosis_terminal.show(data, LogConsole())
    if options.fix:
        assert options.log is not None
        fixed = write_fixed_log(diagnosis, options.log, options.fix)
        data["fix"] = fixed.as_json()
        diagnosis_terminal.show_fix(options.fix, data["fix"], LogConsole())
    if options.html:
        write_text(options.html, render_page(diagnosis, data))
    if options.json:
        write_json(options.json, data)
    low = options.min_hit_rate is not None and data["hit_rate"] < options.min_hit_rate
    return 1 if low or (options.baseline and data["baseline"]["regression"]) else 0


def _server(options: DoctorOptions) -> int:
    data, code = examine_server.examine(options)
    if options.json:
        write_json(options.json, data)
    return code


def explain(options: ExplainOptions) -> int:
    """Prints where and why the second request body stops reusing the first; returns 0. Raises ConfigError."""
    assert options.first is not None
    assert options.second is not None
    compare_bodies.explain(
        options.first, options.second, load_tokenizer_and_template(options.model, options.chat_template), LogConsole()
    )
    return 0


def _load(options: DoctorOptions, progress: Callable[[int], None]) -> Log:
    assert options.log is not None
    return load_log(options.log, load_tokenizer_and_template(options.model, options.chat_template), progress)


def examine(options: DoctorOptions) -> Diagnosis:
    """Reads and diagnoses the log, with a progress bar on standard error."""
    columns = (TextColumn("{task.description:36}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        path = Path(options.log or "-")
        task = progress.add_task("reading", total=path.stat().st_size if path.is_file() else None)
        log = _load(options, lambda done: progress.update(task, completed=done))
        return diagnose(
            log,
            block_size=options.block_size,
            cache_tokens=options.cache_tokens,
            progress=lambda what: progress.update(task, description=what, total=None),
        )
