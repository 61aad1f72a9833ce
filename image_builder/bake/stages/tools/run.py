"""The tools tree: the programs that make roots and disks, of one release, the same on every host.

``mmdebstrap --variant=apt`` of Debian 13; nothing of it is in any image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from image_builder.bake.lock.mmdebstrap import mmdebstrap
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.system import process
from image_builder.system.sandbox import open_overlay


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Make ``product/tree`` with the host's mmdebstrap, from the locked packages only."""
    assert ctx.repo is not None
    options = ctx.plan.options
    tree = ctx.product / "tree"
    tree.mkdir()
    with open_overlay([], ctx.work / "target", upper=tree) as target:
        mmdebstrap(
            process.run,
            os.fspath(target),
            suite=str(options["suite"]),
            architecture=str(options["architecture"]),
            include=[str(name) for name in options["include"]],  # type: ignore[union-attr]
            repo=os.fspath(ctx.repo),
            epoch=int(options["source_date_epoch"]),  # type: ignore[arg-type]
            log=ctx.log,
            doing=ctx.doing,
        )
    return {}
