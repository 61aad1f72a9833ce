"""Get the lab's control plane: Kubernetes' own programs, compiled once, and a tree with Debian's etcd.

Both are stages like those of an image, kept in the store by content. What is locked for an image whose kubelet is
built from source is locked for them too; etcd's packages are asked for once and remembered beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake import space
from image_builder.bake.build import obtain_lock
from image_builder.bake.executor import Build, fetch_locked, missing, run_all
from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.model import Lock, LockedGroup
from image_builder.bake.lock.resolve import remembered_lock
from image_builder.bake.plan.model import Plan
from image_builder.bake.plan.resolve import control_plane_plan
from image_builder.bake.requirements import (
    CONTROL_PLANE,
    CONTROL_PLANE_PACKAGES,
    Group,
    keyring,
    kubelet_from_source,
)
from image_builder.bake.stages.control_plane_build.run import PROGRAMS
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.errors import DefinitionError, LockError, Problem
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings

# What a cluster has beside them, for which a stage of its own compiles the same source: what only looks at nodes needs
# none of it.
CONTROLLERS = ("kube-controller-manager",)
# What the kubelet needs as well: the same bytes, so the same stages.
_SHARED = ("tools", "build_root")


@dataclass(frozen=True)
class ControlPlane:
    """``programs`` holds what was asked for, ``tree`` is a root with etcd. Both are in the store."""

    programs: Path
    tree: Path


def lab_definition(inventory: Path = REPO_ROOT / "inventories/lab") -> ImageDefinition:
    """Return an image of the lab whose kubelet is built from source; raises DefinitionError where none is."""
    found = load_inventory([inventory])
    for name in found.images:
        definition = found.define(name)
        if kubelet_from_source(definition):
            return definition
    raise DefinitionError(
        [Problem(str(inventory), "kubelet_source", "no image builds its kubelet from source")]
    )


def obtain(
    definition: ImageDefinition, settings: Settings, monitor: Monitor, programs: Sequence[str] = PROGRAMS
) -> ControlPlane:
    """Return the control plane, made first where the store lacks it; runs in the namespace.

    Takes some 10 minutes of a processor the first time, and for CONTROLLERS five. Without ``programs`` only the tree
    with etcd is made, in a minute, for a caller that has an API server of its own. Raises what a build raises.
    """
    store = Store(settings.store)
    store.prepare()
    shared = obtain_lock(definition, settings, monitor)
    with store.in_use(), store.staging() as staging:
        lock = _lock(definition, shared, settings, staging)
        plan = control_plane_plan(definition, lock, settings.repo_root, programs)
        wanted = plan.stages[-2:] if programs else plan.stages[-1:]
        todo = missing(plan, store, [s.name for s in wanted])
        space.check(lock, todo, store, settings, definition)
        work = Build(definition, lock, plan, settings, store, monitor, staging, None)
        fetch_locked(work, todo)
        run_all(work, todo)
        store.record(CONTROL_PLANE, [s.id for s in plan.stages if store.has(s.id)])
    return _places(plan, store)


def _places(plan: Plan, store: Store) -> ControlPlane:
    *_, build, tree = plan.stages
    return ControlPlane(store.product(build.id), store.product(tree.id) / "tree")


def _lock(definition: ImageDefinition, shared: Lock, settings: Settings, staging: Path) -> Lock:
    """Return the lock of the control plane: the remembered one while it fits what the image has now."""
    suite = kubelet_from_source(definition)
    assert suite is not None
    group = Group(suite, CONTROL_PLANE_PACKAGES)
    remembered = remembered_lock(settings, CONTROL_PLANE)
    known: Lock | None = None
    with suppress(LockError):  # none yet
        known = Lock.load(remembered)
    locked = known.groups.get(CONTROL_PLANE) if known else None
    if locked is None or sorted(locked.requested) != sorted(group.names) or locked.suite != suite:
        locked = _ask(definition, settings, group, staging)
    lock = Lock(
        image=CONTROL_PLANE,
        source_date_epoch=shared.source_date_epoch,
        repositories=shared.repositories,
        groups={**{name: shared.group(name) for name in _SHARED}, CONTROL_PLANE: locked},
        sources=shared.sources,
    )
    lock.save(remembered)
    return lock


def _ask(definition: ImageDefinition, settings: Settings, group: Group, staging: Path) -> LockedGroup:
    mirror = settings.mirror or definition.base.mirror
    sources = debian_sources(group.suite, group.components, keyring(definition), mirror)
    apt = Apt(staging / "apt", sources, definition.base.architecture)
    apt.update()
    packages = apt.install(["?essential", "apt", *group.names])
    return LockedGroup(**group.question.model_dump(), packages=packages)
