"""Make a lock: resolve names to bytes, with apt, from the mirrors as they are now.

The one place that asks what is newest.
"""

from __future__ import annotations

import time
from pathlib import Path

from image_builder.apt import Apt, Source, debian_sources
from image_builder.definition import ImageDefinition
from image_builder.errors import DefinitionError, ImageBuilderError, LockError, Problem, PullError
from image_builder.events import Monitor
from image_builder.lock import Lock, LockedGroup, LockedPackage, LockedSource
from image_builder.pull.registry import Endpoints, locate
from image_builder.requirements import Group, Requirements, keyring, requirements
from image_builder.settings import Settings
from image_builder.store import Store


def resolve_lock(definition: ImageDefinition, settings: Settings, monitor: Monitor) -> Lock:
    """Resolve everything that ``definition`` needs. Raises FetchError, LockError, HostError."""
    if definition.base.distribution != "debian":
        raise DefinitionError(
            [Problem("", "image_base.distribution", "only `debian` can be baked so far")],
        )
    store = Store(settings.store)
    store.prepare()
    needs = requirements(definition)
    started = time.monotonic()
    monitor.stage_started("lock")
    try:
        with store.staging() as staging:
            lock = _resolve(definition, needs, settings, monitor, staging)
    except ImageBuilderError:
        monitor.stage_failed("lock", time.monotonic() - started)
        raise
    monitor.stage_finished("lock", time.monotonic() - started, cached=False)
    return _unless_the_same(lock, remembered_lock(settings, definition.name))


def lock_images(definition: ImageDefinition, lock: Lock, endpoints: Endpoints, monitor: Monitor) -> Lock:
    """Return ``lock`` with what each preloaded image's tag means now; what it knows already stays as it is.

    Raises PullError for a required image that can't be had; any other is left out, and told.
    """
    images, left_out = [], []
    started = time.monotonic()
    monitor.stage_started("lock")
    try:
        for wanted in definition.preload:
            locked = lock.locked_image(wanted.ref)
            if locked is None or locked.platform != wanted.platform:
                monitor.stage_doing("lock", f"asking for {wanted.ref}")
                try:
                    locked = locate(wanted.ref, wanted.platform, endpoints)
                except PullError as error:
                    if wanted.required:
                        raise
                    left_out.append(wanted.ref)
                    monitor.note(f"left out, it is not required: {error.message}")
                    continue
            images.append(locked)
    except ImageBuilderError:
        monitor.stage_failed("lock", time.monotonic() - started)
        raise
    monitor.stage_finished("lock", time.monotonic() - started, cached=False)
    return lock.model_copy(update={"images": images, "left_out": left_out})


def remembered_lock(settings: Settings, image: str) -> Path:
    """Return where the store keeps the lock of an image's last build."""
    return settings.store / "locks" / f"{image}.lock.json"


def _unless_the_same(lock: Lock, remembered: Path) -> Lock:
    """Return the remembered lock when only the archive's date moved on: the same bytes, the same ids."""
    try:
        before = Lock.load(remembered)
    except LockError:
        return lock
    same = before == lock.model_copy(
        update={
            "source_date_epoch": before.source_date_epoch,
            "images": before.images,
            "left_out": before.left_out,
        }
    )
    epoch = before.source_date_epoch if same else lock.source_date_epoch
    return lock.model_copy(update={"source_date_epoch": epoch})


def _resolve(
    definition: ImageDefinition, needs: Requirements, settings: Settings, monitor: Monitor, staging: Path
) -> Lock:
    groups: dict[str, LockedGroup] = {}
    sources: dict[str, LockedSource] = {}
    repositories: dict[str, str | None] = {}
    epoch = 0
    for chain in _chains(needs):
        first = needs.groups[chain[0]]
        source_packages = [name for name, suite in needs.sources.items() if suite == first.suite]
        monitor.stage_doing("lock", f"reading the package indices of {first.suite}")
        apt = Apt(
            staging / f"apt-{chain[0]}",
            _sources(definition, settings, needs.groups[chain[-1]], bool(source_packages)),
            definition.base.architecture,
        )
        apt.update()
        for name in chain:
            monitor.stage_doing("lock", f"resolving the packages of {name}")
            groups[name] = _group(apt, needs.groups[name])
        if chain[0] == "build_root":
            for name in source_packages:
                version, files = apt.source(name)
                sources[name] = LockedSource(suite=first.suite, version=version, files=files)
        if chain[0] == "base":
            epoch = apt.release_date()
        repositories.update({s.id: None if s.id.startswith("debian") else s.uri for s in apt.sources})
    return Lock(
        image=definition.name,
        source_date_epoch=epoch,
        repositories=repositories,
        groups=groups,
        sources=sources,
        archives=list(needs.all_archives),
    )


def _chains(needs: Requirements) -> list[list[str]]:
    """Return the groups in chains, each group installed on top of the one before."""
    chains: list[list[str]] = []
    for name, group in needs.groups.items():
        if group.after is None:
            chains.append([name])
        else:
            next(c for c in chains if c[-1] == group.after).append(name)
    return chains


def _group(apt: Apt, group: Group) -> LockedGroup:
    names = list(group.names)
    packages: list[LockedPackage] = []
    if group.alone:
        packages += apt.files(names)
    elif group.after is None:
        packages += apt.install(["?essential", "apt", *names])
    elif names:
        packages += apt.install(names)
    return LockedGroup(**group.question.model_dump(), packages=packages)


def _sources(
    definition: ImageDefinition, settings: Settings, group: Group, with_sources: bool
) -> list[Source]:
    mirror = settings.mirror or definition.base.mirror
    found = debian_sources(
        group.suite, group.components, keyring(definition), mirror, with_sources=with_sources
    )
    for repository in group.repositories:
        found += [
            Source(
                repository.name if len(repository.uris) == 1 else f"{repository.name}-{number}",
                uri,
                tuple(repository.suites),
                tuple(repository.components),
                repository.signed_by,
            )
            for number, uri in enumerate(repository.uris)
        ]
    return found


def addresses(definition: ImageDefinition, settings: Settings, lock: Lock) -> dict[str, str]:
    """Map the repositories of a lock to where their files are fetched: the mirror now, not the one then."""
    mirror = settings.mirror or definition.base.mirror
    known = {
        s.id: s.uri for s in debian_sources(definition.base.suite, ("main",), keyring(definition), mirror)
    }
    return {name: uri or known.get(name, "") for name, uri in lock.repositories.items()}
