"""Make a root from the locked packages with mmdebstrap(1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from image_builder.system.process import Completed


class Run(Protocol):
    """How to run a program: on the host, or in the tools tree."""

    def __call__(
        self,
        argv: Sequence[str],
        *,
        env: dict[str, str],
        log: Path,
        on_line: Callable[[str], None],
    ) -> Completed: ...


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
