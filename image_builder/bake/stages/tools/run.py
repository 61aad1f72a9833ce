"""The tools tree: the programs that make roots and disks, of one release, the same on every host.

``mmdebstrap --variant=apt`` of Debian 13 with ``TOOLS_PACKAGES``; nothing of it is in any image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from image_builder.bake.lock.mmdebstrap import mmdebstrap
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.system import process
from image_builder.system.sandbox import open_overlay

# The first Debian with e2fsprogs >= 1.47.1 (SOURCE_DATE_EPOCH) and a systemd-repart that works offline.
SUITE = "trixie"
# What the stages base, preload_store, disk, convert and lab_images run. systemd-repart makes the disk and calls
# mkfs.ext4 (e2fsprogs), mkfs.vfat (dosfstools) and mcopy (mtools); sbverify proves signatures; fsck.* read back;
# veritysetup (cryptsetup-bin) makes hash trees; docker-registry is the lab's.
TOOLS_PACKAGES = (
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


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Make ``product/tree`` with the host's mmdebstrap, from the locked packages alone."""
    assert ctx.repo is not None
    options = ctx.plan.options
    tree = ctx.product / "tree"
    tree.mkdir()
    with open_overlay([], ctx.work / "target", upper=tree) as target:
        mmdebstrap(
            process.run,
            os.fspath(target),
            suite=SUITE,
            architecture=str(options["architecture"]),
            include=[str(name) for name in options["include"]],  # type: ignore[union-attr]
            repo=os.fspath(ctx.repo),
            epoch=int(options["source_date_epoch"]),  # type: ignore[arg-type]
            log=ctx.log,
            doing=ctx.doing,
        )
    return {}
