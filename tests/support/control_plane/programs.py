"""The programs of the lab's control plane: Kubernetes' own, and a tree with Debian's etcd.

The programs are current releases if IMAGE_BUILDER_PROGRAMS names a directory of them; otherwise those of Debian's
Kubernetes, compiled once. The compiled programs and the tree are stages like those of an image, kept in the store by
content. They share the locked packages of an image whose kubelet is built from source; etcd's packages are resolved
once and remembered in a separate lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from image_builder.bake.build import make, obtain_lock
from image_builder.bake.executor import Build, missing
from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.model import Lock, LockedGroup
from image_builder.bake.lock.requirements import Group, keyring
from image_builder.bake.lock.resolve import remembered_lock
from image_builder.bake.plan.resolve import kinds, requirements
from image_builder.bake.records import remember
from image_builder.bake.stages import go, root
from image_builder.bake.stages.kind import Draft
from image_builder.bake.store import Store
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.errors import DefinitionError, LockError, Problem
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings
from tests.support.images import programs

# The name of the control plane's tree and lock, and the packages in it besides the essential ones.
CONTROL_PLANE = "control_plane"
_PACKAGES = ("etcd-server",)
_BUILD, _CONTROLLERS_BUILD = "control_plane_build", "controllers_build"
# Without controllers nothing acts on its own, which is enough for tests that only look at nodes. Compiling them is a
# separate stage, which takes five minutes more.
SERVERS = ("kube-apiserver", "kube-scheduler")
CONTROLLERS = ("kube-controller-manager",)
# Needed by the kubelet as well: the same bytes, so the same stages.
_SHARED = (root.TOOLS, go.BUILD_ROOT)


@dataclass(frozen=True)
class ControlPlane:
    """``programs`` are the directories with Kubernetes' programs, ``tree`` is a root with etcd."""

    programs: tuple[Path, ...]
    tree: Path


def lab_definition(inventory: Path = REPO_ROOT / "inventories/lab") -> ImageDefinition:
    """Return a lab image whose kubelet is built from source. Raises DefinitionError if there is none."""
    lab = load_inventory([inventory])
    for name in lab.images:
        definition = lab.define(name)
        if go.source_suite(definition):
            return definition
    raise DefinitionError(
        [Problem(str(inventory), "kubelet_source", "no image builds its kubelet from source")]
    )


def obtain(settings: Settings, monitor: Monitor, *, controllers: bool = False) -> ControlPlane:
    """Return the control plane, built first if the store lacks it. Must run in the namespace.

    Programs that have to be compiled take some 10 minutes of one CPU the first time, and controllers five more; the
    tree with etcd takes one. Raises the errors of a build.
    """
    definition = lab_definition()
    if programs.DIRECTORY:
        place = settings.store.parent / f"{settings.store.name}-programs"
        (tree,) = _make(definition, settings, monitor, {})
        return ControlPlane((programs.control_plane(programs.DIRECTORY, place),), tree / "tree")
    builds = {_BUILD: SERVERS} | ({_CONTROLLERS_BUILD: CONTROLLERS} if controllers else {})
    *built, tree = _make(definition, settings, monitor, builds)
    return ControlPlane(tuple(built), tree / "tree")


def _make(
    definition: ImageDefinition, settings: Settings, monitor: Monitor, builds: Mapping[str, Sequence[str]]
) -> list[Path]:
    """Make the stages that the store lacks; return the products of ``builds`` (name -> programs) and of the tree."""
    store = Store(settings.store)
    store.prepare()
    shared = obtain_lock(definition, settings, monitor, extensions())
    needs = requirements(definition, extensions())
    remember(definition, needs, shared, settings, extensions().supplier, monitor)
    with store.in_use(), store.staging() as staging:
        lock = _lock(definition, shared, settings, staging)
        draft = Draft(definition, lock, settings.repo_root, kinds())
        draft.add(*root.TOOLS_KIND.plan(draft))
        for name, names in builds.items():
            build_root, build = go.programs(draft, name, names)
            draft.add(*([build] if build_root in draft.stages else [build_root, build]))
        draft.add(root.root(draft, CONTROL_PLANE, _PACKAGES))
        plan = draft.plan()
        goals = [*builds, CONTROL_PLANE]
        work = Build(definition, lock, settings, store, monitor, staging, kinds())
        make(work, missing(plan, store, goals))
        store.record(CONTROL_PLANE, [s.id for s in plan.stages if store.has(s.id)])
    return [store.product(plan.stage(goal).id) for goal in goals]


def _lock(definition: ImageDefinition, shared: Lock, settings: Settings, staging: Path) -> Lock:
    """Return the control plane's lock; etcd's packages are the remembered ones while they fit the image."""
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
