#!/usr/bin/env python3
"""Give the container engine the images that this node was baked with, before the kubelet asks for them.

The list says which references must be there and what they must mean; the archive holds them. What the engine
has already, whole and under the right names, is left alone. Otherwise the archive is checked and loaded, and
what the engine then has is looked at again. The engine is the only state.

Docker: ``docker image load`` restores tags alone, so a reference by digest can't be had. Nothing can be
pinned: cri-dockerd and dockershim spare the pause image that they were told, and no other.
containerd: an image gets a name by tag and one by digest, as after a pull; what is pinned is labelled so on
both, and the kubelet's garbage collection spares it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess  # noqa: TID251 (runs on the node, by itself)
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FORMAT = 1
TAIL_LINES = 20
CHUNK = 4 << 20
MANAGED = "io.cri-containerd.image=managed"
PINNED = "io.cri-containerd.pinned=pinned"


class PreloadError(Exception):
    """Something that an operator must see: what failed, and the output of what failed."""


@dataclass(frozen=True)
class Image:
    """What a reference means. Digests begin with ``sha256:``; ``digest`` may be an index's."""

    ref: str
    digest: str
    manifest: str
    id: str
    pin: bool
    diff_ids: tuple[str, ...]

    @property
    def by_digest(self) -> str:
        return f"{self.ref.rpartition(':')[0]}@{self.digest}"


@dataclass(frozen=True)
class Preload:
    """The list: where the archive is, its size in bytes, and the images in it."""

    engine: str
    archive: Path
    size: int
    sha256: str
    images: tuple[Image, ...]


class Engine(Protocol):
    def faults(self, images: Sequence[Image]) -> dict[str, str]:
        """Return what is wrong with the images themselves, by reference: loading would help."""

    def misnamed(self, images: Sequence[Image]) -> dict[str, str]:
        """Return names and labels that are missing, by reference."""

    def name(self, images: Sequence[Image]) -> None:
        """Add them."""

    def load(self, archive: Path) -> list[str]:
        """Return the command that loads the archive."""


# -- the list and the archive ----------------------------------------------------------------------------------


