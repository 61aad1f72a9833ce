"""What a store remembers of an image from one build to the next: its lock, and the repository that it belongs to."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from image_builder.bake.lock.model import Lock, LockedImage
from image_builder.bake.lock.requirements import Requirements
from image_builder.bake.lock.resolve import earlier_lock, remembered_lock
from image_builder.bake.stages.kind import Supplier
from image_builder.definition import ImageDefinition
from image_builder.events import Monitor
from image_builder.node import files
from image_builder.settings import REPOSITORY_ID, Settings, repository_id


def remember(
    definition: ImageDefinition,
    needs: Requirements,
    lock: Lock,
    settings: Settings,
    supplier: Supplier,
    monitor: Monitor,
    *,
    resolved_on_request: bool = False,
) -> bool:
    """Remember the lock of a build, together with what an earlier one has that the definition doesn't need now.

    Another repository's lock stays as it is (see ``other_owner``). So does one that no longer fits because of ``-e``,
    unless the new one was ``resolved_on_request``. Returns whether builds of this definition count for the image.
    """
    if other_owner(definition, needs, settings):
        return False
    earlier, name = earlier_lock(definition.record_names, settings, replaced=resolved_on_request)
    merged = with_rest_of(lock, earlier, supplier) if earlier else lock
    if merged != earlier and earlier and definition.extra and not resolved_on_request:
        monitor.note(
            f"this lock isn't remembered, since -e may have changed what it is for: the one of {definition.name} stays"
        )
        return True
    if name != definition.record_name:
        inventory = os.fspath(definition.inventory_paths[0])
        monitor.note(f"the lock and the builds remembered of {definition.name} are now those of {inventory}")
    if merged != earlier or name != definition.record_name:
        merged.save(remembered_lock(settings, definition.record_name))
    # From before inventories counted. Under its other former names, repositories may share a lock.
    if name == definition.name:
        remembered_lock(settings, name).unlink(missing_ok=True)
    if not definition.extra or not _owner(settings, definition.record_name):
        _own(definition, needs, settings)
    return True


def other_owner(definition: ImageDefinition, needs: Requirements, settings: Settings) -> Path | None:
    """Return the repository that a lock belongs to if this one is a copy of it, which by now requires something else.

    Both have the same id, as two checkouts do. Those require the same.
    """
    record = _owner(settings, definition.record_name)
    if record.get("requirements") in (None, needs.digest):
        return None
    return living_owner(definition.record_name, definition.roots[0], settings)


def living_owner(name: str, project: Path, settings: Settings) -> Path | None:
    """Return another directory that has the repository's id, and whose builds the store remembers under ``name``."""
    record = _owner(settings, name)
    other = Path(str(record.get("repository", "")))
    key = repository_id(project)
    with suppress(OSError):  # gone, or not for this user to read
        if key and other.is_absolute() and repository_id(other) == key and not other.samefile(project):
            return other
    return None


def note_foreign(
    definition: ImageDefinition,
    needs: Requirements,
    settings: Settings,
    monitor: Monitor,
    *,
    lock_given: bool = False,
) -> None:
    """Note if this repository is a copy of which nothing is remembered.

    Otherwise note if only other repositories have a lock, unless there is a ``lock_given``.
    """
    if other := other_owner(definition, needs, settings):
        monitor.note(
            f"warning: {other} has the same id as this repository and other requirements: neither locks nor builds of"
            f" this one are remembered; give the copy an id of its own: uuidgen >{REPOSITORY_ID}"
        )
    elif not (lock_given or any(remembered_lock(settings, n).exists() for n in definition.record_names)):
        folder = settings.store / "locks"
        known = sorted(folder.glob(f"{definition.record_name.rpartition('-')[0]}-*.lock.json"))
        if known:
            monitor.note(
                f"no lock of {definition.name} is remembered for this repository, only for others"
                f" ({', '.join(path.name for path in known[:3])}{', …' if len(known) > 3 else ''} in {folder}):"
                " it gets a new one"
            )


def with_rest_of(lock: Lock, earlier: Lock, supplier: Supplier) -> Lock:
    """Return a lock with what an earlier one has besides: groups, source packages, archives, and images.

    Groups that were locked without what they stand on stay only if no group has changed.
    """
    same = all(earlier.groups[n].digest == g.digest for n, g in lock.groups.items() if n in earlier.groups)
    rest = {n: g for n, g in earlier.groups.items() if n not in lock.groups and (same or g.below)}
    archives = {(archive.url, archive.sha256): archive for archive in (*earlier.archives, *lock.archives)}
    images = {image.ref: image for image in (*still_meant(earlier, lock, supplier), *lock.images)}
    left_out = dict.fromkeys((*earlier.left_out, *lock.left_out))
    return lock.model_copy(
        update={
            "repositories": {**earlier.repositories, **lock.repositories} if rest else lock.repositories,
            "groups": {**lock.groups, **rest},
            "sources": {**earlier.sources, **lock.sources},
            "archives": list(archives.values()),
            "images": [image for ref, image in images.items() if ref not in lock.left_out],
            "left_out": [ref for ref in left_out if lock.locked_image(ref) is None],
        }
    )


def still_meant(earlier: Lock, lock: Lock, supplier: Supplier) -> list[LockedImage]:
    """Return an earlier lock's images that are still valid: a supplier's change with the packages they are made of."""
    name = supplier.kind.name
    same = name not in lock.groups or earlier.groups.get(name) == lock.groups[name]
    return [image for image in earlier.images if same or not supplier.has(image.ref)]


def _own(definition: ImageDefinition, needs: Requirements, settings: Settings) -> None:
    """Record whose the lock is, if the repository has an id, unless it is that of another checkout."""
    project, name = definition.roots[0], definition.record_name
    if repository_id(project) and not living_owner(name, project, settings):
        record = {"repository": os.fspath(project.resolve()), "requirements": needs.digest}
        files.write_changed(_owner_file(settings, name), json.dumps(record).encode())


def _owner_file(settings: Settings, name: str) -> Path:
    return settings.store / "locks" / f"{name}.repository.json"


def _owner(settings: Settings, name: str) -> dict[str, Any]:
    """Return the repository that built an image last, and the digest of its requirements; empty if unknown."""
    return files.read_json(_owner_file(settings, name))
