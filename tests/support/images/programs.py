"""Programs that Debian's archive doesn't have: current releases of Kubernetes and the container engines.

They are in the directory that IMAGE_BUILDER_PROGRAMS names. Without it, the tests that run them are skipped.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.bake.lock.fetch import PROGRAMS
from image_builder.settings import REPO_ROOT

ABSENT = f"{PROGRAMS} names no directory of today's programs"
_NAMED = os.environ.get(PROGRAMS, "")
DIRECTORY: Path | None = Path(_NAMED).absolute() if _NAMED and Path(_NAMED).is_dir() else None
needs_programs = pytest.mark.skipif(DIRECTORY is None, reason=ABSENT)


# Holds the version of the programs; a build from source writes it too.
VERSION_FILE = "VERSION"
CONTROL_PLANE = ("kube-apiserver", "kube-scheduler", "kube-controller-manager")


def find(pattern: str) -> list[Path]:
    """Return the files of the directory that match a pattern, sorted; none without a directory."""
    return sorted(DIRECTORY.glob(pattern)) if DIRECTORY else []


def role_variables(address: str) -> dict[str, Any]:
    """Return the variables with which layers install these programs from a directory served at ``address``, a URL."""
    current = yaml.safe_load((REPO_ROOT / "inventories/lab/group_vars/current.yml").read_text())
    source = current["current_programs"]["directory"]

    def offered(program: dict[str, str]) -> dict[str, str]:
        return {**program, "url": program["url"].replace("file:", f"{address}/")}

    return {
        "container_runtime_repository": {**source["repository"], "uris": [f"{address}/repository"]},
        "container_runtime_containerd_version": source["containerd"],
        "container_runtime_docker_version": current["container_runtime_docker_version"],
        "kubelet_version": current["kubelet_version"],
        "kubelet_source": offered(source["kubelet"]),
        "kubelet_crictl": offered(source["crictl"]),
    }


def unpack(name: str, directory: Path) -> Path:
    """Unpack a program (``kubernetes-1.36.2/kubelet``) into a directory; return its path. Skip the test without it."""
    packed = find(f"{name}.xz")
    if not packed:
        pytest.skip(ABSENT)
    target = directory / Path(name).name
    _unpack(packed[0], target)
    return target


def control_plane(directory: Path, place: Path) -> Path:
    """Unpack a directory's newest complete control plane, once, below ``place``; return the folder of its programs.

    Raises ValueError for an archive whose digest isn't the one in SHA256SUMS.
    """
    folders = [
        folder
        for folder in directory.glob("kubernetes-*")
        if all((folder / f"{name}.xz").is_file() for name in CONTROL_PLANE)
    ]
    folder = max(folders, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])
    version = folder.name.removeprefix("kubernetes-")
    unpacked = place / folder.name
    if unpacked.is_dir():
        return unpacked
    listed = (line.split(maxsplit=1) for line in (directory / "SHA256SUMS").read_text().splitlines())
    digests = {path: digest for digest, path in listed}
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as temporary:
        draft = Path(temporary) / "draft"
        draft.mkdir()
        for name in CONTROL_PLANE:
            archive = folder / f"{name}.xz"
            if (
                hashlib.sha256(archive.read_bytes()).hexdigest()
                != digests[f"./{archive.relative_to(directory)}"]
            ):
                raise ValueError(f"{archive}: SHA256SUMS has another digest")
            _unpack(archive, draft / name)
        (draft / VERSION_FILE).write_text(f"{version}\n", encoding="utf-8")
        with suppress(OSError):  # another test was faster
            draft.rename(unpacked)
    return unpacked


def _unpack(packed: Path, target: Path) -> None:
    with lzma.open(packed) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    target.chmod(0o755)
