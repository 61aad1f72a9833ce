"""A root made only from packages: a distribution's essential ones, apt, and the names in ``options.include``.

The tools tree is such a root: it has the programs that make roots and disks, from one release and the same on every
host, and no part of it is in any image. The host's mmdebstrap(1) makes it, and the mmdebstrap in it makes all others:
the image's base, and the roots in which Debian sources are built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from image_builder.bake.lock import repository
from image_builder.bake.stages import StageContext
from image_builder.canonical import JSON
from image_builder.system import process
from image_builder.system.process import Completed
from image_builder.system.sandbox import open_overlay, open_root

_TARGET = "/mnt"


Run = Callable[..., Completed]
"""How to run a program: on the host, or in the tools tree."""


def run(ctx: StageContext) -> Mapping[str, JSON]:
    """Make ``product/tree`` from the locked packages only."""
    assert ctx.repo is not None
    tree = ctx.product / "tree"
    tree.mkdir()
    with open_overlay([], ctx.work / "target", upper=tree) as target:
        if "tools" not in ctx.inputs:
            _fill(ctx, process.run, os.fspath(target), os.fspath(ctx.repo))
            return {}
        with open_root(
            [ctx.inputs["tools"] / "tree"],
            ctx.work / "tools",
            binds={repository.MOUNT_POINT: ctx.repo},
            writable_binds={_TARGET: target},
        ) as tools:
            _fill(ctx, tools.run, _TARGET, repository.MOUNT_POINT)
    return {}


def _fill(ctx: StageContext, run: Run, target: str, repo: str) -> None:
    options = ctx.plan.options
    mmdebstrap(
        run,
        target,
        suite=options["suite"],
        architecture=options["architecture"],
        include=options["include"],
        repo=repo,
        epoch=options["source_date_epoch"],
        log=ctx.log,
        doing=ctx.doing,
    )


def mmdebstrap(
    run: Run,
    target: str,
    *,
    suite: str,
    architecture: str,
    include: Sequence[str],
    repo: str,
    epoch: int,
    log: Path,
    doing: Callable[[str], None],
) -> None:
    """Fill the empty directory ``target`` with the essential packages, apt and ``include``.

    ``target`` and ``repo`` (a flat repository) are paths as ``run`` sees them. Neither package lists nor
    sources are left in the tree. Raises CommandError.
    """

    def show(line: str) -> None:
        if line.startswith("I: "):
            doing(line[3:].rstrip("."))

    argv = [
        "mmdebstrap",
        "--mode=root",
        "--variant=apt",
        f"--architectures={architecture}",
        f"--include={','.join(include)}",
        "--aptopt=APT::Install-Recommends false",
        "--aptopt=Acquire::Languages none",
        "--dpkgopt=force-unsafe-io",
        '--setup-hook=mkdir -p "$1/etc/apt/sources.list.d"',
        '--customize-hook=rm -f "$1/etc/apt/sources.list" "$1/etc/hostname" "$1/etc/resolv.conf"',
        '--customize-hook=rm -f "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1/etc/dpkg/dpkg.cfg.d/99mmdebstrap"',
        suite,
        target,
        f"deb [trusted=yes] copy:{repo} ./",
    ]
    run(argv, env={"SOURCE_DATE_EPOCH": str(epoch)}, log=log, on_line=show)
