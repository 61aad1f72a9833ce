"""Additions to the lab that ``slices`` needs: a container image of ansible-runner, and kubectl, from Debian packages.

The image is Debian's Python and OpenSSH client, with ansible-core and ansible-runner in this environment's versions:
those that `requirements.lock` names.
"""

from __future__ import annotations

import compileall
import io
import json
import os
import py_compile
import shutil
import sys
import tarfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.fetch import Download, fetch
from image_builder.bake.lock.requirements import keyring
from image_builder.lab import images, pause
from image_builder.settings import Settings
from image_builder.system import process
from tests.support.control_plane.programs import lab_definition

# The suite that the lab's Kubernetes is from: its kubectl matches its API server.
SUITE, PYTHON = "bookworm", (3, 11)
KUBECTL = "kubernetes-client"
PACKAGES = ("coreutils", "dash", "libc-bin", "openssh-client", "python3")
DISTRIBUTIONS = ("ansible-core", "ansible-runner")
# As on a worker: two programs, found by their path.
PROGRAMS = {"ansible-runner": "ansible_runner", "ansible-playbook": "ansible.cli.playbook"}
SETTINGS = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "LANG=C.UTF-8"]}
USER = 1000
# Left out: ansible-core's own tests, and the packages' documentation, which is useless in a container.
_LEFT_OUT = ("ansible_test/", "../")
_DOCUMENTS = ("doc", "man", "locale", "info", "lintian")
_ARCHITECTURE = "amd64"


def get_packages(settings: Settings, staging: Path) -> dict[str, Path]:
    """Return the .deb files by package: those of the image with all their dependencies, and kubectl's."""
    definition = lab_definition()
    mirror = settings.mirror or definition.base.mirror
    sources = debian_sources(SUITE, ("main",), keyring(definition), mirror)
    apt = Apt(staging / "apt", sources, _ARCHITECTURE)
    apt.update()
    found = [*apt.install(PACKAGES), *apt.files([KUBECTL])]
    where = {source.id: source.uri for source in sources}
    wanted = [Download(p.name, f"{where[p.repository]}/{p.path}", p.sha256, p.size) for p in found]
    files = fetch(wanted, settings.store / "debs", staging)
    return {package.name: files[package.sha256] for package in found}


def unpack_kubectl(deb: Path, work: Path) -> Path:
    """Return the path of the program, which needs nothing but a kernel."""
    process.run(["dpkg-deb", "--extract", deb, work])
    return work / "usr/bin/kubectl"


def write_archive(debs: list[Path], reference: str, work: Path, out: Path) -> None:
    """Make the image and write it to ``out`` in the format of ``docker load``."""
    tree = work / "tree"
    fill(tree, debs)
    layer = images.layer_from_tree(tree, work / "layer.tar.gz", process.run)
    image = images.make_image([layer], SETTINGS, ["ansible-runner"])
    config = pause.encode(image.config)
    name = f"{image.id.removeprefix('sha256:')}.json"
    listed = [{"Config": name, "Layers": [layer.path.name], "RepoTags": [reference]}]
    with tarfile.open(out, "w") as tar:
        for path, content in ((name, config), ("manifest.json", json.dumps(listed).encode())):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        tar.add(layer.path, layer.path.name)


def fill(tree: Path, debs: list[Path]) -> None:
    """Make the tree of the image: unpacked packages, Ansible, a user with a name."""
    for name in ("bin", "sbin", "lib", "lib64"):
        (tree / "usr" / name).mkdir(parents=True)
        (tree / name).symlink_to(f"usr/{name}")
    for deb in debs:
        process.run(["dpkg-deb", "--extract", deb, tree])
    for name in _DOCUMENTS:
        shutil.rmtree(tree / "usr/share" / name, ignore_errors=True)
    (tree / "etc/passwd").write_text(f"root:x:0:0::/:/bin/sh\nrunner:x:{USER}:{USER}::/work:/bin/sh\n")
    (tree / "etc/group").write_text(f"root:x:0:\nrunner:x:{USER}:\n")
    for name in ("proc", "sys", "dev", "tmp", "work"):
        (tree / name).mkdir(exist_ok=True)
    (tree / "bin/sh").unlink(missing_ok=True)
    (tree / "bin/sh").symlink_to("dash")
    place = tree / f"usr/local/lib/python{PYTHON[0]}.{PYTHON[1]}/dist-packages"
    for name in distributions():
        _copy(metadata.distribution(name), place)
    (tree / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    for name, module in PROGRAMS.items():
        program = tree / "usr/local/bin" / name
        program.write_text(f'#!/bin/sh\nexec python3 -m {module} "$@"\n')
        program.chmod(0o755)
    if sys.version_info[:2] == PYTHON:
        _compile(tree / "usr")


def distributions() -> list[str]:
    """Return the names of the distributions of Ansible and its runner, and of all their requirements."""
    found: dict[str, None] = {}
    ahead = list(DISTRIBUTIONS)
    while ahead:
        name = ahead.pop()
        if name not in found:
            found[name] = None
            required = map(Requirement, metadata.requires(name) or ())
            ahead += [r.name.lower() for r in required if not r.marker or r.marker.evaluate({"extra": ""})]
    return sorted(found)


def _copy(distribution: metadata.Distribution, place: Path) -> None:
    for file in distribution.files or ():
        name = os.fspath(file)
        if name.startswith(_LEFT_OUT) or "__pycache__" in file.parts:
            continue
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(distribution.locate_file(file), target)  # type: ignore[arg-type]


def _compile(tree: Path) -> None:
    """Compile what Python will import: a container's root is read-only, and an emulated machine is slow.

    A layer doesn't preserve timestamps, so they aren't checked.
    """
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for place in (tree / "lib/python3", tree / "local/lib", *tree.glob("lib/python3.*")):
        compileall.compile_dir(place, maxlevels=20, quiet=2, stripdir=tree.parent, invalidation_mode=mode)
