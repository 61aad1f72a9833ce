"""What a build says of itself at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder import build as building
from image_builder import cgroups
from image_builder.definition import load_inventory
from image_builder.events import NullMonitor
from image_builder.lock import Lock, LockedGroup
from image_builder.plan.resolve import resolve
from image_builder.requirements import requirements
from image_builder.resolve import remembered_lock
from image_builder.settings import REPO_ROOT, Settings
from image_builder.store import Store


@pytest.mark.parametrize("given", [True, False], ids=["--locked", "the last one made"])
def test_it_names_the_lock_that_it_took(tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cgroups, "reap", lambda: None)  # another build's, on this host
    definition = load_inventory([REPO_ROOT / "inventories/lab"]).define("minimal")
    needs = requirements(definition)
    groups = {n: LockedGroup(**g.question.model_dump(), packages=[]) for n, g in needs.groups.items()}
    lock = Lock(image="minimal", source_date_epoch=1, repositories={}, groups=groups)
    settings = Settings(store=tmp_path / "store", output=tmp_path / "output")
    store = Store(settings.store)
    store.prepare()
    tools = resolve(definition, lock, REPO_ROOT).stage("tools")
    with store.staging() as staging:
        (staging / "object/product").mkdir(parents=True)
        store.commit(tools, staging / "object", 1.0, {})
    path = tmp_path / "given.json" if given else remembered_lock(settings, "minimal")
    lock.save(path)
    done = building.build(
        definition, settings, NullMonitor(), locked=path if given else None, stop_after="tools"
    )
    assert [stage["cached"] for stage in done.stages] == [True]
    assert done.lock == path
