"""Collections in a user's repository: locked by content, installed by ``ansible-galaxy``, and used in a bake."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from image_builder.cli import init
from image_builder.errors import DefinitionError, FetchError, LockError, UsageError
from image_builder.settings import REPO_ROOT
from tests.support.galaxy import Galaxy, build_collection
from tests.support.images.builds import Workplace, make_tiny
from tests.support.servers import running

pytestmark = pytest.mark.root
FILTER = """
class FilterModule:
    def filters(self):
        return {"shout": lambda text: text.upper() + "%s"}
"""
BASE = {
    "roles/ground/defaults/main.yml": "ground_mark: of a collection\n",
    "roles/ground/tasks/main.yml": "[]\n",
}


@dataclass(frozen=True)
class Repository:
    """A repository as `init` makes it, whose role needs a collection from a Galaxy server."""

    path: Path
    galaxy: Galaxy
    url: str
    store: Path

    def run(self, *words: str | Path, status: int = 0) -> str:
        argv = [REPO_ROOT / "image-builder", *words]
        environment = {**os.environ, "CI": "true", "IMAGE_BUILDER_STORE": os.fspath(self.store)}
        done = subprocess.run(argv, cwd=self.path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def publish(self, name: str, version: str, files: dict[str, str]) -> Path:
        archive = build_collection(self.path.parent / "sources", name, version, files)
        self.galaxy.archives[name, version] = archive
        return archive

    def require(self, *entries: dict[str, str]) -> None:
        (self.path / "requirements.yml").write_text(json.dumps({"collections": list(entries)}))

    @property
    def installed(self) -> Path:
        return self.path / "collections/ansible_collections"

    @property
    def lock(self) -> dict[str, str]:
        """Return the locked versions."""
        content = json.loads((self.path / "collections.lock").read_text())
        return {c["name"]: c["version"] for c in content["collections"]}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    galaxy = Galaxy(dependencies={"acme.text": {"acme.base": ">=1.0.0"}})
    (tmp_path / "sources").mkdir()
    path = tmp_path / "images of the büro"
    shutil.copytree(init.TEMPLATE, path)
    template = path / "roles/site_banner/templates/motd.j2"
    template.write_text("{{ site_banner_owner | acme.text.shout }}\n" + template.read_text())
    (path / "roles/site_banner/meta/main.yml").write_text("dependencies: [acme.base.ground]\n")
    with running(galaxy.server()) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with (path / "ansible.cfg").open("a") as stream:
            stream.write(f"\n[galaxy]\nserver_list = own\n[galaxy_server.own]\nurl = {url}/api/\n")
        repository = Repository(path, galaxy, url, tmp_path / "store")
        repository.publish("acme.base", "1.0.0", BASE)
        for version, mark in {"1.0.0": "!", "1.1.0": "!!", "2.0.0": "!!!"}.items():
            repository.publish("acme.text", version, {"plugins/filter/shout.py": FILTER % mark})
        repository.require({"name": "acme.text", "version": ">=1.0.0,<2.0.0"})
        yield repository


def test_what_is_asked_for_is_locked_and_installed_once(repository: Repository) -> None:
    asked = repository.run("validate", status=DefinitionError.exit_code)
    assert (
        "requirements.yml  requirements.yml: its collections are not locked: run `image-builder collections`"
        in asked
    )
    repository.run("collections")
    assert repository.lock == {"acme.base": "1.0.0", "acme.text": "1.1.0"}
    repository.run("validate")
    repository.galaxy.down = True
    assert repository.run("collections").count("there already") == 2, "nobody was asked"


@pytest.mark.slow
def test_a_lock_installs_the_same_anywhere(repository: Repository) -> None:
    repository.run("collections")
    shutil.rmtree(repository.installed.parent)
    assert "acme.text: is not installed" in repository.run("validate", status=DefinitionError.exit_code)
    repository.publish("acme.text", "1.2.0", {"plugins/filter/shout.py": FILTER % "?"})
    repository.run("collections")
    assert "!!" in (repository.installed / "acme/text/plugins/filter/shout.py").read_text()
    repository.run("collections", "--update")
    assert repository.lock["acme.text"] == "1.2.0"
    assert '"?"' in (repository.installed / "acme/text/plugins/filter/shout.py").read_text()


def test_another_content_under_a_locked_version_is_not_installed(repository: Repository) -> None:
    repository.run("collections")
    shutil.rmtree(repository.installed.parent)
    repository.publish("acme.text", "1.1.0", {"plugins/filter/shout.py": FILTER % "evil"})
    failure = repository.run("collections", status=FetchError.exit_code)
    assert "and what came is acme.text 1.1.0 of another content" in failure
    assert not repository.installed.exists()
    assert not list(repository.installed.parent.iterdir()), "nothing is left behind"


def test_a_change_of_what_is_installed_is_seen_and_mended(repository: Repository) -> None:
    repository.run("collections")
    text = repository.installed / "acme/text"
    installed = _contents(text)
    for file in ("plugins/filter/shout.py", "plugins/filter/more.py", "MANIFEST.json", "README.md"):
        with (text / file).open("a") as stream:
            stream.write("# changed\n")
        assert "acme.text: " in repository.run("validate", status=DefinitionError.exit_code)
        repository.run("collections")
        assert _contents(text) == installed
    repository.run("validate")
    shutil.copytree(text, repository.installed / "acme/other")
    assert "acme.other: is not in collections.lock" in repository.run(
        "validate", status=DefinitionError.exit_code
    )


def _contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_server_that_fails_leaves_what_is_there(repository: Repository) -> None:
    repository.run("collections")
    before = (repository.path / "collections.lock").read_text()
    repository.galaxy.down = True
    failure = repository.run("collections", "--update", status=FetchError.exit_code)
    assert "500" in failure, failure
    assert (repository.path / "collections.lock").read_text() == before
    repository.run("validate")
    assert [entry.name for entry in repository.installed.parent.iterdir()] == ["ansible_collections"]


@pytest.mark.slow
def test_collections_of_an_address_and_of_git_are_locked_too(repository: Repository) -> None:
    source = repository.path.parent / "sources/acme.text-2.0.0"
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"],
    ):
        subprocess.run(["git", *words], cwd=source, check=True)
    repository.require(
        {"name": f"{repository.url}/archives/acme-base-1.0.0.tar.gz", "type": "url"},
        {"name": f"git+file://{source}", "type": "git", "version": "HEAD"},
    )
    repository.run("collections")
    assert repository.lock == {"acme.base": "1.0.0", "acme.text": "2.0.0"}
    shutil.rmtree(repository.installed.parent)
    repository.run("collections")
    repository.run("validate")


@pytest.mark.parametrize(
    ("file", "text", "status"),
    [
        ("requirements.yml", "roles: [{name: acme.role}]\n", DefinitionError.exit_code),
        ("requirements.yml", "collections: [\n", DefinitionError.exit_code),
        ("requirements.yml", "collections: acme.text\n", DefinitionError.exit_code),
        ("requirements.yml", "- acme.text\n", DefinitionError.exit_code),
        ("requirements.yml", "collections: [{name: acme.nothing}]\n", FetchError.exit_code),
        ("collections.lock", "{}", LockError.exit_code),
    ],
)
def test_what_cant_be_installed(repository: Repository, file: str, text: str, status: int) -> None:
    (repository.path / file).write_text(text)
    repository.run("collections", status=status)
    assert not repository.installed.exists()


def test_without_requirements_there_is_nothing_to_install(repository: Repository) -> None:
    (repository.path / "requirements.yml").unlink()
    assert "has no requirements.yml" in repository.run("collections", status=UsageError.exit_code)


@pytest.mark.slow
def test_an_image_is_baked_with_what_a_collection_brings(tiny: Workplace, repository: Repository) -> None:
    repository = Repository(repository.path, repository.galaxy, repository.url, tiny.store)
    make_tiny(repository.path)
    repository.run("collections")
    repository.galaxy.down = True
    check = repository.path / "checks/test_site_banner.py"
    expected = 'f"{v[\'site_banner_owner\'].upper()}!!\\n" + f"This machine'
    check.write_text(check.read_text().replace('f"This machine', expected))
    repository.run("build", "node")
    repository.galaxy.down = False
    repository.require({"name": "acme.text", "version": "==1.0.0"})
    repository.run("collections", "--update")
    explained = repository.run("plan", "node", "--explain")
    assert "collections/ansible_collections/acme/text/MANIFEST.json" in explained, explained
