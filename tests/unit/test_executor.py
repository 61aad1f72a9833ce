"""What a stage is given: the locked files that it may use, and an earlier preload that is sound."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.events import NullMonitor
from image_builder.executor import Build, _context
from image_builder.plan.model import JSON, StagePlan
from image_builder.settings import Settings
from image_builder.stages import StageContext
from image_builder.store import Store


def _preload(*images: str) -> StagePlan:
    options: dict[str, JSON] = {
        "engine": "docker",
        "snapshotter": "overlay2",
        "packages": "p",
        "archives": ["a" * 64],
        "images": [{"digest": digest} for digest in images],
    }
    return StagePlan("preload", "preload", options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def _given(store: Store, stage: StagePlan, staging: Path) -> StageContext:
    lock: Any = SimpleNamespace(groups={}, sources={})
    nothing: Any = None
    work = Build(nothing, lock, nothing, Settings(store=store.path), store, NullMonitor(), staging, None)
    return _context(work, stage, staging / "log")


def test_a_preload_takes_over_from_a_sound_one_alone(store: Store) -> None:
    before = _preload("sha256:1")
    with store.staging() as staging:
        state = staging / "object/product/state"
        state.mkdir(parents=True)
        (state / "layer").write_text("files of a layer")
        store.commit(before, staging / "object", 1.0, {})
    with store.staging() as staging:
        # The archives of the engine's layer are in that layer's tree; nobody fetched them for the pull.
        assert _given(store, _preload("sha256:1", "sha256:2"), staging).previous == store.product(before.id)
    (store.product(before.id) / "state/layer").write_text("of another")
    with store.staging() as staging:
        assert _given(store, _preload("sha256:1", "sha256:2"), staging).previous is None
