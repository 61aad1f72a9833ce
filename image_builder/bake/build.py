"""One build from its lock to what is published; and locks, for which a supplier of images may have to serve.

Everything here runs inside ``namespace.run_isolated``, except ``obtain_lock`` where a lock is only looked at.
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
from image_builder.bake.lock.model import Lock, LockedImage
from image_builder.bake.lock.requirements import node_network
from image_builder.bake.lock.resolve import lock_images, remembered_lock, resolve_lock
from image_builder.bake.plan.model import Plan, StagePlan
from image_builder.bake.plan.resolve import kinds, requirements, resolve, supplier_plan
from image_builder.bake.pull.network import Endpoints
from image_builder.bake.stages.convert import CONVERT
from image_builder.bake.stages.kind import Extensions, Supplier
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition
from image_builder.errors import LockError, UsageError
from image_builder.events import Monitor
from image_builder.settings import Settings
from image_builder.system import cgroups, host, process
from image_builder.system.sandbox import Root


@dataclass(frozen=True)
class BuildResult:
    """How a build ended. ``artefact`` is the published directory, None after ``stop_after``; ``lock`` what it took.

    ``seconds`` is wall time, ``peak_mib`` this program's own largest resident size (children not counted).
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
    """Return the lock to build with: packages, archives and container images, a supplier's where it knows them.

    ``file`` when given; else the one of the image's last build while it still fits the definition; else a new
    one, which differs from that as little as the definition does. Raises LockError when ``file`` doesn't fit, or a
    lock is damaged.
    """
    needs = requirements(definition, extensions)
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
    remembered = remembered_lock(settings, definition.record_name)
    try:
        _adopt(definition, settings, monitor)
        earlier = Lock.remembered(remembered)
    except PermissionError:  # `plan` as an ordinary user
        earlier = Lock.remembered(remembered) or Lock.remembered(remembered_lock(settings, definition.name))
    if earlier and not needs.misfit(earlier):
        lock = earlier
    else:
        host.check_writable(settings.store)  # what the lock names is fetched into it
        lock = resolve_lock(definition, needs, settings, monitor, earlier)
        if earlier:  # another package is no reason to ask again what a tag means
            images = _still_meant(earlier, lock, extensions.supplier)
            lock = lock.model_copy(update={"images": images, "left_out": earlier.left_out})
        lock.save(remembered)
    if needs.unlocked_images(lock) and not extensions.supplier.serves(definition):
        lock = lock_images(definition, lock, {}, monitor)
        lock.save(remembered)
    refs = {image.ref for image in definition.preload}
    return lock.model_copy(
        update={
            "images": [image for image in lock.images if image.ref in refs],
            "left_out": [ref for ref in lock.left_out if ref in refs],
        }
    )


def _adopt(definition: ImageDefinition, settings: Settings, monitor: Monitor) -> None:
    if Store(settings.store).adopt(definition.record_name):
        inventory = os.fspath(definition.inventory_paths[0])
        monitor.note(f"the lock and the builds remembered of {definition.name} are now those of {inventory}")


def _still_meant(earlier: Lock, lock: Lock, supplier: Supplier) -> list[LockedImage]:
    """Return the images of an earlier lock; a supplier's are made of packages, and new ones make new images."""
    name = supplier.kind.name
    same = earlier.groups.get(name) == lock.groups.get(name)
    return [image for image in earlier.images if same or not supplier.has(image.ref)]


def make_plan(definition: ImageDefinition, lock: Lock, settings: Settings, extensions: Extensions) -> Plan:
    """Return the plan of an image.

    Raises LockError when the lock lacks a stage of the definition, SpaceError when the tree can't fit the disk.
    """
    space.check_root(lock, definition)
    return resolve(definition, lock, settings.repo_root, extensions)


