"""A stand-in for a Galaxy server: the documents of API v3 that ``ansible-galaxy`` requests.

Shapes are as in galaxy_ng's ``/api/v3/collections/``; archives are built by ``ansible-galaxy collection build``.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from image_builder.canonical import JSON


def build_collection(place: Path, name: str, version: str, files: Mapping[str, str], **info: JSON) -> Path:
    """Write the source of a collection below ``place``, build its archive and return the archive's path."""
    namespace, _, short = name.partition(".")
    source = place / f"{name}-{version}"
    galaxy = {"namespace": namespace, "name": short, "version": version, "readme": "README.md", **info}
    for path, text in {
        "galaxy.yml": json.dumps({"authors": ["a test"], **galaxy}),
        "README.md": f"{name}\n",
        "meta/runtime.yml": "requires_ansible: '>=2.15'\n",
        **files,
    }.items():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text(text)
    program = Path(sys.executable).parent / "ansible-galaxy"
    subprocess.run(
        [program, "collection", "build", "--force", "--output-path", place, source],
        check=True,
        capture_output=True,
    )
    return place / f"{namespace}-{short}-{version}.tar.gz"


@dataclass
class Galaxy:
    """A server's archives, by name and version, and collections' dependencies; ``down`` answers everything with 500."""

    archives: dict[tuple[str, str], Path] = field(default_factory=dict)
    dependencies: dict[str, dict[str, str]] = field(default_factory=dict)
    down: bool = False

    def server(self) -> ThreadingHTTPServer:
        galaxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                content = None if galaxy.down else galaxy.answer(self.path.partition("?")[0])
                self.send_response(500 if galaxy.down else 404 if content is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_: object) -> None:
                pass

        return ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def answer(self, path: str) -> bytes | None:
        """Return the content at a path, or None if there is none."""
        match path.strip("/").split("/"):
            case ["api"]:
                return _json({"available_versions": {"v3": "v3/"}})
            case ["api", "v3", "collections", namespace, name]:
                times = [
                    a.stat().st_mtime
                    for (full, _), a in self.archives.items()
                    if full == f"{namespace}.{name}"
                ]
                newest = datetime.fromtimestamp(max(times, default=0), UTC).isoformat()
                return _json({"created_at": newest, "updated_at": newest}) if times else None
            case ["api", "v3", "collections", namespace, name, "versions"]:
                numbers = [version for full, version in self.archives if full == f"{namespace}.{name}"]
                listed = [{"version": number, "href": f"{path}{number}/"} for number in numbers]
                return _json({"meta": {"count": len(listed)}, "links": {"next": None}, "data": listed})
            case ["api", "v3", "collections", namespace, name, "versions", version]:
                return self._version(namespace, name, version)
            case ["archives", file]:
                return next((a.read_bytes() for a in self.archives.values() if a.name == file), None)
            case _:
                return None

    def _version(self, namespace: str, name: str, version: str) -> bytes | None:
        archive = self.archives.get((f"{namespace}.{name}", version))
        if archive is None:
            return None
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        return _json(
            {
                "namespace": {"name": namespace},
                "collection": {"name": name},
                "version": version,
                "download_url": f"/archives/{archive.name}",
                "artifact": {
                    "filename": archive.name,
                    "sha256": sha256,
                    "size": archive.stat().st_size,
                },
                "metadata": {"dependencies": self.dependencies.get(f"{namespace}.{name}", {})},
                "href": f"/api/v3/collections/{namespace}/{name}/versions/{version}/",
                "signatures": [],
            }
        )


def _json(value: JSON) -> bytes:
    return json.dumps(value).encode()
