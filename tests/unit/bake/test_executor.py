"""Stages at work: what each is given, which run at the same time, and what happens to the others when one fails."""

from __future__ import annotations

import errno
import hashlib
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.bake import executor
from image_builder.bake.executor import Build, _context, _run_stage
from image_builder.bake.lock.model import LockedArchive, LockedFile
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.plan.resolve import kinds
from image_builder.bake.stages import StageContext
from image_builder.bake.stages.convert import run as convert
from image_builder.bake.stages.disk import run as disk
from image_builder.bake.stages.go.openapi import BUILD
from image_builder.bake.stages.layer import run as layer
from image_builder.bake.stages.preload import run as preload
from image_builder.bake.stages.preload_store import run as preload_store
from image_builder.bake.stages.rehearsal import run as rehearsal
from image_builder.bake.store import Store
from image_builder.canonical import JSON
from image_builder.cli import failure
from image_builder.cli.command import extensions
from image_builder.errors import (
    CommandError,
    ImageBuilderError,
    PullError,
    StageError,
    StoreError,
    VerifyError,
)
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system import process
from image_builder.system.trees import code_digests, named_digests
from image_builder.verify.stage import run as verify
from tests.unit.bake.plan.user_layer import definition, edit, make, plan

_SOURCE_TEXT = "Source: kubernetes\n"
_SOURCE: dict[str, Any] = {
    "name": "k.dsc",
    "sha256": hashlib.sha256(_SOURCE_TEXT.encode()).hexdigest(),
    "size": 1,
    "path": "k.dsc",
    "repository": "debian",
}


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
    lock: Any = SimpleNamespace(
        groups={},
        repositories={"debian": None},
        sources={"kubernetes": SimpleNamespace(files=[LockedFile(**_SOURCE)])},
        archives=[LockedArchive(url="https://example.invalid/a.tar", sha256="a" * 64)],
    )
    definition: Any = SimpleNamespace(name="worker", place_of=lambda _: "")
    settings, all_kinds = Settings(store=store.path), kinds(extensions())
    return Build(definition, lock, settings, store, Monitor(), staging, all_kinds)


def _given(store: Store, stage: StagePlan, staging: Path) -> StageContext:
    return _context(_work(store, staging), stage, staging / "log")


def test_a_preload_takes_over_from_a_sound_one_alone(store: Store) -> None:
    before = _preload("sha256:1")
    with store.staging() as staging:
        state = staging / "object/product/state"
        state.mkdir(parents=True)
        (state / "layer").write_text("files of a layer")
        store.commit(before, staging / "object", 1.0, {})
    for name, record in (("a" * 64, "{"), ("b" * 64, '{"name": "preload"}'), ("c" * 64, "{}")):
        store.object(name).mkdir()
        (store.object(name) / "meta.json").write_text(record)
    with store.staging() as staging:
        # The archives of the engine's layer are in that layer's tree; none were fetched for the pull.
        assert _given(store, _preload("sha256:1", "sha256:2"), staging).previous == store.product(before.id)
    (store.product(before.id) / "state/layer").write_text("of another")
    with store.staging() as staging:
        assert _given(store, _preload("sha256:1", "sha256:2"), staging).previous is None


def test_a_stage_that_another_build_made_meanwhile_is_checked(store: Store) -> None:
    stage = StagePlan("preload", "preload")
    with store.staging() as staging:
        (staging / "object/product").mkdir(parents=True)
        (staging / "object/product/file").write_text("made")
        store.commit(stage, staging / "object", 1.0, {})
        work = _work(store, staging)
        executor._require_sound(work, stage.id)
        (store.product(stage.id) / "file").write_text("else")
        with pytest.raises(StoreError):
            executor._require_sound(work, stage.id)


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        (StagePlan("gpu", "layer", {"archives": ["a" * 64]}), {"a" * 64}),
        (StagePlan("system", "layer", {"archives": []}), set()),
        (StagePlan("kubelet_build", "go"), {"k.dsc"}),
    ],
)
def test_a_stage_gets_links_to_its_own_locked_files(store: Store, stage: StagePlan, names: set[str]) -> None:
    for digest in ("a" * 64, _SOURCE["sha256"]):
        (store.path / "files" / digest).write_text(digest)
    with store.staging() as staging:
        files = _given(store, stage, staging).files
        assert {path.name for path in files.iterdir()} == names if files else not names
        for path in files.iterdir() if files else ():
            assert path.stat().st_nlink == 2


@pytest.mark.parametrize(
    ("cached", "used"), [(None, {"debian"}), ("damaged", {"debian"}), (_SOURCE_TEXT, set())]
)
def test_a_mirror_is_used_only_for_what_the_store_lacks(
    store: Store, monkeypatch: pytest.MonkeyPatch, cached: str | None, used: set[str]
) -> None:
    def addresses(*arguments: object) -> dict[str, str]:
        assert arguments[-1] == used
        return {"debian": ""}

    monkeypatch.setattr(executor, "addresses", addresses)
    monkeypatch.setattr(executor, "fetch", lambda *_: None)
    if cached is not None:
        (store.path / "files" / _SOURCE["sha256"]).write_text(cached)
    with store.staging() as staging:
        executor.fetch_locked(_work(store, staging), [StagePlan("kubelet_build", "go")])


