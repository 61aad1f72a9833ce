"""containerd, through ctr.

An image gets a name by tag and one by digest, as after a pull; both names of a pinned image are labeled as pinned, so
that the kubelet's garbage collection spares it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from image_builder.node import child, files
from image_builder.node.data_root import BLOBS, scan
from image_builder.node.errors import ProgramError
from image_builder.node.preload.images import PATIENCE, EngineState, attempt_each, together
from image_builder.node.store import Image, chain

MANAGED = "io.cri-containerd.image=managed"
PINNED = "io.cri-containerd.pinned=pinned"


@dataclass(frozen=True)
class Listed:
    """An image name in containerd: the digest that it refers to, and its labels as ``key=value``."""

    digest: str
    labels: frozenset[str]


INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)


@dataclass(frozen=True)
class Containerd:
    """``data_root`` is containerd's ``root``; ``patience`` is how long the CRI plugin gets for new names (seconds)."""

    namespace: str
    data_root: Path
    snapshotter: str = "overlayfs"
    patience: float = 5.0

    def ctr(self, *arguments: str) -> str:
        return child.run(["ctr", "--namespace", self.namespace, *arguments], timeout=PATIENCE).stdout

    def listed(self) -> dict[str, Listed]:
        return parse_list(self.ctr("images", "list"))

    def look(self, images: Sequence[Image]) -> EngineState:
        filters = [f'name=="{image.ref}"' for image in images]
        check = ("images", "check", "--snapshotter", self.snapshotter, *filters)
        listed, text = together(self.listed, lambda: self.ctr(*check) if filters else "")
        checked = parse_check(text)
        faults: dict[str, str] = {}
        misnamed: dict[str, str] = {}
        unpinned: dict[str, str] = {}
        broken = scan(self.data_root, "containerd").broken
        for image in images:
            fault = containerd_fault(image, listed, checked, self._content)
            if fault := fault or lost_fault(image, broken):
                faults[image.ref] = fault
            elif lacks := list(lacking(image, listed)):
                is_named = not any(lacking(replace(image, pin=False), listed))
                (unpinned if is_named else misnamed)[image.ref] = f"lacks {', '.join(lacks)}"
        return EngineState(faults, misnamed, unpinned)

    def name(self, images: Sequence[Image], lacks: Mapping[str, str]) -> dict[str, str]:
        images = [image for image in images if image.ref in lacks]
        listed = self.listed()
        ctr = ["ctr", "--namespace", self.namespace, "images"]
        failures = attempt_each(
            (image.ref, [*ctr, "tag", "--force", image.ref, image.by_digest])
            for image in images
            if not leads_to(listed, image.by_digest, listed[image.ref].digest)
        )
        # The CRI plugin notices new names, labels them, and also names the image by its id. If we added the labels
        # first, it would skip that, so let it go first.
        deadline = time.monotonic() + self.patience
        every = {name for image in images for name in names(image)}
        while time.monotonic() < deadline:
            listed = self.listed()
            if all(name in listed and MANAGED in listed[name].labels for name in every):
                break
            time.sleep(0.1)
        return failures | attempt_each(
            (image.ref, [*ctr, "label", name, *sorted(missing)])
            for image in images
            for name in names(image)
            if name in listed and (missing := labels(image) - listed[name].labels)
        )

    def forget(self, images: Sequence[Image]) -> None:
        """Remove lost layers with everything that refers to them, or an import would consider them unpacked.

        That is every image that has one of them, even if it was pulled, and every container above one, as left behind
        by a reboot. A running container stays, and so do its layers. Raises ProgramError.
        """
        broken = scan(self.data_root, "containerd").broken
        lost = {
            layer.chain for image in images for layer in chain(image.diff_ids) if layer.diff_id[7:] in broken
        }
        if not lost:
            return
        snapshots = parse_snapshots(self.ctr("snapshots", "--snapshotter", self.snapshotter, "list"))
        containers = self.ctr("containers", "list", "--quiet").split()
        # CRI and ctr name a container's snapshot after the container.
        if ended := [name for name in containers if stands_on(name, lost, snapshots)]:
            child.run(
                ["ctr", "--namespace", self.namespace, "containers", "delete", *ended],
                ok=(0, 1),
                timeout=PATIENCE,
            )
        listed = self.listed()
        digests = {listed[i.ref].digest for i in images if i.ref in listed and lost_fault(i, broken)}
        digests |= {entry.digest for entry in listed.values() if self._chains(entry.digest) & lost}
        if gone := [name for name, entry in listed.items() if entry.digest in digests]:
            # --sync collects garbage before it returns, so that the layers are off the disk, too.
            self.ctr("images", "remove", "--sync", *gone)

    def load(self, archive: Path) -> list[str]:
        # Without --digests, which would create names like import-2024-01-31@sha256:..., which nothing uses.
        return [
            *("ctr", "--namespace", self.namespace, "images", "import"),
            *("--snapshotter", self.snapshotter, os.fspath(archive)),
        ]

    def _content(self, digest: str) -> dict[str, Any]:
        """Return an index or manifest; empty if containerd has none, or a damaged one.

        Read it from the disk if possible, which saves starting two programs for each image. ``images check`` says
        whether containerd itself knows of it.
        """
        data = self._blob(digest)
        if data is None:
            try:
                data = self.ctr("content", "get", digest).encode()
            except ProgramError as error:
                if "not found" in error.tail.lower():
                    return {}
                raise
        return files.json_object(data)

    def _blob(self, digest: str) -> bytes | None:
        """Return the content store's blob with a digest from the disk; None if it is missing or doesn't match."""
        algorithm, _, hexadecimal = digest.partition(":")
        try:
            data = (self.data_root / BLOBS / hexadecimal).read_bytes()
        except OSError:
            return None
        return data if algorithm == "sha256" and hashlib.sha256(data).hexdigest() == hexadecimal else None

    def _chains(self, digest: str) -> set[str]:
        """Return the chain ids of an image's layers, for each platform whose manifest is on the disk."""
        document = files.json_object(self._blob(digest) or b"")
        if "manifests" in document:
            return {chain_id for entry in document["manifests"] for chain_id in self._chains(entry["digest"])}
        config = files.json_object(self._blob((document.get("config") or {}).get("digest", "")) or b"")
        return {layer.chain for layer in chain((config.get("rootfs") or {}).get("diff_ids") or [])}


