"""The program in a container of only Debian's archive and a package index: it builds, or names what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from image_builder.errors import HostError, StoreError
from image_builder.settings import REPO_ROOT
from tests.support.images.builds import Workplace
from tests.support.installed import build_wheel

# pip and apt take two minutes of a run.
pytestmark = [pytest.mark.root, pytest.mark.slow]
IMAGE, BASE = "localhost/image-builder", "localhost/base"
RIGHTS = ("--cap-add", "SYS_ADMIN,MKNOD")
# Some machines that run tests may not raise limits, as Podman does.
LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")


@dataclass(frozen=True)
class Containers:
    """Podman and Buildah with their own storage."""

    folder: Path

    def command(self, program: str, *argv: str | Path) -> list[str | Path]:
        places = ("--root", self.folder / "storage", "--runroot", self.folder / "run")
        return [program, *places, "--storage-driver", "vfs", *argv]

    def start(self, *options: str | Path, argv: tuple[str | Path, ...]) -> subprocess.CompletedProcess[str]:
        """Run the image with these ``podman run`` options and this command line for the program."""
        how = ("--runtime", "runc", "--cgroup-manager", "cgroupfs", "run", "--rm", "--network", "host")
        return subprocess.run(
            self.command("podman", *how, *LIMITS, *options, IMAGE, *argv),
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """Build packaging/Containerfile as docs/how-to/install.md describes, on a base from Debian's archive."""
    folder = tmp_path_factory.mktemp("containers")
    containers, context, base = Containers(folder), folder / "context", folder / "base.tar"
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", "trixie", base], check=True)
    subprocess.run(containers.command("podman", "import", "--quiet", base, BASE), check=True)
    for name in ("requirements.lock", "image_builder/system/host.txt"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO_ROOT / name, context / name)
    build_wheel(context / "dist")
    # The host's pip knows its package index and which CA to trust for it; the container's gets files.
    pip: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--quiet",
    ]
    which = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--python-version", "3.13")
    subprocess.run(
        [*pip, *which, "--dest", folder / "wheels", "-r", REPO_ROOT / "requirements.lock"], check=True
    )
    subprocess.run(
        containers.command(
            *("buildah", "build", "--isolation", "chroot", "--network", "host"),
            *("--volume", f"{folder / 'wheels'}:/wheels:ro"),
            *("--build-arg", "PIP_NO_INDEX=1", "--build-arg", "PIP_FIND_LINKS=/wheels"),
            *("--build-arg", f"BASE={BASE}", "--tag", IMAGE),
            *("--file", REPO_ROOT / "packaging/Containerfile", context),
        ),
        check=True,
    )
    yield containers
    subprocess.run(containers.command("buildah", "rmi", "--all", "--force"), check=True)


def test_without_rights_they_are_named(containers: Containers, tmp_path: Path) -> None:
    volume = ("--volume", f"{tmp_path}:/var/lib/image-builder")
    done = containers.start(*volume, argv=("build", "tiny"))
    assert done.returncode == HostError.exit_code
    assert "error: this process lacks CAP_SYS_ADMIN, CAP_MKNOD\n" in done.stderr
    assert "--cap-add SYS_ADMIN,MKNOD" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = containers.start(*volume, argv=("doctor",))
    assert done.returncode == HostError.exit_code and "lacks CAP_SYS_ADMIN" in done.stdout


def test_a_store_on_an_overlay_is_refused(containers: Containers, tmp_path: Path) -> None:
    """The store is on an overlay, as is the container's own root where Podman keeps its containers in overlays."""
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    overlay = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", overlay, tmp_path / "merged"], check=True)
    try:
        volume = ("--volume", f"{tmp_path}/merged:/var/lib/image-builder")
        done = containers.start(*RIGHTS, *volume, argv=("build", "tiny"))
    finally:
        subprocess.run(["umount", tmp_path / "merged"], check=True)
    assert done.returncode == StoreError.exit_code
    assert "is on overlay" in done.stderr and "in a container, on a volume" in done.stderr


def test_an_image_is_built(containers: Containers, tiny: Workplace, tmp_path: Path) -> None:
    """Two capabilities, a volume and a different Python are enough; the base is already in the store."""
    volumes = (
        *("--volume", f"{tiny.store}:/var/lib/image-builder"),
        *("--volume", f"{tmp_path}:/work/output"),
        *("--volume", f"{tiny.lock.parent}:/locks:ro"),
    )
    lock = ("--locked", Path("/locks") / tiny.lock.name)
    changed = ("-e", '{"system_limits": []}')  # a layer that no other test makes
    done = containers.start(*RIGHTS, *volumes, argv=("build", "tiny", *lock, *changed))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tiny/latest/manifest.json").is_file()
    assert "base " not in done.stderr and "verify" in done.stderr
