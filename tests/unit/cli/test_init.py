"""The command ``init`` writes a repository with the pipeline of one service, and only where nothing exists yet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.errors import UsageError
from image_builder.settings import REPO_ROOT


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["init", *words])
    return done.exit_code, done.stdout


@pytest.mark.parametrize(
    ("options", "pipeline"),
    [
        ((), ".github/workflows/image.yml"),
        (("--ci", "github"), ".github/workflows/image.yml"),
        (("--ci", "azure"), "azure-pipelines.yml"),
        (("--ci", "gitlab"), ".gitlab-ci.yml"),
    ],
)
def test_the_pipeline_is_of_one_service(tmp_path: Path, options: tuple[str, ...], pipeline: str) -> None:
    _, made = run("images", *options, "--json")
    files = json.loads(made)["files"]
    pipelines = [".github/workflows/image.yml", "azure-pipelines.yml", ".gitlab-ci.yml"]
    assert [name for name in pipelines if name in files] == [pipeline]
    assert (tmp_path / "images" / pipeline).stat().st_size and "README.md" in files


def test_another_service_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    assert run("images", "--ci", "jenkins")[0] == UsageError.exit_code
    assert not (tmp_path / "images").exists()


@pytest.mark.parametrize("target", ["full", "file", "file/below", os.fspath(REPO_ROOT / "mine")])
def test_where_something_is_already_nothing_is_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/one").touch()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert run(target)[0] == UsageError.exit_code
    assert sorted(tmp_path.rglob("*")) == before
    assert not (REPO_ROOT / "mine").exists()
