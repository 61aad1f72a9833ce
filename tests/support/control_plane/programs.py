"""Get the lab's control plane: Kubernetes' own programs, compiled once, and a tree with Debian's etcd.

Both are stages like those of an image, kept in the store by content. What is locked for an image whose kubelet is
built from source is locked for them too; etcd's packages are asked for once and remembered beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.build import make, obtain_lock
from image_builder.bake.executor import Build, missing
from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.model import Lock, LockedGroup
from image_builder.bake.lock.requirements import Group, keyring
from image_builder.bake.lock.resolve import remembered_lock
from image_builder.bake.plan.draft import Draft
from image_builder.bake.plan.model import Plan
from image_builder.bake.plan.resolve import kinds
from image_builder.bake.stages.base import plan as base
from image_builder.bake.stages.go import plan as go
from image_builder.bake.stages.tools import plan as tools
from image_builder.bake.store import Store
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.errors import DefinitionError, LockError, Problem
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings

# The tree that the control plane runs in, its lock, and what it has beside the essential packages.
CONTROL_PLANE = "control_plane"
_PACKAGES = ("etcd-server",)
_BUILD = "control_plane_build"
# What it is made of at least.
PROGRAMS = ("kube-apiserver", "kube-scheduler")
# What a cluster has beside them, for which a stage of its own compiles the same source: what only looks at nodes needs
# none of it.
CONTROLLERS = ("kube-controller-manager",)
# What the kubelet needs as well: the same bytes, so the same stages.
_SHARED = (tools.TOOLS, go.BUILD_ROOT)


@dataclass(frozen=True)
class ControlPlane:
    """``programs`` holds what was asked for, ``tree`` is a root with etcd. Both are in the store."""

    programs: Path
    tree: Path


def lab_definition(inventory: Path = REPO_ROOT / "inventories/lab") -> ImageDefinition:
    """Return an image of the lab whose kubelet is built from source; raises DefinitionError where none is."""
    lab = load_inventory([inventory])
    for name in lab.images:
        definition = lab.define(name)
        if go.source_suite(definition):
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
    shared = obtain_lock(definition, settings, monitor, extensions())
    with store.in_use(), store.staging() as staging:
        lock = _lock(definition, shared, settings, staging)
        plan = _plan(definition, lock, settings.repo_root, programs)
        goals = [_BUILD, CONTROL_PLANE] if programs else [CONTROL_PLANE]
        work = Build(definition, lock, plan, settings, store, monitor, staging, kinds())
        make(work, missing(plan, store, goals))
        store.record(CONTROL_PLANE, [s.id for s in plan.stages if store.has(s.id)])
    return _places(plan, store)


def _plan(definition: ImageDefinition, lock: Lock, repo_root: Path, programs: Sequence[str]) -> Plan:
    """Return the stages of the control plane: its own programs, and a tree with Debian's etcd."""
    draft = Draft(definition, lock, repo_root, kinds())
    draft.add(*tools.KIND.plan(draft))
    draft.add(*go.programs(draft, _BUILD, programs))
    draft.add(base.root(draft, CONTROL_PLANE, _PACKAGES))
    return draft.plan()


def _places(plan: Plan, store: Store) -> ControlPlane:
    *_, build, tree = plan.stages
    return ControlPlane(store.product(build.id), store.product(tree.id) / "tree")


def _lock(definition: ImageDefinition, shared: Lock, settings: Settings, staging: Path) -> Lock:
    """Return the lock of the control plane: the remembered one while it fits what the image has now."""
    suite = go.source_suite(definition)
    assert suite is not None
    group = Group(suite, _PACKAGES)
    remembered = remembered_lock(settings, CONTROL_PLANE)
    locked: LockedGroup | None = None
    with suppress(LockError):  # none yet
        locked = Lock.load(remembered).groups.get(CONTROL_PLANE)
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
