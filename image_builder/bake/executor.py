"""Run the stages of a plan that the store lacks, after fetching the files that are locked for them.

Everything here runs inside ``namespace.run_isolated``: a SIGKILL at any moment leaves nothing but a staging directory,
which the next start reaps.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.bake import space
from image_builder.bake.lock.fetch import Download, fetch, is_cached
from image_builder.bake.lock.model import Lock, LockedArchive, LockedFile
from image_builder.bake.lock.repository import write_repository
from image_builder.bake.lock.resolve import addresses
from image_builder.bake.plan.model import Plan, StagePlan, value_digests
from image_builder.bake.pull import retry
from image_builder.bake.pull.network import Endpoints, Network
from image_builder.bake.stages import Stage, StageContext
from image_builder.bake.stages.kind import StageKind
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition, PlaybookReading, UnreadableError, reread
from image_builder.errors import (
    CommandError,
    ImageBuilderError,
    PullError,
    SpaceError,
    StageError,
    StoreError,
)
from image_builder.events import Monitor, shown_stage
from image_builder.settings import Settings
from image_builder.system import process
from image_builder.system.sandbox import Root
from image_builder.system.trees import code_digests, named_digests, remove_tree

# The errors that may say that the store's disk is full, and the lines about a sandbox's directories in memory. What
# stages bind to these paths below /run is on that disk.
_SAYING_FULL = (CommandError, PullError, ImageBuilderError)
_ON_DISK = r"/(?:disk|esp|out|pack|tree|work|image-builder/(?:build|disk|out))\b"
_IN_MEMORY = re.compile(rf".*(?<![\w./-])/(?:dev|tmp|run(?!{_ON_DISK}))/.*")


@dataclass(frozen=True)
class Build:
    """The state that the steps of one build share."""

    definition: ImageDefinition
    lock: Lock
    settings: Settings
    store: Store
    monitor: Monitor
    staging: Path
    kinds: Mapping[str, StageKind]
    shell: Callable[[Root], None] | None = None
    endpoints: Endpoints = field(default_factory=dict)
    network: Network = field(default_factory=Network)
    stop: threading.Event = field(default_factory=threading.Event)
    ran: dict[str, dict[str, Any]] = field(default_factory=dict)
    # The checks of finished stages against their manifests, by id (one per build is enough), and the ids of those that
    # were made here and need no check. Threads share both, so nothing iterates over them.
    checks: dict[str, Future[None]] = field(default_factory=dict)
    new_ids: set[str] = field(default_factory=set)

    def kind(self, stage: StagePlan) -> StageKind:
        """Return a stage's kind."""
        return self.kinds[stage.kind]


def missing(plan: Plan, store: Store, goals: Iterable[str]) -> list[StagePlan]:
    """Return the stages to run, in order: the goals that the store lacks, and the missing stages that they need."""
    needed = {plan.stage(name).id for name in goals}
    todo = []
    for stage in reversed(plan.stages):
        if stage.id in needed and not store.has(stage.id):
            todo.append(stage)
            needed.update(stage.requires)
    return todo[::-1]


def fetch_locked(work: Build, todo: Sequence[StagePlan]) -> None:
    """Fetch every locked file that the stages in ``todo`` will use, before the first of them starts."""
    lock, store, monitor = work.lock, work.store, work.monitor
    names = {s.name for s in todo}
    by_folder: dict[str, Mapping[str, LockedFile | LockedArchive]] = {
        "debs": {p.sha256: p for n, g in lock.groups.items() if n in names for p in g.packages},
        "files": {file.sha256: file for stage in todo for file in work.kind(stage).files(stage, lock)},
    }
    if not any(by_folder.values()):
        return
    with shown_stage(monitor, "fetch"):
        lacking = {
            folder: [f for f in files.values() if not is_cached(store.path / folder, f.sha256)]
            for folder, files in by_folder.items()
        }
        used = {f.repository for files in lacking.values() for f in files if isinstance(f, LockedFile)}
        where = addresses(work.definition, work.settings, lock, used)
        for folder, files in lacking.items():
            fetch(
                [_download(file, where, work) for file in files],
                store.path / folder,
                work.staging,
                lambda done, all_: monitor.stage_progress("fetch", done, all_, "B"),
            )


def _download(file: LockedFile | LockedArchive, where: Mapping[str, str], work: Build) -> Download:
    """Return the download of a locked file, named so that a failure shows which inventory line requires it."""
    place_of = work.definition.place_of
    if isinstance(file, LockedArchive):
        place = place_of(file.sha256)
        return Download(_name(file.url.rsplit("/", 1)[-1], place), file.url, file.sha256)
    place = place_of(where[file.repository]) if work.lock.repositories[file.repository] else ""
    address = f"{where[file.repository]}/{file.path}"
    return Download(_name(file.name, place), address, file.sha256, file.size)