@pytest.mark.parametrize("edited", [None, "image_builder/own.py", "roles/r/tasks/main.yml", "gone.yml"])
def test_a_stage_whose_sources_change_while_it_runs_is_not_committed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str | None
) -> None:
    """Its id covers the files as they were before; comments in the program's own code don't count."""
    root, project = tmp_path / "program", tmp_path / "project"
    program = root / "image_builder/own.py"
    read = {"roles/r/tasks/main.yml": root / "roles/r/tasks/main.yml", "gone.yml": project / "gone.yml"}
    for path in (program, *read.values()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1\n")
    code = code_digests(root, [program]) | named_digests(read)
    stage = StagePlan("verify", "verify", code=code, places=read)

    def run(_: StageContext) -> dict[str, JSON]:
        program.write_text("2\n" if edited == "image_builder/own.py" else "# The same.\n1\n")
        if edited == "roles/r/tasks/main.yml":
            read[edited].write_text("# Sent with its comments.\n1\n")
        if edited == "gone.yml":
            read[edited].unlink()
        return {}

    monkeypatch.setattr(verify, "run", run)
    with store.staging() as staging:
        work = _work(store, staging)
        work = replace(work, settings=replace(work.settings, repo_root=root))
        if not edited:
            _run_stage(work, stage)
            assert store.has(stage.id)
            return
        with pytest.raises(StageError, match=f"changed while the stage ran: {edited}$") as failed:
            _run_stage(work, stage)
    assert failed.value.hint == "run the build again"
    assert store.ids() == []


def test_a_stage_that_is_new_in_every_build_may_change_what_it_reads(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, by a lookup that runs a program."""
    read = {"roles/r/files/made": tmp_path / "made"}
    stage = StagePlan("verify", "verify", {"run": "a"}, {"roles/r/files/made": "0" * 64}, places=read)
    monkeypatch.setattr(verify, "run", lambda _: {})
    with store.staging() as staging:
        _run_stage(_work(store, staging), stage)
    assert store.has(stage.id)


@pytest.mark.parametrize(
    ("name", "old", "new", "reason"),
    [
        ("mine", "site_of_include: a", "site_of_include: b", "the inventory's site_of_include$"),
        # The layer has a lookup of `vars`.
        ("mine", "site_name: a", "site_more: a", r"the inventory's \(others\)"),
        ("mine", "mine_included: included", "mine_included: {}", "mine.yml:13: the role '{}' was not found"),
        ("mine", "worker:", "other:", "no image matches `worker`"),
        ("first", "site_name: a", "site_name: b", None),
        # A play gets the builder's own variables from the bake.
        ("mine", "suite: trixie", "suite: bookworm", None),
    ],
)
def test_a_layer_whose_variables_change_while_it_runs_is_not_committed(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    old: str,
    new: str,
    reason: str | None,
) -> None:
    """Its play reads the inventory by itself. What an editor leaves next to it doesn't count."""
    root = make(tmp_path / "repository").root
    stage = plan(root).stage(name)

    def run(_: StageContext) -> dict[str, JSON]:
        (root / "inventory/.hosts.yml.swp").touch()
        edit("inventory/hosts.yml", old, new)(root)
        return {}

    monkeypatch.setattr(layer, "run", run)
    with store.staging() as staging:
        work = _work(store, staging)
        settings = replace(work.settings, repo_root=root)
        work = replace(work, definition=definition(root), settings=settings, new_ids={*stage.requires})
        if not reason:
            _run_stage(work, stage)
            assert store.has(stage.id)
            return
        with pytest.raises(StageError, match=reason):
            _run_stage(work, stage)
    assert store.ids() == []


def test_checks_that_fail_leave_their_reports(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product is removed with the failed stage, but finding out why nothing was published takes the reports."""

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


@pytest.mark.parametrize(("stage", "enterable"), [("verify", False), ("system", True)])
def test_one_may_enter_what_a_play_left(
    store: Store, monkeypatch: pytest.MonkeyPatch, stage: str, enterable: bool
) -> None:
    def run(_: StageContext) -> None:
        raise VerifyError("it failed")

    for module in (verify, layer):
        monkeypatch.setattr(module, "run", run)
    plan = StagePlan(stage, stage if stage == "verify" else "layer", {"archives": []})
    with store.staging() as staging, pytest.raises(StageError) as failed:
        _run_stage(_work(store, staging), plan)
    assert failed.value.enterable is enterable


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            PullError(
                "images that can't be pulled:\n  r/a:1: failed to register layer: no space left on device"
            ),
            6,
        ),
        (PullError("images that can't be pulled:\n  r/a:1: unexpected EOF"), 15),
        (OSError(errno.ENOSPC, "No space left on device"), 6),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 6),
        # As mkfs.erofs words its errors (``preload_store``).
        (ImageBuilderError("mkfs.erofs: erofs: failed to write: [Error 122] Disk quota exceeded"), 6),
        (CommandError("exit status 2: tar", tail="tar: usr/x: Cannot write: Disk quota exceeded"), 6),
        # The sandbox has these directories in memory, except for what a stage binds there.
        (CommandError("exit status 1: cp", tail="cp: error writing '/tmp/x': No space left on device"), 10),
        (CommandError("exit status 1: cp", tail="cp: error writing '/run/x': No space left on device"), 10),
        (CommandError("exit status 1: cp", tail="cp: '/run/outer/x': No space left on device"), 10),
        *(
            (CommandError("exit status 2: tar", tail=f"tar: {place}/x: Cannot write: Disk quota exceeded"), 6)
            for place in (convert._OUT, disk._OUT, disk._WORK, preload._OUT, preload_store._OUT, BUILD)
        ),
        (CommandError("exit status 1: cp", tail=f"cp: '{rehearsal._DISK}/x': No space left on device"), 6),
        (VerifyError("a check failed: no space left on device"), 12),
        (OSError(errno.EIO, "Input/output error"), 10),
    ],
)
def test_a_disk_that_was_full_and_has_room_again_is_the_cause(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    """An engine removes what it couldn't unpack before it reports why."""

    def run(_: StageContext) -> None:
        raise error

    monkeypatch.setattr(verify, "run", run)
    with store.staging() as staging, pytest.raises(StageError) as failed:
        _run_stage(_work(store, staging), StagePlan("verify", "verify"))
    assert failed.value.exit_code == code
    assert ("store gc" in (failed.value.hint or "")) == (code == 6)
    if isinstance(error, CommandError):
        assert error.tail in failure.text(failed.value)


def test_a_pull_runs_beside_the_layers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, str] = {}
    monkeypatch.setattr(
        executor, "_run_stage", lambda _, stage: threads.update({stage.name: threading.current_thread().name})
    )
    base = StagePlan("base", "base")
    pull = StagePlan("preload", "preload", ground=(base.id,))
    layers = [StagePlan(name, "layer", lowers=(base.id,)) for name in ("system", "node")]
    seal = StagePlan("seal", "seal", lowers=(pull.id, *(stage.id for stage in layers)))
    with store.staging() as staging:
        executor.run_all(_work(store, staging), [base, pull, *layers, seal])
    here = threading.current_thread().name
    assert {name for name, thread in threads.items() if thread != here} == {"preload"}
    assert len(threads) == 5


def test_a_program_compiles_and_images_are_pulled_at_the_same_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=30)
    waited: list[str] = []

    def run(_: Build, stage: StagePlan) -> None:
        if stage.name in ("kubelet_build", "preload"):
            both.wait()
            waited.append(stage.name)

    monkeypatch.setattr(executor, "_run_stage", run)
    base, compiled = StagePlan("base", "base"), StagePlan("kubelet_build", "go")
    pull = StagePlan("preload", "preload", ground=(base.id,))
    seal = StagePlan("seal", "seal", lowers=(pull.id, compiled.id))
    with store.staging() as staging:
        executor.run_all(_work(store, staging), [compiled, base, pull, seal])
    assert sorted(waited) == ["kubelet_build", "preload"]


def test_what_fails_beside_the_layers_ends_the_bake_before_the_next_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ran, set_exception = threading.Event(), [], Future.set_exception

    def fail(future: Future[None], error: BaseException | None) -> None:
        set_exception(future, error)
        failed.set()

    def run(_: Build, stage: StagePlan) -> None:
        ran.append(stage.name)
        if stage.name == "kubelet_build":
            raise StageError(stage.name, CommandError("the compiler failed"))
        assert failed.wait(30)

    monkeypatch.setattr(Future, "set_exception", fail)
    monkeypatch.setattr(executor, "_run_stage", run)
    compiled, layers = StagePlan("kubelet_build", "go"), [StagePlan(n, "layer") for n in ("system", "node")]
    seal = StagePlan("seal", "seal", lowers=(compiled.id, *(stage.id for stage in layers)))
    with store.staging() as staging, pytest.raises(StageError, match="the compiler failed"):
        executor.run_all(_work(store, staging), [compiled, *layers, seal])
    assert not {"node", "seal"} & set(ran)


def test_a_layer_that_fails_ends_what_runs_beside_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def run(work: Build, stage: StagePlan) -> None:
        if stage.name == "kubelet_build":
            begun.set()
            assert work.stop.wait(30)
            with pytest.raises(CommandError, match="the work is ending"):
                process.run(["sleep", "600"])
            return
        assert begun.wait(30)
        raise StageError(stage.name, CommandError("the play failed"))

    monkeypatch.setattr(executor, "_run_stage", run)
    compiled, system = StagePlan("kubelet_build", "go"), StagePlan("system", "layer")
    seal = StagePlan("seal", "seal", lowers=(compiled.id, system.id))
    with store.staging() as staging, pytest.raises(StageError, match="the play failed"):
        executor.run_all(_work(store, staging), [compiled, system, seal])
