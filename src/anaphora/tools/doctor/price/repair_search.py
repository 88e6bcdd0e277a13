"""Searches for the repairs that save most: each is switched on, and the log runs through the cache again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from anaphora.tools.doctor.find.findings import Finding, Repair, Rewriter
from anaphora.tools.doctor.price.breaks import Break, noise, num_gaining, predicted_rate, without_price
from anaphora.tools.doctor.price.rerun_log import Outcome, rerun
from anaphora.tools.doctor.read.load_log import Log


class RepairSearch:
    """Mends one finding after the other and keeps the repairs that save tokens switched on.

    ``before`` is the outcome of the log as it is, ``current`` that of the log with the repairs kept so far. ``mended``
    are the breaks with a repair, ``useless`` those without one. ``progress`` is called with the next step in words.
    """

    def __init__(
        self,
        log: Log,
        rewriters: Sequence[Rewriter],
        before: Outcome,
        block_size: int,
        progress: Callable[[str], None],
    ) -> None:
        self._log = log
        self._rewriters = rewriters
        self._block_size = block_size
        self._progress = progress
        self.before = before
        self.current = before
        self.mended: list[Break] = []
        self.useless: list[Break] = []

    def run(self, findings: Sequence[Finding]) -> list[Break]:
        """Prices all findings, given from the beginning of the prompt to its end; returns the mended breaks first.

        A finding that saves nothing is tried again once a later one is mended: a template may write the tools behind
        the system text, for example. What still saves nothing is tried together.
        """
        waiting = list(findings)
        while waiting:
            waiting = self._mend_each(waiting)
            if not waiting and self.useless and self._mend_together():
                waiting, self.useless = [item.finding for item in self.useless if item.repair is None], []
        self._relocate()
        return [*self.mended, *self.useless]

    def _rerun(self) -> Outcome:
        return rerun(self._log, self._rewriters, block_size=self._block_size)

    # --- one finding after the other -----------------------------------------------------------------------------

    def _mend_each(self, findings: Sequence[Finding]) -> list[Finding]:
        """Mends each finding that saves something; returns those that failed before another one succeeded."""
        failed: list[Break] = []
        num_to_retry = 0
        for finding in findings:
            self._progress(f"mending: {finding.kind}")
            item = self._mend(finding)
            if item.repair is None:
                failed.append(item)
            else:
                self.mended.append(item)
                num_to_retry = len(failed)
        self.useless += failed[num_to_retry:]
        return [item.finding for item in failed[:num_to_retry]]

    def _mend(self, finding: Finding) -> Break:
        """Tries all repairs of a finding; keeps the best one switched on if it is worth it."""
        tried: list[tuple[Outcome, Repair]] = []
        for repair in finding.repairs:
            repair.switch(True)
            tried.append((self._rerun(), repair))
            repair.switch(False)
        good = min(after.computed for after, _ in tried) + noise(self.before)
        after, repair = next((after, repair) for after, repair in tried if after.computed <= good)
        gaining = num_gaining([finding], self.before, self.current, after)
        if not gaining:
            return without_price(finding, self.before, "suspected")
        repair.switch(True)
        saved = self.current.computed - after.computed
        rate = predicted_rate(self.before, saved, after.total - self.current.total)
        self.current = after
        return Break(finding, repair, saved, gaining, rate, finding.status)

    # --- several at once -----------------------------------------------------------------------------------------

    def _mend_together(self) -> bool:
        """Mends at once what saves nothing alone; returns whether that saved anything.

        Such are two values in one block, or a break behind the destination of another one's value. Only the repairs
        that are needed stay on, and each is charged an equal share of what they save together.
        """
        self._progress("mending: several at once")
        items = [*self.mended, *self.useless]
        original = [item.repair for item in items]
        tried: list[tuple[Outcome, list[Repair]]] = []
        for repairs in _assignments(items):
            _switch(original, repairs)
            tried.append((self._rerun(), repairs))
            _switch(repairs, original)
        after, repairs = min(tried, key=lambda entry: entry[0].computed)
        if not num_gaining([item.finding for item in self.useless], self.before, self.current, after):
            return False
        _switch(original, repairs)
        count = len(self.mended)
        needed, after = self._needed(repairs[count:], after)
        gaining = 0
        if needed:
            gaining = num_gaining([item.finding for item, _ in needed], self.before, self.current, after)
        if not gaining:
            _switch(repairs, original)
            return False
        for item, repair in (*zip(self.mended, repairs, strict=False), *needed):
            item.repair = repair
        self._charge_equally([item for item, _ in needed], gaining, after)
        self.mended += [item for item, _ in needed]
        self.current = after
        return True

    def _needed(self, repairs: Sequence[Repair], after: Outcome) -> tuple[list[tuple[Break, Repair]], Outcome]:
        """Switches off the repairs of useless breaks without which nothing is lost, from the last to the first.

        Returns the breaks that keep their repair, and the outcome with them.
        """
        needed: list[tuple[Break, Repair]] = []
        for item, repair in reversed(list(zip(self.useless, repairs, strict=True))):
            repair.switch(False)
            without = self._rerun()
            if num_gaining([item.finding], self.before, without, after):
                repair.switch(True)
                needed.insert(0, (item, repair))
            else:
                after = without
        return needed, after

    def _charge_equally(self, items: Sequence[Break], gaining: int, after: Outcome) -> None:
        saved = self.current.computed - after.computed
        for item in items:
            item.tokens_lost, item.requests, item.status = saved // len(items), gaining, item.finding.status
            item.predicted_hit_rate = predicted_rate(self.before, saved, after.total - self.current.total)
            if others := ", ".join(other.finding.kind for other in items if other is not item):
                note = f"saves only together with {others}"
                item.finding.note = "; ".join(filter(None, (item.finding.note, note)))

    # --- other destinations --------------------------------------------------------------------------------------

    def _relocate(self) -> None:
        """Tries other destinations once more now that all breaks are mended, for all breaks at once and for each.

        The saving is charged to the relocated break; of several, to the last one in the prompt.
        """
        mended = sorted(self.mended, key=lambda item: item.finding.location.order)
        if len(mended) < 2:
            return
        destinations = dict.fromkeys(repair.destination for item in mended for repair in item.finding.repairs)
        for group, destination in itertools.product([mended, *([item] for item in mended)], destinations):
            changes = [
                (item, item.repair, other)
                for item in group
                for other in item.finding.repairs
                if item.repair is not None and other.destination == destination != item.repair.destination
            ]
            if changes:
                self._try_changes(changes)

    def _try_changes(self, changes: Sequence[tuple[Break, Repair, Repair]]) -> None:
        """Replaces repairs, given as (break, old, new); undoes that if it saves no more than noise."""
        for _, old, new in changes:
            old.switch(False)
            new.switch(True)
        after = self._rerun()
        if after.computed < self.current.computed - noise(self.before):
            last = changes[-1][0]
            last.tokens_lost += self.current.computed - after.computed
            last.predicted_hit_rate = predicted_rate(self.before, last.tokens_lost, after.total - self.before.total)
            self.current = after
            for item, _, new in changes:
                item.repair = new
        else:
            for _, old, new in changes:
                new.switch(False)
                old.switch(True)


def _assignments(items: Sequence[Break]) -> list[list[Repair]]:
    """Returns ways to repair all breaks at once, without duplicates.

    In the first, each break keeps its repair (or takes its first one); in the others, all that can go to one
    destination.
    """
    assignments: dict[tuple[str, ...], list[Repair]] = {}
    for destination in (None, *dict.fromkeys(repair.destination for item in items for repair in item.finding.repairs)):
        repairs = [
            next((repair for repair in item.finding.repairs if repair.destination == destination), None)
            or item.repair
            or item.finding.repairs[0]
            for item in items
        ]
        assignments.setdefault(tuple(repair.destination for repair in repairs), repairs)
    return list(assignments.values())


def _switch(old: Sequence[Repair | None], new: Sequence[Repair | None]) -> None:
    """Switches the old repairs off and then the new ones on."""
    for repair in old:
        if repair is not None:
            repair.switch(False)
    for repair in new:
        if repair is not None:
            repair.switch(True)
