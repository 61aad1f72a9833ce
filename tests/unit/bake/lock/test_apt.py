"""The sources of Debian's packages, and the packages that apt considers installed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from image_builder.bake.lock import apt, fetch
from image_builder.bake.lock.model import LockedPackage
from image_builder.errors import CommandError, FetchError, SpaceError
from image_builder.system import process


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """Return the /etc of a Debian 13 host without sources."""
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text("ID=debian\nVERSION_CODENAME=trixie\n")
    return tmp_path


def test_the_hosts_deb822_and_one_line_sources(etc: Path) -> None:
    (etc / "apt/sources.list.d/debian.sources").write_text(
        "Types: deb\nURIs: http://one.example/debian\nSuites: trixie trixie-updates\nComponents: main\n"
    )
    (etc / "apt/sources.list").write_text(
        "deb [arch=amd64] http://two.example/security trixie-security main\n"
    )
    assert apt.host_mirrors(etc) == {
        "debian": "http://one.example/debian",
        "debian-security": "http://two.example/security",
    }


def test_a_vendors_repository_is_not_taken_for_debians(etc: Path) -> None:
    """Vendor sources are as Docker's and Microsoft's instructions set them up; files are read in name order."""
    (etc / "apt/sources.list.d/azure-cli.sources").write_text(
        "Types: deb\nURIs: https://packages.vendor.example/repos/azure-cli/\nSuites: trixie\nComponents: main\n"
    )
    (etc / "apt/sources.list").write_text(
        "deb http://one.example/debian trixie main\n"
        "deb http://one.example/debian trixie-updates main\n"
        "deb http://one.example/debian-security trixie-security main\n"
    )
    assert apt.host_mirrors(etc) == {
        "debian": "http://one.example/debian",
        "debian-security": "http://one.example/debian-security",
    }


@pytest.mark.parametrize("word", ["no", "No", "false", "off", "0"])
def test_sources_that_are_off_are_none(etc: Path, word: str) -> None:
    (etc / "apt/sources.list.d/debian.sources").write_text(
        f"Types: deb\nURIs: http://one.example/debian\nSuites: trixie\nEnabled: {word}\n\n"
        "Types: deb\nURIs: http://two.example/debian\nSuites: trixie\nEnabled: yes\n"
    )
    assert apt.host_mirrors(etc) == {"debian": "http://two.example/debian"}


def test_a_list_of_mirrors_gives_its_first_one_and_a_cdrom_nothing(etc: Path) -> None:
    mirrors = etc / "apt/debian.list"
    mirrors.write_text("# comment\nhttp://first.example/debian priority:1\nhttp://second.example/debian\n")
    (etc / "apt/sources.list").write_text(
        "deb cdrom:[Debian]/ trixie main\n"
        f"deb mirror+file://{mirrors} trixie main\n"
        "deb mirror+file:///nowhere trixie-security main\n"
    )
    assert apt.host_mirrors(etc) == {"debian": "http://first.example/debian"}


def test_a_comment_in_another_encoding_is_no_hindrance(etc: Path) -> None:
    comment = "# für Büro\n".encode("latin-1")
    (etc / "apt/sources.list.d/debian.sources").write_bytes(
        comment + b"Types: deb\nURIs: http://one.example/debian\nSuites: trixie\nComponents: main\n"
    )
    (etc / "apt/sources.list").write_bytes(
        comment + b"deb http://two.example/security trixie-security main\n"
    )
    assert apt.host_mirrors(etc) == {
        "debian": "http://one.example/debian",
        "debian-security": "http://two.example/security",
    }


def test_a_host_that_does_not_say_what_it_is_has_no_mirror(etc: Path) -> None:
    (etc / "os-release").unlink()
    assert apt.host_mirrors(etc) == {}


def test_a_host_that_is_not_debian_has_no_mirror_and_gets_the_default(
    etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (etc / "os-release").write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    found = apt.host_mirrors(etc)
    assert found == {}
    monkeypatch.setattr(apt, "host_mirrors", lambda: found)
    monkeypatch.setattr(apt, "default_mirrors", lambda: {"debian": "http://a.example/debian"})
    sources = apt.debian_sources("trixie", ("main",), etc / "os-release", None)
    assert [s.uri for s in sources] == ["http://a.example/debian"]


def test_the_default_is_mmdebstraps_own(tmp_path: Path) -> None:
    program = tmp_path / "mmdebstrap"
    program.write_text(
        "    my $mirror    = 'http://a.example/debian';\n    my $secmirror = 'http://b.example/security';\n"
    )
    found = apt.default_mirrors(program)
    assert found == {"debian": "http://a.example/debian", "debian-security": "http://b.example/security"}
    assert apt.default_mirrors(tmp_path / "none") == {}


@pytest.mark.parametrize("mirror", ["http://one.example/debian", "http://one.example/debian/"])
def test_security_lies_beside_a_named_mirror(etc: Path, mirror: str) -> None:
    sources = apt.debian_sources("trixie", ("main",), etc / "os-release", mirror)
    assert [s.uri for s in sources] == ["http://one.example/debian", "http://one.example/debian-security"]


def test_the_dates_of_releases_are_known_by_what_all_mirrors_call_them(tmp_path: Path) -> None:
    asked = apt.Apt(tmp_path, [], "amd64")
    signed = "-----BEGIN PGP SIGNED MESSAGE-----\nHash: SHA256\n\n"
    header = "Origin: Debian\nLabel: Debian-Security\nSuite: stable-security\nCodename: trixie-security\n"
    date = "Date: Tue, 14 Nov 2023 22:13:20 UTC\n"
    (tmp_path / "lists/one.example_dists_trixie-security_InRelease").write_text(signed + header + date)
    (tmp_path / "lists/vendor.example_Release").write_text(date)
    assert asked.release_dates() == {
        "Debian-Security trixie-security": 1_700_000_000,
        "vendor.example_Release": 1_700_000_000,
    }


def test_the_dates_of_some_repositories(tmp_path: Path) -> None:
    def source(name: str, uri: str) -> apt.Source:
        return apt.Source(name, uri, ("x",), ("main",), "key")

    sources = [
        source("debian", "http://user:word@one.example:80/a_b/debian/"),
        source("flat", "file:/srv/programs"),
        source("other", "https://one.example"),
    ]
    asked = apt.Apt(tmp_path, sources, "amd64")
    # File names as apt 2.6 and 3.0 write them.
    for number, name in enumerate(
        (
            "one.example:80_a%5fb_debian_dists_trixie_InRelease",
            "_srv_programs_._InRelease",
            "one.example_dists_x_Release",
        )
    ):
        date = f"Date: Tue, 14 Nov 2023 22:13:2{number} UTC\n"
        (tmp_path / "lists" / name).write_text(f"Label: {number}\nCodename: x\n{date}")
    assert asked.release_dates({"debian"}) == {"0 x": 1_700_000_000}
    assert asked.release_dates({"flat", "other"}) == {"1 x": 1_700_000_001, "2 x": 1_700_000_002}
    assert len(asked.release_dates()) == 3


def test_a_relative_address_is_below_the_directory_of_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat = apt.Source("flat", "file:repository", ("/",), (), "key")
    monkeypatch.setenv(fetch.PROGRAMS, "/srv/my programs")
    assert "URIs: file:/srv/my%20programs/repository\n" in flat.deb822()
    asked = apt.Apt(tmp_path, [flat], "amd64")
    assert asked._locate("file:/srv/my%20programs/repository/./x.deb") == ("flat", "./x.deb")
    for address in ("file:/srv/x", "file:///srv/x", "https://one.example/x", "copy:/srv/x"):
        assert fetch.located(address) == address
    monkeypatch.delenv(fetch.PROGRAMS)
    with pytest.raises(FetchError, match="file:repository is relative .* IMAGE_BUILDER_PROGRAMS") as caught:
        fetch.located("file:repository")
    assert caught.value.hint and "repository" in caught.value.hint


def _package(name: str, version: str = "1.0", architecture: str = "amd64") -> LockedPackage:
    sha256 = hashlib.sha256(f"{name} {version}".encode()).hexdigest()
    more = {"size": 1, "path": f"pool/{name}.deb", "repository": "debian", "architecture": architecture}
    return LockedPackage.model_validate({"name": name, "version": version, "sha256": sha256, **more})


def _stanza(package: LockedPackage) -> str:
    return f"Package: {package.name}\nArchitecture: {package.architecture}\nVersion: {package.version}"


CURL, DBUS, DATA = _package("curl"), _package("dbus", "1:2.0-1"), _package("data", architecture="all")
NO_PACKAGES = "N: Unable to locate package curl\nE: No packages found"


@pytest.mark.parametrize(
    ("answer", "unknown"),
    [
        pytest.param([CURL, DBUS, DATA], [], id="all are in the indices"),
        pytest.param([CURL, DATA], [DBUS], id="one isn't"),
        pytest.param([CURL, _package("dbus", "1:2.0-2"), DATA], [DBUS], id="one is there in another version"),
        pytest.param([], [CURL, DBUS, DATA], id="none is: apt-cache says nothing, and ends with 0"),
        pytest.param(None, [CURL, DBUS, DATA], id="none is even by its name: apt-cache ends with 100"),
    ],
)
def test_packages_of_a_lock_are_installed_if_apt_knows_all_of_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: list[LockedPackage] | None,
    unknown: list[LockedPackage],
) -> None:
    """The answers are those of apt-cache 2.6."""

    def run(_: apt.Apt, argv: Sequence[str]) -> str:
        assert argv[-3:] == ["curl:amd64=1.0", "dbus:amd64=1:2.0-1", "data=1.0"]
        if answer is None:
            raise CommandError("apt-cache failed", tail=NO_PACKAGES)
        return "\n\n".join(map(_stanza, answer)) + "\n\n"

    monkeypatch.setattr(apt.Apt, "_run", run)
    fetched = _package("fetched")
    (tmp_path / "debs").mkdir()
    (tmp_path / f"debs/{fetched.sha256}.control").write_text(f"{_stanza(fetched)}\n")
    asked = apt.Apt(tmp_path, [], "amd64")
    assert asked.mark_installed([CURL, fetched, DBUS, DATA], tmp_path / "debs") == unknown
    installed = [] if unknown else [fetched, CURL, DBUS, DATA]
    status = "".join(f"{_stanza(p)}\nStatus: install ok installed\n\n" for p in installed)
    assert (tmp_path / "status").read_text() == status


def test_another_failure_of_apt_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: apt.Apt, argv: Sequence[str]) -> str:
        raise CommandError("apt-cache failed", tail="E: The package lists could not be parsed")

    monkeypatch.setattr(apt.Apt, "_run", run)
    with pytest.raises(CommandError):
        apt.Apt(tmp_path, [], "amd64").mark_installed([CURL], tmp_path)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        # As apt 2.6 reports them.
        (
            "E: Failed to fetch copy:/r/./Packages  Write error - write (28: No space left on device)\n"
            "E: Some index files failed to download. They have been ignored, or old ones used instead.",
            SpaceError,
        ),
        ("E: Write error - write (122: Disk quota exceeded)\nE: IO Error saving source cache", SpaceError),
        ("E: Failed to fetch http://m.example/InRelease  404  Not Found", FetchError),
    ],
)
def test_a_full_disk_is_not_the_mirrors_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str, expected: type[FetchError | SpaceError]
) -> None:
    def run(*_: object, **__: object) -> None:
        raise CommandError("exit status 100: apt-get", tail=tail)

    monkeypatch.setattr(process, "run", run)
    with pytest.raises(expected) as raised:
        apt.Apt(tmp_path, [], "amd64").update()
    assert ("store gc" in (raised.value.hint or "")) == (expected is SpaceError)


def test_an_earlier_version_is_kept_even_if_a_newer_one_is_there(tmp_path: Path) -> None:
    """apt_preferences(5): from 1000 on, a version is taken even if that is a downgrade."""
    apt.Apt(tmp_path, [], "amd64").prefer([CURL, DBUS])
    pins = (tmp_path / "etc/preferences.d/known").read_text().split("\n\n")
    found = [dict(line.split(": ", 1) for line in pin.strip().splitlines()) for pin in pins]
    assert [(pin["Package"], pin["Pin"]) for pin in found] == [
        ("curl", "version 1.0"),
        ("dbus", "version 1:2.0-1"),
    ]
    assert min(int(pin["Pin-Priority"]) for pin in found) >= 1000
