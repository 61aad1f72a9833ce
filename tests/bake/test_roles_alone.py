"""Each role on its own, by plain ansible-playbook, on a host booted by systemd: the play from its README, unchanged.

First in check mode, then for real, then once more, when there is nothing left to change. Addresses that a README
makes up are replaced by those of packages and programs that are here. `image_seal` is for trees, and `nvidia` needs a
kernel with its modules: their scenarios (test_molecule.py) have both.
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
from tests.support.images import programs
from tests.support.images.builds import REPO, Workplace, offered_packages
from tests.support.images.fixtures import WHOLE
from tests.support.nodes.booted import BootedHost, booted

pytestmark = [pytest.mark.root, pytest.mark.slow, programs.needs_programs]

PROGRAMS = "/run/programs"
ELSEWHERE = {"image_seal", "nvidia"}
ROLES = sorted(
    path.name for path in (REPO / "roles").iterdir() if path.is_dir() and path.name not in ELSEWHERE
)


@pytest.fixture(scope="module")
def binds(request: pytest.FixtureRequest) -> Iterator[dict[str, Path]]:
    """Yield a host's mounts below /run: the locked packages of a whole worker, and today's programs."""
    assert programs.DIRECTORY
    with offered_packages(request.getfixturevalue(WHOLE)) as packages:
        yield {repository.MOUNT_POINT: packages, PROGRAMS: programs.DIRECTORY}


@pytest.fixture
def host(minimal: Workplace, binds: dict[str, Path], tmp_path: Path) -> Iterator[BootedHost]:
    """Boot a host from the small image."""
    with booted(minimal.trees("seal"), tmp_path / "host", binds) as host:
        yield host


def readme_play(role: str) -> str:
    """Return the first play of a role's README."""
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (REPO / "roles" / role / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    play: str = next(block for block in blocks if block.startswith("- hosts:"))
    return play


def real_addresses() -> dict[str, Any]:
    """Return values for the addresses that READMEs make up, from the directory of programs."""
    variables = programs.role_variables(f"file://{PROGRAMS}")
    return {
        **variables,
        "azure_guest_agent": False,  # its package isn't in any of the lab's locks
        # What the layer `kubernetes` would set.
        "kubelet_container_runtime_version": variables["container_runtime_containerd_version"],
    }


def settings(host: BootedHost) -> list[str]:
    """Return the arguments of a play that set the real addresses."""
    (host.folder / "addresses.json").write_text(json.dumps(real_addresses()))
    return ["-e", f"@{host.folder}/addresses.json"]


@pytest.mark.parametrize("role", ROLES)
def test_readmes_play(role: str, host: BootedHost) -> None:
    converge(host, readme_play(role), *settings(host))


def test_image_preload_with_docker(minimal: Workplace, worker: Workplace, tmp_path: Path) -> None:
    """Run its README's play with the other engine, from Debian's archive, as the comment there describes."""
    play = readme_play("image_preload")
    for name, other in (
        ("container_runtime_engine: containerd", "container_runtime_engine: docker"),
        ("container_runtime_containerd_root", "container_runtime_data_root"),
    ):
        assert name in play
        play = play.replace(name, other)
    with (
        offered_packages(worker) as packages,
        booted(minimal.trees("seal"), tmp_path / "host", {repository.MOUNT_POINT: packages}) as host,
    ):
        # The host's root is an overlay, on which overlay2 can't be mounted.
        assert host.run("mount", "--mkdir", "-t", "tmpfs", "tmpfs", "/mnt/local").status == 0
        converge(host, play)
        agents = json.loads(host.run("cat", "/etc/node-agent/preload.json").output)
        assert agents["engine"] == "docker"


def converge(host: BootedHost, text: str, *argv: str) -> None:
    """Run a play in check mode, then for real, and once more, when there is nothing left to change."""
    play = host.folder / "play.yml"
    play.write_text(text)
    changes = []
    for check in (["--check"], [], []):
        done = host.play(play, *check, *argv, ANSIBLE_ROLES_PATH=os.fspath(REPO / "roles"))
        assert done.status == 0, done.output
        changes.append(done.changed)
    assert changes[-1] == 0, changes


@pytest.mark.parametrize("role", ["container_runtime", "kubelet", "nvidia"])
def test_check_mode_before_a_repository(role: str, host: BootedHost) -> None:
    """A repository that a first check mode doesn't add offers nothing yet; any other failure of apt is an error."""
    play = host.folder / "play.yml"
    play.write_text(readme_play(role))
    absent = {
        "uris": ["https://packages.invalid/"],
        "suites": ["/"],
        "signed_by": "/usr/share/keyrings/none.gpg",
    }
    variables = {
        **real_addresses(),
        f"{role}_repository": absent,
        "kubelet_source": {"type": "repository"},
        "kubelet_version": "1.34",
    }
    (host.folder / "variables.json").write_text(json.dumps(variables))
    argv = ["--check", "-e", f"@{host.folder}/variables.json"]
    roles = {"ANSIBLE_ROLES_PATH": os.fspath(REPO / "roles")}
    done = host.play(play, *argv, **roles)
    assert done.status == 0 and done.changed > 1, done.output
    host.run("sh", "-c", "echo broken > /etc/apt/sources.list.d/broken.list")
    done = host.play(play, *argv, **roles)
    assert done.status != 0 and "broken.list" in done.output, done.output


def test_layers_of_a_worker(host: BootedHost) -> None:
    """On a host without an image: all layers of a worker that joins a cluster, as its groups in the lab have them."""
    groups = {
        name: {"hosts": {"host": {"container_runtime_engine": "containerd"}}}
        for name in ("current", "joining")
    }
    (host.folder / "groups.json").write_text(json.dumps(groups))
    argv: list[str | Path] = [
        "-i",
        REPO / "inventories/lab",
        "-i",
        host.folder / "groups.json",
        *settings(host),
        "-e",
        "target_hosts=nodes",
    ]
    layers = yaml.safe_load((REPO / "inventories/lab/group_vars/joining.yml").read_text())["image_layers"]
    changes = []
    for layer in layers * 2:
        done = host.play(
            REPO / f"playbooks/layers/{layer}.yml", *argv, ANSIBLE_ROLES_PATH=os.fspath(REPO / "roles")
        )
        assert done.status == 0, done.output
        changes.append(done.changed)
    assert changes[len(layers) :] == [0] * len(layers)
