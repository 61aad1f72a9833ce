"""A mirror that is down, stale, forged or wrong: a clear error, and nothing that a build could trust."""

from __future__ import annotations

import hashlib
import http.server
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.fetch import Download, fetch
from image_builder.bake.lock.model import LockedPackage
from image_builder.errors import FetchError, LockError
from tests.support.debian_mirror import SUITE, Repository, serve, serve_counted
from tests.support.servers import running

pytestmark = pytest.mark.root


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    served = tmp_path / "served"
    made = Repository(served / "debian", tmp_path)
    made.add("hello")
    made.publish()
    (served / "debian-security").symlink_to("debian")
    return made


@pytest.fixture
def mirror(repository: Repository) -> Iterator[str]:
    with serve(repository.path.parent) as address:
        yield f"{address}/debian"


def _apt(tmp_path: Path, repository: Repository, mirror: str) -> Apt:
    return Apt(tmp_path / "apt", debian_sources(SUITE, ("main",), repository.keyring, mirror), "amd64")


def _wanted(mirror: str, package: LockedPackage) -> Download:
    return Download(package.name, f"{mirror}/{package.path}", package.sha256, package.size)


def test_a_sound_mirror_is_resolved_and_fetched(tmp_path: Path, repository: Repository, mirror: str) -> None:
    apt = _apt(tmp_path, repository, mirror)
    apt.update()
    (package,) = apt.install(["hello"])
    assert (package.name, package.version, package.repository) == ("hello", "1.0", "debian")
    cache = tmp_path / "cache"
    cache.mkdir()
    files = fetch([_wanted(mirror, package)], cache, tmp_path)
    assert files[package.sha256].read_bytes() == (repository.path / package.path).read_bytes()
    assert apt.install(["hello"]) == []  # it counts as installed for the groups that follow


@pytest.mark.parametrize("scheme", ["file", "copy"])
def test_a_directory_of_this_host_is_a_mirror(tmp_path: Path, repository: Repository, scheme: str) -> None:
    mirror = f"{scheme}:{repository.path}"
    apt = _apt(tmp_path, repository, mirror)
    apt.update()
    (package,) = apt.install(["hello"])
    cache = tmp_path / "cache"
    cache.mkdir()
    files = fetch([_wanted(mirror, package)], cache, tmp_path)
    assert files[package.sha256].read_bytes() == (repository.path / package.path).read_bytes()


def test_a_mirror_that_is_down(tmp_path: Path, repository: Repository) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(FetchError, match="package indices could not be read"):
        _apt(tmp_path, repository, f"http://127.0.0.1:{port}/debian").update()


def test_a_release_that_has_expired(tmp_path: Path, repository: Repository, mirror: str) -> None:
    repository.publish(valid_for=-7200.0)
    with pytest.raises(FetchError, match="(?s)expired|Valid-Until"):
        _apt(tmp_path, repository, mirror).update()


def test_a_release_signed_by_somebody_else(tmp_path: Path, repository: Repository, mirror: str) -> None:
    (tmp_path / "other").mkdir()
    stranger = Repository(tmp_path / "other/debian", tmp_path / "other")
    with pytest.raises(FetchError, match="(?i)NO_PUBKEY|signatures couldn't be verified|not signed"):
        _apt(tmp_path, stranger, mirror).update()


def test_an_index_that_is_not_the_signed_one(tmp_path: Path, repository: Repository, mirror: str) -> None:
    index = repository.path / f"dists/{SUITE}/main/binary-amd64"
    for name in ("Packages", "Packages.gz"):
        data = bytearray((index / name).read_bytes())
        data[-1] ^= 1
        (index / name).write_bytes(bytes(data))
    with pytest.raises(FetchError, match="(?i)hash sum mismatch|unexpected size"):
        _apt(tmp_path, repository, mirror).update()


def test_a_package_nobody_has(tmp_path: Path, repository: Repository, mirror: str) -> None:
    apt = _apt(tmp_path, repository, mirror)
    apt.update()
    with pytest.raises(LockError, match="no-such-package"):
        apt.install(["no-such-package"])


def test_wrong_bytes_of_the_right_length(tmp_path: Path, repository: Repository, mirror: str) -> None:
    apt = _apt(tmp_path, repository, mirror)
    apt.update()
    (package,) = apt.install(["hello"])
    file = repository.path / package.path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(FetchError, match=f"hello: .*locked is {package.sha256}"):
        fetch([_wanted(mirror, package)], cache, tmp_path)
    assert list(cache.iterdir()) == []


def test_a_damaged_cache_is_fetched_again(tmp_path: Path, repository: Repository, mirror: str) -> None:
    apt = _apt(tmp_path, repository, mirror)
    apt.update()
    (package,) = apt.install(["hello"])
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / package.sha256).write_bytes(b"damaged")
    fetch([_wanted(mirror, package)], cache, tmp_path)
    assert (cache / package.sha256).stat().st_size == package.size


def test_all_missing_files_are_named_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    with serve_counted(tmp_path) as (mirror, asked):
        wanted = [Download(f"gone{n}", f"{mirror}/pool/gone{n}.deb", f"{n}" * 64, 1) for n in range(3)]
        with pytest.raises(FetchError, match="(?s)3 of 3.*gone0.*gone1.*gone2"):
            fetch(wanted, cache, tmp_path)
    assert sorted(asked) == [f"/pool/gone{n}.deb" for n in range(3)], "a plain 404 is not retried"


class _Endless(http.server.BaseHTTPRequestHandler):
    """Sends ``/small`` at once, and everything else at a megabyte a second for minutes; notes what it sent whole."""

    whole: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        small = self.path == "/small"
        self.send_response(200)
        self.send_header("Content-Length", "1" if small else str(200 << 20))
        self.end_headers()
        try:
            for _ in range(1 if small else 3200):
                self.wfile.write(b"x" if small else bytes(1 << 16))
                time.sleep(0.06)
        except OSError:
            return  # the client has disconnected
        self.whole.append(self.path)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_interrupt_ends_the_downloads_and_begins_no_other(tmp_path: Path) -> None:
    small = hashlib.sha256(b"x").hexdigest()

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endless)) as server:
        wanted = [
            Download(name, f"http://127.0.0.1:{server.server_port}/{name}", sha256)
            for name, sha256 in (("small", small), *((f"file{n}", f"{n:064}") for n in range(40)))
        ]
        with pytest.raises(KeyboardInterrupt):
            fetch(wanted, tmp_path, tmp_path, interrupt)
        assert set(_Endless.whole) <= {"/small"}
    assert [path.name for path in tmp_path.iterdir()] == [small]  # no partial one
