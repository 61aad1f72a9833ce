"""The runner of the recorded mutants ends programs that hang, along with everything that they started."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.mutations import __main__ as runner

pytestmark = [pytest.mark.root, pytest.mark.process]


def test_a_program_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script, log = f"sleep 300 & echo $! > {tmp_path}/pid; echo said; wait", tmp_path / "log"
    log.touch()
    seconds = 0.5
    while not log.read_text():  # on a busy machine, it is killed before it gets that far
        seconds *= 2
        assert runner.status_within(seconds, ["sh", "-c", script], tmp_path, os.environ, log) is None
    assert log.read_text() == "said\n"
    started = Path("/proc", (tmp_path / "pid").read_text().strip())
    deadline = time.monotonic() + 30
    while _runs(started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(started)


def _runs(process: Path) -> bool:
    """Return whether a process is running; one that hasn't been reaped yet isn't."""
    try:
        return "State:\tZ" not in (process / "status").read_text()
    except OSError:
        return False


def test_a_program_that_ends_has_its_status(tmp_path: Path) -> None:
    assert runner.status_within(60, ["sh", "-c", "exit 3"], tmp_path, os.environ, tmp_path / "log") == 3
