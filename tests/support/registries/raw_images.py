"""Images of other shapes than the lab's own: arbitrary blobs and manifests, pushed past the proxies."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import urllib3

from image_builder.lab.images import MANIFEST_TYPE
from image_builder.lab.registry import HOST
from tests.support.registries.pulls import Lab

OCI = "application/vnd.oci.image"
INDEX, MANIFEST, CONFIG = f"{OCI}.index.v1+json", f"{OCI}.manifest.v1+json", f"{OCI}.config.v1+json"
LAYER = f"{OCI}.layer.v1.tar"
# A frame's magic number, its header (one segment, its size in four bytes), and the size limit of its blocks (RFC 8878
# 3.1.1).
_ZSTD_MAGIC, _ZSTD_HEADER, _ZSTD_BLOCK = b"\x28\xb5\x2f\xfd", b"\xa0", 1 << 17

Descriptor = dict[str, Any]


class RawRepository:
    """A repository of the lab's registry that accepts whatever a test makes."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab, self.name = lab, name

    def _request(self, method: str, path: str, body: bytes = b"", kind: str = "") -> urllib3.BaseHTTPResponse:
        headers = {"Host": HOST, "Accept": MANIFEST_TYPE, "Content-Length": str(len(body))}
        headers |= {"Content-Type": kind} if kind else {}
        with self.lab.registry.connect() as pool:
            answer = pool.request(method, path, body=body, headers=headers)
        assert answer.status < 300, (method, path, answer.status, answer.data)
        return answer

    def blob(self, data: bytes, kind: str) -> Descriptor:
        """Upload a blob; return its descriptor for a manifest."""
        found = describe(data, kind)
        begun = self._request("POST", f"/v2/{self.name}/blobs/uploads/")
        place = begun.headers["Location"].removeprefix(f"https://{HOST}")
        octets = "application/octet-stream"
        self._request("PUT", f"{place}{'&' if '?' in place else '?'}digest={found['digest']}", data, octets)
        return found

    def document(self, document: Mapping[str, Any], tag: str = "") -> Descriptor:
        """Put a manifest or an index, by tag or else by its digest; return its descriptor for an index."""
        data, kind = json.dumps(document).encode(), document["mediaType"]
        found = describe(data, kind)
        self._request("PUT", f"/v2/{self.name}/manifests/{tag or found['digest']}", data, kind)
        return found

    def described(self, digest: str) -> Descriptor:
        """Return the descriptor of a manifest of the lab's own type."""
        return describe(self._request("GET", f"/v2/{self.name}/manifests/{digest}").data, MANIFEST_TYPE)

    def image(
        self, layers: Sequence[Descriptor], tars: Sequence[bytes], tag: str = "", architecture: str = "amd64"
    ) -> Descriptor:
        """Put an OCI image of uploaded layers, which unpack to ``tars``."""
        diff_ids = [describe(tar, "")["digest"] for tar in tars]
        config = {
            "os": "linux",
            "architecture": architecture,
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
        }
        described = self.blob(json.dumps(config).encode(), CONFIG)
        return self.document(manifest(described, layers), tag)


def manifest(config: Descriptor, layers: Sequence[Descriptor]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": list(layers)}


def index(entries: Sequence[tuple[Descriptor, str]]) -> dict[str, Any]:
    """Return an index of manifests, each with its platform (``linux/amd64/v3``; empty for none)."""
    manifests = []
    for entry, platform in entries:
        parts = dict(zip(("os", "architecture", "variant"), platform.split("/"), strict=False))
        manifests.append({**entry, **({"platform": parts} if platform else {})})
    return {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}


def describe(data: bytes, kind: str) -> Descriptor:
    return {"mediaType": kind, "size": len(data), "digest": f"sha256:{hashlib.sha256(data).hexdigest()}"}


def tar_of(path: str, data: bytes) -> bytes:
    """Return a tar of one file."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        entry = tarfile.TarInfo(path)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return sink.getvalue()


def zstd(data: bytes) -> bytes:
    """Return ``data`` as a Zstandard frame of uncompressed blocks (RFC 8878)."""
    frame = [_ZSTD_MAGIC, _ZSTD_HEADER, struct.pack("<I", len(data))]
    for begin in range(0, len(data), _ZSTD_BLOCK):
        block = data[begin : begin + _ZSTD_BLOCK]
        last = begin + _ZSTD_BLOCK >= len(data)
        frame += [struct.pack("<I", len(block) << 3 | last)[:3], block]
    return b"".join(frame)
