"""Images that are odd in one way each: layers, files, indexes and configurations as tools other than ours make them."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from image_builder.lab import pause
from image_builder.lab.registry import HOST
from tests.support.registries.pulls import Lab
from tests.support.registries.raw_images import (
    CONFIG,
    LAYER,
    Descriptor,
    RawRepository,
    describe,
    index,
    manifest,
    zstd,
)

# The capability of ping, as in a layer's tar: effective cap_net_raw (VFS_CAP_REVISION_2, linux/capability.h).
_CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
_ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, permissions, number)
    for tag, permissions, number in (
        (1, 6, 0xFFFFFFFF),
        (2, 4, 1234),
        (4, 4, 0xFFFFFFFF),
        (16, 4, 0xFFFFFFFF),
        (32, 0, 0xFFFFFFFF),
    )
)
Entry = tarfile.TarInfo
Layers = list[bytes]


def entry(
    name: str,
    kind: bytes = tarfile.REGTYPE,
    *,
    data: bytes = b"",
    mode: int = 0o644,
    owner: int = 0,
    time: float = 1_600_000_000,
    target: str = "",
    device: tuple[int, int] = (0, 0),
    attributes: Mapping[str, bytes] | None = None,
) -> tuple[Entry, bytes]:
    """Return an entry of a layer and its content."""
    made = tarfile.TarInfo(name)
    made.type, made.mode, made.mtime, made.linkname = kind, mode, time, target
    made.uid = made.gid = owner
    made.devmajor, made.devminor = device
    made.size = len(data)
    made.pax_headers = {
        f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape")
        for key, value in (attributes or {}).items()
    }
    return made, data


def folder(name: str, mode: int = 0o755, owner: int = 0, **more: Any) -> tuple[Entry, bytes]:
    return entry(name, tarfile.DIRTYPE, mode=mode, owner=owner, **more)


def link(name: str, target: str) -> tuple[Entry, bytes]:
    return entry(name, tarfile.SYMTYPE, target=target)


def layer(*entries: tuple[Entry, bytes]) -> bytes:
    """Return a layer's tar. Without entries it is the empty one that builders make of a step without changes."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as tar:
        for made, data in entries:
            tar.addfile(made, io.BytesIO(data))
    return sink.getvalue() if entries else b"\0" * 1024


EMPTY = layer()
_DUP = layer(entry("dup", data=b"dup"))
# A file, without an entry of the directories that it is in.
_BARE = layer(entry("var/lib/app/config.json", data=b"{}"))
_APP = ("var", "var/lib")


def _app(mode: int, owner: int, **more: Any) -> bytes:
    return layer(*map(folder, _APP), folder("var/lib/app", mode, owner, **more))


def _steps(count: int) -> Layers:
    return [layer(entry(f"steps/{number}", data=b"%d" % number)) for number in range(count)]


