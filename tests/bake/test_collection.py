"""The roles as a collection: built from this repository, installed offline, applied by their full names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder import __version__
from image_builder.bake.lock import repository
from tests.support.images.builds import REPO, Workplace, offered_packages
from tests.support.nodes.booted import BootedHost, booted

pytestmark = pytest.mark.root

ROLES = sorted(path.name for path in (REPO / "roles").iterdir() if path.is_dir())
PROGRAM = "/usr/local/sbin/node-agent"
# Both are in the collection: the lookup that the role node_agent calls, and the module.
PLAY = """\
- hosts: nodes
  roles:
    - role: image_builder.node.node_agent
  tasks:
    - image_builder.node.kubelet_files:
        entries: [{dest: /etc/kubernetes, state: directory, mode: "0755"}]
"""


def galaxy(*argv: str | Path, home: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": os.fspath(home)}
    command = [Path(sys.executable).parent / "ansible-galaxy", "collection", *argv]
    subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the collection as it is published; return its archive."""
    folder = tmp_path_factory.mktemp("built")
    galaxy("build", REPO, "--output-path", folder, home=folder)
    return folder / f"image_builder-node-{__version__}.tar.gz"


@pytest.fixture(scope="module")
def collections(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the collection in an empty directory; return that."""
    folder = tmp_path_factory.mktemp("collections")
    galaxy("install", "--offline", "-p", folder, archive, home=folder)
    return folder


@pytest.fixture
def host(minimal: Workplace, tmp_path: Path) -> Iterator[BootedHost]:
    """Boot a host from the small image, with access to that image's packages."""
    with (
        offered_packages(minimal) as packages,
        booted(minimal.trees("seal"), tmp_path / "host", {repository.MOUNT_POINT: packages}) as host,
    ):
        yield host


def play(host: BootedHost, collections: Path, *argv: str | Path) -> int:
    """Run a playbook with the collection and nothing else from this repository; return the number of changes."""
    done = host.play(*argv, ANSIBLE_COLLECTIONS_PATH=os.fspath(collections))
    assert done.status == 0, done.output
    return done.changed


def test_archive_has_what_the_roles_need_and_nothing_else(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        names = [Path(name) for name in opened.getnames()]
    tops = {
        "FILES.json",
        "LICENSE",
        "MANIFEST.json",
        "image_builder",
        "meta",
        "playbooks",
        "plugins",
        "roles",
    }
    assert {name.parts[0] for name in names} == tops
    assert {name.parts[1] for name in names if name.parts[0] == "image_builder" and len(name.parts) > 1} == {
        "__init__.py",
        "node",
    }
    assert not [name for name in names if "molecule" in name.parts or "__pycache__" in name.parts]
    assert {name.parts[1] for name in names if name.parts[0] == "roles" and len(name.parts) > 2} == set(ROLES)


def documented(kind: str, names: Sequence[str], collections: Path) -> dict[str, Any]:
    """Return ansible-doc's output for roles or plugins of the collection, by their full names."""
    paths = {"HOME": os.fspath(collections), "ANSIBLE_COLLECTIONS_PATH": os.fspath(collections)}
    full = [f"image_builder.node.{name}" for name in names]
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-doc", "--json", "-t", kind, *full],
        env={"PATH": os.environ["PATH"], **paths},
        cwd=collections,
        capture_output=True,
        check=True,
    )
    pages: dict[str, Any] = json.loads(done.stdout)
    assert list(pages) == full
    return pages


def test_documentation_shows_each_option(collections: Path) -> None:
    pages = documented("role", ROLES, collections)
    for role in ROLES:
        specs = yaml.safe_load((REPO / "roles" / role / "meta/argument_specs.yml").read_text())
        shown = pages[f"image_builder.node.{role}"]["entry_points"]["main"]
        assert shown["options"].keys() == (specs["argument_specs"]["main"].get("options") or {}).keys()
    documented("module", ["kubelet_files", "nvidia_modules"], collections)
    documented("lookup", ["node_agent_archive"], collections)


def test_roles_and_plugins_work_by_their_full_names(host: BootedHost, collections: Path) -> None:
    (host.folder / "play.yml").write_text(PLAY)
    assert play(host, collections, host.folder / "play.yml") > 0
    assert play(host, collections, host.folder / "play.yml") == 0
    assert "promote" in host.run(PROGRAM, "--help").output


@pytest.mark.slow
def test_layers_change_hosts_of_any_group(host: BootedHost, collections: Path) -> None:
    argv: Sequence[str] = ("image_builder.node.layers.system", "-e", "target_hosts=nodes")
    play(host, collections, *argv)
    assert play(host, collections, *argv) == 0
