"""An image from a user's own repository: baked with its role, and verified by its check, which provably can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.cli import init
from image_builder.errors import PublishError, VerifyError
from image_builder.settings import REPO_ROOT
from tests.support.images.builds import Workplace, make_tiny

pytestmark = pytest.mark.root
CHECK = "test_site_banner.py::test_banner_names_the_owner"


@dataclass(frozen=True)
class Project:
    """A repository as `init` makes it, and where it is built. What one of them bakes, all others find in the store."""

    path: Path
    store: Path
    output: Path

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run_program([REPO_ROOT / "image-builder", *words])

    def run_program(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "CI": "true", "IMAGE_BUILDER_STORE": os.fspath(self.store)}
        return subprocess.run(
            argv, cwd=self.path, env=environment, capture_output=True, text=True, check=False
        )

    def build(self) -> subprocess.CompletedProcess[str]:
        return self.run("build", "node", "--output", self.output, "--json")

    def change(self, file: str, text: str) -> None:
        (self.path / file).write_text(text)


BECOMING = """  become: true
  pre_tasks:
    - name: Become a user without a shell
      become_user: games
      block:
        - name: Copy a file
          ansible.builtin.copy: {content: text, dest: /var/tmp/site, mode: "0600"}
        - name: Look at it
          ansible.builtin.command: stat --format %U /var/tmp/site
          register: site_user
          changed_when: false
          failed_when: site_user.stdout != "games"
        - name: Remove it
          ansible.builtin.file: {path: /var/tmp/site, state: absent}
"""


@pytest.fixture
def project(tiny: Workplace, tmp_path: Path) -> Project:
    path = tmp_path / "images of the büro"
    shutil.copytree(init.TEMPLATE, path)
    make_tiny(path)
    # As in a layer that is also applied to live hosts. A bake runs as root, and the image has no sudo.
    layer = path / "playbooks/layers/site.yml"
    layer.write_text(layer.read_text().replace("  roles:", BECOMING + "  roles:"))
    return Project(path, tiny.store, tmp_path / "output")


def test_an_image_of_ones_own_is_baked_and_verified(project: Project) -> None:
    built = project.build()
    assert built.returncode == 0, built.stderr
    artefact = (project.output / "node/latest").resolve()
    verdict = _verdict(artefact)
    assert [(check["name"], check["outcome"]) for check in verdict["checks"] if check["is_own"]] == [
        (CHECK, "passed")
    ]
    assert verdict["counts"]["own"] == 1 and verdict["counts"]["passed"] > 50
    assert "test_site_banner" in (artefact / "junit.xml").read_text()
    assert json.loads((artefact / "facts.json").read_text())["variables"]["site_banner_owner"]

    # Nothing but the output is written, wherever the repository is.
    place = os.fspath(project.path)
    script = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && exec "$@"'
    read_only = ["unshare", "--mount", "sh", "-c", script, place, os.fspath(REPO_ROOT / "image-builder")]
    assert project.run_program([*read_only, "build", "node", "--output", project.output]).returncode == 0
    refused = project.run_program([*read_only, "build", "node"])
    assert refused.returncode == PublishError.exit_code and "Read-only file system" in refused.stderr

    # The expectation and the image's contents are separate: the check sees that they differ.
    role = "roles/site_banner/templates/motd.j2"
    project.change(role, "Nobody's machine\n")
    broken = project.build()
    assert broken.returncode == VerifyError.exit_code and CHECK in broken.stderr, broken.stderr
    assert (project.output / "node/latest").resolve() == artefact, "what was there stays"


TUTORIAL = REPO_ROOT / "docs/tutorial/your-own-image.md"


def test_the_tutorial_holds_as_far_as_the_bake(tiny: Workplace, tmp_path: Path) -> None:
    """Its first block, word for word, on a smaller image; ``plan --explain`` then says what a change costs."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/image-builder").symlink_to(REPO_ROOT / "image-builder")
    environment = {
        **os.environ,
        "CI": "true",
        "IMAGE_BUILDER_STORE": os.fspath(tiny.store),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
    }

    def run(script: str, place: Path) -> str:
        done = subprocess.run(
            ["sh", "-euc", script], cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    block = TUTORIAL.read_text().partition("```sh\n")[2].partition("```")[0]
    *commands, boot = block.splitlines()
    assert len(commands) == 4 and " boot " in boot
    run("\n".join(commands[:2]), tmp_path)
    place = tmp_path / "images"
    make_tiny(place)
    run("\n".join(commands[2:]), place)
    variables = place / "inventories/site/group_vars/images.yml"
    variables.write_text(variables.read_text().replace("the platform team", "somebody else"))
    explained = run("image-builder plan node --explain", place)
    assert "site_banner_owner" in explained, explained
    verdict = _verdict((place / "output/node/latest").resolve())
    assert verdict["counts"]["own"] == 1


def test_a_check_that_stays_green_on_a_broken_image_ends_the_bake(project: Project) -> None:
    project.change("checks/mutations.yml", "test_banner_names_the_owner: [rm /etc/motd, touch /etc/other]\n")
    built = project.build()
    assert built.returncode == VerifyError.exit_code, built.stderr
    assert "can fail:" in built.stderr and f"{CHECK}[1]: passed\n" in built.stderr
    assert f"{CHECK}[0]" not in built.stderr, "it saw that one"
    assert not (project.output / "node").exists()


def test_a_mutation_that_fails_proves_nothing(project: Project) -> None:
    project.change("checks/mutations.yml", "test_banner_names_the_owner: [rm /etc/nothing]\n")
    built = project.build()
    assert built.returncode == VerifyError.exit_code
    assert "rm /etc/nothing: ended with 1" in built.stderr, built.stderr


def _verdict(artefact: Path) -> dict[str, Any]:
    verdict: dict[str, Any] = json.loads((artefact / "verify.json").read_text())
    return verdict
