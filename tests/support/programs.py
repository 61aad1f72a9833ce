"""Programs of today's Kubernetes, which Debian's archive lacks: the directory that IMAGE_BUILDER_PROGRAMS names.

The directory has one folder for each version, ``kubernetes-1.36.2``, with programs packed by xz, and SHA256SUMS.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

VARIABLE = "IMAGE_BUILDER_PROGRAMS"
CONTROL_PLANE = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")
# The version that programs are of; a build from source writes it too.
VERSION_FILE = "VERSION"


def directory() -> Path | None:
    """Return the directory, None where the environment names none."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def control_plane_version(programs: Path) -> str:
    """Return the newest version of which the whole control plane is there, as `1.36.2`."""
    versions = [
        folder.name.removeprefix("kubernetes-")
        for folder in programs.glob("kubernetes-*")
        if all((folder / f"{name}.xz").is_file() for name in CONTROL_PLANE)
    ]
    return max(versions, key=lambda version: [int(number) for number in version.split(".")])


def unpack(programs: Path, version: str, names: Sequence[str], place: Path) -> Path:
    """Unpack programs of a version once into a directory below ``place``; return the directory.

    Each archive has the digest that SHA256SUMS says. Raises ValueError for one that doesn't.
    """
    unpacked = place / f"kubernetes-{version}"
    if unpacked.is_dir():
        return unpacked
    listed = (line.split(maxsplit=1) for line in (programs / "SHA256SUMS").read_text().splitlines())
    digests = {path: digest for digest, path in listed}
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        draft = Path(temporary) / "draft"
        draft.mkdir()
        for name in names:
            archive = programs / f"kubernetes-{version}" / f"{name}.xz"
            if (
                hashlib.sha256(archive.read_bytes()).hexdigest()
                != digests[f"./{archive.relative_to(programs)}"]
            ):
                raise ValueError(f"{archive}: SHA256SUMS has another digest")
            with lzma.open(archive) as packed, (draft / name).open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
            (draft / name).chmod(0o755)
        (draft / VERSION_FILE).write_text(f"{version}\n", encoding="utf-8")
        with suppress(OSError):  # another test was faster
            draft.rename(unpacked)
    return unpacked
