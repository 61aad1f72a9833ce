"""One build, from its lock to the published files; and locking, for which an image supplier may have to serve.

Everything here runs inside ``namespace.run_isolated``, except ``obtain_lock`` when a lock is only inspected.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from image_builder.bake import publish, space
from image_builder.bake.executor import Build, fetch_locked, missing, run_all
from image_builder.bake.lock.model import Lock
from image_builder.bake.lock.requirements import node_network
from image_builder.bake.lock.resolve import earlier_lock, lock_images, remembered_lock, resolve_lock
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.plan.resolve import kinds, requirements, resolve, supplier_plan
from image_builder.bake.pull.network import Endpoints
from image_builder.bake.records import note_foreign, other_owner, remember, still_meant
from image_builder.bake.stages import preload
from image_builder.bake.stages.convert import CONVERT
from image_builder.bake.stages.disk import DISK
from image_builder.bake.stages.kind import Extensions
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition
from image_builder.errors import LockError, UsageError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system import cgroups, host, process
from image_builder.system.sandbox import Root


@dataclass(frozen=True)
class BuildResult:
    """The result of a build. ``artefact`` is the published directory, None after ``stop_after``; ``lock`` its lock
    file.

    ``seconds`` is wall time; ``peak_mib`` is this process's own peak resident size (children not counted).
    """

    image: str
    build_id: str
    stages: Sequence[Mapping[str, Any]]
    seconds: float
    peak_mib: float
    artefact: Path | None = None
    lock: Path | None = None


def obtain_lock(
    definition: ImageDefinition,
    settings: Settings,
    monitor: Monitor,
    extensions: Extensions,
    file: Path | None = None,
) -> Lock:
    """Return the lock to build with: packages, archives and container images.

    This is ``file`` if given; otherwise the lock of the image's last build if it still fits the definition; otherwise a
    new one that differs from that lock only as far as the definition does. Without ``file``, images that aren't locked
    yet stay unlocked if a supplier has to serve first. What the store remembers stays as it is. Raises LockError when
    ``file`` doesn't fit, or a lock is damaged.
    """
    needs = requirements(definition, extensions)
    note_foreign(definition, needs, settings, monitor, lock_given=file is not None)
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
        return needs.part_of(lock)
    earlier, _ = earlier_lock(definition.record_names, settings)
    if earlier and not needs.misfit(earlier):
        lock = needs.part_of(earlier)
    else:
        host.check_writable(settings.store)  # package indices are read into it
        lock = resolve_lock(definition, needs, settings, monitor, earlier)
        if earlier:  # a changed package is no reason to resolve the tags again
            images = still_meant(earlier, lock, extensions.supplier)
            lock = lock.model_copy(update={"images": images, "left_out": earlier.left_out})
    if needs.unlocked_images(lock) and not extensions.supplier.serves(definition):
        lock = lock_images(definition, lock, {}, monitor)
    refs = {image.ref for image in definition.preload}
    return lock.model_copy(
        update={
            "images": [image for image in lock.images if image.ref in refs],
            "left_out": [ref for ref in lock.left_out if ref in refs],
        }
    )


def make_plan(definition: ImageDefinition, lock: Lock, settings: Settings, extensions: Extensions) -> Plan:
    """Return the plan of an image.

    Raises LockError when the lock lacks a stage of the definition, SpaceError when the tree can't fit on the disk.
    """
    space.check_root(lock, definition)
    return resolve(definition, lock, settings.repo_root, extensions)


def make_lock(
    definition: ImageDefinition, settings: Settings, monitor: Monitor, extensions: Extensions
) -> Lock:
    """Resolve everything again, container images too, and remember it for the next builds.

    Runs in the namespace: the supplier may have to serve.
    """
    store = Store(settings.store)
    store.prepare()
    needs = requirements(definition, extensions)
    note_foreign(definition, needs, settings, monitor)
    lock = resolve_lock(definition, needs, settings, monitor)
    if definition.preload:
        with supplied(definition, lock, settings, monitor, extensions) as supply:
            lock = lock_images(definition, lock, supply.endpoints(), monitor)
    remember(definition, needs, lock, settings, extensions.supplier, monitor, resolved_on_request=True)
    return lock


class Supply:
    """A supplier's registry for one build, started on first use, after its images have been made."""

    def __init__(self, work: Build, extensions: Extensions) -> None:
        self.work, self.extensions = work, extensions
        self._running = ExitStack()
        self._endpoints: Endpoints | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def endpoints(self) -> Endpoints:
        """Return the endpoints of the definition's registries that aren't in DNS."""
        work, supplier = self.work, self.extensions.supplier
        if not supplier.serves(work.definition):
            return {}
        if self._endpoints is None:
            plan = supplier_plan(work.definition, work.lock, work.settings.repo_root, self.extensions)
            make(work, missing(plan, work.store, [stage.name for stage in plan.stages]))
            tools, images = (work.store.product(stage.id) for stage in plan.stages)
            endpoint = self._running.enter_context(
                supplier.serve(tools / "tree", images, work.staging / "registry")
            )
            self._endpoints = {supplier.host: endpoint}
        return self._endpoints