def make_lock(
    definition: ImageDefinition, settings: Settings, monitor: Monitor, extensions: Extensions
) -> Lock:
    """Resolve everything again, container images too; runs in the namespace, since the supplier may have to serve."""
    store = Store(settings.store)
    store.prepare()
    _adopt(definition, settings, monitor)
    lock = resolve_lock(definition, requirements(definition, extensions), settings, monitor)
    if not definition.preload:
        return lock
    with supplied(definition, lock, settings, monitor, extensions) as supply:
        return lock_images(definition, lock, supply.endpoints(), monitor)


class Supply:
    """A supplier's registry for one build: its images are made and it is started when something is asked there."""

    def __init__(self, work: Build, extensions: Extensions) -> None:
        self.work, self.extensions = work, extensions
        self._running = ExitStack()
        self._endpoints: Endpoints | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def endpoints(self) -> Endpoints:
        """Return where the definition's registries are reached that no DNS knows."""
        work, supplier = self.work, self.extensions.supplier
        if not supplier.serves(work.definition):
            return {}
        if self._endpoints is None:
            plan = supplier_plan(work.definition, work.lock, work.settings.repo_root, self.extensions)
            make(work, missing(plan, work.store, [plan.stages[-1].name]))
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
    """Yield a supply, and with it the work of a build, which has a staging area and uses the store until the end."""
    store = Store(settings.store)
    with store.in_use(), store.staging() as staging:
        # Programs put their temporary files where the next start removes what a killed build left.
        os.environ["TMPDIR"] = os.fspath(staging)
        work = Build(definition, lock, settings, store, monitor, staging, kinds(extensions))
        with Supply(work, extensions) as supply:
            yield supply


def make(work: Build, todo: Sequence[StagePlan], supply: Supply | None = None) -> None:
    """Run stages, once it is sure that there is room for them and what is locked for them was fetched.

    Those that pull images find the ones of ``supply`` in its registry.
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

    Raises StageError (with the log's path) when a stage fails, SpaceError before anything was started,
    FetchError, LockError, PublishError. What was published before stays as it is in every case.
    """
    started = time.monotonic()
    store = Store(settings.store)
    store.prepare()
    cgroups.reap()
    lock = obtain_lock(definition, settings, monitor, extensions, locked)
    remembered = remembered_lock(settings, definition.record_name)
    with supplied(definition, lock, settings, monitor, extensions) as supply:
        if requirements(definition, extensions).unlocked_images(lock):
            lock = lock_images(definition, lock, supply.endpoints(), monitor)
            lock.save(remembered)
        plan = make_plan(definition, lock, settings, extensions)
        for warning in plan.warnings:
            monitor.note(f"warning: {warning}")
        work = replace(supply.work, lock=lock, shell=shell)
        todo = missing(plan, store, _goals(plan, extensions, stop_after))
        monitor.stages_planned(
            [(s.name, s.id, s not in todo) for s in plan.stages if s in todo or store.has(s.id)]
        )
        make(work, todo, supply)
        if not stop_after:
            store.record(definition.record_name, [s.id for s in plan.stages if store.has(s.id)])
        summary = [_summary(work, s) for s in plan.stages if store.has(s.id)]
        artefact = (
            None if stop_after else publish.publish(definition, lock, plan, store, settings, summary, monitor)
        )
    seconds = time.monotonic() - started
    saved = artefact / "lock.json" if artefact else locked or remembered
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return BuildResult(definition.name, plan.build_id, summary, seconds, peak_mib, artefact, saved)


def _goals(plan: Plan, extensions: Extensions, stop_after: str | None) -> list[str]:
    """Return the stages that a build is for: all others run only when one of these needs them. Raises UsageError."""
    names = [stage.name for stage in plan.stages]
    if not stop_after:
        return [extensions.verification.name, CONVERT]
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
    """Give the terminal a shell in ``root``; what it changes is dropped with the failed stage."""
    process.shell(root.argv(["/bin/bash", "-i"], {"TERM": os.environ.get("TERM", "dumb")}))
