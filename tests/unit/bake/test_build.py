"""The report of a build when it ends."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from image_builder.bake import build as building
from image_builder.bake.executor import Build, missing
from image_builder.bake.lock.model import (
    Lock,
    LockedGroup,
    LockedImage,
    LockedLayer,
    LockedPackage,
    LockedSource,
)
from image_builder.bake.lock.resolve import remembered_lock
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.plan.resolve import kinds, requirements, resolve, supplier_plan
from image_builder.bake.pull.network import Endpoint
from image_builder.bake.store import Store
from image_builder.canonical import JSON
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, load_inventory, model
from image_builder.definition.model import PreloadedImage, record_name
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings
from image_builder.system import cgroups
from image_builder.system.trees import remove_tree
from tests.support.shipped import shipped


@pytest.mark.parametrize("given", [True, False], ids=["--locked", "the last one made"])
def test_it_names_the_lock_that_it_took(tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cgroups, "reap", lambda: None)  # it would clean up after other builds on this host
    definition = shipped("lab").define("minimal")
    needs = requirements(definition, extensions())
    groups = {n: LockedGroup(**g.question.model_dump(), packages=[]) for n, g in needs.groups.items()}
    lock = Lock(image="minimal", source_date_epoch=1, repositories={}, groups=groups)
    settings = Settings(store=tmp_path / "store", output=tmp_path / "output")
    store = Store(settings.store)
    store.prepare()
    tools = resolve(definition, lock, REPO_ROOT, extensions()).stage("tools")
    with store.staging() as staging:
        (staging / "object/product").mkdir(parents=True)
        store.commit(tools, staging / "object", 1.0, {})
    path = tmp_path / "given.json" if given else remembered_lock(settings, definition.record_name)
    lock.save(path)
    done = building.build(
        definition, settings, Monitor(), extensions(), locked=path if given else None, stop_after="tools"
    )
    assert [stage["cached"] for stage in done.stages] == [True]
    assert done.lock == path


def _minimal(inventory: Path) -> ImageDefinition:
    shutil.copytree(REPO_ROOT / "inventories/lab", inventory)
    return load_inventory([inventory]).define("minimal")


def _fitting(definition: ImageDefinition, version: str) -> Lock:
    package = LockedPackage(
        name="p", sha256="a" * 64, size=1, path="p", repository="debian", version=version, architecture="all"
    )
    needs = requirements(definition, extensions())
    groups = {n: LockedGroup(**g.question.model_dump(), packages=[package]) for n, g in needs.groups.items()}
    sources = {n: LockedSource(suite=suite, version=version, files=[]) for n, suite in needs.sources.items()}
    return Lock(image="minimal", source_date_epoch=1, repositories={}, groups=groups, sources=sources)


def _version(definition: ImageDefinition, settings: Settings) -> str:
    lock = building.obtain_lock(definition, settings, Monitor(), extensions())
    return lock.group("base").packages[0].version


def test_each_inventory_has_locks_of_its_own(tmp_path: Path) -> None:
    """Their images may share a name, but the newest versions for one weren't requested by the other."""
    settings = Settings(store=tmp_path / "store")
    Store(settings.store).prepare()
    mine, other = _minimal(tmp_path / "mine/lab"), _minimal(tmp_path / "other/lab")
    for definition, version in ((mine, "1"), (other, "2")):
        _fitting(definition, version).save(remembered_lock(settings, definition.record_name))
    assert (_version(mine, settings), _version(other, settings)) == ("1", "2")


def test_the_projects_inventories_are_the_same_in_every_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = shipped("lab").define("minimal").record_name
    checkout = tmp_path / "checkout"
    monkeypatch.setattr(model, "REPO_ROOT", checkout)
    (checkout / "inventories/lab").mkdir(parents=True)
    assert record_name("minimal", [checkout / "inventories/lab"], checkout) == here
    (tmp_path / "link").symlink_to(checkout / "inventories/lab")
    assert record_name("minimal", [tmp_path / "link"], checkout) == here
    assert record_name("minimal", [tmp_path / "link"], REPO_ROOT) != here
    assert record_name("minimal", [checkout / "inventories/lab", tmp_path], checkout) != here


