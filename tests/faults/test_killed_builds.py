"""SIGKILL of the outermost process at any moment: nothing left but staging, and the next build just works."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builds import Workplace, network_state, wait_for_line, wait_until_clean

pytestmark = pytest.mark.root

STAGES = ("base", "system", "seal", "verify", "disk", "convert")
RANDOM_KILLS = int(os.environ.get("IMAGE_BUILDER_RANDOM_KILLS", "20"))


def _tree(path: Path) -> set[str]:
    return {os.fspath(p.relative_to(path)) for p in path.rglob("*")}


def _kill_when(workplace: Workplace, line: Callable[[str], bool], delay: float) -> bool:
    """Start a build, SIGKILL it ``delay`` seconds after the wanted line; False when it ended before."""
    network = network_state()
    outside = {p for p in _tree(workplace.store) if not p.startswith(("staging", "objects"))}
    child = workplace.start()
    try:
        seen = wait_for_line(child, line)
        time.sleep(delay)
        alive = child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert wait_until_clean(workplace.store) == []
    assert network_state() == network
    now = {p for p in _tree(workplace.store) if not p.startswith(("staging", "objects"))}
    # The files that locks are held on stay; they are empty.
    more = [p for p in now - outside if (workplace.store / p).stat().st_size]
    assert more == []
    return seen and alive


def test_killed_in_every_stage(workplace: Workplace) -> None:
    workplace.forget(*STAGES)
    for stage in STAGES:
        killed = _kill_when(workplace, lambda line, s=stage: f" {s} " in line and "start" in line, 0.3)  # type: ignore[misc]
        assert killed, stage
        # The next stage's turn comes only when this one is finished: build up to it.
        done = workplace.build("--stop-after", stage)
        assert done.status == 0, done.stderr
    done = workplace.build()
    assert done.status == 0, done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
    verified = Path(done.result["artefact"]) / "manifest.json"
    assert verified.exists()


def test_killed_at_random(workplace: Workplace) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    last = ("seal", "verify", "disk", "convert")
    for n in range(RANDOM_KILLS):
        if n % 5 == 0:
            workplace.forget(*last)
        _kill_when(workplace, lambda _line: True, chance.uniform(0.0, 8.0))
    done = workplace.build()
    assert done.status == 0, done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
