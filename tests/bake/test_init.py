"""A user's own repository is found from its directory, and what is wrong with it is shown where a CI looks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from image_builder.errors import DefinitionError, UsageError
from image_builder.settings import PROJECT_VARIABLE, REPO_ROOT

pytestmark = pytest.mark.root


def run(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != PROJECT_VARIABLE}
    argv = [REPO_ROOT / "image-builder", *words]
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_a_new_repository_is_valid_and_is_found_from_its_directory(tmp_path: Path) -> None:
    made = run("init", "images of ours", cwd=tmp_path)
    assert made.returncode == 0 and "cd 'images of ours'" in made.stdout, made.stderr
    place = tmp_path / "images of ours"
    assert run("images", cwd=place).stdout == "node\n"
    checked = run("validate", cwd=place)
    assert (checked.returncode, checked.stdout) == (0, "node: no problems\n"), checked.stderr


def test_a_configuration_without_an_inventory_is_told(tmp_path: Path) -> None:
    (tmp_path / "ansible.cfg").write_text("[defaults]\n")
    done = run("images", cwd=tmp_path)
    assert done.returncode == UsageError.exit_code
    assert f"{tmp_path}/ansible.cfg names none" in done.stderr and "-i" in done.stderr


def test_a_ci_is_shown_the_file_and_the_line(tmp_path: Path) -> None:
    run("init", "images", cwd=tmp_path)
    done = run("--annotations", "github", "validate", "-e", "site_banner_onwer=x", cwd=tmp_path / "images")
    assert done.returncode == DefinitionError.exit_code
    assert "::error::site_banner_onwer: unknown variable" in done.stdout, done
    assert (
        run("--annotations", "jenkins", "validate", cwd=tmp_path / "images").returncode
        == UsageError.exit_code
    )


@pytest.mark.parametrize("options", [("images",), ("validate", "--json", "-i", "nowhere.yml")])
def test_a_reader_that_has_gone_is_neither_a_bug_nor_the_error(
    tmp_path: Path, options: Sequence[str]
) -> None:
    """As in `image-builder images | true`, even if the result is an error."""
    assert run("init", "mine", cwd=tmp_path).returncode == 0
    reader, writer = os.pipe()
    os.close(reader)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with os.fdopen(writer, "w") as nobody:
        done = subprocess.run(
            [REPO_ROOT / "image-builder", *options],
            cwd=tmp_path / "mine",
            env=environment,
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 128 + signal.SIGPIPE and "Traceback" not in done.stderr, done.stderr
