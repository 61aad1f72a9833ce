"""Third-party package repositories, with the host's own apt: flat ones, private ones, slow ones, broken promises."""

from __future__ import annotations

import base64
import hashlib
import http.server
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from image_builder.bake.lock import apt_auth
from image_builder.bake.lock import fetch as fetching
from image_builder.bake.lock.apt import Apt, Source, debian_sources
from image_builder.bake.lock.fetch import Download, fetch
from image_builder.errors import FetchError, LockError
from tests.support.debian_mirror import SUITE, Repository
from tests.support.roles.container_runtime import render
from tests.support.servers import running

pytestmark = pytest.mark.root

LOGIN = "robot:a-canary"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "served/debian", tmp_path)
    made.add("hello")
    made.publish()
    return made


def _make_flat(repository: Repository) -> str:
    """Give a repository its index and signature at the top level, as flat ones have them; return its armored key."""
    top = repository.path
    index = (top / "dists" / SUITE / "main/binary-amd64/Packages").read_bytes()
    (top / "Packages").write_bytes(index)
    line = f" {hashlib.sha256(index).hexdigest()} {len(index)} Packages"
    (top / "Release").write_text(f"Date: Mon, 02 Nov 2026 00:00:00 UTC\nSHA256:\n{line}\n")
    repository._gpg("--clearsign", "--output", str(top / "InRelease"), str(top / "Release"))
    return repository._gpg("--armor", "--export").decode()


def test_a_flat_repository_is_locked_and_its_sources_file_is_one_that_apt_takes(
    tmp_path: Path, repository: Repository
) -> None:
    key = _make_flat(repository)
    uri = f"file:{repository.path}"
    apt = Apt(tmp_path / "apt", [Source("flat", uri, ("/",), (), key)], "amd64")
    apt.update()
    assert [package.name for package in apt.install(["hello"])] == ["hello"]
    declared = {"uris": [uri], "suites": ["/"], "components": [], "signed_by": key}
    text = render("repository.sources.j2", container_runtime_repository=declared)
    again = Apt(tmp_path / "again", [Source("flat", uri, ("/",), (), key)], "amd64")
    (again.path / "etc/sources.list.d/all.sources").write_text(text)
    again.update()
    assert [package.name for package in again.install(["hello"])] == ["hello"]


def test_a_repository_in_the_directory_of_programs(
    tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the directory's name nor its location is locked; errors there name the inventory's line."""
    key, line = _make_flat(repository), "group_vars/current.yml:7"
    source = Source("flat", "file:debian", ("/",), (), key, place=line)
    monkeypatch.setenv(fetching.PROGRAMS, str(tmp_path / "served"))
    apt = Apt(tmp_path / "apt", [source], "amd64")
    apt.update()
    (package,) = apt.install(["hello"])
    assert (package.repository, str(tmp_path) in package.model_dump_json()) == ("flat", False)
    (tmp_path / "cache").mkdir()
    wanted = Download(f"hello ({line})", f"file:debian/{package.path}", package.sha256, package.size)
    assert fetch([wanted], tmp_path / "cache", tmp_path)[package.sha256].exists()
    (tmp_path / "cache" / package.sha256).unlink()
    deb = repository.path / package.path
    deb.write_bytes(deb.read_bytes()[:-1] + b"x")
    with pytest.raises(FetchError, match=rf"hello \({line}\): file:{deb} gave .*{package.sha256}"):
        fetch([wanted], tmp_path / "cache", tmp_path)
    deb.unlink()
    with pytest.raises(FetchError, match=rf"hello \({line}\): file:{deb}: No such file"):
        fetch([wanted], tmp_path / "cache", tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    index = repository.path / "Packages"
    index.write_bytes(index.read_bytes() + b"\n")
    with pytest.raises(FetchError, match=rf"file:debian \({line}\)"):
        Apt(tmp_path / "changed", [source], "amd64").update()
    monkeypatch.setenv(fetching.PROGRAMS, str(tmp_path / "elsewhere"))
    with pytest.raises(FetchError, match=rf"file:debian \({line}\)"):
        Apt(tmp_path / "missing", [source], "amd64").update()


def test_what_a_package_lacks_is_told(tmp_path: Path, repository: Repository) -> None:
    repository.add("needy", extra="Depends: absent (>= 2)\n")
    repository.publish()
    sources = debian_sources(SUITE, ("main",), repository.keyring, f"file:{repository.path}")
    apt = Apt(tmp_path / "apt", sources[:1], "amd64")
    apt.update()
    with pytest.raises(LockError, match=r"needy : Depends: absent \(>= 2\)"):
        apt.install(["needy"])


@contextmanager
def _private(repository: Repository) -> Iterator[str]:
    basic = f"Basic {base64.b64encode(LOGIN.encode()).decode()}"

    class Private(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") == basic:
                super().do_GET()
            else:
                self.send_error(401)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def translate_path(self, path: str) -> str:
            return str(repository.path / path.lstrip("/"))

    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Private)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


def test_a_private_repository_opens_for_apt_and_for_what_is_fetched(
    tmp_path: Path, repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth, cache = tmp_path / "auth.conf", tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv(apt_auth.VARIABLE, str(auth))
    with _private(repository) as uri:
        name, _, password = LOGIN.partition(":")
        sources = [Source("private", uri, (SUITE,), ("main",), repository.keyring)]
        auth.write_text("")
        with pytest.raises(FetchError, match="401"):
            Apt(tmp_path / "outside", sources, "amd64").update()
        auth.write_text(f"machine {uri} login {name} password {password}\n")
        apt = Apt(tmp_path / "apt", sources, "amd64")
        apt.update()
        (package,) = apt.install(["hello"])
        wanted = Download(package.name, f"{uri}/{package.path}", package.sha256, package.size)
        fetch([wanted], cache, tmp_path)
        auth.write_text("")
        (cache / package.sha256).unlink()
        with pytest.raises(FetchError, match=r"HTTP status 401; .*auth\.conf\.d"):
            fetch([wanted], cache, tmp_path)
    locked = package.model_dump_json()
    assert uri not in locked and password not in locked
    # Not even for a moment: apt is only given the name of the file.
    found = subprocess.run(["grep", "-rlF", password, tmp_path / "apt"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")


def test_a_mirror_that_drips_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_RATE_SECONDS", 1.0)

    class Dripping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"x")
                    time.sleep(0.1)
            except OSError:
                pass  # the client left

        def log_message(self, format: str, *args: object) -> None:
            pass

    (tmp_path / "cache").mkdir()
    with running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping)) as server:
        wanted = Download("x", f"http://user:canary@127.0.0.1:{server.server_port}/x", "0" * 64)
        with pytest.raises(FetchError, match="too slow") as caught:
            fetch([wanted], tmp_path / "cache", tmp_path)
    assert "canary" not in caught.value.message
