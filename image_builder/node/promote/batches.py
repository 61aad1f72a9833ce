"""One promotion: start the workers, sync their copies, and exchange these with the links."""

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

# Copies are synced in batches: once they have this many bytes, or the first of them is this old (seconds).
_BATCH_BYTES = 256 << 20
_BATCH_SECONDS = 5.0


@dataclass
class Progress:
    """How much has been exchanged, and the failure that ended the promotion early."""

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

    ``staging`` must be on the links' filesystem, and is removed afterwards. An error of the store or the disk ends the
    promotion and is in the result; earlier exchanges stay. Raises NodeError (``promote.worker``) if a worker was killed
    or crashed.
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
    """Sync the copies, then exchange them with their links. Raises OSError; if the sync fails, none is exchanged."""
    files.syncfs(job.staging)
    waiting, progress._waiting = progress._waiting, []
    for number in waiting:
        item = job.items[number]
        if exchange(job.staging / str(number), item.link.path, item.link.target):
            progress.done += 1
            progress.bytes += item.bytes


def exchange(copy: Path, link: Path, target: Path) -> bool:
    """Exchange a copy with its link and delete the link; return False if the engine has changed the name meanwhile.

    Raises OSError.
    """
    try:
        files.exchange(copy, link)
    except FileNotFoundError:  # the image has been deleted
        return False
    if stat.S_ISLNK(copy.lstat().st_mode) and os.readlink(copy) == os.fspath(target):
        copy.unlink()
        return True
    files.exchange(copy, link)  # it has been pulled again: keep the engine's own files
    return False
