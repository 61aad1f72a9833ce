"""What a store remembers of an image: who may change it, and to whom it belongs."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder.bake import build as building
from image_builder.bake.lock.model import Lock, LockedGroup, LockedPackage, LockedSource
from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.lock.resolve import remembered_lock
from image_builder.bake.plan.resolve import requirements, resolve
from image_builder.bake.records import with_rest_of
from image_builder.bake.store import Store
from image_builder.cli.command import extensions
from image_builder.cli.main import app
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.errors import LockError, UsageError
from image_builder.events import Monitor
from image_builder.settings import PROJECT_VARIABLE, REPO_ROOT, REPOSITORY_ID, Settings, repository_id
from image_builder.system import cgroups


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cgroups, "reap", lambda: None)  # it would clean up after other builds on this host
    settings = Settings(store=tmp_path / "store", output=tmp_path / "output")
    Store(settings.store).prepare()
    return settings


def _init(path: Path) -> Path:
    assert CliRunner().invoke(app, ["init", str(path)]).exit_code == 0
    return path


def _node(project: Path, *extra: str) -> ImageDefinition:
    return load_inventory([project / "inventories/site"], project=project, extra=extra).define("node")


def _fitting(needs: Requirements, version: str) -> Lock:
    package = LockedPackage(
        name="p", sha256="a" * 64, size=1, path="p", repository="debian", version=version, architecture="all"
    )
    groups = {n: LockedGroup(**g.question.model_dump(), packages=[package]) for n, g in needs.groups.items()}
    sources = {n: LockedSource(suite=suite, version=version, files=[]) for n, suite in needs.sources.items()}
    return Lock(image="node", source_date_epoch=1, repositories={}, groups=groups, sources=sources)


class _Mirror:
    """A mirror whose versions rise with each new lock; ``asked`` counts these."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        monkeypatch.setattr(building, "resolve_lock", self._resolve)

    def _resolve(self, _definition: object, needs: Requirements, *_: object) -> Lock:
        self.asked += 1
        return _fitting(needs, str(self.asked))


def _build(definition: ImageDefinition, settings: Settings, locked: Path | None = None) -> list[str]:
    """Build an image up to its tools, which are there; return the notes."""
    notes: list[str] = []
    monitor = Monitor()
    monitor.note = notes.append  # type: ignore[assignment,method-assign]
    lock = _fitting(requirements(definition, extensions()), "1")
    store, tools = Store(settings.store), resolve(definition, lock, REPO_ROOT, extensions()).stage("tools")
    if not store.has(tools.id):
        with store.staging() as staging:
            (staging / "object/product").mkdir(parents=True)
            store.commit(tools, staging / "object", 1.0, {})
    building.build(definition, settings, monitor, extensions(), locked=locked, stop_after="tools")
    return notes


def _plan(definition: ImageDefinition, settings: Settings) -> None:
    building.obtain_lock(definition, settings, Monitor(), extensions())


def _locks(settings: Settings) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (settings.store / "locks").glob("*.json")}


def _version(lock: Path, group: str = "base") -> str:
    return Lock.load(lock).group(group).packages[0].version