@contextmanager
def supplied(
    definition: ImageDefinition, lock: Lock, settings: Settings, monitor: Monitor, extensions: Extensions
) -> Iterator[Supply]:
    """Yield a supply and, in it, a build with a staging area; the store stays in use until the end."""
    store = Store(settings.store)
    with store.in_use(), store.staging() as staging:
        # Programs put their temporary files where the next start cleans up after a killed build.
        os.environ["TMPDIR"] = os.fspath(staging)
        work = Build(definition, lock, settings, store, monitor, staging, kinds(extensions))
        with Supply(work, extensions) as supply:
            yield supply


def make(work: Build, todo: Sequence[StagePlan], supply: Supply | None = None) -> None:
    """Run stages, after checking that there is enough space for them and fetching their locked files.

    Stages that pull images get those of ``supply`` from its registry.
    """
    space.check(work, todo)
    fetch_locked(work, todo)
    if supply and any(work.kind(stage).pulls for stage in todo):
        work = replace(work, endpoints=supply.endpoints(), network=node_network(work.definition))
    run_all(work, todo)


def build(
    definition: ImageDefinition,
    settings: Settings,
    monitor: Monitor,
    extensions: Extensions,
    *,
    locked: Path | None = None,
    stop_after: str | None = None,
    shell: Callable[[Root], None] | None = None,
) -> BuildResult:
    """Build an image and publish it below ``settings.output``.

    Raises StageError (with the log's path) when a stage fails, SpaceError when disk space is short (checked before
    the stages start), FetchError, LockError and PublishError. In each case, earlier publications stay as they are.
    """
    started = time.monotonic()
    store = Store(settings.store)
    store.prepare()
    cgroups.reap()
    lock = obtain_lock(definition, settings, monitor, extensions, locked)
    needs = requirements(definition, extensions)
    with supplied(definition, lock, settings, monitor, extensions) as supply:
        if needs.unlocked_images(lock):
            lock = lock_images(definition, lock, supply.endpoints(), monitor)
        plan = make_plan(definition, lock, settings, extensions)
        goals = _goals(plan, extensions, stop_after)
        if locked:
            owned = not other_owner(definition, needs, settings)
        else:
            owned = remember(definition, needs, lock, settings, extensions.supplier, monitor)
        for warning in plan.warnings:
            monitor.note(f"warning: {warning}")
        for ref, reason in _left_out(definition, lock, plan, store).items():
            monitor.note(f"left out, it is not required: {ref}: {reason}")
        work = replace(supply.work, lock=lock, shell=shell)
        todo = missing(plan, store, goals)
        monitor.stages_planned(
            [(s.name, s.id, s not in todo) for s in plan.stages if s in todo or store.has(s.id)]
        )
        make(work, todo, supply)
        if owned and not stop_after:
            name, *former = definition.record_names
            store.record(name, [s.id for s in plan.stages if store.has(s.id)], former)
        summary = [_summary(work, s) for s in plan.stages if store.has(s.id)]
        artefact = (
            None if stop_after else publish.publish(definition, lock, plan, store, settings, summary, monitor)
        )
    seconds = time.monotonic() - started
    saved = (
        artefact / "lock.json" if artefact else locked or remembered_lock(settings, definition.record_name)
    )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return BuildResult(definition.name, plan.build_id, summary, seconds, peak_mib, artefact, saved)


def _left_out(definition: ImageDefinition, lock: Lock, plan: Plan, store: Store) -> dict[str, str]:
    """Return the images that a build leaves out before it pulls any, and why: the lock or an earlier pull did so."""
    left_out = preload.unlocked(definition, lock)
    for stage in plan.stages:
        if stage.kind == preload.KIND.name and store.has(stage.id):
            left_out |= store.meta(stage.id)["facts"]["left_out"]
    return left_out


def _goals(plan: Plan, extensions: Extensions, stop_after: str | None) -> list[str]:
    """Return the stages that a build is for; all others run only if one of these needs them. Raises UsageError.

    A publication reads the records of the disk, if there is one, and of the first preload, too.
    """
    names = [stage.name for stage in plan.stages]
    if not stop_after:
        preloads = [stage.name for stage in plan.stages if stage.kind == preload.KIND.name]
        disks = [name for name in names if name == DISK]
        return [extensions.verification.name, *disks, CONVERT, *preloads[:1]]
    if stop_after not in names:
        raise UsageError(f"{plan.image} has no stage `{stop_after}`", hint=f"its stages: {', '.join(names)}")
    return [stop_after]


def _summary(work: Build, stage: StagePlan) -> dict[str, Any]:
    meta = work.ran.get(stage.name) or work.store.meta(stage.id)
    return {
        "name": stage.name,
        "id": stage.id,
        "seconds": meta["seconds"],
        "bytes": meta["bytes"],
        "cached": stage.name not in work.ran,
    }


def open_shell(root: Root) -> None:
    """Open a shell in ``root`` on the terminal; its changes are discarded with the failed stage."""
    process.shell(root.argv(["/bin/bash", "-i"], {"TERM": os.environ.get("TERM", "dumb")}))
