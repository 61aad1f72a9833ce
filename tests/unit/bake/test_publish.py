"""Publishing: whole or not at all, with real files, renames and locks."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake import manifest as manifests
from image_builder.bake import publish
from image_builder.bake.lock.model import DEBIAN, Lock, LockedGroup, LockedImage
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.publish import Publication, publish_files
from image_builder.bake.store import Store
from image_builder.bake.verification import passed_verification
from image_builder.definition.model import ImageBase, ImageDefinition, ImageDisk, PreloadedImage
from image_builder.errors import PublishError, SpaceError, StoreError
from image_builder.events import Monitor
from image_builder.node import files
from image_builder.settings import Settings
from image_builder.system import sparse
from tests.support.images.manifests import BUILD_ID, DISK, DOCUMENTS, artefact, manifest, write

FILES = {"worker.raw": b"disk" * 1000, "worker.vhd": b"disk" * 1000 + b"footer"}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "output"


def _publish(output: Path, files: dict[str, bytes] | None = None, **changes: Any) -> Publication:
    files = FILES if files is None else files
    source = write(output.parent / "source", files)
    return publish_files(manifest(files, **changes), source, DOCUMENTS, output, Monitor())


def _names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_everything_is_published_under_the_builds_id(output: Path) -> None:
    done = _publish(output)
    assert done == Publication(output / "worker" / BUILD_ID[:12], reused=False)
    assert _names(done.path) == sorted([*FILES, *DOCUMENTS, "manifest.json"])
    assert _names(output / "worker") == [BUILD_ID[:12], "latest"]
    assert os.readlink(output / "worker/latest") == BUILD_ID[:12]
    for name, data in (FILES | DOCUMENTS).items():
        assert (done.path / name).read_bytes() == data
        assert (done.path / name).stat().st_mode & 0o777 == 0o644
    assert done.path.stat().st_mode & 0o777 == 0o755
    assert manifests.load((done.path / "manifest.json").read_bytes()) == manifest(FILES)


def test_the_same_build_is_recognised_and_left_alone(output: Path) -> None:
    first = _publish(output)
    before = {p.name: p.stat().st_ino for p in first.path.iterdir()}
    again = _publish(output, created="2027-01-01T00:00:00Z")
    assert again == Publication(first.path, reused=True)
    assert {p.name: p.stat().st_ino for p in first.path.iterdir()} == before


def test_a_newer_build_moves_latest_and_keeps_the_earlier_one(output: Path) -> None:
    first = _publish(output)
    second = _publish(output, {"worker.raw": b"other"}, build_id="cd" * 32)
    assert os.readlink(output / "worker/latest") == second.path.name
    assert (first.path / "worker.raw").read_bytes() == FILES["worker.raw"]
    _publish(output)
    assert os.readlink(output / "worker/latest") == first.path.name


@pytest.mark.parametrize("damage", ["changed", "same size", "missing", "added", "manifest"])
def test_a_damaged_publication_is_replaced(output: Path, damage: str) -> None:
    path = _publish(output).path
    match damage:
        case "changed":
            (path / "worker.raw").write_bytes(b"short")
        case "same size":
            (path / "worker.raw").write_bytes(b"DISK" * 1000)
        case "missing":
            (path / "worker.vhd").unlink()
        case "added":
            (path / "surprise").touch()
        case _:
            (path / "manifest.json").write_bytes(b"{")
    assert not _publish(output).reused
    assert _names(path) == sorted([*FILES, *DOCUMENTS, "manifest.json"])
    assert (path / "worker.raw").read_bytes() == FILES["worker.raw"]
    assert _names(output / "worker") == [BUILD_ID[:12], "latest"]
    assert _publish(output).reused


def test_a_touched_file_is_hashed_and_found_to_be_the_same(output: Path) -> None:
    path = _publish(output).path
    (path / "worker.raw").touch()
    assert _publish(output).reused


def test_other_formats_of_the_same_build_replace_it_in_one_step(output: Path) -> None:
    path = _publish(output).path
    held = os.open(path, os.O_RDONLY)  # a reader that has the old directory open
    _publish(output, {"worker.raw": FILES["worker.raw"]})
    assert _names(path) == sorted(["worker.raw", *DOCUMENTS, "manifest.json"])
    assert os.listdir(held) == []  # the old directory was removed as a whole, not turned into the new one
    os.close(held)


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when a pool has been told to end, but not yet waited for."""
    event, shutdown = threading.Event(), ThreadPoolExecutor.shutdown

    def told(pool: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        event.set()
        shutdown(pool, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", told)
    return event


def test_after_a_failure_no_other_file_is_begun(output: Path, cancelled: threading.Event) -> None:
    files = {f"worker{number}.raw": bytes(1000) for number in range(6)}
    source = write(output.parent / "source", files)
    (source / "worker0.raw").unlink()
    begun: list[str] = []

    class Recorder(Monitor):
        def stage_doing(self, stage: str, what: str) -> None:  # noqa: ARG002
            begun.append(what)
            assert len(begun) < 3 or cancelled.wait(30)

    with pytest.raises(PublishError, match=r"worker0\.raw"):
        publish_files(manifest(files), source, DOCUMENTS, output, Recorder())
    # Two at a time: the failed file, the one next to it, and what the two threads took before the failure was known.
    assert len(begun) <= 4
    assert _names(output / "worker") == []


def test_a_copy_under_way_ends_with_a_failure(output: Path, cancelled: threading.Event) -> None:
    files = {"worker.raw": b"disk" * (8 << 20), "worker.vhd": b"x"}
    source = write(output.parent / "source", files)
    (source / "worker.vhd").unlink()
    told: list[int] = []

    class Recorder(Monitor):
        def stage_progress(self, stage: str, done: int, total: int, unit: str) -> None:  # noqa: ARG002
            told.append(done)
            assert len(told) < 2 or cancelled.wait(30)

    with pytest.raises(PublishError, match=r"worker\.vhd"):
        publish_files(manifest(files), source, DOCUMENTS, output, Recorder())
    assert len(told) < 3


def test_bytes_that_are_not_the_builds_are_not_published(output: Path) -> None:
    earlier = _publish(output, {"worker.raw": b"good"}, build_id="cd" * 32).path
    source = write(output.parent / "bad", dict.fromkeys(FILES, b"rotten"))
    with pytest.raises(PublishError, match=r"worker\.(raw|vhd) differs on the disk"):
        publish_files(manifest(FILES), source, DOCUMENTS, output, Monitor())
    assert _names(output / "worker") == [earlier.name, "latest"]
    assert os.readlink(output / "worker/latest") == earlier.name


def test_a_file_that_is_missing_is_named(output: Path) -> None:
    source = write(output.parent / "empty", {})
    with pytest.raises(PublishError, match=r"worker\.(raw|vhd): No such file"):
        publish_files(manifest(FILES), source, DOCUMENTS, output, Monitor())
    assert _names(output / "worker") == []


def test_a_full_disk_is_a_space_error(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: Path, target: Path, _progress: object, *, direct: bool) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", os.fspath(target))

    monkeypatch.setattr(sparse, "copy", full)
    with pytest.raises(SpaceError, match="no space left") as caught:
        _publish(output)
    assert "--output" in (caught.value.hint or "")
    assert _names(output / "worker") == []


def test_an_output_that_can_not_be_written_is_a_publish_error(output: Path) -> None:
    output.write_text("a file")
    with pytest.raises(PublishError, match="can't publish"):
        _publish(output)


def test_what_dead_publishers_left_is_reaped_and_a_living_ones_is_kept(output: Path) -> None:
    folder = output / "worker"
    dead, living = folder / ".staging-dead", folder / ".staging-living"
    for path in (dead, living):
        write(path, {"worker.raw": b"half"})
    (folder / ".latest-dead").symlink_to("nowhere")
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    _publish(output)
    assert not dead.exists()
    assert living.exists()
    assert not os.path.lexists(folder / ".latest-dead")
    os.close(held)


def test_without_renameat2_the_result_is_the_same(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_args: object) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(files, "_libc", type("Libc", (), {"renameat2": staticmethod(missing)}))
    path = _publish(output).path
    _publish(output, {"worker.raw": b"disk"})
    assert _names(path) == sorted(["worker.raw", *DOCUMENTS, "manifest.json"])
    _publish(output)
    assert _names(output / "worker") == [BUILD_ID[:12], "latest"]


def _verdict(checks: int, passed: int) -> dict[str, bytes]:
    document = {"marker": "offline", "checks": checks, "passed": passed, "not_applicable": 0, "seconds": 1.0}
    return {"verdict.json": json.dumps(document).encode()}


def test_only_a_passed_verification_counts(tmp_path: Path) -> None:
    assert passed_verification(write(tmp_path / "good", _verdict(1, 1))).passed == 1
    with pytest.raises(PublishError, match="not verified: 1 of 2 checks failed"):
        passed_verification(write(tmp_path / "bad", _verdict(2, 1)))
    with pytest.raises(PublishError, match="no check"):
        passed_verification(write(tmp_path / "none", _verdict(0, 0)))
    with pytest.raises(PublishError, match="not verified"):
        passed_verification(tmp_path / "missing")
    # A forged document, and ones that aren't our own at all.
    forged = json.loads(_verdict(2, 1)["verdict.json"]) | {"verdict": "passed"}
    for content in (json.dumps(forged).encode(), b"{}", b"passed"):
        with pytest.raises(PublishError, match="not verified"):
            passed_verification(write(tmp_path / "forged", {"verdict.json": content}))


def _commit(store: Store, plan: StagePlan, files: dict[str, bytes], facts: dict[str, Any]) -> None:
    with store.staging() as staging:
        write(staging / "object" / "product", files)
        store.commit(plan, staging / "object", 1.0, facts)


def _built(tmp_path: Path) -> tuple[ImageDefinition, Lock, Plan, Store, Settings, list[dict[str, Any]]]:
    """Return a build of one small artifact, with a store that holds what the build would have left."""
    names = ("tools", "seal", "verify", "disk", "convert")
    plan = Plan("worker", tuple(StagePlan(n, n, {"ansible": "2.19"}) for n in names))
    store = Store(tmp_path / "store")
    store.prepare()
    facts = {"packages": [{"name": "bash", "version": "5.2", "architecture": "amd64"}]}
    files = {
        "verify": {
            **_verdict(1, 1),
            "verify.json": b"{}",
            "junit.xml": b"<testsuites/>",
            "facts.json": json.dumps(facts).encode(),
        },
        "convert": {"worker.raw": b"disk"},
    }
    told = {
        "disk": DISK.model_dump(mode="json") | {"content_bytes": 1},
        "convert": {"files": [artefact("worker.raw", b"disk").model_dump()]},
    }
    for stage in plan.stages:
        _commit(store, stage, files.get(stage.name, {}), told.get(stage.name, {}))
    definition = ImageDefinition(
        name="worker",
        base=ImageBase.model_validate({"suite": "trixie"}),
        layers=("system",),
        disk=ImageDisk.model_validate({}),
        formats=("raw",),
        kernel_args=(),
        secure_boot=False,
        variables={},
        inventory_paths=(),
    )
    lock = Lock(image="worker", source_date_epoch=1735689600, repositories={}, groups={})
    stages = [{"name": s.name, "id": s.id, "seconds": 1.0, "bytes": 1, "cached": False} for s in plan.stages]
    return definition, lock, plan, store, Settings(store=store.path, output=tmp_path / "output"), stages


def test_the_stages_of_a_build_are_published(tmp_path: Path) -> None:
    built = _built(tmp_path)
    path = publish.publish(*built, Monitor())
    assert _names(path) == sorted(
        ["facts.json", "junit.xml", "lock.json", "manifest.json", "verify.json", "worker.raw"]
    )
    told = manifests.load((path / "manifest.json").read_bytes())
    assert [p.name for p in told.packages] == ["bash"]
    assert told.verification.passed == 1
    assert told.tools["ansible-core"] == "2.19"
    assert Lock.load(path / "lock.json") == built[1]
    inode = path.stat().st_ino
    assert publish.publish(*built, Monitor()) == path
    assert path.stat().st_ino == inode


def test_an_image_without_a_disk_is_published(tmp_path: Path) -> None:
    definition, lock, plan, store, settings, stages = _built(tmp_path)
    plan = Plan(plan.image, tuple(stage for stage in plan.stages if stage.name != "disk"))
    stages = [stage for stage in stages if stage["name"] != "disk"]
    path = publish.publish(definition, lock, plan, store, settings, stages, Monitor())
    told = manifests.load((path / "manifest.json").read_bytes())
    assert told.disk is None and told.secure_boot is None


def test_what_an_operator_ought_to_know_of_a_lock_is_in_the_manifest(tmp_path: Path) -> None:
    definition, lock, plan, store, settings, stages = _built(tmp_path)
    base = LockedGroup(suite="trixie", components=["main"], requested=[], packages=[])
    lock = lock.model_copy(update={"groups": {"base": base}, "repositories": {DEBIAN: None}})
    path = publish.publish(definition, lock, plan, store, settings, stages, Monitor())
    told = manifests.load((path / "manifest.json").read_bytes())
    assert told.warnings == ("trixie was locked without its security updates: the mirror in use has none",)


def test_images_that_the_lock_left_out_are_in_the_manifest(tmp_path: Path) -> None:
    definition, lock, plan, store, settings, stages = _built(tmp_path)
    images = [{"ref": f"r.example/{n}:1", "digest": "d", "platform": "p", "pin": False} for n in "ab"]
    preload = StagePlan("preload", "preload", {"images": images})
    engine = dict.fromkeys(("name", "version", "binary"), "docker") | {"binary_sha256": "0" * 64}
    facts = {"engine": engine, "images": ["r.example/a:1"], "left_out": {"r.example/b:1": "it answered 503"}}
    _commit(store, preload, {"pulls.json": b"{}"}, facts)
    preloads = tuple(
        PreloadedImage.model_validate({"ref": f"r.example/{n}:1", "required": n == "a"}) for n in "abc"
    )
    definition = replace(definition, preload=preloads)
    packed = StagePlan("preload_store", "preload_store", inputs={"docker": preload.id})
    _commit(store, packed, {"tree/opt/preload/store.json": b'{"images": [{"ref": "r.example/a:1"}]}'}, {})
    plan = Plan("worker", (*plan.stages, preload, packed))
    digests = dict.fromkeys(("digest", "manifest", "config"), f"sha256:{'1' * 64}")
    locked = [LockedImage(ref=f"r.example/{n}:1", platform="p", layers=[], **digests) for n in "ab"]
    lock = lock.model_copy(update={"images": locked, "left_out": ["r.example/c:1"]})
    path = publish.publish(definition, lock, plan, store, settings, stages, Monitor())
    preloaded = manifests.load((path / "manifest.json").read_bytes()).preload
    assert preloaded and preloaded.left_out == {
        "r.example/b:1": "it answered 503",
        "r.example/c:1": "the lock has no digest for it",
    }
    document = {"images": [{"ref": f"r.example/{n}:1"} for n in "ab"]}
    (store.product(packed.id) / "tree/opt/preload/store.json").write_text(json.dumps(document))
    with pytest.raises(StoreError) as failed:  # what the disk has, if the store had lost the preload
        publish.publish(definition, lock, plan, store, settings, stages, Monitor())
    assert failed.value.hint and failed.value.hint.endswith(f"rm -r {store.object(packed.id)}")


def test_images_that_were_all_left_out_are_warnings_in_the_manifest(tmp_path: Path) -> None:
    """Without any image, there is no preload stage."""
    definition, lock, plan, store, settings, stages = _built(tmp_path)
    preloads = (PreloadedImage.model_validate({"ref": "r.example/a:1", "required": False}),)
    definition = replace(definition, preload=preloads)
    lock = lock.model_copy(update={"left_out": ["r.example/a:1"]})
    path = publish.publish(definition, lock, plan, store, settings, stages, Monitor())
    published = manifests.load((path / "manifest.json").read_bytes())
    assert published.preload is None
    assert published.warnings == (
        "left out, it is not required: r.example/a:1: the lock has no digest for it",
    )


def test_a_failed_verification_is_never_published(tmp_path: Path) -> None:
    built = _built(tmp_path)
    product = built[3].product(built[2].stage("verify").id)
    write(product, _verdict(1, 0))
    with pytest.raises(PublishError, match="not verified"):
        publish.publish(*built, Monitor())
    assert not (tmp_path / "output").exists()