def _name(name: str, place: str) -> str:
    return f"{name} ({place})" if place else name


def run_all(work: Build, todo: Sequence[StagePlan]) -> None:
    """Run the stages in order, and up to two at a time in the background if they can wait.

    So the checks run while the disk is made, and programs are compiled and images pulled while layers are made; the
    last stage waits only for what it requires. A failure in the background is noticed before the next stage starts.
    After any failure, the stages still running are stopped and that failure is raised.
    """
    needed = {i for stage in todo for i in stage.requires}
    beside: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(2) as pool, ThreadPoolExecutor(1) as checker:
        _check_ahead(work, todo, checker)
        try:
            for stage in todo:
                for future in beside.values():
                    if future.done():
                        future.result()
                awaited = [beside[i] for i in beside.keys() & stage.requires]
                if work.kind(stage).beside or (stage.id not in needed and stage is not todo[-1]):
                    beside[stage.id] = pool.submit(_run_beside, awaited, work, stage)
                else:
                    _run_after(awaited, work, stage)
            for future in beside.values():
                future.result()
        except BaseException:  # a failure or Ctrl-C: don't start anything else
            work.stop.set()
            for waiting in (pool, checker):
                waiting.shutdown(wait=False, cancel_futures=True)
            raise


def _check_ahead(work: Build, todo: Sequence[StagePlan], checker: ThreadPoolExecutor) -> None:
    """Start checking the finished stages that ``todo`` builds on against their manifests, in the order needed."""
    todo_ids = {stage.id for stage in todo}
    for stage in todo:
        for needed in sorted(stage.requires - todo_ids - work.checks.keys()):
            work.checks[needed] = checker.submit(work.store.check, needed)


def _require_sound(work: Build, needed: str) -> None:
    """Raise StoreError if a finished stage doesn't match its manifest."""
    if needed in work.checks:
        work.checks[needed].result()
    else:  # it was to be made here, but another build made it
        work.store.check(needed)


def _run_beside(awaited: Iterable[Future[None]], work: Build, stage: StagePlan) -> None:
    with process.stopped_by(work.stop):
        _run_after(awaited, work, stage)


def _run_after(awaited: Iterable[Future[None]], work: Build, stage: StagePlan) -> None:
    for future in awaited:
        future.result()
    _run_stage(work, stage)


def _run_stage(work: Build, stage: StagePlan) -> None:
    """Run one stage and commit it, unless another build did so in the meantime."""
    monitor, store = work.monitor, work.store

    def on_wait() -> None:
        monitor.stage_doing(stage.name, "another build makes it")

    with store.claim(stage.id, on_wait, work.stop):
        if store.has(stage.id):
            monitor.stage_finished(stage.name, 0.0, cached=True)
            return
        monitor.stage_started(stage.name)
        started = time.monotonic()
        log = work.staging / f"{stage.name}.log"
        try:
            for needed in stage.requires - work.new_ids:
                _require_sound(work, needed)
            context = _context(work, stage, log)
            run: Stage = importlib.import_module(work.kind(stage).module).run
            facts = run(context)
            _require_unchanged(work, stage)
            monitor.stage_doing(stage.name, "committing")
            meta = store.commit(stage, context.product.parent, time.monotonic() - started, facts)
            remove_tree(work.staging / stage.name)
        except (ImageBuilderError, OSError) as error:
            if not work.stop.is_set():  # otherwise it was stopped because another stage failed
                monitor.stage_failed(stage.name, time.monotonic() - started)
            cause = _cause(error, store)
            _keep_reports(work, stage)
            raise StageError(
                stage.name, cause, log=_keep_log(work, stage, log), enterable=work.kind(stage).enterable
            ) from error
        work.ran[stage.name] = meta
        work.new_ids.add(stage.id)
        monitor.stage_finished(stage.name, meta["seconds"], cached=False)


def _require_unchanged(work: Build, stage: StagePlan) -> None:
    """Raise ImageBuilderError if what the stage's id covers differs from what it was when the id was made.

    That is files, and variables of the inventory, which a play reads by itself. An id that is new in every build is
    never used again.
    """
    if "run" in stage.options:
        return
    root = work.settings.repo_root
    own = [root / name for name in stage.code if name not in stage.places]
    now = code_digests(root, filter(os.path.lexists, own))
    now |= named_digests({name: path for name, path in stage.places.items() if os.path.lexists(path)})
    changed = [name for name, digest in sorted(stage.code.items()) if now.get(name) != digest]
    hint = "run the build again"
    if (reading := work.kind(stage).reading) and not changed:
        changed = [f"the inventory's {name}" for name in _changed_variables(work, stage, reading)]
        hint += "; an inventory script must give the same values each time"
    if changed:
        raise ImageBuilderError(f"changed while the stage ran: {', '.join(changed)}", hint=hint)


