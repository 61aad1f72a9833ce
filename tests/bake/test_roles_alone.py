"""Each role alone, by plain ansible-playbook, on a host that systemd has booted: the play of its README as it stands.

First in check mode, then for real, then once more, when nothing is left to change. Addresses that a README makes up
are replaced by those of packages and programs that are here. `image_seal` is for trees, and `nvidia` needs a kernel
with its modules: their scenarios (test_molecule.py) have both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.bake.lock import repository
from image_builder.bake.lock.model import Lock
from image_builder.bake.store import Store
from tests.support.images import programs
from tests.support.images.builds import REPO, Workplace
from tests.support.images.fixtures import WHOLE
from tests.support.nodes.booted import BootedHost, booted

pytestmark = [pytest.mark.root, pytest.mark.image(WHOLE), programs.needs_programs]

PROGRAMS = "/run/programs"
ELSEWHERE = {"image_seal", "nvidia"}
# What every commit shows: packages, handlers, units, a download.
EVERY_COMMIT = ("network_accounting", "node_agent")
ROLES = [
    pytest.param(path.name, marks=[] if path.name in EVERY_COMMIT else pytest.mark.nightly)
    for path in sorted((REPO / "roles").iterdir())
    if path.is_dir() and path.name not in ELSEWHERE
]


@pytest.fixture(scope="module")
def binds(request: pytest.FixtureRequest) -> Iterator[dict[str, Path]]:
    """What a host has below /run: the locked packages of a whole worker, and today's programs."""
    built: Workplace = request.getfixturevalue(WHOLE)
    store = Store(built.store)
    groups = [group for group in Lock.load(built.lock).groups.values() if group.suite == "trixie"]
    packages = {
        p.sha256: p for group in groups for p in group.packages if (built.store / "debs" / p.sha256).exists()
    }
    assert programs.DIRECTORY
    with store.staging() as staging:
        repository.write_repository(packages.values(), "trixie", built.store / "debs", staging / "repo")
        yield {repository.MOUNT_POINT: staging / "repo", PROGRAMS: programs.DIRECTORY}


@pytest.fixture
def host(minimal: Workplace, binds: dict[str, Path], tmp_path: Path) -> Iterator[BootedHost]:
    """A booted host of the small image."""
    with booted(minimal.trees("seal"), tmp_path / "host", binds) as host:
        yield host


def readme_play(role: str) -> str:
    """Return the first play of a role's README."""
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (REPO / "roles" / role / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return next(block for block in blocks if block.startswith("- hosts:"))


def real_addresses() -> dict[str, Any]:
    """Return values for what READMEs make up, of the directory of programs."""
    current = yaml.safe_load((REPO / "inventories/lab/group_vars/current.yml").read_text())
    source = current["current_programs"]["directory"]
    repository_here = {**source["repository"], "uris": [f"file:{PROGRAMS}/repository"]}
    here = {"url": source["kubelet"]["url"].replace("file:", f"file://{PROGRAMS}/")}
    return {
        "container_runtime_repository": repository_here,
        "container_runtime_containerd_version": source["containerd"],
        "kubelet_container_runtime_version": source["containerd"],
        "kubelet_version": current["kubelet_version"],
        "kubelet_source": {**source["kubelet"], **here},
    }


@pytest.mark.parametrize("role", ROLES)
def test_readmes_play(role: str, host: BootedHost) -> None:
    play = host.folder / "play.yml"
    play.write_text(readme_play(role))
    (host.folder / "addresses.json").write_text(json.dumps(real_addresses()))
    argv, settings = ["-e", "@addresses.json"], {"ANSIBLE_ROLES_PATH": os.fspath(REPO / "roles")}
    checked = host.play(play, "--check", *argv, **settings)
    assert checked.status == 0, checked.output
    first = host.play(play, *argv, **settings)
    assert first.status == 0, first.output
    second = host.play(play, *argv, **settings)
    assert second.status == 0, second.output
    assert second.changed == 0, second.output