def test_two_repositories_have_two_locks(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = _Mirror(monkeypatch)
    definitions = [_node(_init(tmp_path / name)) for name in "ab"]
    monkeypatch.setenv(PROJECT_VARIABLE, str(tmp_path / "a"))
    for definition in definitions:
        _plan(definition, settings)
        assert definition.record_name not in "".join(_locks(settings))
        _build(definition, settings)
    paths = [remembered_lock(settings, definition.record_name) for definition in definitions]
    assert len(set(paths)) == 2
    before, asked = _locks(settings), mirror.asked
    assert sorted(name for name in before if name.endswith(".lock.json")) == sorted(p.name for p in paths)
    for definition in definitions:
        _plan(definition, settings)
        _build(definition, settings)
        inventory = [str(path) for path in definition.inventory_paths]
        assert CliRunner().invoke(app, ["validate", "node", "-i", *inventory]).exit_code == 0
    assert (_locks(settings), mirror.asked) == (before, asked)
    assert [_version(path) for path in paths] == ["2", "4"]


def test_a_repository_is_known_by_its_id_and_by_its_path_without_one(tmp_path: Path) -> None:
    project = _init(tmp_path / "a")
    shutil.copytree(project, tmp_path / "clone")
    assert _node(tmp_path / "clone").record_name == _node(project).record_name
    with_id = _node(project).record_names
    for place in (project, tmp_path / "clone"):
        (place / REPOSITORY_ID).unlink()
    named = [_node(place).record_names for place in (project, tmp_path / "clone")]
    assert named[0][0] != named[1][0] and named[0][1:] == named[1][1:]  # as they were both called before
    assert with_id[1:] == named[0][:1]


def test_a_lock_of_before_repositories_counted_is_for_all_that_shared_it(
    tmp_path: Path, settings: Settings
) -> None:
    for name in "ab":
        (_init(tmp_path / name) / REPOSITORY_ID).unlink()
    definitions = [_node(tmp_path / name) for name in "ab"]
    (former,) = {definition.record_names[1] for definition in definitions}
    needs = requirements(definitions[0], extensions())
    _fitting(needs, "1").save(remembered_lock(settings, former))
    Store(settings.store).record(former, [])
    for definition in definitions:
        _plan(definition, settings)
        assert not remembered_lock(settings, definition.record_name).exists()
        notes = _build(definition, settings)
        assert [note for note in notes if "are now those of" in note]
        assert _version(remembered_lock(settings, definition.record_name)) == "1"


def test_a_lock_under_the_images_name_is_for_the_first_one(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Mirror(monkeypatch)
    project = _init(tmp_path / "a")
    (project / REPOSITORY_ID).unlink()
    definition = _node(project)
    older = remembered_lock(settings, "node")
    _fitting(requirements(definition, extensions()), "old").save(older)
    _plan(definition, settings)
    assert older.exists()
    _build(definition, settings)
    assert not older.exists() and _version(remembered_lock(settings, definition.record_name)) == "old"
    (project / REPOSITORY_ID).write_text("1b4e28ba\n")  # it gets an id later
    _build(_node(project), settings)
    assert _version(remembered_lock(settings, _node(project).record_name)) == "old"


def test_who_has_no_lock_reads_that_others_have(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Mirror(monkeypatch)
    first, second = (_node(_init(tmp_path / name)) for name in "ab")
    assert _build(first, settings) == []
    (note,) = _build(second, settings)
    assert remembered_lock(settings, first.record_name).name in note


def _with_package(project: Path) -> None:
    role = project / "roles/site_banner"
    (role / "vars").mkdir()
    (role / "vars/main.yml").write_text("---\n__site_banner_packages: [htop]\n")


def test_a_copied_repository_is_noticed_and_changes_nothing(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Mirror(monkeypatch)
    project = _init(tmp_path / "a")
    _build(_node(project), settings)
    shutil.copytree(project, tmp_path / "copy")
    copy = _node(tmp_path / "copy")
    assert _build(copy, settings) == []  # it may well be another checkout
    before = _locks(settings)
    _with_package(tmp_path / "copy")
    _fitting(requirements(_node(tmp_path / "copy"), extensions()), "1").save(tmp_path / "lock.json")
    for locked in (None, tmp_path / "lock.json"):
        (note,) = _build(_node(tmp_path / "copy"), settings, locked)
        assert os.fspath(project) in note and REPOSITORY_ID in note
    building.make_lock(_node(tmp_path / "copy"), settings, Monitor(), extensions())
    assert _locks(settings) == before
    _with_package(project)  # both have the same commit again
    _build(_node(project), settings)
    assert _build(_node(tmp_path / "copy"), settings) == []
    (project / REPOSITORY_ID).unlink()  # as if it was gone
    _with = json.loads(_locks(settings)[f"{copy.record_name}.repository.json"])
    assert _with["repository"] == os.fspath(project)
    shutil.rmtree(tmp_path / "copy/roles/site_banner/vars")
    assert _build(_node(tmp_path / "copy"), settings) == []


SHORT = json.dumps({"image_layers": ["site"]})


def test_extra_variables_change_no_remembered_lock(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = _Mirror(monkeypatch)
    project = _init(tmp_path / "a")
    other = json.dumps({"image_base": {"suite": "bookworm"}})
    _build(_node(project, SHORT), settings)  # but a pipeline that always has some isn't without a lock
    first = _locks(settings)
    assert len(first) == 2
    _build(_node(project), settings)
    before = _locks(settings)
    assert before != first
    asked = mirror.asked
    for extra in (SHORT, other):
        _plan(_node(project, extra), settings)
        notes = _build(_node(project, extra), settings)
        assert _locks(settings) == before
        assert len([note for note in notes if "-e" in note]) == (extra == other)
    assert mirror.asked - asked == 2  # only for the other release
    building.make_lock(_node(project, SHORT), settings, Monitor(), extensions())
    assert _locks(settings) != before  # which was asked for


def test_groups_that_a_shorter_definition_does_without_stay_locked(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = _Mirror(monkeypatch)
    project = _init(tmp_path / "a")
    variables = project / "inventories/site/group_vars/images.yml"
    whole = variables.read_text()
    _build(_node(project), settings)
    path = remembered_lock(settings, _node(project).record_name)
    before = Lock.load(path)
    variables.write_text(whole.replace("  - system\n", ""))
    assert _node(project).layers == ("site",)
    _build(_node(project), settings)
    assert Lock.load(path) == before and "system" in before.groups
    variables.write_text(whole)
    _build(_node(project), settings)
    assert (Lock.load(path), mirror.asked) == (before, 1)


def test_a_damaged_lock_is_replaced_by_a_new_one_only_on_request(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Mirror(monkeypatch)
    definition = _node(_init(tmp_path / "a"))
    path = remembered_lock(settings, definition.record_name)
    path.write_text("{")
    with pytest.raises(LockError):
        _build(definition, settings)
    assert path.read_text() == "{"
    building.make_lock(definition, settings, Monitor(), extensions())
    assert _version(path) == "1"


def test_a_stage_that_there_is_not_locks_nothing(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Mirror(monkeypatch)
    definition = _node(_init(tmp_path / "a"))
    with pytest.raises(UsageError):
        building.build(definition, settings, Monitor(), extensions(), stop_after="typo")
    assert _locks(settings) == {}


def _group(*packages: str, below: str | None = None) -> LockedGroup:
    made = [
        LockedPackage(
            name=name,
            sha256=name * 64,
            size=1,
            path=name,
            repository="debian",
            version="1",
            architecture="all",
        )
        for name in packages
    ]
    return LockedGroup(suite="trixie", components=["main"], requested=[], packages=made, below=below)


def test_a_group_is_used_only_on_top_of_what_it_was_locked_on() -> None:
    """Without the layer below it, a layer's packages lack what that one had brought."""
    lock = Lock(image="i", source_date_epoch=1, repositories={}, groups={"base": _group("a")})
    groups = {"base": _group("a"), "low": _group("b"), "top": _group("c")}
    whole = lock.model_copy(update={"groups": groups})
    groups["low"] = _group("b", below=whole.digest_of(["base"]))
    groups["top"] = _group("c", below=whole.digest_of(["base", "low"]))
    chain = {"base": Group("trixie", ()), "low": Group("trixie", (), after="base")}
    needs = Requirements({**chain, "top": Group("trixie", (), after="low")})
    shorter = Requirements({"base": chain["base"], "top": Group("trixie", (), after="base")})
    assert needs.misfit(whole) == [] and shorter.misfit(whole) != []
    groups["top"] = _group("c")  # as earlier versions locked it
    assert shorter.misfit(whole) == []


@pytest.mark.parametrize(
    ("base", "below", "kept"), [("a", None, True), ("d", None, False), ("d", "0" * 64, True)]
)
def test_a_group_whose_base_is_unknown_goes_with_the_next_lock(
    base: str, below: str | None, kept: bool
) -> None:
    groups = {"base": _group("a"), "low": _group("b", below=below)}
    earlier = Lock(image="i", source_date_epoch=1, repositories={}, groups=groups)
    new = earlier.model_copy(update={"groups": {"base": _group(base)}})
    assert ("low" in with_rest_of(new, earlier, extensions().supplier).groups) is kept


def test_an_id_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    project = _init(tmp_path / "site")
    (project / REPOSITORY_ID).unlink()
    (project / REPOSITORY_ID).mkdir()
    with pytest.raises(UsageError, match=REPOSITORY_ID):
        repository_id(project)
