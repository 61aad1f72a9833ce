"""containerd, by ctr.

An image gets a name by tag and one by digest, as after a pull; what is pinned is labelled so on both, and the
kubelet's garbage collection spares it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import child, files
from image_builder.node.data_root import BLOBS, scan
from image_builder.node.errors import ProgramError
from image_builder.node.preload.images import PATIENCE, EngineState, together
from image_builder.node.store import Image, chain

MANAGED = "io.cri-containerd.image=managed"
PINNED = "io.cri-containerd.pinned=pinned"


@dataclass(frozen=True)
class Listed:
    """A name that containerd has: the digest that it leads to, and its labels as ``key=value``."""

    digest: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Containerd:
    """``data_root`` is containerd's ``root``; ``patience`` are the seconds that the CRI plugin gets for new names."""

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
        faults, misnamed = {}, {}
        broken = scan(self.data_root, "containerd").broken
        for image in images:
            fault = containerd_fault(image, listed, checked, self._content)
            if fault := fault or lost_fault(image, broken):
                faults[image.ref] = fault
            elif lacks := list(lacking(image, listed)):
                misnamed[image.ref] = f"lacks {', '.join(lacks)}"
        return EngineState(faults, misnamed)

    def name(self, images: Sequence[Image], misnamed: Mapping[str, str]) -> None:
        images = [image for image in images if image.ref in misnamed]
        listed = self.listed()
        for image in images:
            if not leads_to(listed, image.by_digest, listed[image.ref].digest):
                self.ctr("images", "tag", "--force", image.ref, image.by_digest)
        # The CRI plugin hears of new names, labels them and names the image by its id as well. Where we were
        # faster it would leave that out, so it goes first.
        deadline = time.monotonic() + self.patience
        every = {name for image in images for name in names(image)}
        while time.monotonic() < deadline:
            listed = self.listed()
            if all(name in listed and MANAGED in listed[name].labels for name in every):
                break
            time.sleep(0.1)
        for image in images:
            for name in names(image):
                if missing := labels(image) - listed[name].labels:
                    self.ctr("images", "label", name, *sorted(missing))

    def forget(self, images: Sequence[Image]) -> None:
        """Take out lost layers with all that keeps them on record, or an import would take them for unpacked.

        That is every image that has one of them, pulled ones too, and every container above one, as a reboot leaves
        them. A container that runs stays, and so do its layers. Raises ProgramError.
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
            # --sync collects the garbage before it returns: then the layers are off the disk, too.
            self.ctr("images", "remove", "--sync", *gone)

    def load(self, archive: Path) -> list[str]:
        # Without --digests: that makes names like import-2024-01-31@sha256:..., which nobody asks for.
        return [
            *("ctr", "--namespace", self.namespace, "images", "import"),
            *("--snapshotter", self.snapshotter, os.fspath(archive)),
        ]

    def _content(self, digest: str) -> dict[str, Any]:
        """Return an index or manifest; empty where containerd has none, or one that is damaged.

        Read from the disk: two programs less for each image. That containerd knows of it is what
        ``images check`` says.
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
        """Return what the content store has on the disk under a digest; None where it has nothing, or other bytes."""
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
    """Return the names that pods use of an image."""
    return (image.ref, image.by_digest)


def labels(image: Image) -> frozenset[str]:
    """Return the labels that each of them has."""
    return frozenset([MANAGED, PINNED] if image.pin else [MANAGED])


def lost_fault(image: Image, broken: Set[str]) -> str:
    """Return that layers of an image are links to where nothing is, or nothing. ``broken`` is as of ``scan``."""
    lost = [diff_id for diff_id in image.diff_ids if diff_id.removeprefix("sha256:") in broken]
    return f"has lost layers: {', '.join(lost)}" if lost else ""


def leads_to(listed: Mapping[str, Listed], name: str, digest: str) -> bool:
    """Tell whether containerd has a name and it leads to a digest."""
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
    """Read ``ctr images list``: REF TYPE DIGEST SIZE PLATFORMS LABELS. A size is two words."""
    listed = {}
    for line in text.splitlines()[1:]:
        fields = line.split()
        labelled = fields[-1].split(",") if fields[-1] != "-" else []
        listed[fields[0]] = Listed(fields[2], frozenset(labelled))
    return listed


def parse_snapshots(text: str) -> dict[str, str]:
    """Read ``ctr snapshots list``: KEY PARENT KIND. Returns each key's parent, empty for a lowest one."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return {fields[0]: fields[-2] if len(fields) > 2 else "" for fields in rows}


def stands_on(key: str, lost: Set[str], parents: Mapping[str, str]) -> bool:
    """Tell whether a snapshot is a lost one, or above one."""
    while key and key not in lost:
        key = parents.get(key, "")
    return bool(key)


def parse_check(text: str) -> dict[str, str]:
    """Read ``ctr images check``: what is wrong with each image, or nothing.

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


def containerd_fault(
    image: Image,
    listed: Mapping[str, Listed],
    checked: Mapping[str, str],
    content: Callable[[str], dict[str, Any]],
) -> str:
    """Return what is wrong with an image, or nothing. ``content`` returns an index or manifest by digest."""
    if image.ref not in listed:
        return "is missing"
    target = listed[image.ref].digest
    if target not in (image.digest, image.manifest):
        return f"is another image: {target}, not {image.digest}"
    if target != image.manifest:
        index = content(target)
        if image.manifest not in [entry["digest"] for entry in index.get("manifests", [])]:
            return f"is without its manifest: {target} does not name {image.manifest}"
    manifest = content(image.manifest)
    if not manifest:
        return f"is without its manifest: {image.manifest} is not there or damaged"
    if manifest["config"]["digest"] != image.id:
        return f"is another image: {manifest['config']['digest']}, not {image.id}"
    return checked.get(image.ref, "was not checked")
