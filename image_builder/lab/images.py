"""Container images of the lab: made from directories and Debian packages, pushed over the registry's HTTP API.

The same files give the same bytes, so an image's digests follow from its locked packages. Everything is owned
by root; layers are compressed by the ``gzip`` that ``run`` finds (the tools tree's), since zlib's output depends
on the zlib of the host's Python.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import urllib3

from image_builder.errors import ImageBuilderError, PublishError
from image_builder.lab import pause
from image_builder.lab.registry import HOST, Registry

MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_OCTETS = "application/octet-stream"
_EPOCH = "1970-01-01T00:00:00Z"
# The directories that Debian's merged /usr turns into links: https://wiki.debian.org/UsrMerge
_MERGED = frozenset(("bin", "sbin", "lib", "lib32", "lib64", "libo32", "libx32"))
_CHUNK = 1 << 20

# Runs a program to completion, with the caller's paths: process.run, or Root.run of a root that has them.
Run = Callable[[Sequence[str]], object]


@dataclass(frozen=True)
class Layer:
    """A layer as a gzip file: ``digest`` and ``size`` (bytes) are the file's, the other two those of the tar in it."""

    path: Path
    digest: str
    size: int
    diff_id: str
    tar_size: int


@dataclass(frozen=True)
class Image:
    """Layers, lowest first, and the configuration that names their ``diff_id``s in the same order."""

    layers: tuple[Layer, ...]
    config: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Return the image's id, as Docker shows it: the digest of its configuration."""
        return _digest(pause.encode(self.config))

    @property
    def digest(self) -> str:
        """Return the manifest's digest, which follows the ``@`` in a reference."""
        return _digest(self.manifest())

    def manifest(self) -> bytes:
        """Return the image's manifest (Docker's version 2, schema 2)."""
        config = pause.encode(self.config)
        return pause.encode(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": {"mediaType": CONFIG_TYPE, "size": len(config), "digest": _digest(config)},
                "layers": [
                    {"mediaType": LAYER_TYPE, "size": layer.size, "digest": layer.digest}
                    for layer in self.layers
                ],
            }
        )


def make_image(layers: Sequence[Layer], settings: Mapping[str, Any], created_by: Sequence[str]) -> Image:
    """Return an image of ``layers`` with ``settings`` (Env, Cmd, …) and a ``created_by`` for each layer's history."""
    config = {
        "architecture": "amd64",
        "config": dict(settings),
        "created": _EPOCH,
        "history": [
            {"created": _EPOCH, "created_by": comment} for _, comment in zip(layers, created_by, strict=True)
        ],
        "os": "linux",
        "rootfs": {"diff_ids": [layer.diff_id for layer in layers], "type": "layers"},
    }
    return Image(tuple(layers), config)


def pause_image(out: Path) -> Image:
    """Write the layer of the lab's pause image to ``out``; the image's id is that of ``pause.py``'s archive."""
    content = pause.layer()
    packed = _stored_gzip(content)
    out.write_bytes(packed)
    layer = Layer(out, _digest(packed), len(packed), _digest(content), len(content))
    return Image((layer,), pause.configuration())


def layer_from_tree(path: Path, out: Path, run: Run) -> Layer:
    """Write the directory ``path`` as a layer to ``out`` (named ``.gz``); all times are 1970, all owners root.

    Raises ImageBuilderError for a file that a layer can't hold (a socket).
    """
    with _new_layer(out, run) as layer:
        for file in sorted(_walk(path)):
            entry = layer.tar.gettarinfo(os.fspath(file), arcname=os.fspath(file.relative_to(path)))
            if entry is None:
                raise ImageBuilderError(f"{file} can't be in a layer: it is a socket")
            if entry.isreg():
                with file.open("rb") as content:
                    layer.tar.addfile(_plain(entry, mtime=0), content)
            else:
                layer.tar.addfile(_plain(entry, mtime=0))
    return layer.finished()


def layer_from_debs(debs: Iterable[Path], out: Path, run: Run) -> Layer:
    """Write the files of Debian packages, in order, as a layer to ``out`` (named ``.gz``).

    They are only unpacked: no maintainer scripts run. Files that a package still has in /bin, /lib and so on go
    to /usr; the links that lead there are part of base-files. Raises ImageBuilderError for a file that isn't a
    package, and for a path that two packages contain.
    """
    with _new_layer(out, run) as layer:
        owners: dict[str, str] = {}
        for deb in debs:
            for entry, content in _package_files(deb):
                if entry.name in owners:
                    if entry.isdir():
                        continue
                    raise ImageBuilderError(f"{deb.name} and {owners[entry.name]} both have /{entry.name}")
                owners[entry.name] = deb.name
                layer.tar.addfile(entry, content)
    return layer.finished()


def push(registry: Registry, name: str, tag: str, image: Image) -> str:
    """Push ``image`` to a registry as ``name:tag`` (without the host) and return the manifest's digest.

    Blobs that it already has aren't sent again. Raises PublishError naming the request that was refused, and
    the response.
    """
    config = pause.encode(image.config)
    with registry.connect() as pool:
        client = _Client(pool, name)
        for layer in image.layers:
            if not client.has(layer.digest):
                with layer.path.open("rb") as content:
                    client.upload(content, layer.size, layer.digest)
        if not client.has(_digest(config)):
            client.upload(io.BytesIO(config), len(config), _digest(config))
        manifest = image.manifest()
        client.request(
            "PUT",
            f"/v2/{name}/manifests/{tag}",
            (201,),
            body=manifest,
            headers={"Content-Type": MANIFEST_TYPE},
        )
    return _digest(manifest)


