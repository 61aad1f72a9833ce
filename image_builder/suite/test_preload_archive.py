"""The archive of preloaded images: the declared images are listed, and complete in the archive."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from preloaded import ARCHIVE, familiar, images, listed, plain
from suite import booted, differences, needs, nothing, offline, output
from testinfra.host import Host

V = dict[str, Any]
baked = needs("container_runtime", image_preload=bool)
saved = needs("container_runtime", image_preload=bool, image_preload_archive=True)

# Reads the archive once, on the target, so that gigabytes stay there. Prints each member's sha256 as stored and
# unpacked, the targets of links, and the content of small members.
_READER = """
import gzip, hashlib, json, sys, tarfile, zlib

class Archive:
    def __init__(self, path):
        self.file, self.size, self.digest = open(path, "rb"), 0, hashlib.sha256()
    def read(self, number=1 << 20):
        data = self.file.read(number)
        self.size += len(data)
        self.digest.update(data)
        return data

def member(stream, small):
    raw, plain, text = hashlib.sha256(), hashlib.sha256(), b""
    head = data = stream.read(1 << 20)
    unzip = zlib.decompressobj(31) if head[:2] == b"\\x1f\\x8b" else None
    while data:
        raw.update(data)
        text += data if small else b""
        while data:
            plain.update(unzip.decompress(data) if unzip else data)
            data = unzip.unused_data if unzip and unzip.eof else b""
            unzip = zlib.decompressobj(31) if data else unzip
        data = stream.read(1 << 20)
    return {"sha256": raw.hexdigest(), "plain": plain.hexdigest(), "text": text.decode("utf-8", "replace")}

archive, members = Archive(sys.argv[1]), {}
problem = ""
try:
    with tarfile.open(fileobj=archive, mode="r|") as tar:
        for info in tar:
            if info.isreg():
                members[info.name] = member(tar.extractfile(info), info.size < 1 << 20)
            elif info.issym() or info.islnk():
                members[info.name] = {"link": info.linkname, "hard": info.islnk()}
except (tarfile.TarError, zlib.error, OSError) as error:
    problem = f"{type(error).__name__}: {error}"
while archive.read():
    pass
print(json.dumps({"bytes": archive.size, "sha256": archive.digest.hexdigest(), "members": members,
                  "problem": problem}))
"""


def _archive(host: Host) -> dict[str, Any]:
    """Return the contents of the archive, read once for all checks of a target."""
    if not hasattr(host, "preload_archive"):
        host.preload_archive = json.loads(output(host, "python3 -c %s %s", _READER, ARCHIVE))
    actual: dict[str, Any] = host.preload_archive
    return actual


def _member(archive: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a member, or the target of a link (old versions of Docker store a shared layer as one)."""
    members = archive["members"]
    for _ in range(8):
        assert name in members, f"the archive has no {name} {archive['problem']}"
        actual: dict[str, Any] = members[name]
        if "link" not in actual:
            return actual
        name = actual["link"] if actual["hard"] else _relative(name, actual["link"])
    raise AssertionError(f"links of the archive lead nowhere: {name}")


def _relative(name: str, link: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / link).parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _json(archive: dict[str, Any], name: str) -> Any:
    text = _member(archive, name)["text"]
    try:
        return json.loads(text)
    except ValueError as error:
        raise AssertionError(f"{name} of the archive is not JSON: {error}") from error


def _entries(archive: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of the archive's manifest.json by reference."""
    entries = _json(archive, "manifest.json")
    return {tag: entry for entry in entries for tag in entry["RepoTags"] or []}


def _saved_image(archive: dict[str, Any], image: dict[str, Any]) -> dict[str, Any]:
    saved = _entries(archive)
    names = {image["ref"], familiar(image["ref"])} & saved.keys()
    assert names, f"the archive has no {image['ref']}, only {', '.join(saved) or 'nothing'}"
    return saved[names.pop()]


@offline
@booted
@baked
def test_preload_lists_what_is_declared(host: Host, v: V) -> None:
    """The list has every required image and no undeclared one, each for its platform and pinned as declared."""
    declared = {image["ref"]: image for image in v["image_preload"]}
    content = listed(host)
    actual = {image["ref"]: image for image in content["images"]}
    assert len(actual) == len(content["images"]), "an image is listed twice"
    nothing(differences({"engine": v["container_runtime_engine"]}, content))
    nothing(f"{ref} is not listed" for ref in declared if declared[ref]["required"] and ref not in actual)
    nothing(f"{ref} is listed, not declared" for ref in actual if ref not in declared)
    for ref, image in actual.items():
        expected = {key: declared[ref][key] for key in ("pin", "platform")}
        nothing(f"{ref}: {difference}" for difference in differences(expected, image))


@offline
@booted
@baked
def test_preload_archive_is_as_declared(host: Host, v: V) -> None:
    """The image has an archive of the preloaded images, and the list names it, if and only if that is declared."""
    actual = {"file": host.run("test -e %s", ARCHIVE).rc == 0, "list": listed(host)["archive"] is not None}
    nothing(differences(dict.fromkeys(actual, v["image_preload_archive"]), actual))


@offline
@saved
def test_preload_archive_is_the_recorded_one(host: Host) -> None:
    """The archive has the recorded size and sha256, and is a readable tar."""
    recorded, actual = listed(host)["archive"], _archive(host)
    assert actual["problem"] == "", actual["problem"]
    expected = {"bytes": recorded["bytes"], "sha256": plain(recorded["sha256"])}
    nothing(differences(expected, actual))
    assert recorded["path"] == ARCHIVE


@offline
@saved
def test_preload_archive_holds_every_image(host: Host) -> None:
    """Every listed reference is in the archive and refers to the listed image id there."""
    archive = _archive(host)
    for image in images(host):
        config = _saved_image(archive, image)["Config"]
        actual = _member(archive, config)["sha256"]
        assert actual == plain(image["id"]), f"{image['ref']} is {actual}, not {image['id']}"


@offline
@saved
def test_preload_images_are_complete(host: Host) -> None:
    """Every layer of every image is in the archive, unpacks, and is the one that the image's configuration names."""
    archive = _archive(host)
    for image in images(host):
        saved = _saved_image(archive, image)
        config = _json(archive, saved["Config"])
        named = config["rootfs"]["diff_ids"]
        assert named == image["diff_ids"], f"{image['ref']}: the list has other layers than the image"
        actual = [_member(archive, layer)["plain"] for layer in saved["Layers"]]
        assert actual == [plain(diff_id) for diff_id in named], f"{image['ref']} has damaged layers: {actual}"


@offline
@saved
def test_preload_images_are_of_their_platform(host: Host) -> None:
    """Every image is for the operating system and architecture that the list names."""
    archive = _archive(host)
    for image in images(host):
        config = _json(archive, _saved_image(archive, image)["Config"])
        actual = f"{config['os']}/{config['architecture']}"
        expected = "/".join(image["platform"].split("/")[:2])
        assert actual == expected, f"{image['ref']} is for {actual}, not {expected}"
