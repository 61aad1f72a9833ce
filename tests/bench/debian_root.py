"""A throwaway Debian 13 root from the host's own mirror, for programs and machines to compare ours with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from image_builder.bake.lock.apt import default_mirrors, host_mirrors
from image_builder.bake.lock.model import DEBIAN
from image_builder.system import namespace, process
from image_builder.system.trees import remove_tree

SUITE = "trixie"


@contextmanager
def debian_root(parent: Path, packages: Sequence[str]) -> Iterator[Path]:
    """Make a root with these packages below ``parent``; needs root and a network. It is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="bench-debian-", dir=parent))
    tree = folder / "tree"
    tree.mkdir(mode=0o755)
    folder.chmod(0o755)  # apt downloads as a user of its own
    mirror = host_mirrors().get(DEBIAN) or default_mirrors()[DEBIAN]
    argv = ["mmdebstrap", "--mode=root", "--variant=apt", f"--include={','.join(packages)}"]
    argv += ["--aptopt=APT::Install-Recommends false", "--dpkgopt=force-unsafe-io", SUITE]

    def make() -> int:
        process.run([*argv, tree, mirror], log=folder / "mmdebstrap.log")
        return 0

    try:
        if status := namespace.run_isolated(make):
            raise SystemExit(status)
        yield tree
    finally:
        remove_tree(folder)
