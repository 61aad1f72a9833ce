"""The store commits whole stages, notices changes, and never deletes across a mount."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import stat
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from image_builder.bake.plan.model import StagePlan
from image_builder.bake.store import Store
from image_builder.errors import StoreError
from image_builder.system.trees import remove_tree


def _commit(store: Store, name: str = "base", option: str = "a") -> StagePlan:
    plan = StagePlan(name, "base", {"option": option})
    with store.staging() as staging:
        tree = staging / "object" / "product" / "tree"
        (tree / "etc").mkdir(parents=True)
        (tree / "etc/file").write_text(option)
        (tree / "etc/link").symlink_to("file")
        store.commit(plan, staging / "object", 1.0, {"fact": 1})
    return plan


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def test_a_committed_stage_is_whole_and_recorded(store: Store) -> None:
    plan = _commit(store)
    assert store.has(plan.id)
    assert (store.product(plan.id) / "tree/etc/file").read_text() == "a"
    meta = store.meta(plan.id)
    assert meta["facts"] == {"fact": 1}
    assert meta["entries"] == 4
    assert list((store.path / "staging").iterdir()) == []
    store.check(plan.id)
    assert store.verify() == []


def test_a_stage_that_fails_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.staging() as staging:  # noqa: PT012  # what fails is the block
        (staging / "half").write_text("half")
        raise RuntimeError
    assert list((store.path / "staging").iterdir()) == []
    assert store.ids() == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda tree: (tree / "etc/file").write_text("longer"), "etc/file was changed"),
        (lambda tree: (tree / "etc/file").chmod(0o600), "etc/file was changed"),
        (lambda tree: (tree / "etc/file").unlink(), "etc/file is missing"),
        (lambda tree: (tree / "etc/more").write_text(""), "etc/more was added"),
    ],
)
def test_a_changed_stage_is_refused_when_it_is_read(store: Store, damage: object, told: str) -> None:
    plan = _commit(store)
    damage(store.product(plan.id) / "tree")  # type: ignore[operator]
    with pytest.raises(StoreError, match=told):
        store.check(plan.id)


def test_a_changed_extended_attribute_is_refused_when_it_is_read(store: Store) -> None:
    plan = _commit(store)
    file = store.product(plan.id) / "tree/etc/file"
    os.setxattr(file, "user.mark", b"y")
    with pytest.raises(StoreError, match="extended attributes of tree/etc/file were changed"):
        store.check(plan.id)
    assert [d.difference for d in store.verify()] == ["the extended attributes of tree/etc/file were changed"]
    os.removexattr(file, "user.mark")
    store.check(plan.id)


def test_a_stage_of_before_attributes_were_recorded_is_still_sound(store: Store) -> None:
    plan = _commit(store)
    obj = store.object(plan.id)
    lines = gzip.decompress((obj / "manifest.gz").read_bytes()).splitlines()
    shorter = b"".join(json.dumps(json.loads(line)[:8]).encode() + b"\n" for line in lines)
    (obj / "manifest.gz").write_bytes(gzip.compress(shorter))
    meta = store.meta(plan.id)
    meta["manifest_sha256"] = hashlib.sha256((obj / "manifest.gz").read_bytes()).hexdigest()
    (obj / "meta.json").write_text(json.dumps(meta))
    store.check(plan.id)
    assert store.verify() == []


def test_trees_are_closed_to_other_users_and_records_are_not(store: Store) -> None:
    """A tree may contain setuid programs; `plan` reads the records without root privileges."""
    plan = _commit(store)

    def others(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode) & 0o077

    assert others(store.product(plan.id)) == others(store.path / "staging") == 0
    for path in (store.path, store.path / "objects", store.path / "locks", store.object(plan.id)):
        assert others(path) == 0o055, path
    assert others(store.object(plan.id) / "meta.json") == 0o044


@pytest.mark.parametrize("name", ["a store", "a:b", "a,b", "a\\b", "a\udcffb", 'a"b', "a%b"])
def test_a_path_that_a_bake_can_not_use_is_refused_at_once(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="characters that can't be in it"):
        Store(tmp_path / name).prepare()
    assert list(tmp_path.iterdir()) == []


def test_a_path_may_have_letters_of_any_alphabet(tmp_path: Path) -> None:
    Store(tmp_path / "büro/печь-1.0_a+b").prepare()


def test_an_older_store_is_closed_on_its_next_use(store: Store) -> None:
    plan = _commit(store)
    store.product(plan.id).chmod(0o755)
    (store.path / "staging").chmod(0o755)
    store.prepare()
    assert stat.S_IMODE(store.product(plan.id).stat().st_mode) == 0o700
    assert stat.S_IMODE((store.path / "staging").stat().st_mode) == 0o700


def test_verify_finds_a_changed_byte_that_stat_does_not_show(store: Store) -> None:
    plan = _commit(store)
    file = store.product(plan.id) / "tree/etc/file"
    before = file.stat()
    file.write_text("b")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    store.check(plan.id)
    (damage,) = store.verify()
    assert damage.id == plan.id
    assert "content of tree/etc/file" in damage.difference


def test_verify_finds_a_damaged_manifest_and_download(store: Store) -> None:
    plan = _commit(store)
    (store.object(plan.id) / "manifest.gz").write_bytes(b"no gzip")
    (store.path / "debs" / ("0" * 64)).write_bytes(b"other bytes")
    assert sorted(d.name for d in store.verify()) == ["base", "debs"]


def test_verify_names_a_stage_whose_record_is_gone_and_looks_at_the_others(store: Store) -> None:
    plans = [_commit(store, option=option) for option in "abc"]
    for plan in plans[:2]:
        (store.object(plan.id) / "meta.json").write_bytes(b"")
    assert {d.id for d in store.verify()} == {plan.id for plan in plans[:2]}


def test_a_list_of_builds_that_a_power_cut_left_empty_is_named(store: Store) -> None:
    plan = _commit(store)
    path = store.path / "locks" / "worker.builds"
    path.touch()
    for use in (
        lambda: store.record("worker", [plan.id]),
        lambda: store.gc(1),
        lambda: store.last_build("worker"),
    ):
        with pytest.raises(StoreError, match="worker.builds can't be read"):
            use()
    assert store.has(plan.id)
    path.unlink()
    assert store.last_build("worker") == {}
    store.record("worker", [plan.id])
    assert list(store.last_build("worker")) == ["base"]


def test_the_staging_area_of_a_dead_build_is_reaped_and_a_living_one_kept(store: Store) -> None:
    dead = store.path / "staging" / "dead"
    (dead / "tree").mkdir(parents=True)
    (dead / ".lock").touch()
    with store.staging() as mine:
        assert not dead.exists()
        store.reap()
        assert mine.exists()


def test_gc_keeps_the_last_builds_of_every_image(store: Store) -> None:
    old, new, other = (
        _commit(store, option="old"),
        _commit(store, option="new"),
        _commit(store, option="other"),
    )
    store.record("worker", [old.id])
    store.record("worker", [new.id])
    store.record("minimal", [other.id])
    removed, freed, _ = store.gc(keep=1)
    assert removed == [old.id]
    assert freed > 0
    assert sorted(store.ids()) == sorted([new.id, other.id])


def test_gc_is_not_held_up_by_a_record_that_can_not_be_read(store: Store) -> None:
    damaged, old, new = (_commit(store, option=name) for name in ("damaged", "old", "new"))
    (store.object(damaged.id) / "meta.json").write_text("{")
    store.record("worker", [new.id])
    removed, freed, _ = store.gc(keep=1)
    assert sorted(removed) == sorted([damaged.id, old.id]) and freed > 0
    assert store.ids() == [new.id]


def test_an_image_takes_over_what_was_remembered_by_its_name_only(store: Store) -> None:
    """The first inventory with an image of that name takes it over; nothing of its own is replaced."""
    shared, following = (_commit(store, option=name) for name in ("shared", "following"))
    store.record("worker", [shared.id])
    assert list(store.last_build("worker@lab-1b9d6bcd", "worker")) == ["base"]
    store.record("worker@lab-1b9d6bcd", [following.id], ["worker"])
    assert [p.name for p in store.path.glob("locks/worker*")] == ["worker@lab-1b9d6bcd.builds"]
    assert store.gc(keep=2)[0] == []  # what it took over counts
    mine = _commit(store, option="mine")
    store.record("worker@mine-5c1e0d7a", [mine.id], ["worker"])
    store.record("worker", [shared.id])  # an older version of this program
    store.record("worker@mine-5c1e0d7a", [mine.id], ["worker"])
    assert store.gc(keep=1)[0] == []
    assert {i["id"] for i in store.last_build("worker@mine-5c1e0d7a", "worker").values()} == {mine.id}


@pytest.mark.parametrize("image", ["store", "staging"])
def test_an_image_may_be_called_as_the_stores_own_locks(store: Store, image: str) -> None:
    plan = _commit(store)
    with store.in_use():  # as a build does
        waiting = threading.Thread(target=store.record, args=(image, [plan.id]), daemon=True)
        waiting.start()
        waiting.join(5)
        assert not waiting.is_alive()
    assert list(store.last_build(image)) == ["base"]
    assert store.gc(1)[0] == []


def test_gc_removes_downloads_of_no_lock_only_where_it_is_told_to(store: Store) -> None:
    """Files that a kept lock names may exist nowhere else: a security update replaces a version in its archive."""
    package, archive, loose = "a" * 64, "b" * 64, "c" * 64
    lock = {"groups": {"base": {"packages": [{"sha256": package}]}}, "archives": [{"sha256": archive}]}
    (store.path / "locks/worker@lab-1b9d6bcd.lock.json").write_text(json.dumps(lock))
    names = [f"debs/{package}", f"debs/{package}.control", f"files/{archive}"]
    unnamed = [f"debs/{loose}", f"debs/{loose}.control", f"files/{loose}"]
    for name in (*names, *unnamed):
        (store.path / name).write_text("bytes")

    def present() -> list[str]:
        return sorted(f"{f}/{p.name}" for f in ("debs", "files") for p in (store.path / f).iterdir())

    assert store.gc(keep=1).downloads == [] and present() == sorted([*names, *unnamed])
    cut = store.path / "locks/minimal@lab-77aa77aa.lock.json"
    cut.write_text("{")
    with pytest.raises(StoreError, match="minimal@lab-77aa77aa.lock.json can't be read"):
        store.gc(keep=1, downloads=True)
    assert present() == sorted([*names, *unnamed])
    cut.unlink()
    collected = store.gc(keep=1, downloads=True)
    assert collected.downloads == [name.partition("/")[2] for name in unnamed] and collected.bytes > 0
    assert present() == names


def test_gc_removes_the_claims_of_stages_that_are_gone(store: Store) -> None:
    old, new = (_commit(store, option=name) for name in ("old", "new"))
    for plan in (old, new):
        with store.claim(plan.id):
            pass
    with store.claim("f" * 64):  # one that failed
        pass
    store.record("worker", [new.id])
    store.gc(keep=1)
    claims = {path.name for path in (store.path / "locks").iterdir() if "." not in path.name}
    assert claims == {new.id[:32]}


def test_gc_tells_that_it_waits_for_a_build(store: Store) -> None:
    old = _commit(store)
    with ExitStack() as build:
        build.enter_context(store.in_use())
        told: list[bool] = []

        def end_the_build() -> None:
            told.append(store.has(old.id))
            build.close()

        assert store.gc(0, end_the_build)[0] == [old.id]
    assert told == [True]


def test_a_build_that_ends_does_not_wait_for_another_ones_stage(store: Store) -> None:
    stop = threading.Event()
    with store.claim("a" * 64):
        with pytest.raises(StoreError, match="the build ends"), store.claim("a" * 64, stop.set, stop):
            pass
        with store.claim("b" * 64, stop.clear, stop):
            assert stop.is_set()  # it isn't held, so nothing is reported


def test_a_tree_with_a_mount_is_not_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/canary").write_text("alive")
    monkeypatch.setattr("image_builder.system.trees.mounts.below", lambda path: [f"{path}/mnt"])
    with pytest.raises(StoreError, match="is mounted there"):
        remove_tree(tmp_path / "tree")
    assert (tmp_path / "tree/canary").read_text() == "alive"


def test_meta_is_readable_json(store: Store) -> None:
    plan = _commit(store)
    assert json.loads((store.object(plan.id) / "meta.json").read_text())["id"] == plan.id
