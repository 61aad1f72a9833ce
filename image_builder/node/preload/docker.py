"""Docker Engine, by its client.

``docker image load`` restores only tags: a reference by digest can be had only of what the seed gave.

A guard is a stopped container for each pinned image, which keeps Docker from deleting the image.

Docker knows no pinned images, and the kubelet, dockershim and cri-dockerd ask it to delete what no pod uses. They
ask without force, and then an image that has a container stays (moby daemon/images/image_delete.go): "conflict:
unable to remove repository reference". The container is never started: it costs an empty directory and no mount.
The shims look at containers with labels of Kubernetes alone, so nobody deletes it as a pod's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import child
from image_builder.node.preload.images import PATIENCE, EngineState, together
from image_builder.node.store import Image

_ABSENT = "no such image"
GUARD_LABEL = "image-builder.pin=1"
GUARD_PREFIX = "preload-pin-"
# What it would run. It must be named, since an image may be without a command, and need not exist.
_COMMAND = "never-started"


@dataclass(frozen=True)
class Docker:
    """``pause`` is the image that the kubelet's own garbage collection spares: it needs no guard."""

    pause: str = ""

    def look(self, images: Sequence[Image]) -> EngineState:
        inspected, guarded = together(lambda: inspect([image.ref for image in images]), list_guards)
        faults, digestless = {}, {}
        for image in images:
            details = inspected.get(familiar(image.ref))
            if fault := "is missing" if details is None else docker_fault(image, details):
                faults[image.ref] = fault
            elif details is not None and (fault := digest_fault(image, details)):
                digestless[image.ref] = fault
        return EngineState(faults, guard_faults(images, self.pause, guarded), digestless)

    def name(self, images: Sequence[Image], misnamed: Mapping[str, str]) -> None:
        for name in misnamed:
            if name.startswith(GUARD_PREFIX):
                child.run(["docker", "container", "rm", name], timeout=PATIENCE)
        # Of several references of one image the first brings the guard.
        by_guard = {guard_name(image): image.ref for image in images if image.ref in misnamed}
        inspected = inspect(list(by_guard.values()))
        for name, ref in by_guard.items():
            volumes = (inspected[familiar(ref)].get("Config") or {}).get("Volumes") or {}
            child.run(guard_creation(name, ref, volumes), timeout=PATIENCE)

    def forget(self, images: Sequence[Image]) -> None:
        """Do nothing: what Docker has on record is taken out while it is stopped (``seed.lost``)."""

    def load(self, archive: Path) -> list[str]:
        return ["docker", "image", "load", "--input", os.fspath(archive)]


def inspect(refs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return what Docker says of each image that it has, by every tag of it. Raises ProgramError.

    One program for all: it prints those that are there, and names the others on its standard error.
    """
    if not refs:
        return {}
    argv = ["docker", "image", "inspect", *refs]
    done = child.run(argv, ok=(0, 1), timeout=PATIENCE)
    others = [line for line in done.stderr.splitlines() if line.strip() and _ABSENT not in line.lower()]
    if done.status and (others or not done.stderr.strip()):
        output = "\n".join(others)
        raise child.failed(argv, done.status, output)
    return {tag: image for image in json.loads(done.stdout) for tag in image.get("RepoTags") or []}


def familiar(ref: str) -> str:
    """Return a reference as Docker writes it: its own registry goes without saying."""
    return ref.removeprefix("docker.io/").removeprefix("library/") if ref.startswith("docker.io/") else ref


def docker_fault(
    image: Image, inspected: Mapping[str, Any], exists: Callable[[str], bool] = os.path.isdir
) -> str:
    """Return what is wrong with an image by ``docker image inspect``, or nothing.

    Docker knows an image's layers from its configuration; that they are on the disk shows there alone. A seeded
    layer is a link into the preload store, and lost where the link leads nowhere.
    """
    if inspected["Id"] != image.id:
        return f"is another image: {inspected['Id']}, not {image.id}"
    layers = tuple(inspected["RootFS"].get("Layers") or ())
    if layers != image.diff_ids:
        return f"has other layers: {', '.join(layers) or 'none'}"
    gone = [folder for folder in layer_folders(inspected) if not exists(folder)]
    return f"has lost layers: {', '.join(gone)}" if gone else ""


def layer_folders(inspected: Mapping[str, Any]) -> list[str]:
    """Return where an image's layers are, the uppermost first."""
    data = (inspected.get("GraphDriver") or {}).get("Data") or {}
    return [
        folder for key in ("UpperDir", "LowerDir") for folder in (data.get(key) or "").split(":") if folder
    ]


def digest_fault(image: Image, inspected: Mapping[str, Any]) -> str:
    """Return that an image can't be had by its digest, or nothing."""
    digests = inspected.get("RepoDigests") or []
    if familiar(image.by_digest) in digests:
        return ""
    return f"has no digest {image.digest}, only {', '.join(digests) or 'its tag'}"


# -- guards ----------------------------------------------------------------------------------------------------


def guard_name(image: Image) -> str:
    """Return the name of an image's guard: one for all references of an image id."""
    return f"{GUARD_PREFIX}{image.id.removeprefix('sha256:')[:12]}"


def needs_guard(image: Image, pause: str) -> bool:
    """Tell whether an image has a guard. The pause image needs none: cri-dockerd or the kubelet was told of it."""
    return image.pin and image.ref != pause


def guard_faults(images: Iterable[Image], pause: str, existing: Iterable[str]) -> dict[str, str]:
    """Return who lacks a guard, by reference, and which guards are left of other images, by their names."""
    names = set(existing)
    guarded = [image for image in images if needs_guard(image, pause)]
    lacking = {
        image.ref: "has no container that guards it" for image in guarded if guard_name(image) not in names
    }
    surplus = sorted(names - {guard_name(image) for image in guarded})
    return lacking | dict.fromkeys(surplus, "guards an image that is not pinned")


def list_guards() -> list[str]:
    """Return the names of all guards, stopped ones included. Raises ProgramError."""
    argv = [
        "docker",
        "container",
        "ls",
        "--all",
        "--filter",
        f"label={GUARD_LABEL}",
        "--format",
        "{{.Names}}",
    ]
    return child.run(argv, timeout=PATIENCE).stdout.split()


def guard_creation(guard: str, ref: str, volumes: Iterable[str]) -> list[str]:
    """Return the command that makes a guard.

    A volume that the image declares would be filled with a copy of what the image has there; a memory
    filesystem in its place exists only while a container runs.
    """
    places = [f"--mount=type=tmpfs,destination={volume}" for volume in volumes]
    return [
        *("docker", "container", "create", "--pull=never", f"--name={guard}", f"--label={GUARD_LABEL}"),
        *("--network=none", "--log-driver=none", *places, ref, _COMMAND),
    ]