# The layers above the pause program of each image.
LAYERS: dict[str, Layers] = {
    # the same layer more than once
    "empty-twice": [EMPTY, _DUP, EMPTY, _DUP],
    "empty-often": [EMPTY] * 20,
    "content-twice": [_DUP, layer(entry("other")), _DUP],
    "twice-around-a-whiteout": [_DUP, layer(entry(".wh.dup")), _DUP],
    "bare-twice": [_app(0o700, 1000), _BARE, _app(0o2770, 33), _BARE],
    # one layer above different directories
    "bare-on-private": [_app(0o700, 1000), _BARE],
    "bare-on-public": [_app(0o755, 0), _BARE],
    "bare-on-shared": [_app(0o2775, 50), _BARE],
    "bare-on-sticky": [_app(0o1777, 0), _BARE],
    "bare-on-nothing": [_BARE],
    "bare-on-marked": [_app(0o755, 0, attributes={"user.mark": b"below"}), _BARE],
    "bare-on-other-time": [_app(0o755, 0, time=1_234_567_890), _BARE],
    "bare-on-itself": [_app(0o700, 7), _BARE, layer(entry("var/lib/app/second", data=b"2"))],
    "bare-on-a-link": [layer(folder("run"), folder("var"), link("var/lib", "../run")), _BARE],
    "bare-on-a-file": [layer(folder("var"), entry("var/lib", data=b"a file")), _BARE],
    "bare-on-a-whiteout": [
        _app(0o700, 1000),
        layer(folder("var"), folder("var/lib"), entry("var/lib/.wh.app")),
        _BARE,
    ],
    "bare-whiteout": [_app(0o700, 1000), _BARE, layer(entry("var/lib/app/.wh.config.json"))],
    # what a layer takes away
    "opaque": [_app(0o755, 0), _BARE, layer(folder("var/lib/app", 0o711), entry("var/lib/app/.wh..wh..opq"))],
    "bare-opaque": [
        _app(0o750, 9),
        _BARE,
        layer(entry("var/lib/app/.wh..wh..opq"), entry("var/lib/app/new")),
    ],
    "whiteout-of-nothing": [layer(entry(".wh.never"), folder("a"), entry("a/.wh.never"))],
    "folder-over-file-and-back": [
        layer(entry("x", data=b"1")),
        layer(folder("x"), entry("x/y")),
        layer(entry("x", data=b"2")),
    ],
    # files
    "top-of-its-own": [layer(folder("./", 0o750, 1000), entry("./file", owner=1000))],
    "large-owner": [layer(entry("file", owner=4_000_000_000), folder("folder", 0o700, 4_000_000_000))],
    "special-modes": [
        layer(entry("s", mode=0o6755), folder("t", 0o1777), folder("g", 0o2755), entry("none", mode=0))
    ],
    "capability": [
        layer(entry("ping", mode=0o755, data=b"x", attributes={"security.capability": _CAPABILITY}))
    ],
    "attributes": [
        layer(
            entry("file", attributes={f"user.{'k' * 100}{n}": b"v" * 200 for n in range(5)}),
            folder("folder", attributes={"user.of-a-folder": b"1", "system.posix_acl_access": _ACL}),
        )
    ],
    "devices": [
        layer(
            entry("tty", tarfile.CHRTYPE, device=(4, 300)),
            entry("disk", tarfile.BLKTYPE, device=(259, 70_000)),
            entry("pipe", tarfile.FIFOTYPE),
        )
    ],
    "names": [
        layer(
            *(
                entry(name)
                for name in ("a\nb", "a,b", "a:b", 'a"b', "a\\b", "*", "-rf", "ü", "\udcff", "n" * 255)
            ),
            entry("/".join(["deep" * 20] * 35)),
        )
    ],
    "links": [
        layer(
            *(folder("one"), folder("two"), entry("one/a", data=b"a")),
            entry("two/b", tarfile.LNKTYPE, target="one/a"),
            *(link("loop", "loop"), link("gone", "/nowhere"), link("up", "../../../etc")),
        )
    ],
    "times": [
        layer(
            entry("zero", time=0),
            entry("old", time=-5),
            entry("late", time=4_400_000_000),
            entry("part", time=1.25),
        )
    ],
    "large": [layer(entry("zeros", data=bytes(40_000_000)), entry("ones", data=b"1" * 5_000_001))],
    "deep": _steps(124),
}
# The same, with settings in the configuration.
SETTINGS: dict[str, dict[str, Any]] = {
    "volume-relative": {"Volumes": {"data": {}}},
    "volume-spaces": {"Volumes": {"/a b/c": {}, "/with,comma": {}, '/with"quote': {}, "/with:colon": {}}},
    "volume-dots": {"Volumes": {"/x/../y/./z//": {}, "/w/": {}, "/w": {}}},
    "volumes-nested": {"Volumes": {"/deep": {}, "/deep/er": {}, "/deep/er/est": {}}},
    "volumes-many": {"Volumes": {f"/volumes/{n}": {} for n in range(60)}},
    "volume-with-content": {"Volumes": {"/var/lib/app": {}}},
    "user-and-health": {
        "User": "1234:5678",
        "Healthcheck": {"Test": ["CMD", "/nothing"], "Interval": 1_000_000_000},
        "Labels": {"image-builder.pin": "1"},
        "StopSignal": "SIGRTMIN+3",
    },
    "working-directory": {"WorkingDir": "/not/there"},
}
# Images whose layers are compressed otherwise.
PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "zstd": ("+zstd", zstd),
    "plain": ("", lambda tar: tar),
}
INDEXES = ("index-without-platform", "index-with-attestation", "index-of-an-index")
# 301 layers, where Docker takes 125.
DEEPER = "deeper"
NAMES = (*LAYERS, *SETTINGS, *PACKED, *INDEXES, DEEPER)


def push(lab: Lab, names: Iterable[str] = NAMES) -> dict[str, str]:
    """Push odd images; return each one's reference."""
    place = RawRepository(lab, "odd")
    for name in names:
        _push(place, name)
    return {name: f"{HOST}/odd:{name}" for name in names}


def _push(place: RawRepository, name: str) -> None:
    if name in LAYERS:
        _image(place, LAYERS[name], tag=name)
    elif name == DEEPER:
        _image(place, _steps(300), tag=name)
    elif name in SETTINGS:
        _image(place, [_app(0o700, 1000), _BARE], tag=name, settings=SETTINGS[name])
    elif name in PACKED:
        _image(place, [_DUP, _BARE], tag=name, packed=PACKED[name])
    else:
        image = _image(place, [_DUP])
        attestation = place.document(manifest(place.blob(b'{"os":"unknown"}', CONFIG), []))
        entries = {
            INDEXES[0]: [(image, "")],
            INDEXES[1]: [(attestation, "unknown/unknown"), (image, "")],
            INDEXES[2]: [(place.document(index([(image, "linux/amd64")])), "linux/amd64")],
        }
        place.document(index(entries[name]), name)


def _image(
    place: RawRepository,
    tars: Sequence[bytes],
    tag: str = "",
    settings: Mapping[str, Any] | None = None,
    packed: tuple[str, Callable[[bytes], bytes]] = ("+gzip", lambda tar: gzip.compress(tar, 1, mtime=0)),
) -> Descriptor:
    """Push an image of the pause program and these layers, which runs; return its manifest's descriptor."""
    every = [pause.layer(), *tars]
    kind, pack = packed
    blobs = {tar: place.blob(pack(tar), f"{LAYER}{kind}") for tar in dict.fromkeys(every)}
    config = {
        "os": "linux",
        "architecture": "amd64",
        "config": {**pause.configuration()["config"], **(settings or {})},
        "rootfs": {"type": "layers", "diff_ids": [describe(tar, "")["digest"] for tar in every]},
    }
    described = place.blob(json.dumps(config).encode(), CONFIG)
    return place.document(manifest(described, [blobs[tar] for tar in every]), tag)
