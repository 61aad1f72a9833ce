"""What a stage is given: the locked files that it may use, and an earlier preload that is sound."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.bake.executor import Build, _context, _run_stage
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages import StageContext
from image_builder.bake.store import Store
from image_builder.canonical import JSON
from image_builder.errors import StageError, VerifyError
from image_builder.events import NullMonitor
from image_builder.settings import Settings
from image_builder.verify import runner as verify


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


def _work(store: Store, staging: Path) -> Build:
    lock: Any = SimpleNamespace(groups={}, sources={})
    definition: Any = SimpleNamespace(name="worker")
    nothing: Any = None
    return Build(definition, lock, nothing, Settings(store=store.path), store, NullMonitor(), staging, None)


def _given(store: Store, stage: StagePlan, staging: Path) -> StageContext:
    return _context(_work(store, staging), stage, staging / "log")


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


def test_checks_that_fail_leave_their_reports(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product goes with the failed stage; who has to tell why an image wasn't published needs them."""

    def run(ctx: StageContext) -> None:
        for name in ("junit.xml", "verify.json", "facts.json"):
            (ctx.product / name).write_text(name)
        ctx.log.write_text("a check is red")
        raise VerifyError("1 of 2 checks failed")

    monkeypatch.setattr(verify, "run", run)
    stage = StagePlan("verify", "verify")
    with store.staging() as staging, pytest.raises(StageError) as failed:
        _run_stage(_work(store, staging), stage)
    logs = store.path / "logs"
    start = f"worker-verify-{stage.id[:12]}"
    kept = {path.name: path.read_text() for path in logs.iterdir()}
    assert kept == {
        f"{start}.log": "a check is red",
        f"{start}-junit.xml": "junit.xml",
        f"{start}-verify.json": "verify.json",
    }
    assert failed.value.log == str(logs / f"{start}.log")
    assert not store.has(stage.id)
