"""Batches of copies: when they are made durable and exchanged, what stops the others, which link is deleted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.data_root import Link
from image_builder.node.promote import batches
from image_builder.node.promote.batches import Progress
from image_builder.node.promote.plan import PAUSE, REST, Item
from image_builder.node.promote.workers import ItemResult, Job


def _item(path: Path, rank: int = REST, count: int = 1) -> Item:
    return Item(Link(path, Path("/store/layers/x"), "sha256:x", True), count, rank)


class Said:
    """Workers with prepared results."""

    def __init__(self, *results: Sequence[ItemResult]) -> None:
        self._results = [*results]

    def results(self, _seconds: float) -> Sequence[ItemResult] | None:
        return self._results.pop(0) if self._results else None


def _follow(
    tmp_path: Path, *results: Sequence[ItemResult], rank: int = REST
) -> tuple[Progress, list[str], list[int]]:
    """Follow such workers; return the progress, whether they were stopped, and the count done at each report."""
    staging = tmp_path / "staging"
    items = []
    for number in range(3):
        (staging / str(number)).mkdir(parents=True)
        (tmp_path / str(number)).symlink_to("/store/layers/x")
        items.append(_item(tmp_path / str(number), rank))
    job, progress, stopped, done = Job(items, staging, 0, False), Progress(), [], []
    crew: Any = Said(*results)
    batches._follow(crew, job, progress, lambda now: done.append(now.done), lambda: stopped.append("stopped"))
    return progress, stopped, done


@pytest.mark.parametrize(
    ("code", "stops"), [("promote.space", False), ("promote.store", True), ("promote.io", True)]
)
def test_a_full_disk_lets_other_copies_end(code: str, stops: bool, tmp_path: Path) -> None:
    progress, stopped, _ = _follow(tmp_path, [ItemResult(0, code, "why")], [ItemResult(1)])
    assert bool(stopped) == stops
    assert progress.failure == ItemResult(0, code, "why") and progress.done == 1


@pytest.mark.parametrize(("rank", "reports"), [(PAUSE, [1, 2]), (REST, [2])])
def test_the_pause_image_waits_for_no_other(rank: int, reports: list[int], tmp_path: Path) -> None:
    assert _follow(tmp_path, [ItemResult(0)], [ItemResult(1)], rank=rank)[2] == reports


def test_a_batch_is_due_by_its_bytes(tmp_path: Path) -> None:
    half = batches._BATCH_BYTES // 2
    items = [_item(tmp_path, count=half), _item(tmp_path, count=half - 1), _item(tmp_path, count=1)]
    progress = Progress(_waiting=[0, 1], _since=float("inf"))
    assert not batches._is_due(items, progress)
    progress._waiting.append(2)
    assert batches._is_due(items, progress)


def test_a_link_that_somebody_else_made_stays(tmp_path: Path) -> None:
    copy, link = tmp_path / "copy", tmp_path / "link"
    copy.mkdir()
    link.symlink_to("/elsewhere")
    assert batches.exchange(copy, link, Path("/store/layers/x")) is False
    assert os.readlink(link) == "/elsewhere" and copy.is_dir()
