"""Run a plan: fetch what is locked, run the stages that the store lacks, publish what came of it.

Everything here runs inside ``namespace.run_isolated``: a SIGKILL at any moment leaves nothing but a staging
directory, which the next start reaps.
"""

from __future__ import annotations

import importlib
import os
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from image_builder import process, publish, space
from image_builder.definition import ImageDefinition
from image_builder.errors import ImageBuilderError, LockError, SpaceError, StageError, UsageError
from image_builder.events import Monitor
from image_builder.fetch import Wanted, fetch
from image_builder.lab.registry import HOST as LAB_HOST
from image_builder.lab.registry import serve
from image_builder.lock import Lock
from image_builder.plan.model import Plan, StagePlan
from image_builder.plan.resolve import lab_plan, resolve
from image_builder.pull.registry import Endpoint, Endpoints
from image_builder.repository import write_repository
from image_builder.requirements import LAB_IMAGES, requirements, uses_lab
from image_builder.resolve import addresses, lock_images, remembered_lock, resolve_lock
from image_builder.sandbox import Root
from image_builder.settings import Settings
from image_builder.stages import Stage, StageContext
from image_builder.store import Store, remove_tree

# What `build` is asked for; all other stages run only when one of these needs them.
_GOALS = ("verify", "convert")
# Kinds that wait for the network more than they work.
_BESIDE = ("preload",)


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
    endpoints: Endpoints = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    ran: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Ids of the stages that were compared with their manifest, or made, in this build: once is enough.
    sound: set[str] = field(default_factory=set)


def obtain_lock(
    definition: ImageDefinition, settings: Settings, monitor: Monitor, file: Path | None = None
) -> Lock:
    """Return the lock to build with: packages and archives, and the container images that it knows already.

    ``file`` when given; else the one of the image's last build while it still fits the definition; else a new
    one. Raises LockError when ``file`` doesn't fit.
    """
    needs = requirements(definition)
    if file:
        lock = Lock.load(file)
        reasons = needs.misfit(lock)
        reasons += [f"container image not locked: {ref}" for ref in needs.unlocked_images(lock)]
        if reasons:
            shown = "\n  ".join(reasons)
            raise LockError(
                f"the lock {file} doesn't fit the definition:\n  {shown}",
                hint="make a new one: image-builder lock",
            )
        return lock
    remembered = remembered_lock(settings, definition.name)
    known: Lock | None = None
    with suppress(LockError):  # none yet, or one of an older version of this program
        known = Lock.load(remembered)
    if known and not needs.misfit(known):
        lock = known
    else:
        lock = resolve_lock(definition, settings, monitor)
        if known:  # another package is no reason to ask anew what a tag means
            lock = lock.model_copy(update={"images": known.images, "left_out": known.left_out})
        lock.save(remembered)
    wanted = {image.ref for image in definition.preload}
    return lock.model_copy(
        update={
            "images": [image for image in lock.images if image.ref in wanted],
            "left_out": [ref for ref in lock.left_out if ref in wanted],
        }
    )


def make_lock(definition: ImageDefinition, settings: Settings, monitor: Monitor) -> Lock:
    """Resolve everything anew, container images too; runs in the namespace, since the lab may have to serve."""
    store = Store(settings.store)
    store.prepare()
    lock = resolve_lock(definition, settings, monitor)
    if not definition.preload:
        return lock
    with (
        store.in_use(),
        store.staging() as staging,
        _Lab(definition, lock, settings, monitor, staging) as lab,
    ):
        return lock_images(definition, lock, lab.endpoints(), monitor)


class _Lab:
    """The lab's registry for one build: built and started when something is to be asked or pulled there."""

    def __init__(
        self, definition: ImageDefinition, lock: Lock, settings: Settings, monitor: Monitor, staging: Path
    ) -> None:
        self.definition, self.lock, self.settings = definition, lock, settings
        self.monitor, self.staging = monitor, staging
        self.store = Store(settings.store)
        self._running = ExitStack()
        self._endpoints: Endpoints | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def endpoints(self) -> Endpoints:
        """Return where the definition's registries are reached that no DNS knows."""
        if not uses_lab(self.definition):
            return {}
        if self._endpoints is None:
            plan = lab_plan(self.definition, self.lock, self.settings.repo_root)
            todo = _missing(plan, self.store, [LAB_IMAGES])
            work = _Build(
                self.definition, self.lock, plan, self.settings, self.store, self.monitor, self.staging, None
            )
            space.check(self.lock, todo, self.store, self.settings, self.definition)
            _fetch(work, todo)
            _run_all(work, todo)
            tools, images = plan.stages
            registry = self._running.enter_context(
                serve(
                    self.store.product(tools.id) / "tree",
                    self.store.product(images.id) / "registry",
                    self.staging / "lab",
                )
            )
            self._endpoints = {LAB_HOST: Endpoint(LAB_HOST, registry.address, registry.port, registry.ca)}
        return self._endpoints


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
    with (
        store.in_use(),
        store.staging() as staging,
        _Lab(definition, lock, settings, monitor, staging) as lab,
    ):
        if requirements(definition).unlocked_images(lock):
            lock = lock_images(definition, lock, lab.endpoints(), monitor)
            lock.save(remembered_lock(settings, definition.name))
        plan = resolve(definition, lock, settings.repo_root)
        names = [s.name for s in plan.stages]
        if stop_after and stop_after not in names:
            raise UsageError(
                f"{definition.name} has no stage `{stop_after}`", hint=f"its stages: {', '.join(names)}"
            )
        work = _Build(definition, lock, plan, settings, store, monitor, staging, shell)
        goals = [stop_after] if stop_after else list(_GOALS)
        todo = _missing(plan, store, goals)
        monitor.stages_planned(
            [(s.name, s.id, s not in todo) for s in plan.stages if s in todo or store.has(s.id)]
        )
        space.check(lock, todo, store, settings, definition)
        _fetch(work, todo)
        if any(s.kind == "preload" for s in todo):
            work = replace(work, endpoints=lab.endpoints())
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
            needed.update(stage.requires)
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
    """Run the stages in order; those that can wait run beside the rest, one at a time.

    So the checks run while the disk is made, and images are pulled while layers are. What fails first is
    raised, after what runs beside it has ended.
    """
    needed = {i for stage in todo for i in stage.requires}
    beside: dict[str, Future[None]] = {}
    with ThreadPoolExecutor(1) as pool:
        try:
            for stage in todo:
                for awaited in beside.keys() & stage.requires:
                    beside[awaited].result()
                if stage.kind in _BESIDE or stage.id not in needed:
                    beside[stage.id] = pool.submit(_run_stage, work, stage)
                else:
                    _run_stage(work, stage)
            for future in beside.values():
                future.result()
        except BaseException:  # a failure or Ctrl-C: what has not begun is not begun any more
            work.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
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
            for needed in stage.requires - work.sound:
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
        ground=tuple(store.product(i) / "tree" for i in stage.ground),
        inputs=inputs,
        repo=repo,
        archives=archives,
        monitor=work.monitor,
        log=log,
        settings=work.settings,
        shell=work.shell,
        endpoints=work.endpoints,
        previous=_previous(work, stage) if stage.kind == "preload" else None,
        stop=work.stop,
    )


def _previous(work: _Build, stage: StagePlan) -> Path | None:
    """Return the product of the last build's stage of this name, if the same engine made it."""
    before = work.store.last_build(work.definition.name).get(stage.name)
    if before is None:
        return None
    same = all(
        before["options"].get(key) == stage.options[key]
        for key in ("engine", "snapshotter", "packages", "archives")
    )
    return work.store.product(before["id"]) if same else None


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