def read_list(path: Path, pause: str = "") -> Preload:
    """Read the list of images; the one called ``pause`` is pinned in any case. Raises PreloadError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise PreloadError(f"{path} has format {found['format']}, this program reads {FORMAT}")
        images = tuple(
            Image(
                str(image["ref"]),
                str(image["digest"]),
                str(image["manifest"]),
                str(image["id"]),
                bool(image["pin"]) or image["ref"] == pause,
                tuple(image["diff_ids"]),
            )
            for image in found["images"]
        )
        archive = found["archive"]
        return Preload(
            str(found["engine"]), Path(archive["path"]), int(archive["bytes"]), archive["sha256"], images
        )
    except OSError as error:
        raise PreloadError(f"{path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise PreloadError(
            f"{path} is not a list of preloaded images: {type(error).__name__}: {error}"
        ) from error


def check_archive(preload: Preload, tell: Callable[[str], None], interval: float) -> None:
    """Read the archive once; raises PreloadError unless it is the one that was baked."""
    digest, done, told = hashlib.sha256(), 0, time.monotonic()
    try:
        size = preload.archive.stat().st_size
        if size != preload.size:
            raise PreloadError(f"{preload.archive} is damaged: {size} bytes, not {preload.size}")
        with preload.archive.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                digest.update(chunk)
                done += len(chunk)
                if time.monotonic() - told >= interval:
                    told = time.monotonic()
                    tell(f"checking the archive: {portion(done, size)}")
    except OSError as error:
        raise PreloadError(f"{preload.archive}: {error.strerror}") from error
    found, wanted = digest.hexdigest(), preload.sha256.removeprefix("sha256:")
    if found != wanted:
        raise PreloadError(f"{preload.archive} is damaged: its sha256 is {found}, not {wanted}")


def portion(done: int, total: int) -> str:
    """Return how far something is, as text."""
    return f"{100 * done // max(total, 1)}% of {total / 1e9:.2f} GB"


# -- programs --------------------------------------------------------------------------------------------------


def run(argv: Sequence[str], absent: str = "") -> str | None:
    """Return a program's standard output, or None where it failed with the words ``absent``.

    Raises PreloadError with the command and the end of its output.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise PreloadError(f"{argv[0]}: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    if absent and absent.lower() in done.stderr.lower():
        return None
    raise PreloadError(failure(argv, done.returncode, done.stderr + done.stdout))


def failure(argv: Sequence[str], status: int, output: str) -> str:
    """Return what to say of a command that failed."""
    lines = output.strip().splitlines()[-TAIL_LINES:]
    return "\n  ".join([f"`{' '.join(argv)}` ended with {status}", *(lines or ["it said nothing"])])


def watch(argv: Sequence[str], archive: Path, tell: Callable[[str], None], interval: float) -> None:
    """Run a program that reads the archive and tell how far it is; raises PreloadError."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        except OSError as error:
            raise PreloadError(f"{argv[0]}: {error.strerror}") from error
        size, begun = archive.stat().st_size, False
        with child:
            try:
                while (status := _wait(child, interval)) is None:
                    position = read_position(child.pid, archive)
                    begun = begun or position is not None
                    tell(f"{stage(position, size, begun)}, {time.monotonic() - started:.0f} s")
            except BaseException:
                child.kill()
                raise
        output.seek(0)
        if status:
            raise PreloadError(failure(argv, status, output.read().decode("utf-8", "replace")))


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def stage(position: int | None, size: int, begun: bool) -> str:
    """Return what a program does with the archive. Read to its end, it is the engine's turn: it is silent."""
    if begun and (position is None or position >= size):
        return "unpacking the layers"
    return f"loading: {portion(position or 0, size)} read"


def read_position(pid: int, path: Path) -> int | None:
    """Return up to where a process has read a file that it has open; None where it hasn't."""
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.path.realpath(link) == os.path.realpath(path):
                info = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text(encoding="ascii")
                return int(info.splitlines()[0].removeprefix("pos:"))
    except (OSError, ValueError):
        pass  # it ended, or closed the file, while we looked
    return None


# -- Docker ----------------------------------------------------------------------------------------------------


class Docker:
    """Docker Engine, by its client."""

    def faults(self, images: Sequence[Image]) -> dict[str, str]:
        found = {}
        for image in images:
            answer = run(["docker", "image", "inspect", image.ref], absent="no such image")
            fault = "is missing" if answer is None else docker_fault(image, answer)
            if fault:
                found[image.ref] = fault
        return found

    def misnamed(self, images: Sequence[Image]) -> dict[str, str]:  # noqa: ARG002
        return {}  # see above: tags are all there is

    def name(self, images: Sequence[Image]) -> None:
        pass

    def load(self, archive: Path) -> list[str]:
        return ["docker", "image", "load", "--input", os.fspath(archive)]


def docker_fault(image: Image, answer: str, exists: Callable[[str], bool] = os.path.isdir) -> str:
    """Return what is wrong with an image by ``docker image inspect``, or nothing.

    Docker knows an image's layers from its configuration; that they are on the disk shows there alone.
    """
    inspected = json.loads(answer)[0]
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


# -- containerd ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """A name that containerd has: the digest that it leads to, and its labels as ``key=value``."""

    digest: str
    labels: frozenset[str]


@dataclass(frozen=True)
class Containerd:
    """containerd, by ctr."""

    namespace: str
    snapshotter: str = "overlayfs"
    patience: float = 5.0

    def ctr(self, *arguments: str, absent: str = "") -> str | None:
        return run(["ctr", "--namespace", self.namespace, *arguments], absent)

    def listed(self) -> dict[str, Listed]:
        return parse_list(self.ctr("images", "list") or "")

    def faults(self, images: Sequence[Image]) -> dict[str, str]:
        listed = self.listed()
        present = [image.ref for image in images if image.ref in listed]
        filters = [f'name=="{ref}"' for ref in present]
        checked = parse_check(
            (self.ctr("images", "check", "--snapshotter", self.snapshotter, *filters) or "")
            if filters
            else ""
        )
        faults = {image.ref: containerd_fault(image, listed, checked, self._content) for image in images}
        return {ref: fault for ref, fault in faults.items() if fault}

    def misnamed(self, images: Sequence[Image]) -> dict[str, str]:
        listed = self.listed()
        return {
            image.ref: f"lacks {', '.join(lacks)}"
            for image in images
            if (lacks := list(lacking(image, listed)))
        }

    def name(self, images: Sequence[Image]) -> None:
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

    def load(self, archive: Path) -> list[str]:
        # Without --digests: that makes names like import-2024-01-31@sha256:..., which nobody asks for.
        return [
            *("ctr", "--namespace", self.namespace, "images", "import"),
            *("--snapshotter", self.snapshotter, os.fspath(archive)),
        ]

    def _content(self, digest: str) -> dict[str, Any] | None:
        text = self.ctr("content", "get", digest, absent="not found")
        found: dict[str, Any] | None = None if text is None else json.loads(text)
        return found


def names(image: Image) -> tuple[str, ...]:
    """Return the names that pods use of an image."""
    return (image.ref, image.by_digest)


def labels(image: Image) -> frozenset[str]:
    """Return the labels that each of them has."""
    return frozenset([MANAGED, PINNED] if image.pin else [MANAGED])


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
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        labelled = words[-1].split(",") if words[-1] != "-" else []
        found[words[0]] = Listed(words[2], frozenset(labelled))
    return found


def parse_check(text: str) -> dict[str, str]:
    """Read ``ctr images check``: what is wrong with each image, or nothing.

    REF TYPE DIGEST STATUS SIZE UNPACKED; STATUS is like ``incomplete (1/3)``, UNPACKED true or false.
    """
    found = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if words[3] != "complete":
            found[words[0]] = f"has not all its content: {' '.join(words[3:5])}"
        else:
            found[words[0]] = "" if words[-1] == "true" else f"is not unpacked: {words[-1]}"
    return found


def containerd_fault(
    image: Image,
    listed: Mapping[str, Listed],
    checked: Mapping[str, str],
    content: Callable[[str], dict[str, Any] | None],
) -> str:
    """Return what is wrong with an image, or nothing. ``content`` returns an index or manifest by digest."""
    if image.ref not in listed:
        return "is missing"
    target = listed[image.ref].digest
    if target not in (image.digest, image.manifest):
        return f"is another image: {target}, not {image.digest}"
    if target != image.manifest:
        index = content(target) or {}
        if image.manifest not in [entry["digest"] for entry in index.get("manifests", [])]:
            return f"is without its manifest: {target} does not name {image.manifest}"
    manifest = content(image.manifest)
    if manifest is None:
        return f"is without its manifest: {image.manifest} is not there"
    if manifest["config"]["digest"] != image.id:
        return f"is another image: {manifest['config']['digest']}, not {image.id}"
    return checked.get(image.ref, "was not checked")


# -- all of it -------------------------------------------------------------------------------------------------


def bring(preload: Preload, engine: Engine, tell: Callable[[str], None], interval: float) -> dict[str, Any]:
    """Load what is missing and return what was done; ``problems`` are what is still wrong.

    Raises PreloadError.
    """
    lacking = engine.faults(preload.images)
    for ref, fault in lacking.items():
        tell(f"{ref} {fault}")
    if lacking:
        tell(f"{len(lacking)} of {len(preload.images)} images are loaded from {preload.archive}")
        check_archive(preload, tell, interval)
        watch(engine.load(preload.archive), preload.archive, tell, interval)
    faults = engine.faults(preload.images) if lacking else {}
    sound = [image for image in preload.images if image.ref not in faults]
    if engine.misnamed(sound):
        engine.name(sound)
        faults |= engine.misnamed(sound)
    return {
        "loaded": [ref for ref in lacking if ref not in faults],
        "bytes": preload.size if lacking else 0,
        "problems": [f"{ref} {fault}" for ref, fault in faults.items()],
    }


def write_status(path: Path, status: Mapping[str, Any]) -> None:
    """Write the summary as one line, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps(status) + "\n", encoding="utf-8")
    draft.replace(path)


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Load the container images that this node was baked with.")
    parser.add_argument("--engine", choices=("docker", "containerd"), required=True)
    parser.add_argument("--namespace", default="k8s.io", help="containerd's, of the images")
    parser.add_argument("--pause", default="", metavar="REF", help="the pause image, pinned in any case")
    parser.add_argument("--list", type=Path, default=Path("/opt/preloaded_docker_images.json"))
    parser.add_argument("--status", type=Path, default=Path("/run/image-preload/status.json"))
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between two lines of progress")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Return 0 when every image is there, whole and under its names."""
    options = parse_arguments(argv)

    def tell(text: str) -> None:
        sys.stdout.write(f"image-preload: {text}\n")
        sys.stdout.flush()

    engine: Engine = Docker() if options.engine == "docker" else Containerd(options.namespace)
    started = time.monotonic()
    number = 0
    status: dict[str, Any] = {"loaded": [], "bytes": 0}
    try:
        preload = read_list(options.list, options.pause)
        number = len(preload.images)
        if preload.engine != options.engine:
            raise PreloadError(f"{options.list} is for {preload.engine}, this node has {options.engine}")
        status = bring(preload, engine, tell, options.interval)
    except PreloadError as error:
        status["problems"] = [str(error)]
    seconds = round(time.monotonic() - started, 1)
    write_status(
        options.status,
        {"format": FORMAT, "engine": options.engine, "images": number, "seconds": seconds, **status},
    )
    for problem in status["problems"]:
        tell(f"FAILED: {problem}")
    if not status["problems"] and status["loaded"]:
        tell(f"loaded in {seconds} s: {', '.join(status['loaded'])}")
    elif not status["problems"]:
        tell(f"all {number} images are there already, nothing was loaded ({seconds} s)")
    return 1 if status["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
