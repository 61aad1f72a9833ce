"""A root from packages only: a distribution's essential ones, apt, and the names in ``options.include``.

The image's base is one, and so is the root in which Debian sources are built.
"""

from __future__ import annotations

from collections.abc import Mapping

from image_builder.bake.lock import repository
from image_builder.bake.lock.mmdebstrap import mmdebstrap
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.system.sandbox import open_overlay, open_root

_TARGET = "/mnt"


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Make ``product/tree`` with the tools tree's mmdebstrap, from the locked packages only."""
    assert ctx.repo is not None
    options = ctx.plan.options
    tree = ctx.product / "tree"
    tree.mkdir()
    with (
        open_overlay([], ctx.work / "target", upper=tree) as target,
        open_root(
            [ctx.inputs["tools"] / "tree"],
            ctx.work / "tools",
            binds={repository.MOUNT_POINT: ctx.repo},
            writable_binds={_TARGET: target},
        ) as tools,
    ):
        mmdebstrap(
            tools.run,
            _TARGET,
            suite=str(options["suite"]),
            architecture=str(options["architecture"]),
            include=[str(name) for name in options["include"]],  # type: ignore[union-attr]
            repo=repository.MOUNT_POINT,
            epoch=int(options["source_date_epoch"]),  # type: ignore[arg-type]
            log=ctx.log,
            doing=ctx.doing,
        )
    return {}