@dataclass(frozen=True)
class _Client:
    """The requests that a push makes: https://distribution.github.io/distribution/spec/api/."""

    pool: urllib3.HTTPSConnectionPool
    name: str

    def has(self, digest: str) -> bool:
        return self.request("HEAD", f"/v2/{self.name}/blobs/{digest}", (200, 404)).status == 200

    def upload(self, content: IO[bytes], size: int, digest: str) -> None:
        begun = self.request("POST", f"/v2/{self.name}/blobs/uploads/", (202,))
        # The registry calls itself by the name that clients use; the connection still goes to its address.
        place = begun.headers["Location"].removeprefix(f"https://{HOST}")
        url = f"{place}{'&' if '?' in place else '?'}digest={digest}"
        headers = {"Content-Type": _OCTETS, "Content-Length": str(size)}
        self.request("PUT", url, (201,), body=content, headers=headers)

    def request(
        self,
        method: str,
        url: str,
        ok: Sequence[int],
        body: bytes | IO[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        shown = f"{method} https://{HOST}{url.partition('?')[0]}"
        try:
            answer = self.pool.request(
                method, url, body=body, headers={**self.pool.headers, **(headers or {})}, redirect=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise PublishError(f"{shown}: {error}") from error
        if answer.status not in ok:
            reason = answer.data.decode("utf-8", "replace").strip()
            raise PublishError(f"{shown}: HTTP status {answer.status}: {reason}")
        return answer


# -- tars and packages -----------------------------------------------------------------------------------------


class _Hashing(io.RawIOBase):
    """Forwards everything written to ``sink``, and hashes it."""

    def __init__(self, sink: IO[bytes]) -> None:
        self.sink, self.sha256, self.size = sink, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self.sink.write(data)


class _NewLayer:
    """A layer that is being written: entries go to ``tar``."""

    def __init__(self, sink: IO[bytes], out: Path) -> None:
        self.out = out
        self.hashing = _Hashing(sink)
        # A stream: nothing is ever rewritten, so the hash is that of the file.
        self.tar = tarfile.open(fileobj=self.hashing, mode="w|", format=tarfile.PAX_FORMAT, bufsize=_CHUNK)  # noqa: SIM115

    def finished(self) -> Layer:
        with self.out.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return Layer(
            path=self.out,
            digest=f"sha256:{digest}",
            size=self.out.stat().st_size,
            diff_id=f"sha256:{self.hashing.sha256.hexdigest()}",
            tar_size=self.hashing.size,
        )


@contextmanager
def _new_layer(out: Path, run: Run) -> Iterator[_NewLayer]:
    """Open a tar next to ``out``, and compress it to ``out`` if the block succeeds."""
    tar = out.with_suffix("")
    try:
        with tar.open("wb") as sink:
            layer = _NewLayer(sink, out)
            with layer.tar:
                yield layer
        run(["gzip", "-1", "-n", "-f", os.fspath(tar)])
    finally:
        tar.unlink(missing_ok=True)


def _walk(path: Path) -> Iterator[Path]:
    for directory, directories, files in os.walk(path):
        yield from (Path(directory, name) for name in (*directories, *files))


def _plain(entry: tarfile.TarInfo, *, mtime: int) -> tarfile.TarInfo:
    """Return the entry without traces of where it was made."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = mtime
    entry.pax_headers = {}
    return entry


def _package_files(deb: Path) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Yield a package's entries with their names in the image, such as ``usr/bin/sh``; its root is left out."""
    with deb.open("rb") as stream:
        kind = _find_data(stream, deb).rpartition(".")[2]
        if kind not in ("tar", "gz", "xz"):
            raise ImageBuilderError(f"{deb.name}: a data.tar.{kind} can't be read here")
        with tarfile.open(fileobj=stream, mode="r|" if kind == "tar" else f"r|{kind}", bufsize=_CHUNK) as tar:  # type: ignore[call-overload]
            for entry in tar:
                name = entry.name.removeprefix("./").rstrip("/")
                if name in ("", ".") or (name in _MERGED and entry.isdir()):
                    continue
                entry.name = _merged(name)
                if entry.islnk():
                    entry.linkname = _merged(entry.linkname.removeprefix("./"))
                content = tar.extractfile(entry) if entry.isreg() else None
                yield _plain(entry, mtime=int(entry.mtime)), content


def _merged(name: str) -> str:
    return f"usr/{name}" if "/" in name and name.partition("/")[0] in _MERGED else name


def _find_data(stream: IO[bytes], deb: Path) -> str:
    """Leave ``stream`` at the content of a package's data member (deb(5): the last one); return the member's name.

    A member of an ar archive has a header of 60 bytes (name 16, … size 10, end 2) and begins at an even offset.
    """
    if stream.read(8) != b"!<arch>\n":
        raise ImageBuilderError(f"{deb} is not a Debian package")
    while len(header := stream.read(60)) == 60:
        name = header[:16].decode("ascii", "replace").strip().rstrip("/")
        if name.startswith("data.tar"):
            return name
        size = int(header[48:58])
        stream.seek(size + size % 2, os.SEEK_CUR)
    raise ImageBuilderError(f"{deb} is not a Debian package: it has no data.tar")


def _stored_gzip(data: bytes) -> bytes:
    """Return ``data`` (below 64 KiB) as a gzip file of one uncompressed block (RFC 1951 3.2.4, RFC 1952 2.3)."""
    head = b"\x1f\x8b\x08\0" + bytes(4) + b"\0\xff"  # deflate, no flags, no time, unknown system
    block = struct.pack("<BHH", 1, len(data), 0xFFFF ^ len(data)) + data
    return head + block + struct.pack("<II", zlib.crc32(data), len(data))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
