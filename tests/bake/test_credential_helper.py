"""A credential helper as the Docker client calls it: its answer is used, its failure reported without secrets."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from image_builder.bake.pull.credentials import VARIABLE, Credentials, credentials_for
from image_builder.errors import PullError

pytestmark = pytest.mark.root

SECRET = "s3cret-canary"


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Configure a helper called `lab` for registry.example; the test decides what it answers."""
    program = tmp_path / "docker-credential-lab"
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {"registry.example": "lab"}}))
    return program


def _answer(program: Path, script: str) -> None:
    program.write_text(f"#!/bin/sh\ncat > {program}.asked\n{script}\n")
    program.chmod(0o755)


def test_its_answer_is_used(helper: Path) -> None:
    _answer(helper, f"""echo '{json.dumps({"Username": "robot", "Secret": SECRET, "ServerURL": "x"})}'""")
    assert credentials_for("registry.example") == Credentials("robot", SECRET)
    assert Path(f"{helper}.asked").read_text() == "registry.example"
    assert credentials_for("other.example") is None


def test_an_identity_token_is_told_apart(helper: Path) -> None:
    _answer(helper, f"""echo '{json.dumps({"Username": "<token>", "Secret": SECRET, "ServerURL": "x"})}'""")
    found = credentials_for("registry.example")
    assert found is not None and found.token == SECRET


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"echo {SECRET}; echo broken {SECRET} >&2; exit 1", "exit status 1"),
        (f"echo no JSON {SECRET}", "its answer is not the protocol's JSON"),
        (f"""echo '["{SECRET}"]'""", "its answer is not the protocol's JSON"),
        (f"echo {SECRET}; sleep 600", "timed out after 0.5 s"),
    ],
    ids=["fails", "no JSON", "no object", "hangs"],
)
def test_one_that_fails_is_named_and_shows_no_secret(
    helper: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr("image_builder.bake.pull.credentials._HELPER_SECONDS", 0.5)
    _answer(helper, script)
    with pytest.raises(PullError) as caught:
        credentials_for("registry.example")
    assert caught.value.message == f"the credential helper for registry.example failed: {reason}"
    assert SECRET not in str(caught.value) and caught.value.__cause__ is None


def test_one_that_is_not_installed_is_named(helper: Path) -> None:
    with pytest.raises(PullError, match=r"failed: can't run docker-credential-lab: No such file"):
        credentials_for("registry.example")


def test_one_that_knows_nothing_leaves_it_to_the_file_and_to_anonymous_access(helper: Path) -> None:
    _answer(helper, "echo credentials not found in native keychain; exit 1")
    assert credentials_for("registry.example") is None
    auth = base64.b64encode(f"file:{SECRET}".encode()).decode()
    settings = {
        "credHelpers": {"registry.example": "lab"},
        "auths": {"https://registry.example": {"auth": auth}},
    }
    (helper.parent / "config.json").write_text(json.dumps(settings))
    assert credentials_for("registry.example") == Credentials("file", SECRET)


def test_docker_hub_is_asked_for_by_the_name_that_helpers_know(helper: Path) -> None:
    (helper.parent / "config.json").write_text(json.dumps({"credsStore": "lab"}))
    _answer(helper, f"""echo '{json.dumps({"Username": "robot", "Secret": SECRET})}'""")
    assert credentials_for("docker.io") == Credentials("robot", SECRET)
    assert Path(f"{helper}.asked").read_text() == "https://index.docker.io/v1/"


def test_a_damaged_configuration_is_told_without_what_is_in_it(helper: Path) -> None:
    (helper.parent / "config.json").write_text(json.dumps({"auths": {"registry.example": {"auth": SECRET}}}))
    with pytest.raises(PullError, match="the Docker client's configuration can't be read") as caught:
        credentials_for("registry.example")
    assert SECRET not in str(caught.value)
