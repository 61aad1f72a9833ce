"""Programs that Debian's archive doesn't have: today's Kubernetes and engines.

They are in the directory that IMAGE_BUILDER_PROGRAMS names. Without one, the tests that run them are skipped.
"""

from __future__ import annotations

import lzma
import os
import shutil
from pathlib import Path

import pytest

from image_builder.bake.lock.fetch import PROGRAMS

ABSENT = f"{PROGRAMS} names no directory of today's programs"
_NAMED = os.environ.get(PROGRAMS, "")
DIRECTORY: Path | None = Path(_NAMED).absolute() if _NAMED and Path(_NAMED).is_dir() else None
needs_programs = pytest.mark.skipif(DIRECTORY is None, reason=ABSENT)


def find(pattern: str) -> list[Path]:
    """Return the files of the directory that match a pattern, sorted; none without a directory."""
    return sorted(DIRECTORY.glob(pattern)) if DIRECTORY else []


def unpack(name: str, directory: Path) -> Path:
    """Unpack a program (``kubernetes-1.36.2/kubelet``) into a directory and return it; skips the test without it."""
    packed = find(f"{name}.xz")
    if not packed:
        pytest.skip(ABSENT)
    target = directory / Path(name).name
    with lzma.open(packed[0]) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    target.chmod(0o755)
    return target
