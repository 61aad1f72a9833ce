"""Ctrl-C, or the SIGTERM of a CI, in any stage: the build ends at once, and nothing of it is left, staging included."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builds import Workplace, is_drained, left_behind, wait_for_line

pytestmark = pytest.mark.root

# Five seconds are promised: three for clearing away, then the kernel and the command do it. With twenty processes for
# two processors it took 5.02.
AT_MOST = 8.0


@pytest.fixture
def workplace(copies: Callable[[Workplace], Workplace], worker: Workplace) -> Workplace:
    return copies(worker)


def _control_groups() -> set[Path]:
    return {p for p in Path("/sys/fs/cgroup").glob("**/image-builder-*") if p.is_dir()}


def _interrupt(
    workplace: Workplace, number: signal.Signals, line: str, delay: float, *argv: str | Path
) -> None:
    """Send a build a signal ``delay`` seconds after a line of a stage; it must end as told, and clean."""
    groups = _control_groups()
    child = workplace.start("--locked", workplace.lock, *argv)
    assert wait_for_line(child, lambda told: line in " ".join(told.split()))
    time.sleep(delay)
    assert child.poll() is None
    started = time.monotonic()
    child.send_signal(number)
    status = child.wait(timeout=60)
    seconds = time.monotonic() - started
    print(f"{line}: {seconds:.2f} s")
    assert status == 128 + number
    assert seconds < AT_MOST
    assert is_drained(child)
    assert list((workplace.store / "staging").iterdir()) == []
    assert left_behind(workplace.store) == []
    assert _control_groups() <= groups


def test_in_the_stages_that_stand_on_each_other(workplace: Workplace, worker: Workplace) -> None:
    workplace.forget(
        "base", "system", "kubernetes", "preload_store", "rehearsal", "seal", "verify", "disk", "convert"
    )
    for number, stage, delay in (
        (signal.SIGINT, "base", 1.0),
        (signal.SIGTERM, "system", 2.0),
        (signal.SIGINT, "preload_store", 1.0),
        (signal.SIGTERM, "rehearsal", 2.0),
    ):
        _interrupt(workplace, number, f" {stage} started", delay, "--stop-after", "seal")
        workplace.restore(worker, stage)
    for stage in ("kubernetes", "seal"):
        workplace.restore(worker, stage)
    # The disk is made in the main thread meanwhile, from which on no signal reached what runs beside it.
    _interrupt(workplace, signal.SIGINT, " verify started", 2.0)


def test_while_an_archive_is_packed(workplace: Workplace, tmp_path: Path) -> None:
    """What was pulled is taken over, so that packing begins at once."""
    workplace.forget("preload_store", "rehearsal", "seal", "verify")
    inventory = tmp_path / "inventory.yml"
    refs = ("registry.lab.internal/large:1.0", "registry.lab.internal/pause:1.0")
    preload = "".join(f"        - {{ref: '{ref}', pin: false}}\n" for ref in refs)
    inventory.write_text(f"images:\n  hosts:\n    worker:\n      image_preload:\n{preload}", encoding="utf-8")
    inventories = ("-i", os.fspath(Path("inventories/lab").absolute()), "-i", inventory)
    # Nothing is missing, so the archive is packed at once; a log tells only some of what a stage does.
    line, delay = "preload pulling 0 of 2 images", 5.0
    _interrupt(workplace, signal.SIGTERM, line, delay, *inventories, "--stop-after", "seal")
