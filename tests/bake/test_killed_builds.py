"""SIGKILL of the outermost process at any moment: nothing is left but staging, and the next build just works."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.images.builds import Workplace, is_drained, network_state, wait_for_line, wait_until_clean

pytestmark = [pytest.mark.root, pytest.mark.alone]

STAGES = ("tools", "base", "system", "seal", "verify", "disk", "convert")
# The stages that only a worker has, and those that build on them.
WORKER_STAGES = (
    "lab_images",
    "build_root",
    "kubelet_build",
    "container_runtime",
    "preload",
    "preload_store",
    "rehearsal",
    "node",
    "kubernetes",
)
LAST = ("seal", "verify", "disk", "convert")
# To repeat the moments of a failed run: the number that it printed.
SEED = int(os.environ.get("IMAGE_BUILDER_KILL_SEED") or random.randrange(1 << 32))
RANDOM_KILLS = int(os.environ.get("IMAGE_BUILDER_RANDOM_KILLS", "8"))


def _tree(path: Path) -> set[str]:
    return {os.fspath(p.relative_to(path)) for p in path.rglob("*")}


def _outside(workplace: Workplace) -> set[str]:
    """Return everything where a build must leave nothing: the store outside staging, and temporary directories."""
    found = {p for p in _tree(workplace.store) if not p.startswith(("staging", "objects"))}
    # The stages that a build needs are recorded before it is published, so that they aren't collected.
    found = {p for p in found if not re.fullmatch(r"locks/[^.][^/]*\.builds", p)}
    # Lock files are empty, and stay.
    found = {p for p in found if (workplace.store / p).is_dir() or (workplace.store / p).stat().st_size}
    return found | {os.fspath(p) for folder in ("/tmp", "/var/tmp") for p in Path(folder).iterdir()}


def _kill_when(workplace: Workplace, line: Callable[[str], bool], delay: float, *argv: str | Path) -> bool:
    """Start a build, SIGKILL it ``delay`` seconds after the wanted line; return False if it ended before that."""
    network = network_state()
    outside = _outside(workplace)
    child = workplace.start(*argv)
    try:
        seen = wait_for_line(child, line)
        time.sleep(delay)
        alive = child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert is_drained(child)
    assert wait_until_clean(workplace.store) == []
    assert network_state() == network
    assert _outside(workplace) - outside == set()
    return seen and alive


def _killed_in(workplace: Workplace, stage: str, delay: float, *argv: str) -> bool:
    """Kill a build with the lock of its stages: what the archive has published since doesn't matter."""
    return _kill_when(workplace, _starts(stage), delay, "--locked", workplace.lock, *argv)


def _starts(stage: str) -> Callable[[str], bool]:
    return lambda line: f" {stage} " in line and "started" in line


def test_killed_in_every_stage(workplace: Workplace, minimal: Workplace) -> None:
    workplace.forget(*STAGES)
    for stage in STAGES:
        assert _killed_in(workplace, stage, 0.3), stage
        workplace.restore(minimal, stage)
    workplace.forget("convert")
    assert _killed_in(workplace, "publish", 0.1)
    done = workplace.build()
    assert done.status == 0, done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
    published = list((workplace.output / workplace.image).iterdir())
    assert sorted(p.name for p in published) == sorted([done.result["build_id"][:12], "latest"])


@pytest.mark.nightly
def test_killed_in_every_stage_of_a_worker(
    copies: Callable[[Workplace], Workplace], whole_worker: Workplace
) -> None:
    workplace = copies(whole_worker)
    workplace.forget(*WORKER_STAGES, "seal")
    for stage in WORKER_STAGES:
        # No disk is made: a machine may not have room for another whole image.
        assert _killed_in(workplace, stage, 1.0, "--stop-after", "seal"), stage
        workplace.restore(whole_worker, stage)


@pytest.mark.nightly
def test_killed_at_random(workplace: Workplace) -> None:
    print(f"IMAGE_BUILDER_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    killed = tries = 0
    while killed < RANDOM_KILLS:
        workplace.forget(*LAST)
        # Every fourth build queries the archive first, which takes as long as the stages that are to be hit.
        locked = ("--locked", workplace.lock) if tries % 4 else ()
        killed += _kill_when(workplace, lambda _line: True, chance.uniform(0.0, 8.0), *locked)
        tries += 1
        assert tries < 3 * RANDOM_KILLS, "builds end before they can be killed"
    done = workplace.build()
    assert done.status == 0, done.stderr
    assert list((workplace.store / "staging").iterdir()) == []
