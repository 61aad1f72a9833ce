"""Run a plan: fetch what is locked, run the stages that the store lacks, publish what came of it.

Everything here runs inside ``namespace.run_isolated``: a SIGKILL at any moment leaves nothing but a staging
directory, which the next start reaps.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder import process, publish, space
from image_builder.definition import ImageDefinition
from image_builder.errors import ImageBuilderError, LockError, SpaceError, StageError, UsageError
from image_builder.events import Monitor
from image_builder.fetch import Wanted, fetch
from image_builder.lock import Lock
from image_builder.plan.model import Plan, StagePlan
from image_builder.plan.resolve import resolve
from image_builder.repository import write_repository
from image_builder.requirements import requirements
from image_builder.resolve import addresses, remembered_lock, resolve_lock
from image_builder.sandbox import Root
from image_builder.settings import Settings
from image_builder.stages import Stage, StageContext
from image_builder.store import Store, remove_tree

# What `build` is asked for; all other stages run only when one of these needs them.
_GOALS = ("verify", "convert")


@dataclass(frozen=True)
class BuildResult:
    """How a build ended. ``artefact`` is the published directory, None after ``stop_after``.

    ``seconds`` is wall time, ``peak_mib`` this program's own largest resident size (children not counted).
    """

    image: str
    build_id: str
    stages: Sequence[Mapping[str, Any]]
    seconds: float
    peak_mib: float
    artefact: Path | None = None
    lock: Path | None = None


@dataclass(frozen=True)
class _Build:
    """What the steps of one build share."""

    definition: ImageDefinition
    lock: Lock
    plan: Plan
    settings: Settings
    store: Store
    monitor: Monitor
    staging: Path
    shell: Callable[[Root], None] | None
    ran: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Ids of the stages that were compared with their manifest, or made, in this build: once is enough.
    sound: set[str] = field(default_factory=set)


def obtain_lock(
    definition: ImageDefinition, settings: Settings, monitor: Monitor, file: Path | None = None
) -> Lock:
    """Return the lock to build with.

    ``file`` when given; else the one of the image's last build while it still fits the definition; else a new
    one. Raises LockError when ``file`` doesn't fit.
    """
    needs = requirements(definition)
    if file:
        lock = Lock.load(file)
        if reasons := needs.misfit(lock):
            shown = "\n  ".join(reasons)
            raise LockError(
                f"the lock {file} doesn't fit the definition:\n  {shown}",
                hint="make a new one: image-builder lock",
            )
        return lock
    remembered = remembered_lock(settings, definition.name)
    try:
        lock = Lock.load(remembered)
    except LockError:  # none yet, or one of an older version of this program
        pass
    else:
        if not needs.misfit(lock):
            return lock
    lock = resolve_lock(definition, settings, monitor)
    lock.save(remembered)
    return lock


def build(
    definition: ImageDefinition,
    settings: Settings,
    monitor: Monitor,
    *,
    locked: Path | None = None,
    stop_after: str | None = None,
    shell: Callable[[Root], None] | None = None,
) -> BuildResult:
    """Build an image and publish it below ``settings.output``.

    Raises StageError (with the log's path) when a stage fails, SpaceError before anything was started,
    FetchError, LockError, PublishError. What was published before stays as it is in every case.
    """
    started = time.monotonic()
    store = Store(settings.store)
    store.prepare()
    lock = obtain_lock(definition, settings, monitor, locked)
    plan = resolve(definition, lock, settings.repo_root)
    names = [s.name for s in plan.stages]
    if stop_after and stop_after not in names:
        raise UsageError(
            f"{definition.name} has no stage `{stop_after}`", hint=f"its stages: {', '.join(names)}"
        )
    with store.in_use(), store.staging() as staging:
        work = _Build(definition, lock, plan, settings, store, monitor, staging, shell)
        goals = [stop_after] if stop_after else list(_GOALS)
        todo = _missing(plan, store, goals)
        monitor.stages_planned(
            [(s.name, s.id, s not in todo) for s in plan.stages if s in todo or store.has(s.id)]
        )
        space.check(lock, todo, store, settings, definition)
        _fetch(work, todo)
        _run_all(work, todo)
        if not stop_after:
            store.record(definition.name, [s.id for s in plan.stages if store.has(s.id)])
        summary = [_summary(work, s) for s in plan.stages if store.has(s.id)]
        artefact = (
            None if stop_after else publish.publish(definition, lock, plan, store, settings, summary, monitor)
        )
    seconds = time.monotonic() - started
    saved = artefact / "lock.json" if artefact else remembered_lock(settings, definition.name)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return BuildResult(definition.name, plan.build_id, summary, seconds, peak_mib, artefact, saved)


def _missing(plan: Plan, store: Store, goals: Iterable[str]) -> list[StagePlan]:
    """Return the stages to run, in order: the goals that the store lacks, and what those need."""
    needed = {plan.stage(name).id for name in goals}
    todo = []
    for stage in reversed(plan.stages):
        if stage.id in needed and not store.has(stage.id):
            todo.append(stage)
            needed.update((*stage.lowers, *stage.inputs.values()))
    return todo[::-1]


def _fetch(work: _Build, todo: Sequence[StagePlan]) -> None:
    """Get every locked byte that the stages in ``todo`` will use, before the first of them starts."""
    lock, store, monitor = work.lock, work.store, work.monitor
    where = addresses(work.definition, work.settings, lock)
    names = {s.name for s in todo}
    packages = {p.sha256: p for n, g in lock.groups.items() if n in names for p in g.packages}
    debs = [Wanted(p.name, f"{where[p.repository]}/{p.path}", p.sha256, p.size) for p in packages.values()]
    files = [
        Wanted(f.name, f"{where[f.repository]}/{f.path}", f.sha256, f.size)
        for source in (lock.sources.values() if "kubelet_build" in names else ())
        for f in source.files
    ]
    if any(s.kind == "layer" for s in todo):
        files += [Wanted(a.url.rsplit("/", 1)[-1], a.url, a.sha256) for a in lock.archives]
    if not debs and not files:
        return
    started = time.monotonic()
    monitor.stage_started("fetch")
    try:
        for wanted, folder in ((debs, "debs"), (files, "files")):
            fetch(
                wanted,
                store.path / folder,
                work.staging,
                lambda done, all_: monitor.stage_progress("fetch", done, all_, "B"),
            )
    except ImageBuilderError:
        monitor.stage_failed("fetch", time.monotonic() - started)
        raise
    monitor.stage_finished("fetch", time.monotonic() - started, cached=False)


def _run_all(work: _Build, todo: Sequence[StagePlan]) -> None:
    """Run the stages in order; those that no other one needs run beside the rest, one at a time.

    So the checks run while the disk is made. What fails first is raised, after what runs beside it has ended.
    """
    needed = {i for stage in todo for i in (*stage.lowers, *stage.inputs.values())}
    with ThreadPoolExecutor(1) as beside:
        running = []
        try:
            for stage in todo:
                if stage.id in needed:
                    _run_stage(work, stage)
                else:
                    running.append(beside.submit(_run_stage, work, stage))
            for future in running:
                future.result()
        except BaseException:  # a failure or Ctrl-C: what has not begun is not begun any more
            beside.shutdown(wait=False, cancel_futures=True)
            raise


def _run_stage(work: _Build, stage: StagePlan) -> None:
    """Run one stage and commit it, unless another build did so in the meantime."""
    monitor, store = work.monitor, work.store
    with store.claim(stage.id):
        if store.has(stage.id):
            monitor.stage_finished(stage.name, 0.0, cached=True)
            return
        monitor.stage_started(stage.name)
        started = time.monotonic()
        log = work.staging / f"{stage.name}.log"
        try:
            for needed in {*stage.lowers, *stage.inputs.values()} - work.sound:
                store.check(needed)
                work.sound.add(needed)
            context = _context(work, stage, log)
            module = importlib.import_module(f"image_builder.stages.{stage.kind}")
            run: Stage = module.run
            facts = run(context)
            monitor.stage_doing(stage.name, "committing")
            meta = store.commit(stage, context.product.parent, time.monotonic() - started, facts)
            remove_tree(work.staging / stage.name)
        except (ImageBuilderError, OSError) as error:
            monitor.stage_failed(stage.name, time.monotonic() - started)
            cause = _cause(error, store)
            enterable = stage.kind in ("layer", "seal")
            raise StageError(
                stage.name, cause, log=_keep_log(work, stage, log), enterable=enterable
            ) from error
        work.ran[stage.name] = meta
        work.sound.add(stage.id)
        monitor.stage_finished(stage.name, meta["seconds"], cached=False)


def _cause(error: ImageBuilderError | OSError, store: Store) -> ImageBuilderError:
    """Return what to tell of a stage's failure; a full disk comes first, whatever the program said of it."""
    if isinstance(error, ImageBuilderError):
        told = error
    else:
        told = ImageBuilderError(f"{error.strerror or error}: {error.filename or store.path}")
    if shortage := space.shortage(store.path):
        hint = "free some: image-builder store gc --keep 1; or another disk: --store DIR"
        return SpaceError(f"{shortage}: {told.message}", hint=hint)
    return told


def _keep_log(work: _Build, stage: StagePlan, log: Path) -> str | None:
    """Move the log of a failed stage out of the staging area; return where it is now."""
    if not log.exists():
        return None
    kept = work.store.path / "logs" / f"{work.definition.name}-{stage.name}-{stage.id[:12]}.log"
    log.rename(kept)
    return os.fspath(kept)


def _context(work: _Build, stage: StagePlan, log: Path) -> StageContext:
    """Lay out a stage's directories: scratch, product, and the locked files it may use."""
    here = work.staging / stage.name
    product = here / "object" / "product"
    product.mkdir(parents=True)
    (here / "work").mkdir()
    store, lock = work.store, work.lock
    repo = archives = None
    inputs = {name: store.product(i) for name, i in stage.inputs.items()}
    if stage.name in lock.groups and lock.groups[stage.name].packages:
        repo = here / "repo"
        group = lock.groups[stage.name]
        write_repository(group.packages, group.suite, store.path / "debs", repo)
    if wanted := stage.options.get("archives"):
        archives = here / "archives"
        archives.mkdir()
        for sha256 in map(str, wanted):  # type: ignore[arg-type]
            os.link(store.path / "files" / sha256, archives / sha256)
    if stage.kind == "kubelet_build":
        inputs["sources"] = here / "sources"
        inputs["sources"].mkdir()
        for source in lock.sources.values():
            for file in source.files:
                os.link(store.path / "files" / file.sha256, inputs["sources"] / file.name)
    return StageContext(
        plan=stage,
        definition=work.definition,
        work=here / "work",
        product=product,
        lowers=tuple(store.product(i) / "tree" for i in stage.lowers),
        inputs=inputs,
        repo=repo,
        archives=archives,
        monitor=work.monitor,
        log=log,
        settings=work.settings,
        shell=work.shell,
    )


def _summary(work: _Build, stage: StagePlan) -> dict[str, Any]:
    meta = work.ran.get(stage.name) or work.store.meta(stage.id)
    return {
        "name": stage.name,
        "id": stage.id,
        "seconds": meta["seconds"],
        "bytes": meta["bytes"],
        "cached": stage.name not in work.ran,
    }


def open_shell(root: Root) -> None:
    """Give the terminal a shell in ``root``; what it changes is dropped with the failed stage."""
    process.shell(root.argv(["/bin/bash", "-i"], {"TERM": os.environ.get("TERM", "dumb")}))
