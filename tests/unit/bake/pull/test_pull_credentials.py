"""The sources of credentials, and that they are never shown."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_builder.bake.pull.credentials import VARIABLE, Credentials, credentials_for, docker_header
from image_builder.bake.pull.reference import parse
from image_builder.errors import PullError
from image_builder.system import process

SECRET = "s3cret-canary"


@pytest.fixture(autouse=True)
def _no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


def test_without_any_it_is_anonymous() -> None:
    assert credentials_for("registry.example") is None
    assert docker_header(None) == {}


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    auth = base64.b64encode(b"file:other").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {"registry.example": {"auth": auth}}}))
    assert credentials_for("registry.example") == Credentials("file", "other")
    told = {"registry.example": {"username": "robot", "password": SECRET}}
    monkeypatch.setenv(VARIABLE, json.dumps(told))
    assert credentials_for("registry.example") == Credentials("robot", SECRET)
    assert credentials_for("registry2.example") is None


@pytest.mark.parametrize(
    "text", [f"no json {SECRET}", f'{{"registry.example": {{"password": "{SECRET}"}}}}', "[1]"]
)
def test_a_malformed_variable_is_refused_without_showing_it(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(PullError) as caught:
        credentials_for("registry.example")
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_password_does_not_show_in_a_repr() -> None:
    assert SECRET not in repr(Credentials("robot", SECRET, SECRET))


def test_dockers_header_holds_them() -> None:
    header = docker_header(Credentials("robot", SECRET))["X-Registry-Auth"]
    assert json.loads(base64.urlsafe_b64decode(header)) == {"username": "robot", "password": SECRET}


@pytest.mark.parametrize(
    ("text", "registry", "name", "tag", "host"),
    [
        ("registry.k8s.io/pause:3.10", "registry.k8s.io", "pause", "3.10", "registry.k8s.io"),
        ("localhost:5000/a/b:1", "localhost:5000", "a/b", "1", "localhost:5000"),
        ("docker.io/library/busybox:1", "docker.io", "library/busybox", "1", "registry-1.docker.io"),
        ("docker.io/a/b:1", "docker.io", "a/b", "1", "registry-1.docker.io"),
    ],
)
def test_references(text: str, registry: str, name: str, tag: str, host: str) -> None:
    found = parse(text)
    assert (found.registry, found.name, found.tag) == (registry, name, tag)
    assert found.api_host == host
    assert str(found) == text
    assert found.at("sha256:1") == f"{registry}/{name}@sha256:1"


ANSWER = json.dumps({"Username": "robot", "Secret": SECRET})


@pytest.mark.parametrize(
    ("status", "printed", "found"),
    [
        (0, ANSWER, Credentials("robot", SECRET)),
        (0, ANSWER.replace("robot", "<token>"), Credentials("", "", SECRET)),
        (0, json.dumps({"Username": "", "Secret": ""}), None),
        (1, "credentials not found in native keychain", None),
        (1, SECRET, "refused"),
        (0, SECRET, "refused"),
        (0, f'{{"Secret": "{SECRET}"}}', "refused"),
        (0, f'["{SECRET}"]', "refused"),
    ],
)
def test_a_helper_is_asked_and_what_it_says_is_never_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    printed: str,
    found: Credentials | str | None,
) -> None:
    asked: list[tuple[list[str], str]] = []

    def run(argv: list[str], *, input: str, **_: object) -> SimpleNamespace:
        asked.append((argv, input))
        return SimpleNamespace(returncode=status, stdout=printed)

    monkeypatch.setattr(process, "run", run)
    (tmp_path / "config.json").write_text('{"credHelpers": {"registry.example": "lab"}}')
    if found == "refused":
        with pytest.raises(PullError) as caught:
            credentials_for("registry.example")
        assert SECRET not in f"{caught.value} {caught.value.hint}" and caught.value.__cause__ is None
    else:
        assert credentials_for("registry.example") == found
    assert asked == [(["docker-credential-lab", "get"], "registry.example")]
