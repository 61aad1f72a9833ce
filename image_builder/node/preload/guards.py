"""Guards: a stopped container for each pinned image, which keeps Docker from deleting the image.

Docker knows no pinned images, and the kubelet, dockershim and cri-dockerd ask it to delete what no pod uses. They
ask without force, and then an image that has a container stays (moby daemon/images/image_delete.go): "conflict:
unable to remove repository reference". The container is never started: it costs an empty directory and no mount.
The shims look at containers with labels of Kubernetes alone, so nobody deletes it as a pod's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from image_builder.node import child
from image_builder.node.preload.engine import PATIENCE
from image_builder.node.preload.images import Image

LABEL = "image-builder.pin=1"
PREFIX = "preload-pin-"
# What it would run. It must be named, since an image may be without a command, and need not exist.
_COMMAND = "never-started"


def name(image: Image) -> str:
    """Return the name of an image's guard: one for all references of an image id."""
    return f"{PREFIX}{image.id.removeprefix('sha256:')[:12]}"


def needs_guard(image: Image, pause: str) -> bool:
    """Tell whether an image has a guard. The pause image needs none: cri-dockerd or the kubelet was told of it."""
    return image.pin and image.ref != pause


def faults(images: Iterable[Image], pause: str, existing: Iterable[str]) -> dict[str, str]:
    """Return who lacks a guard, by reference, and which guards are left of other images, by their names."""
    names = set(existing)
    guarded = [image for image in images if needs_guard(image, pause)]
    lacking = {image.ref: "has no container that guards it" for image in guarded if name(image) not in names}
    surplus = sorted(names - {name(image) for image in guarded})
    return lacking | dict.fromkeys(surplus, "guards an image that is not pinned")


def listed() -> list[str]:
    """Return the names of all guards, stopped ones included. Raises ProgramError."""
    argv = ["docker", "container", "ls", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
    return child.run(argv, timeout=PATIENCE).stdout.split()


def creation(guard: str, ref: str, volumes: Iterable[str]) -> list[str]:
    """Return the command that makes a guard.

    A volume that the image declares would be filled with a copy of what the image has there; a memory
    filesystem in its place exists only while a container runs.
    """
    places = [f"--mount=type=tmpfs,destination={volume}" for volume in volumes]
    return [
        *("docker", "container", "create", "--pull=never", f"--name={guard}", f"--label={LABEL}"),
        *("--network=none", "--log-driver=none", *places, ref, _COMMAND),
    ]


def create(guard: str, ref: str, volumes: Mapping[str, object] | Sequence[str]) -> None:
    """Make a guard; raises ProgramError."""
    child.run(creation(guard, ref, volumes), timeout=PATIENCE)


def remove(guard: str) -> None:
    """Remove a guard; raises ProgramError."""
    child.run(["docker", "container", "rm", guard], timeout=PATIENCE)
