"""Make a lock: resolve names to bytes, with apt, from the mirrors as they are now.

This is the only place that asks for the newest versions.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Mapping, Sequence
from functools import partial
from pathlib import Path

from image_builder.bake.lock.apt import Apt, Source, debian_sources
from image_builder.bake.lock.model import (
    DEBIAN,
    SECURITY,
    Lock,
    LockedGroup,
    LockedImage,
    LockedPackage,
    LockedSource,
)
from image_builder.bake.lock.requirements import Group, Requirements, keyring, node_network
from image_builder.bake.pull.credentials import credentials_for
from image_builder.bake.pull.model import MOST_LAYERS, too_deep
from image_builder.bake.pull.network import Endpoints, Mirrors
from image_builder.bake.pull.registry import locate
from image_builder.bake.store import Store
from image_builder.canonical import digest
from image_builder.definition import ImageDefinition, resolved_variables
from image_builder.errors import DefinitionError, FetchError, LockError, Problem, PullError
from image_builder.events import Monitor, shown_stage
from image_builder.settings import Settings


def resolve_lock(
    definition: ImageDefinition,
    needs: Requirements,
    settings: Settings,
    monitor: Monitor,
    previous: Lock | None = None,
) -> Lock:
    """Resolve everything that ``definition`` ``needs``. Raises FetchError, LockError, HostError.

    What ``previous`` answers stays as it is: an additional package is no reason to upgrade the others.
    """
    if definition.base.distribution != "debian":
        raise DefinitionError(
            [Problem("", "image_base.distribution", "only `debian` can be baked so far")],
        )
    store = Store(settings.store)
    store.prepare()
    with shown_stage(monitor, "lock"), store.staging() as staging:
        lock = _resolve(definition, needs, settings, monitor, staging, previous)
    before, _ = earlier_lock(definition.record_names, settings, replaced=True)
    for warning in (*lock.warnings, *(lock.older_than(before) if before else ())):
        monitor.note(f"warning: {warning}")
    return _with_the_date_of(lock, before)


def lock_images(definition: ImageDefinition, lock: Lock, endpoints: Endpoints, monitor: Monitor) -> Lock:
    """Return ``lock`` with each preloaded image's tag resolved; images that it already has stay as they are.

    Raises PullError if a required image isn't available, or an engine can't use it; any other is left out with a note.
    """
    images, left_out = [], []
    network = node_network(definition)
    variables = resolved_variables(definition) if definition.preload else {}
    engine, others = variables.get("container_runtime_engine"), variables.get("container_runtime_install")
    engines = [name for name in MOST_LAYERS if name == engine or name in (others or ())]  # type: ignore[operator]
    with shown_stage(monitor, "lock"):
        if engine == "docker":
            _note_logins(network.mirrors, monitor)
        for image in definition.preload:
            locked = lock.locked_image(image.ref)
            try:
                if locked is None or locked.platform != image.platform:
                    monitor.stage_doing("lock", f"asking for {image.ref}")
                    locked = locate(
                        image.ref,
                        image.platform,
                        endpoints,
                        network.mirrors,
                        network.outbound,
                        on_wait=partial(_note_wait, monitor, image.ref),
                    )
                for name in engines:
                    if reason := too_deep(name, locked):
                        raise PullError(f"{image.ref}: {reason}", hint="build it with fewer layers")
            except PullError as error:
                if image.required:
                    raise
                left_out.append(image.ref)
                monitor.note(f"left out, it is not required: {error.message}")
                continue
            images.append(locked)
        _note_shared_pins(definition, images, monitor)
    return lock.model_copy(update={"images": images, "left_out": left_out})


def _note_shared_pins(definition: ImageDefinition, images: Sequence[LockedImage], monitor: Monitor) -> None:
    """Note the pinned references that Docker can't protect, since they are not their image's only one.

    A node's guard keeps the image, but the kubelet removes an image by each of its names, and only the last one stays.
    """
    pinned = {image.ref for image in definition.preload if image.pin}
    if not pinned or resolved_variables(definition).get("container_runtime_engine") != "docker":
        return
    names: dict[str, list[str]] = {}
    for image in images:
        names.setdefault(image.config, []).append(image.ref)
    for refs in names.values():
        if len(refs) > 1 and (kept := sorted(pinned & set(refs))):
            monitor.note(
                f"warning: Docker can't protect {', '.join(kept)} from the kubelet's garbage collection, which "
                f"removes all names of an image but one until the next boot: {', '.join(sorted(refs))} are one image"
            )


def _note_logins(mirrors: Mirrors, monitor: Monitor) -> None:
    """Note the mirrors that a lock logs in to but Docker doesn't."""
    for mirror in itertools.chain.from_iterable(mirrors.values()):
        with contextlib.suppress(PullError):  # reported when the mirror is asked
            if credentials_for(mirror.host):
                monitor.note(
                    f"warning: Docker doesn't log in to mirrors: what it can't pull from {mirror.url} without a login,"
                    " it asks the registry for"
                )


