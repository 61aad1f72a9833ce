"""Addresses of repositories and archives in a definition: what apt accepts, and no passwords."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.bake.lock.model import DEBIAN, SECURITY
from image_builder.definition import needs
from tests.unit.definition.conftest import Load, lines

GOOD = {
    "name": "x",
    "uris": ["https://apt.example/"],
    "suites": ["stable"],
    "components": ["main"],
    "signed_by": "k",
}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"suites": ["/"], "components": []}, None),
        ({"suites": ["/"]}, "a flat one"),
        ({"components": []}, "needs components"),
        ({"name": DEBIAN}, "`debian` is Debian's own"),
        ({"name": SECURITY}, "`debian-security` is Debian's own"),
        ({"uris": ["https://canary@apt.example/x"]}, "https://apt.example/x has credentials"),
        ({"uris": ["https://robot:canary@apt.example/x"]}, "https://apt.example/x has credentials"),
    ],
)
def test_a_repository_is_as_apt_takes_it(change: dict[str, Any], problem: str | None) -> None:
    if problem is None:
        assert needs._repository({**GOOD, **change}).name == "x"
        return
    with pytest.raises(TypeError, match=problem) as caught:
        needs._repository({**GOOD, **change})
    assert "canary" not in str(caught.value)


def test_an_archive_with_a_password_is_refused() -> None:
    with pytest.raises(TypeError, match="auth.conf.d") as caught:
        needs._archive({"url": "https://robot:canary@files.example/a.tgz", "sha256": "0" * 64})
    assert "canary" not in str(caught.value)


def test_a_mirror_with_a_password_is_refused_without_showing_it(load: Load) -> None:
    base = "{suite: trixie, mirror: 'https://robot:canary@mirror.example/debian'}"
    (problem,) = lines(load(group_vars__images=f"image_base: {base}\nimage_layers: [system]\n"))
    assert "image_base.mirror" in problem and "auth.conf.d" in problem and "canary" not in problem
