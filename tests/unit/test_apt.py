"""Where Debian's packages come from: a mirror that was named, the host's own, or the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder import apt


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """The /etc of a Debian 13 host without sources."""
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
    """As Docker's and Microsoft's instructions set them up; apt's directory is read in the order of names."""
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
