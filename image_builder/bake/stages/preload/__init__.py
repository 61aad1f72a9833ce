"""The plans of pulls: one for each engine whose data a node may get."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from image_builder.bake.lock.model import Image, Lock
from image_builder.bake.lock.requirements import Requirements
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import Draft, Need, Sizes, StageKind
from image_builder.bake.stages.layer import archive_digests
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition, resolved_variables
from image_builder.errors import LockError

PRELOAD = "preload"
# The layer that installs the container engine, and the snapshotters that images are baked for.
ENGINE_LAYER = "container_runtime"
_SNAPSHOTTERS = {"docker": "overlay2", "containerd": "overlayfs"}


def images(draft: Draft) -> list[Image]:
    """Return the images to preload as they are locked; raises LockError for one that isn't."""
    records = []
    for image in draft.definition.preload:
        locked = draft.lock.locked_image(image.ref)
        if locked is not None:
            mode = image.mode or draft.definition.preload_mode
            records.append(Image(**dict(locked), pin=image.pin, required=image.required, mode=mode))
        elif image.required or image.ref not in draft.lock.left_out:
            raise LockError(
                f"the lock of {draft.definition.name} has no digest for {image.ref}",
                hint="image-builder lock asks the registry",
            )
    return records


def unlocked(definition: ImageDefinition, lock: Lock) -> dict[str, str]:
    """Return the images that a build leaves out because its lock has no digest for them, each with that reason."""
    reason = "the lock has no digest for it"
    return {image.ref: reason for image in definition.preload if lock.locked_image(image.ref) is None}


def engines(definition: ImageDefinition) -> list[str]:
    """Return the engines whose data a node may get: the one that runs containers, then any others installed."""
    variables = resolved_variables(definition)
    first = str(variables["container_runtime_engine"])
    installed = variables.get("container_runtime_install") or []
    others = sorted({str(name) for name in installed} & set(_SNAPSHOTTERS) - {first})  # type: ignore[union-attr]
    return [first, *others]


def name_of(draft: Draft, engine: str) -> str:
    """Return the name of the stage that pulls with an engine."""
    return PRELOAD if engine == engines(draft.definition)[0] else f"{PRELOAD}_{engine}"


def _needs(definition: ImageDefinition) -> Requirements:
    return Requirements(
        preload=tuple(image.ref for image in definition.preload),
        optional=frozenset(image.ref for image in definition.preload if not image.required),
    )


def _plan(draft: Draft) -> Iterator[StagePlan]:
    """Yield the stages that pull; their ids cover the engine's packages and the images, but no roles.

    The first engine's images are listed for nodes and, unless the definition opts out, saved as an archive; those of
    further engines go only into the store.
    """
    for engine in engines(draft.definition):
        name = name_of(draft, engine)
        options: dict[str, JSON] = {
            "engine": engine,
            "snapshotter": _SNAPSHOTTERS[engine],
            "packages": draft.lock.group(ENGINE_LAYER).digest,
            "archives": archive_digests(draft.definition, ENGINE_LAYER),
            "images": [image.for_pull() for image in images(draft)],
            "list": name == PRELOAD,
            "save": name == PRELOAD and draft.definition.preload_archive,
        }
        yield StagePlan(
            name,
            KIND.name,
            options,
            draft.code(KIND),
            ground=draft.tree_ids,
            needs=tuple(stage.id for stage in draft.suppliers),
        )


def _space(stage: StagePlan, sizes: Sizes) -> Need:
    blobs = sizes.blobs if stage.options["engine"] == "containerd" else 0.0
    return Need(sizes.images + blobs + (sizes.archive if stage.options["save"] else 0.0))


def _shared(options: Mapping[str, Any], earlier: Mapping[str, Any]) -> int:
    """Return how many of the images an earlier pull of the same engine has; 0 if the engine was another one."""
    if any(earlier.get(key) != options[key] for key in ("engine", "snapshotter", "packages", "archives")):
        return 0
    digests = [{str(image["digest"]) for image in each["images"]} for each in (options, earlier)]
    return len(digests[0] & digests[1])


KIND = StageKind(
    PRELOAD,
    "image_builder.bake.stages.preload.run",
    _plan,
    needs=_needs,
    space=_space,
    shared=_shared,
    beside=True,
    pulls=True,
)