def _note_wait(monitor: Monitor, ref: str, seconds: float) -> None:
    monitor.note(f"{ref}: waiting for {seconds:.0f} s, as its registry asks")


def remembered_lock(settings: Settings, name: str) -> Path:
    """Return where the store keeps the lock of the last build of an image, by its definition's ``record_name``."""
    return settings.store / "locks" / f"{name}.lock.json"


def earlier_lock(
    names: Sequence[str], settings: Settings, *, replaced: bool = False
) -> tuple[Lock | None, str]:
    """Return the lock that the store remembers under the first of an image's record ``names``, and that name.

    Returns None and the first name if there is no lock. Raises LockError if it is damaged, unless it is to be
    ``replaced``.
    """
    for name in names:
        with contextlib.suppress(*([LockError] if replaced else [])):
            if lock := Lock.remembered(remembered_lock(settings, name)):
                return lock, name
    return None, names[0]


def _with_the_date_of(lock: Lock, before: Lock | None) -> Lock:
    """Return a lock with the date of an earlier one if the base is the same.

    All files of a build carry that date, and the archive's date moves several times a day: a newer one would rebuild
    every layer, whether or not its packages have changed.
    """
    if (
        before is None
        or "base" not in before.groups
        or before.group("base").digest != lock.group("base").digest
    ):
        return lock
    return lock.model_copy(update={"source_date_epoch": before.source_date_epoch})


def _resolve(
    definition: ImageDefinition,
    needs: Requirements,
    settings: Settings,
    monitor: Monitor,
    staging: Path,
    previous: Lock | None,
) -> Lock:
    groups: dict[str, LockedGroup] = {}
    sources: dict[str, LockedSource] = {}
    repositories: dict[str, str | None] = {}
    epoch = previous.source_date_epoch if previous else 0
    dates = dict(previous.release_dates) if previous else {}
    for chain in _chains(needs):
        first = needs.groups[chain[0]]
        source_names = first.sources
        reused = _reusable(chain, needs, previous)
        if previous and len(reused) == len(chain) and all(name in previous.sources for name in source_names):
            groups |= reused
            sources |= {name: previous.sources[name] for name in source_names}
            repositories |= _repositories(previous, reused)
            continue
        monitor.stage_doing("lock", f"reading the package indices of {first.suite}")
        apt = Apt(
            staging / f"apt-{chain[0]}",
            _sources(definition, settings, needs.groups[chain[-1]], bool(source_names)),
            definition.base.architecture,
        )
        apt.update()
        dates |= apt.release_dates()
        if previous:
            apt.prefer(p for name in chain if name in previous.groups for p in previous.groups[name].packages)
        for name in chain:
            if name in reused and (
                gone := apt.mark_installed(reused[name].packages, settings.store / "debs")
            ):
                monitor.note(_why_again(name, gone))
                reused = {other: reused[other] for other in chain[: chain.index(name)]}
            if name in reused:
                groups[name] = reused[name]
            else:
                monitor.stage_doing("lock", f"resolving the packages of {name}")
                groups[name] = _group(apt, needs.groups[name], [groups[n] for n in needs.below(name)])
        for name in source_names:
            version, files = apt.source(name)
            sources[name] = LockedSource(suite=first.suite, version=version, files=files)
        if chain[0] == "base" and "base" not in reused:
            _require_debians(groups["base"])
            # A third-party repository is no reason to rebuild the base and the layers below its own.
            epoch = max(apt.release_dates({DEBIAN, SECURITY}).values())
        repositories.update({s.id: None if s.id in (DEBIAN, SECURITY) else s.uri for s in apt.sources})
    return Lock(
        image=definition.name,
        source_date_epoch=epoch,
        repositories=repositories,
        groups=groups,
        release_dates=dates,
        sources=sources,
        archives=list(needs.all_archives),
    )


