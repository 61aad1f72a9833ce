"""Compiled stages outlive the store that they were made in: only whole ones, under their own ids."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.store import Store
from tests.selftest import compiled

KUBELET = StagePlan("kubelet_build", "go", {"version": "1.20.2"})


def _make(store: Store, plan: StagePlan, content: str = "program") -> None:
    with store.staging() as staging:
        product = staging / "object/product"
        product.mkdir(parents=True)
        (product / "kubelet").write_text(content)
        (product / "link").symlink_to("kubelet")
        store.commit(plan, staging / "object", 1.0, {})


@pytest.fixture
def other(tmp_path: Path) -> Store:
    """Return an empty store."""
    made = Store(tmp_path / "other")
    made.prepare()
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return compiled.directory(tmp_path / "cache")


def test_what_was_compiled_in_one_store_is_in_the_next(store: Store, other: Store, place: Path) -> None:
    _make(store, KUBELET)
    _make(store, StagePlan("system", "layer"))
    compiled.keep(store, place)
    assert compiled.restore(other, place) == ["kubelet_build"]
    assert other.ids() == [KUBELET.id] and other.verify() == []
    assert (other.product(KUBELET.id) / "kubelet").read_text() == "program"
    assert compiled.restore(other, place) == []  # it exists already
    assert list((other.path / "staging").iterdir()) == []


def test_the_newest_of_each_name_is_kept(store: Store, place: Path) -> None:
    plans = [StagePlan("kubelet_build", "go", {"version": version}) for version in ("3", "1", "2")]
    for age, plan in enumerate(reversed(plans)):
        _make(store, plan)
        os.utime(store.object(plan.id) / "meta.json", (age, age))
        compiled.keep(store, place)
    assert os.listdir(place) == [plans[0].id]


def test_a_killed_copy_is_removed_and_made_again(store: Store, place: Path) -> None:
    _make(store, KUBELET)
    place.mkdir(mode=0o700, parents=True)
    (place / f"{KUBELET.id}.partial").mkdir()
    compiled.keep(store, place)
    assert os.listdir(place) == [KUBELET.id]


def _change(kept: Path) -> None:
    (kept / "product/kubelet").write_text("PROGRAM")


def _change_with_its_time(kept: Path) -> None:
    before = (kept / "product/kubelet").stat()
    _change(kept)
    os.utime(kept / "product/kubelet", ns=(before.st_atime_ns, before.st_mtime_ns))


def _rename(kept: Path) -> None:
    kept.rename(kept.with_name("0" * 64))


def _lose_its_record(kept: Path) -> None:
    (kept / "meta.json").unlink()


def _open_to_others(kept: Path) -> None:
    kept.parent.chmod(0o777)


def _another_kind(kept: Path) -> None:
    text = (kept / "meta.json").read_text()
    (kept / "meta.json").write_text(text.replace('"kind": "go"', '"kind": "layer"'))


@pytest.mark.parametrize(
    "damage",
    [_change, _change_with_its_time, _rename, _lose_its_record, _open_to_others, _another_kind],
)
def test_what_is_not_whole_or_not_ours_is_not_taken(
    store: Store, other: Store, place: Path, damage: Callable[[Path], None]
) -> None:
    _make(store, KUBELET)
    compiled.keep(store, place)
    damage(place / KUBELET.id)
    assert compiled.restore(other, place) == []
    assert other.ids() == [] and list((other.path / "staging").iterdir()) == []


def test_nothing_is_kept_where_others_can_write(store: Store, place: Path) -> None:
    _make(store, KUBELET)
    place.mkdir(parents=True)
    place.chmod(0o777)
    compiled.keep(store, place)
    assert list(place.iterdir()) == []
