"""Credentials for package repositories, as written in apt's files."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from image_builder.bake.lock import apt_auth
from image_builder.errors import FetchError


@pytest.mark.parametrize(
    ("machine", "url", "sent"),
    [
        ("apt.example", "https://apt.example/debian/pool/a.deb", True),
        ("apt.example", "http://apt.example/debian/pool/a.deb", False),
        ("http://apt.example", "http://apt.example/debian/pool/a.deb", True),
        ("apt.example", "https://apt.example:8443/a.deb", True),
        ("apt.example:8443", "https://apt.example:8443/a.deb", True),
        ("apt.example:8443", "https://apt.example/a.deb", False),
        ("apt.example/debian", "https://apt.example/debian/pool/a.deb", True),
        ("apt.example/debian", "https://apt.example/other/pool/a.deb", False),
        ("apt.example", "https://evil.example/apt.example/a.deb", False),
    ],
)
def test_a_password_goes_where_it_is_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, url: str, sent: bool
) -> None:
    file = tmp_path / "auth.conf"
    file.write_text(f"# comment\nmachine {machine} login robot password secret\n")
    monkeypatch.setenv(apt_auth.VARIABLE, str(file))
    basic = base64.b64encode(b"robot:secret").decode()
    assert apt_auth.header(url) == ({"Authorization": f"Basic {basic}"} if sent else {})
    assert f'Dir::Etc::netrc "{file}";' in apt_auth.configuration()


def test_a_file_that_is_none_is_named_without_what_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "auth.conf"
    monkeypatch.setenv(apt_auth.VARIABLE, str(file))
    with pytest.raises(FetchError, match="can't read the credentials"):
        apt_auth.header("https://apt.example/")
    file.write_text("machine apt.example\nrobot secret-canary\n")
    with pytest.raises(FetchError) as caught:
        apt_auth.header("https://apt.example/")
    assert str(file) in caught.value.message and "canary" not in caught.value.message