def _reusable(chain: list[str], needs: Requirements, previous: Lock | None) -> dict[str, LockedGroup]:
    """Return the groups of a chain that a lock already answers, up to the first that has to be resolved again.

    That is the first whose request has changed, or one of whose packages no longer has an address.
    """
    reusable: dict[str, LockedGroup] = {}
    if previous is None:
        return reusable
    lost = previous.without_address
    for name in chain:
        group = previous.groups.get(name)
        if group is None or group.differences(needs.groups[name].question):
            break
        if any(package.repository in lost for package in group.packages) or not needs.is_based(
            previous, name
        ):
            break
        reusable[name] = group
    return reusable


def _why_again(name: str, gone: list[LockedPackage]) -> str:
    """Return why a locked group is resolved again: to resolve what is on top of it, apt must know what is installed."""
    named = ", ".join(f"{p.name} {p.version}" for p in gone[:3]) + (", …" if len(gone) > 3 else "")
    return (
        f"neither the mirror nor the store still has {named}: "
        f"the packages of {name} and of all layers on top are resolved again"
    )


def _repositories(previous: Lock, groups: Mapping[str, LockedGroup]) -> dict[str, str | None]:
    """Return the repositories that a lock's groups come from, and Debian's."""
    used = {DEBIAN, SECURITY, *(p.repository for group in groups.values() for p in group.packages)}
    return {name: uri for name, uri in previous.repositories.items() if name in used}


def _require_debians(base: LockedGroup) -> None:
    """Raise LockError if a layer's third-party repository would replace a package of the base."""
    foreign = [p for p in base.packages if p.repository not in (DEBIAN, SECURITY)]
    if foreign:
        named = ", ".join(f"{p.name} {p.version} of {p.repository}" for p in foreign)
        raise LockError(
            f"packages of the base would not be Debian's: {named}",
            hint="take the repository out, or use one that doesn't have newer versions of Debian's own packages",
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


def _group(apt: Apt, group: Group, below: Sequence[LockedGroup]) -> LockedGroup:
    names = list(group.names)
    packages: list[LockedPackage] = []
    if group.alone:
        packages += apt.files(names)
    elif group.after is None:
        packages += apt.install(["?essential", "apt", *names])
    elif names:
        packages += apt.install(names)
    return LockedGroup(
        **group.question.model_dump(), packages=packages, below=digest([locked.digest for locked in below])
    )


def _sources(
    definition: ImageDefinition, settings: Settings, group: Group, with_sources: bool
) -> list[Source]:
    mirror = settings.mirror or definition.base.mirror
    sources = debian_sources(
        group.suite, group.components, keyring(definition), mirror, with_sources=with_sources
    )
    for repository in group.repositories:
        sources += [
            Source(
                repository.name if len(repository.uris) == 1 else f"{repository.name}-{number}",
                uri,
                tuple(repository.suites),
                tuple(repository.components),
                repository.signed_by,
                place=definition.place_of(uri),
            )
            for number, uri in enumerate(repository.uris)
        ]
    return sources


def addresses(
    definition: ImageDefinition, settings: Settings, lock: Lock, used: Container[str]
) -> dict[str, str]:
    """Map a lock's repositories to where their files are fetched: from today's mirror, not the one used then.

    Raises FetchError if that is unknown for one that is ``used``; the others may have an empty address.
    """
    mirror = settings.mirror or definition.base.mirror
    uris = {
        s.id: s.uri for s in debian_sources(definition.base.suite, ("main",), keyring(definition), mirror)
    }
    where = {name: uri or uris.get(name, "") for name, uri in lock.repositories.items()}
    if unknown := sorted(name for name, address in where.items() if not address and name in used):
        raise FetchError(
            f"no mirror is known for {', '.join(unknown)}",
            hint="set image_base.mirror or the variable IMAGE_BUILDER_MIRROR; image-builder lock makes a new lock",
        )
    return where