def _changed_variables(
    work: Build, stage: StagePlan, reading: Callable[[ImageDefinition, StagePlan], PlaybookReading]
) -> list[str]:
    """Return the variables that a stage's play would read in the inventory with other values now."""
    try:
        now = reread(work.definition, work.settings.vault)
        if (now, now.magic) == (work.definition, work.definition.magic):
            return []  # working out what the play reads takes a second, reading the inventory a twentieth
        before, after = stage.options["variables"], value_digests(reading(now, stage).variables)
    except UnreadableError as error:
        raise ImageBuilderError(f"{error.place}: {error.reason}") from error
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def _cause(error: ImageBuilderError | OSError, store: Store) -> ImageBuilderError:
    """Return the error to report for a stage; a full disk takes precedence over the program's own message."""
    output = error.tail if isinstance(error, CommandError) else ""
    if isinstance(error, ImageBuilderError):
        cause = error
        # An engine frees the space before it reports that there wasn't any; and a quota isn't the filesystem's space.
        said = _IN_MEMORY.sub("", output) if isinstance(error, CommandError) else error.message
        was_full = type(error) in _SAYING_FULL and retry.classify(said) == "full"
    else:
        cause = ImageBuilderError(f"{error.strerror or error}: {error.filename or store.path}")
        was_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    shortage = space.shortage(store.path)
    if shortage or was_full:
        hint = "free some: image-builder store gc --keep 1; or another disk: --store DIR"
        message = "\n  | ".join([cause.message, *output.splitlines()])
        return SpaceError(f"{shortage}: {message}" if shortage else message, hint=hint)
    return cause


def _keep_log(work: Build, stage: StagePlan, log: Path) -> str | None:
    """Move the log of a failed stage out of the staging area; return where it is now."""
    return _keep(work, stage, log, ".log") if log.exists() else None


def _keep_reports(work: Build, stage: StagePlan) -> None:
    """Move a failed stage's reports to where its log will be, and note their paths."""
    product = work.staging / stage.name / "object" / "product"
    for report in (product / name for name in work.kind(stage).reports):
        if report.exists():
            work.monitor.note(f"{report.name}: {_keep(work, stage, report, f'-{report.name}')}")


def _keep(work: Build, stage: StagePlan, path: Path, suffix: str) -> str:
    target = work.store.path / "logs" / f"{work.definition.name}-{stage.name}-{stage.id[:12]}{suffix}"
    path.rename(target)
    return os.fspath(target)


def _context(work: Build, stage: StagePlan, log: Path) -> StageContext:
    """Lay out a stage's directories: scratch, product, and the locked files it may use."""
    here = work.staging / stage.name
    product = here / "object" / "product"
    product.mkdir(parents=True)
    (here / "work").mkdir()
    store, lock = work.store, work.lock
    repo = None
    inputs = {name: store.product(i) for name, i in stage.inputs.items()}
    if stage.name in lock.groups and lock.groups[stage.name].packages:
        repo = here / "repo"
        group = lock.groups[stage.name]
        write_repository(group.packages, group.suite, store.path / "debs", repo)
    return StageContext(
        plan=stage,
        definition=work.definition,
        work=here / "work",
        product=product,
        lowers=tuple(store.product(i) / "tree" for i in stage.lowers),
        ground=tuple(store.product(i) / "tree" for i in stage.ground),
        inputs=inputs,
        repo=repo,
        files=_link_files(work, stage, here / "files"),
        monitor=work.monitor,
        log=log,
        settings=work.settings,
        shell=work.shell,
        endpoints=work.endpoints,
        network=work.network,
        previous=_previous(work, stage),
        stop=work.stop,
    )


def _link_files(work: Build, stage: StagePlan, folder: Path) -> Path | None:
    """Link a stage's locked files into a folder of its own: archives by SHA-256, others by name."""
    files = work.kind(stage).files(stage, work.lock)
    if not files:
        return None
    folder.mkdir()
    for file in files:
        name = file.sha256 if isinstance(file, LockedArchive) else file.name
        os.link(work.store.path / "files" / file.sha256, folder / name)
    return folder


def _previous(work: Build, stage: StagePlan) -> Path | None:
    """Return the product of the finished stage of this name that shares most with this one, None if none does.

    Return None if that stage is damaged, too: files taken over are covered only by the manifest that is written then.
    """
    store, shared = work.store, work.kind(stage).shared
    if shared is None:
        return None
    best: tuple[int, str] = (0, "")
    for stage_id in store.ids():
        with suppress(StoreError, KeyError):  # a record that can't be read, of whichever stage
            meta = store.meta(stage_id)
            if meta["name"] == stage.name:
                best = max(best, (shared(stage.options, meta["options"]), stage_id))
    if not best[0]:
        return None
    try:
        store.check(best[1])
    except StoreError:
        return None
    return store.product(best[1])
