"""The peak disk usage of a run."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from image_builder.system.host import nearest_existing

_STEP_SECONDS = 2.0


@contextmanager
def peak_disk(places: Sequence[Path]) -> Iterator[list[float]]:
    """Watch the filesystems of ``places``; yields [peak bytes used, beyond those at the start]."""
    devices = {}
    for place in places:
        there = nearest_existing(place)
        devices[there.stat().st_dev] = there

    def used() -> float:
        stats = [os.statvfs(place) for place in devices.values()]
        return float(sum((s.f_blocks - s.f_bfree) * s.f_frsize for s in stats))

    start, peak, over = used(), [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(_STEP_SECONDS):
            peak[0] = max(peak[0], used() - start)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()
        peak[0] = max(peak[0], used() - start)
