"""A small, real, signed Debian repository on the loopback interface, and ways to break it."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

from tests.support.servers import running

SUITE = "trixie"


def build_deb(
    folder: Path, name: str, *, version: str = "1.0", postinst: str | None = None, extra: str = ""
) -> Path:
    """Make a package with dpkg-deb; ``postinst`` is a shell script, ``extra`` has additional control fields."""
    tree = folder / f"{name}_{version}"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share/doc" / name).mkdir(parents=True)
    (tree / "usr/share/doc" / name / "readme").write_text(f"{name} {version}\n")
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: Lab <lab@example.invalid>\n"
        f"Section: misc\nPriority: optional\nDescription: a package of the tests\n{extra}"
    )
    if postinst:
        script = tree / "DEBIAN/postinst"
        script.write_text(postinst)
        script.chmod(0o755)
    deb = folder / f"{name}_{version}_amd64.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, deb], check=True, capture_output=True)
    return deb


class Repository:
    """``path`` is what the server serves; ``keyring`` verifies it."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self.work = path, work
        self.home = work / "gnupg"
        self.home.mkdir(mode=0o700)
        self.keyring = work / "keyring.gpg"
        self._gpg("--quick-gen-key", "--passphrase", "", "lab@example.invalid", "ed25519", "sign", "0")
        self.keyring.write_bytes(self._gpg("--export"))
        (path / "pool").mkdir(parents=True)

    def _gpg(self, *argv: str) -> bytes:
        base: list[str | Path] = [
            "gpg",
            "--homedir",
            self.home,
            "--batch",
            "--yes",
            "--pinentry-mode",
            "loopback",
        ]
        return subprocess.run([*base, *argv], check=True, capture_output=True).stdout

    def add(self, name: str, **options: str) -> Path:
        deb = build_deb(self.work, name, **options)
        target = self.path / "pool" / deb.name
        target.write_bytes(deb.read_bytes())
        return target

    def publish(self, *, valid_for: float = 3600.0, age: float = 86400.0) -> None:
        """Write and sign indices dated ``age`` seconds ago that expire in ``valid_for`` seconds (negative: expired)."""
        index = ""
        for deb in sorted((self.path / "pool").glob("*.deb")):
            control = subprocess.run(
                ["dpkg-deb", "-f", deb], check=True, capture_output=True, text=True
            ).stdout
            data = deb.read_bytes()
            index += (
                f"{control.rstrip()}\nFilename: pool/{deb.name}\nSize: {len(data)}\n"
                f"SHA256: {hashlib.sha256(data).hexdigest()}\n\n"
            )
        for suite in (SUITE, f"{SUITE}-updates", f"{SUITE}-security"):
            self._publish_suite(suite, index if suite == SUITE else "", valid_for, age)

    def _publish_suite(self, suite: str, index: str, valid_for: float, age: float) -> None:
        folder = self.path / "dists" / suite
        binary = folder / "main/binary-amd64"
        binary.mkdir(parents=True, exist_ok=True)
        (binary / "Packages").write_text(index)
        (binary / "Packages.gz").write_bytes(gzip.compress(index.encode()))
        lines = [
            f" {hashlib.sha256(p.read_bytes()).hexdigest()} {p.stat().st_size} {p.relative_to(folder)}"
            for p in sorted(binary.iterdir())
        ]
        now = time.time()
        (folder / "Release").write_text(
            f"Origin: Lab\nSuite: {suite}\nCodename: {suite}\nArchitectures: amd64\nComponents: main\n"
            f"Date: {formatdate(now - age, usegmt=True)}\nValid-Until: {formatdate(now + valid_for, usegmt=True)}\n"
            "SHA256:\n" + "\n".join(lines) + "\n"
        )
        (folder / "InRelease").unlink(missing_ok=True)
        self._gpg("--clearsign", "--output", str(folder / "InRelease"), str(folder / "Release"))


@contextmanager
def serve(path: Path) -> Iterator[str]:
    """Serve a directory on the loopback interface; yield the address without a trailing slash."""
    with serve_counted(path) as (address, _):
        yield address


@contextmanager
def serve_counted(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a directory like ``serve``; also yield the requested paths, in order."""
    asked: list[str] = []
    handler = functools.partial(_Quiet, asked, directory=str(path))
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}", asked


class _Quiet(http.server.SimpleHTTPRequestHandler):
    """A handler that records the requested paths and logs nothing."""

    def __init__(self, asked: list[str], *args: Any, **options: Any) -> None:
        self.asked = asked
        super().__init__(*args, **options)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass
