"""The plan of the tools tree: one for all images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.draft import FIXED_EPOCH, Draft
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import StageKind
from image_builder.canonical import JSON
from image_builder.definition import ImageDefinition

TOOLS = "tools"
# The first Debian with e2fsprogs >= 1.47.1 (SOURCE_DATE_EPOCH) and a systemd-repart that works offline.
SUITE = "trixie"
# What the stages base, preload_store, disk, convert and lab_images run. systemd-repart makes the disk and calls
# mkfs.ext4 (e2fsprogs), mkfs.vfat (dosfstools) and mcopy (mtools); sbverify proves signatures; fsck.* read back;
# veritysetup (cryptsetup-bin) makes hash trees; docker-registry is the lab's.
PACKAGES = (
    "cryptsetup-bin",
    "docker-registry",
    "dosfstools",
    "e2fsprogs",
    "erofs-utils",
    "mmdebstrap",
    "mtools",
    "qemu-utils",
    "sbsigntool",
    "systemd-repart",
    "tar",
    "util-linux",
    "xz-utils",
    "zstd",
)


def _needs(_definition: ImageDefinition) -> Requirements:
    return Requirements({TOOLS: Group(SUITE, PACKAGES)})


def root_options(draft: Draft, group: str, include: Iterable[str], epoch: int) -> dict[str, JSON]:
    """Return the options of a stage that makes a root of a group's packages."""
    locked = draft.lock.group(group)
    return {
        "suite": locked.suite,
        "architecture": draft.definition.base.architecture,
        "include": tuple(include),
        "packages": locked.digest,
        "source_date_epoch": epoch,
    }


def _plan(draft: Draft) -> Iterator[StagePlan]:
    options = root_options(draft, TOOLS, PACKAGES, FIXED_EPOCH)
    yield StagePlan(TOOLS, KIND.name, options, draft.code(KIND))


# The packages come in a repository that is made for the stage.
KIND = StageKind(
    TOOLS,
    "image_builder.bake.stages.tools.run",
    _plan,
    ("image_builder/bake/lock/repository.py",),
    needs=_needs,
)
