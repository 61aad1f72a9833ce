"""Docker Engine, through its client.

``docker image load`` restores only tags: only images from the seed can be referred to by digest.

A guard is a stopped container for each pinned image, which keeps Docker from deleting the image.

Docker has no concept of pinned images, and the kubelet, dockershim and cri-dockerd request the deletion of images that
no pod uses. They do so without force, and then an image that has a container stays (moby
daemon/images/image_delete.go): "conflict: unable to remove repository reference". The container is never started: it
costs an empty directory and no mount. The shims only consider containers with Kubernetes labels, so they don't delete
it as a pod's.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import child
from image_builder.node.preload.images import PATIENCE, EngineState, attempt_each, together
from image_builder.node.store import Image

_ABSENT = "no such image"
GUARD_LABEL = "image-builder.pin=1"
GUARD_PREFIX = "preload-pin-"
# The command that it would run: required, since an image may have no command of its own, but it need not exist.
_COMMAND = "never-started"


@dataclass(frozen=True)
class Docker:
    """``pause`` is the image that the kubelet's garbage collection spares anyway: it needs no guard."""

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
        return EngineState(faults, {}, guard_faults(images, self.pause, guarded), digestless)

    def name(self, images: Sequence[Image], lacks: Mapping[str, str]) -> dict[str, str]:
        surplus = [name for name in lacks if name.startswith(GUARD_PREFIX)]
        commands = [(name, ["docker", "container", "rm", name]) for name in surplus]
        # Several references to one image share a guard.
        by_guard = {guard_name(image): image.ref for image in images if image.ref in lacks}
        inspected = inspect(list(by_guard.values()))
        for name, ref in by_guard.items():
            volumes = (inspected[familiar(ref)].get("Config") or {}).get("Volumes") or {}
            commands.append((ref, guard_creation(name, ref, volumes)))
        return attempt_each(commands)

    def forget(self, images: Sequence[Image]) -> None:
        """Do nothing: Docker's records are removed while it is stopped (``seed.lost``)."""

    def load(self, archive: Path) -> list[str]:
        return ["docker", "image", "load", "--input", os.fspath(archive)]


def inspect(refs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return Docker's description of each image that it has, by each of its tags. Raises ProgramError.

    A single program for all images: it prints those that exist, and reports the others on its standard error.
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
    """Return a reference as Docker writes it, without the name of its own registry."""
    return ref.removeprefix("docker.io/").removeprefix("library/") if ref.startswith("docker.io/") else ref


def docker_fault(
    image: Image, inspected: Mapping[str, Any], exists: Callable[[str], bool] = os.path.isdir
) -> str:
    """Return an image's fault according to ``docker image inspect``, or an empty string.

    Docker takes an image's layers from its configuration; only the disk shows whether they are there. A seeded layer is
    a link into the preload store, and is lost if the link leads nowhere.
    """
    if inspected["Id"] != image.id:
        return f"is another image: {inspected['Id']}, not {image.id}"
    layers = tuple(inspected["RootFS"].get("Layers") or ())
    if layers != image.diff_ids:
        return f"has other layers: {', '.join(layers) or 'none'}"
    gone = [folder for folder in layer_folders(inspected) if not exists(folder)]
    return f"has lost layers: {', '.join(gone)}" if gone else ""


def layer_folders(inspected: Mapping[str, Any]) -> list[str]:
    """Return the directories of an image's layers, topmost first."""
    data = (inspected.get("GraphDriver") or {}).get("Data") or {}
    return [
        folder for key in ("UpperDir", "LowerDir") for folder in (data.get(key) or "").split(":") if folder
    ]


def digest_fault(image: Image, inspected: Mapping[str, Any]) -> str:
    """Return the fault that an image can't be referred to by its digest, or an empty string."""
    digests = inspected.get("RepoDigests") or []
    if familiar(image.by_digest) in digests:
        return ""
    return f"has no digest {image.digest}, only {', '.join(digests) or 'its tag'}"


# -- guards ----------------------------------------------------------------------------------------------------


def guard_name(image: Image) -> str:
    """Return the name of an image's guard: one for all references of an image id."""
    return f"{GUARD_PREFIX}{image.id.removeprefix('sha256:')[:12]}"


def needs_guard(image: Image, pause: str) -> bool:
    """Return whether an image needs a guard. The pause image doesn't: cri-dockerd or the kubelet knows it."""
    return image.pin and image.ref != pause


def guard_faults(images: Iterable[Image], pause: str, existing: Iterable[str]) -> dict[str, str]:
    """Return the faults: images without a guard, by reference, and surplus guards of other images, by name."""
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
    """Return the command that creates a guard.

    Docker would fill a volume that the image declares with a copy of the image's files there; a tmpfs in its place
    exists only while a container runs. A mount's path must be absolute and takes the place of a volume only if that
    one's is: a relative path gets a volume in any container. The working directory and the signal, which Docker checks,
    are not the image's.
    """
    absolute = [volume for volume in volumes if volume.startswith("/")]
    places = sorted({f"/{posixpath.normpath(volume).lstrip('/')}" for volume in absolute})
    return [
        *("docker", "container", "create", "--pull=never", f"--name={guard}", f"--label={GUARD_LABEL}"),
        *("--network=none", "--log-driver=none", "--workdir=/", "--stop-signal=SIGTERM"),
        *(f"--mount=type=tmpfs,{_quoted(f'destination={place}')}" for place in places),
        *(ref, _COMMAND),
    ]


def _quoted(field: str) -> str:
    """Return a field of a mount, which the client reads as a line of CSV (RFC 4180)."""
    return '"{}"'.format(field.replace('"', '""'))
