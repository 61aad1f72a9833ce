"""One promotion: start the workers, sync what they copied, exchange it with its links."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from image_builder.node import files
from image_builder.node.promote.plan import PAUSE, Item
from image_builder.node.promote.workers import ItemResult, Job, Workers, disk_error, running

# Copies are synced together: when they have so many bytes, or the first of them is so many seconds old.
_BATCH_BYTES = 256 << 20
_BATCH_SECONDS = 5.0


@dataclass
class Progress:
    """What was exchanged, and what ended it before all was."""

    done: int = 0
    bytes: int = 0
    failure: ItemResult | None = None
    _waiting: list[int] = field(default_factory=list)
    _since: float = 0.0


def promote(
    items: Sequence[Item],
    staging: Path,
    *,
    workers: int,
    rate: int,
    reserve_percent: float,
    report: Callable[[Progress], None],
) -> Progress:
    """Copy every item and exchange it with its link; ``report`` is called after each batch.

    ``staging`` is on the filesystem of the links and holds nothing afterwards. An error of the store or the disk ends
    it and is in the result; what was exchanged before stays. Raises NodeError (``promote.worker``) for a worker that
    was killed.
    """
    progress = Progress()
    files.remove_tree(staging)
    staging.mkdir(mode=0o700, parents=True)
    try:
        job = Job(items, staging, reserve_percent, flush=rate > 0)
        with running(job, min(workers, len(items)), rate) as (crew, shared):
            _follow(crew, job, progress, report, shared.stop)
    except OSError as error:
        progress.failure = ItemResult(-1, *disk_error(error))
    finally:
        files.remove_tree(staging)
    return progress


def _follow(
    crew: Workers, job: Job, progress: Progress, report: Callable[[Progress], None], stop: Callable[[], None]
) -> None:
    while (messages := crew.results(_BATCH_SECONDS / 5)) is not None:
        for message in messages:
            if message.code:
                progress.failure = progress.failure or message
                if message.code != "promote.space":  # other copies may still fit
                    stop()
            else:
                progress._since = progress._since if progress._waiting else time.monotonic()
                progress._waiting.append(message.item)
        if _is_due(job.items, progress):
            _commit(job, progress)
            report(progress)
    if progress._waiting:
        _commit(job, progress)
        report(progress)


def _is_due(items: Sequence[Item], progress: Progress) -> bool:
    waiting = [items[number] for number in progress._waiting]
    return bool(waiting) and (
        waiting[0].rank == PAUSE
        or sum(item.bytes for item in waiting) >= _BATCH_BYTES
        or time.monotonic() - progress._since >= _BATCH_SECONDS
    )


def _commit(job: Job, progress: Progress) -> None:
    """Make the copies durable, then let the names lead to them. Raises OSError: then none of them was exchanged."""
    files.syncfs(job.staging)
    waiting, progress._waiting = progress._waiting, []
    for number in waiting:
        item = job.items[number]
        if exchange(job.staging / str(number), item.link.path, item.link.target):
            progress.done += 1
            progress.bytes += item.bytes


def exchange(copy: Path, link: Path, target: Path) -> bool:
    """Exchange a copy with its link and delete the link; False where the engine has changed the name meanwhile.

    Raises OSError.
    """
    try:
        files.exchange(copy, link)
    except FileNotFoundError:  # the image was deleted
        return False
    if stat.S_ISLNK(copy.lstat().st_mode) and os.readlink(copy) == os.fspath(target):
        copy.unlink()
        return True
    files.exchange(copy, link)  # it was pulled again: the engine's own files stay
    return False
