"""The plans of roots made only from packages: the tools tree, which all images share, an image's base, and the roots in
which something is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from image_builder.bake.lock.requirements import Group, Requirements
from image_builder.bake.plan.model import StagePlan
from image_builder.bake.stages.kind import FIXED_EPOCH, Draft, StageKind
from image_builder.definition import ImageDefinition

TOOLS, BASE = "tools", "base"
_MODULE = "image_builder.bake.stages.root.run"
# The first Debian with e2fsprogs >= 1.47.1 (SOURCE_DATE_EPOCH) and a systemd-repart that works offline.
_SUITE = "trixie"
# Programs that the stages base, preload_store, disk, convert and lab_images run. systemd-repart writes the partition
# table; mke2fs (e2fsprogs), mkfs.vfat (dosfstools) and mcopy (mtools) fill the partitions; e2fsck and mdir read them
# back; sbverify proves signatures; veritysetup (cryptsetup-bin) makes hash trees; docker-registry is the lab's.
_TOOLS = (
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
# The packages of an image's base besides the essential ones: systemd as its init, and what Ansible needs.
PACKAGES = (
    "ca-certificates",
    "dbus",
    "init-system-helpers",
    "kmod",
    "libpam-systemd",
    "netbase",
    "procps",
    "python3",
    "python3-apt",
    "systemd-sysv",
    "tzdata",
    "udev",
)


def root(draft: Draft, name: str, include: Iterable[str], epoch: int = FIXED_EPOCH) -> StagePlan:
    """Return the stage ``name``: a root of the locked packages of that group."""
    return _root(draft, BASE_KIND, name, include, epoch, {TOOLS: draft.id(TOOLS)})


def _root(
    draft: Draft, kind: StageKind, name: str, include: Iterable[str], epoch: int, inputs: Mapping[str, str]
) -> StagePlan:
    locked = draft.lock.group(name)
    options = {
        "suite": locked.suite,
        "architecture": draft.definition.base.architecture,
        "include": tuple(include),
        "packages": locked.digest,
        "source_date_epoch": epoch,
    }
    return StagePlan(name, kind.name, options, draft.code(kind), inputs=inputs)


def _tools_needs(_definition: ImageDefinition) -> Requirements:
    return Requirements({TOOLS: Group(_SUITE, _TOOLS)})


def _tools_plan(draft: Draft) -> Iterator[StagePlan]:
    yield _root(draft, TOOLS_KIND, TOOLS, _TOOLS, FIXED_EPOCH, {})


def _base_needs(definition: ImageDefinition) -> Requirements:
    base = definition.base
    return Requirements({BASE: Group(base.suite, PACKAGES, tuple(base.components))})


def _base_plan(draft: Draft) -> Iterator[StagePlan]:
    yield root(draft, BASE, PACKAGES, draft.lock.source_date_epoch)


TOOLS_KIND = StageKind(TOOLS, _MODULE, _tools_plan, needs=_tools_needs)
BASE_KIND = StageKind(BASE, _MODULE, _base_plan, needs=_base_needs)
