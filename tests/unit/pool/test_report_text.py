"""The report for a terminal: what hosts say about themselves can't control it."""

from __future__ import annotations

from image_builder.pool.show.report import report, text
from tests.support.pools.simulated.report_runs import hostile_run


def test_names_and_phases_lose_what_steers_a_terminal() -> None:
    progress, records = hostile_run(("\x1b[2Jgone", "two\nlines", "bell\x07"))
    shown = text(report(progress, records, running=False))
    assert "3 hosts: 3 failed" in shown and "phase \ufffd[2Jgone" in shown
    assert all(c.isprintable() or c == "\n" for c in shown)
    # The line of one name wasn't turned into two.
    assert not any(line.startswith("lines") for line in shown.splitlines())
