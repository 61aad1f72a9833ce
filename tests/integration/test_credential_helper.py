"""A credential helper as the Docker client calls it: its answer is used, its failure is told without a secret."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from image_builder.bake.pull.credentials import VARIABLE, Credentials, credentials_for
from image_builder.errors import PullError

pytestmark = [pytest.mark.root, pytest.mark.process]

SECRET = "s3cret-canary"


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A helper called `lab` for registry.example; what it says is up to the test."""
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


def test_one_that_fails_is_named_and_shows_no_secret(helper: Path) -> None:
    _answer(helper, f"echo {SECRET}; echo broken {SECRET} >&2; exit 1")
    with pytest.raises(PullError, match=r"credential helper for registry\.example failed") as caught:
        credentials_for("registry.example")
    assert SECRET not in str(caught.value)