def test_what_a_supplier_made_is_served_once_for_a_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = shipped("lab").define("worker")
    lock = _fitting(definition, "1")
    settings = Settings(store=tmp_path / "store")
    store = Store(settings.store)
    store.prepare()
    plan = supplier_plan(definition, lock, REPO_ROOT, extensions())
    assert [stage.name for stage in plan.stages] == ["tools", "lab_images"]
    served: list[str] = []

    @contextmanager
    def serve(tools: Path, product: Path, work: Path) -> Iterator[Endpoint]:
        assert tools == store.product(plan.stages[0].id) / "tree"
        assert product == store.product(plan.stages[1].id)
        served.append("begins")
        yield Endpoint("registry.lab.internal", "127.1.2.3", 443, work / "ca.pem")
        served.append("ends")

    others = replace(extensions(), supplier=replace(extensions().supplier, serve=serve))
    with store.staging() as staging:
        for stage in plan.stages:
            (staging / stage.name / "product").mkdir(parents=True)
            store.commit(stage, staging / stage.name, 1.0, {})
        work = Build(definition, lock, settings, store, Monitor(), staging, kinds(others))
        with building.Supply(work, others) as supply:
            endpoints = supply.endpoints()
            assert endpoints["registry.lab.internal"].address == "127.1.2.3"
            assert supply.endpoints() is endpoints and served == ["begins"]
        assert served == ["begins", "ends"]
        remove_tree(store.object(plan.stages[0].id))
        made: list[str] = []
        monkeypatch.setattr(building, "make", lambda _, todo: made.extend(stage.name for stage in todo))
        with building.Supply(work, others) as supply:
            supply.endpoints()  # the registry runs in the tools tree
            assert made == ["tools"]
        minimal = shipped("lab").define("minimal")
        served.clear()
        with building.Supply(replace(work, definition=minimal), others) as supply:
            assert supply.endpoints() == {} and not served


@pytest.mark.parametrize("lost", [None, "preload", "disk"])
def test_what_a_publication_reads_is_made_again_if_the_store_lost_it(
    tmp_path: Path, lost: str | None
) -> None:
    stages = [StagePlan("preload", "preload"), StagePlan("preload_docker", "preload", {"engine": "docker"})]
    stages += [StagePlan(name, name) for name in ("preload_store", "seal", "verify", "disk", "convert")]
    plan = Plan("worker", tuple(stages))
    store = Store(tmp_path / "store")
    store.prepare()
    with store.staging() as staging:
        for stage in stages:
            if stage.name not in (lost, "preload_docker", "preload_store"):
                (staging / stage.name / "product").mkdir(parents=True)
                store.commit(stage, staging / stage.name, 1.0, {})
    todo = missing(plan, store, building._goals(plan, extensions(), None))
    assert [stage.name for stage in todo] == ([lost] if lost else [])


def _image(ref: str) -> LockedImage:
    layer = LockedLayer(digest=f"sha256:{'1' * 64}", size=1, diff_id=f"sha256:{'1' * 64}")
    digests = dict.fromkeys(("digest", "manifest", "config"), layer.digest)
    return LockedImage(ref=ref, platform="linux/amd64", layers=[layer], **digests)


def test_images_stay_locked_when_a_package_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tag named when it was locked isn't asked again."""
    refs = [f"registry.example/{name}:1" for name in ("kept", "left_out")]
    worker = load_inventory([REPO_ROOT / "inventories/lab"]).define("worker")
    definition = replace(
        worker, preload=tuple(PreloadedImage.model_validate({"ref": ref, "required": False}) for ref in refs)
    )
    settings = Settings(store=tmp_path / "store")
    Store(settings.store).prepare()
    new = _fitting(definition, "2")
    update = {"images": [_image(refs[0])], "left_out": refs[1:]}
    earlier = _fitting(definition, "1").model_copy(update={**update, "groups": {}})
    earlier.save(remembered_lock(settings, definition.record_name))
    monkeypatch.setattr(building, "resolve_lock", lambda *_: new)
    lock = building.obtain_lock(definition, settings, Monitor(), extensions())
    assert (lock.group("base"), lock.images, lock.left_out) == (new.group("base"), *update.values())


def test_each_build_notes_the_images_that_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even a build that has nothing to pull."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cgroups, "reap", lambda: None)
    unlocked, unpulled = (
        PreloadedImage.model_validate({"ref": f"registry.example/{name}:1", "required": False})
        for name in ("unlocked", "unpulled")
    )
    worker = shipped("lab").define("worker")
    definition = replace(worker, preload=(unlocked, unpulled))
    lock = _fitting(definition, "1").model_copy(
        update={"images": [_image(unpulled.ref)], "left_out": [unlocked.ref]}
    )
    settings = Settings(store=tmp_path / "store", output=tmp_path / "output")
    store = Store(settings.store)
    store.prepare()
    lock.save(remembered_lock(settings, definition.record_name))
    plan = resolve(definition, lock, REPO_ROOT, extensions())
    facts: dict[str, dict[str, JSON]] = {
        "tools": {},
        "preload": {"left_out": {unpulled.ref: "its registry answered 503"}},
    }
    with store.staging() as staging:
        for name, known in facts.items():
            (staging / name / "product").mkdir(parents=True)
            store.commit(plan.stage(name), staging / name, 1.0, known)
    notes: list[str] = []
    monitor = Monitor()
    monkeypatch.setattr(monitor, "note", notes.append)
    planned = replace(plan, warnings=("the layer system runs in every build",))
    monkeypatch.setattr(building, "make_plan", lambda *_: planned)
    building.build(definition, settings, monitor, extensions(), stop_after="tools")
    assert [note for note in notes if planned.warnings[0] in note] == notes[:1]
    assert [note for note in notes if "left out" in note] == [
        f"left out, it is not required: {unlocked.ref}: the lock has no digest for it",
        f"left out, it is not required: {unpulled.ref}: its registry answered 503",
    ]