def names(image: Image) -> tuple[str, ...]:
    """Return the names by which pods refer to an image."""
    return (image.ref, image.by_digest)


def labels(image: Image) -> frozenset[str]:
    """Return the labels that each of an image's names must have."""
    return frozenset([MANAGED, PINNED] if image.pin else [MANAGED])


def lost_fault(image: Image, broken: Set[str]) -> str:
    """Return the fault that an image's layers are broken links, or an empty string. ``broken`` is from ``scan``."""
    lost = [diff_id for diff_id in image.diff_ids if diff_id.removeprefix("sha256:") in broken]
    return f"has lost layers: {', '.join(lost)}" if lost else ""


def leads_to(listed: Mapping[str, Listed], name: str, digest: str) -> bool:
    """Return whether containerd has a name and it refers to this digest."""
    return name in listed and listed[name].digest == digest


def lacking(image: Image, listed: Mapping[str, Listed]) -> Iterable[str]:
    """Yield the names and labels that an image lacks."""
    target = listed[image.ref].digest if image.ref in listed else image.digest
    for name in names(image):
        if not leads_to(listed, name, target):
            yield f"the name {name}"
        elif missing := labels(image) - listed[name].labels:
            yield f"{', '.join(sorted(missing))} on {name}"


def parse_list(text: str) -> dict[str, Listed]:
    """Parse ``ctr images list``: REF TYPE DIGEST SIZE PLATFORMS LABELS. A size is two words."""
    listed = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        labelled = fields[-1].split(",") if fields[-1] != "-" else []
        listed[fields[0]] = Listed(fields[2], frozenset(labelled))
    return listed


def parse_snapshots(text: str) -> dict[str, str]:
    """Parse ``ctr snapshots list``: KEY PARENT KIND. Return each key's parent, empty for a bottom layer."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return {fields[0]: fields[-2] if len(fields) > 2 else "" for fields in rows}


def stands_on(key: str, lost: Set[str], parents: Mapping[str, str]) -> bool:
    """Return whether a snapshot is lost, or above a lost one."""
    while key and key not in lost:
        key = parents.get(key, "")
    return bool(key)


def parse_check(text: str) -> dict[str, str]:
    """Parse ``ctr images check``; return each image's fault, or an empty string.

    REF TYPE DIGEST STATUS SIZE UNPACKED; STATUS is like ``incomplete (1/3)``, UNPACKED true or false.
    """
    faults = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        if fields[3] != "complete":
            faults[fields[0]] = f"has not all its content: {' '.join(fields[3:5])}"
        else:
            faults[fields[0]] = "" if fields[-1] == "true" else f"is not unpacked: {fields[-1]}"
    return faults


def _named(index: str, content: Callable[[str], dict[str, Any]]) -> Iterable[str]:
    """Yield the manifests that an index names, and those of the indexes in it."""
    for entry in content(index).get("manifests", []):
        yield entry["digest"]
        if entry.get("mediaType") in INDEXES:
            yield from _named(entry["digest"], content)


def containerd_fault(
    image: Image,
    listed: Mapping[str, Listed],
    checked: Mapping[str, str],
    content: Callable[[str], dict[str, Any]],
) -> str:
    """Return an image's fault, or an empty string. ``content`` returns an index or manifest by digest."""
    if image.ref not in listed:
        return "is missing"
    target = listed[image.ref].digest
    if target not in (image.digest, image.manifest):
        return f"is another image: {target}, not {image.digest}"
    if target != image.manifest and image.manifest not in _named(target, content):
        return f"is without its manifest: {target} does not name {image.manifest}"
    manifest = content(image.manifest)
    if not manifest:
        return f"is without its manifest: {image.manifest} is not there or damaged"
    if manifest["config"]["digest"] != image.id:
        return f"is another image: {manifest['config']['digest']}, not {image.id}"
    return checked.get(image.ref, "was not checked")
