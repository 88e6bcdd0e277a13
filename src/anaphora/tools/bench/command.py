"""One run of ``anaphora bench``, from its options to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from anaphora.errors import ConfigError
from anaphora.tools.bench import load_generator, replay, workloads
from anaphora.tools.bench.client import Server
from anaphora.tools.bench.figures import Round
from anaphora.tools.bench.options import BenchOptions
from anaphora.tools.bench.own_server import end_on_terminate
from anaphora.tools.bench.page import render_page
from anaphora.tools.bench.progress import PromptProgress, RequestProgress, progress_bars
from anaphora.tools.bench.report import Report, print_report
from anaphora.tools.bench.servers import Servers
from anaphora.tools.bench.workloads import Session
from anaphora.tools.shared.output_file import write_json, write_text

LOOP_FACTORY: Callable[[], asyncio.AbstractEventLoop] | None = None
with contextlib.suppress(ImportError):  # it comes with [serve], and not on Windows
    from uvloop import new_event_loop

    LOOP_FACTORY = new_event_loop

DEFAULT_REQUESTS = 16
SETTLE_SECONDS = 0.3
TERMINATED = 128 + 15


def main(options: BenchOptions) -> int:
    """Runs, prints and writes the files. Returns 1 if a request failed."""
    for name in (options.json, options.html):
        if name and Path(name).is_dir():
            raise ConfigError(f"{name} is a folder: name a file")
    try:
        with asyncio.Runner(loop_factory=LOOP_FACTORY) as runner:
            report = runner.run(Run(options).measure())
    except asyncio.CancelledError:
        return TERMINATED
    print_report(report, Console())
    if options.json:
        write_json(options.json, report.as_json())
        print(f"wrote {options.json}")
    if options.html:
        write_text(options.html, render_page(report))
        print(f"wrote {options.html}")
    return 1 if report.failed else 0


class Run:
    """One benchmark: its servers, rounds and sweep."""

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self.console = Console(stderr=True)
        self.servers = Servers(options, self.say)
        seed = options.seed if options.seed is not None else (int(time.time()) if options.remote else 0)
        self.report = Report(options, seed)
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line on standard error, above the progress bars."""
        self.console.print(f"[dim]{text}[/dim]", highlight=False)

    async def measure(self) -> Report:
        """Runs all rounds and the sweep; stops its own servers even if it is cancelled."""
        end_on_terminate()
        if self.options.replay:
            self._recorded(None)  # report a bad log before a server is started
        try:
            with progress_bars(self.console) as self.progress:
                await self._rounds()
                for concurrency in self.options.sweep:
                    await self._sweep(concurrency)
        finally:
            await self.servers.close()
        return self.report

    async def _rounds(self) -> None:
        rounds = self.options.rounds
        for number in range(rounds):
            begun = time.monotonic()
            await self._round(f"round {number + 1} of {rounds}", number)
            if number + 1 < rounds and self._too_late(time.monotonic() - begun):
                self.report.warn(f"{number + 1} of {rounds} rounds: another would not end within --time-limit")
                return
            if number == 0 and rounds > 1 and self.options.replay and not self.report.salted:
                self.report.warn(
                    "the server takes no cache_salt, so a second round would find the log in its cache: "
                    f"1 round instead of {rounds}"
                )
                return

    def _too_late(self, round_seconds: float) -> bool:
        """Whether another round of the same length would end after the time limit."""
        limit = self.options.time_limit
        return limit is not None and time.monotonic() - self._started + round_seconds > limit

    async def _round(self, title: str, number: int) -> None:
        """Sends the same requests to every side; the order of the sides alternates."""
        sides = self.servers.sides if number % 2 == 0 else self.servers.sides[::-1]
        sessions = await self._sessions(await self.servers.get(sides[0]), title, f"{self.report.seed}/{number}")
        for side in sides:
            seen = await self._send(side, title, sessions, self.options.concurrency)
            self.report.rounds[side].append(seen)

    async def _sweep(self, concurrency: int) -> None:
        title = f"concurrency {concurrency}"
        count = max(2 * concurrency, self.options.requests or DEFAULT_REQUESTS)
        server = await self.servers.get(self.servers.sides[0])
        sessions = await self._sessions(server, title, f"{self.report.seed}/sweep {concurrency}", count)
        for side in self.servers.sides:
            seen = await self._send(side, title, sessions, concurrency)
            self.report.sweep.setdefault(concurrency, {})[side] = seen

    async def _sessions(self, server: Server, title: str, seed: str, count: int | None = None) -> list[Session]:
        options = self.options
        self.report.learn(server)
        wanted = count or options.requests or DEFAULT_REQUESTS
        if options.replay:
            sessions = self._recorded(count)
            sessions, self.report.skipped = await replay.prepare(sessions, server, options.out)
            if not sessions:
                raise ConfigError(f"no request of the log fits the server's window of {server.window} tokens")
        else:
            making = PromptProgress(self.progress, f"{title}: prompts", wanted)
            maker = workloads.SessionMaker(server, workloads.shape_of(options), seed)
            sessions = await maker.sessions(wanted, making.made)
        return load_generator.arrivals(sessions, options.rate, seed) if options.rate else sessions

    def _recorded(self, count: int | None) -> list[Session]:
        """Returns the requests of the log, at most ``count``."""
        options = self.options
        if options.log is None:
            return replay.read_airline(options.data, count or options.requests or DEFAULT_REQUESTS)
        return replay.read_log(options.log, options.out, options.timing)[: count or options.requests]

    async def _send(self, side: str, title: str, sessions: list[Session], concurrency: int) -> Round:
        server, own = await self.servers.get(side), self.servers.own.get(side)
        self.report.learn(server, side)
        observer = RequestProgress(self.progress, f"{title}: {self.options.names[side]}", sessions)
        salt = f"bench-{self.report.seed}-{title}" if self.options.replay else None
        recorded = len(own.prefill_times()) if own else 0
        before = await server.counters()
        if self.options.rate or self.options.timing:
            results = await load_generator.open_loop(server, sessions, observer, salt)
        else:
            results = await load_generator.closed_loop(server, sessions, concurrency, observer, salt)
        await asyncio.sleep(SETTLE_SECONDS)
        after = await server.counters()
        return Round(results, before, after, own.prefill_times()[recorded:] if own else [])
