"""A running machine becomes a worker: it has booted the small image, which has none of a worker's layers.

Its inventory declares it one of today's workers, and plain ansible-playbook applies every layer over SSH; it is
rebooted, and ``verify ssh://`` checks it against that declaration. The declaration leaves out what only a bake can
provide: images in a preload store. `join` needs a cluster to verify: test_roles_alone.py applies that layer,
tests/e2e/join.py lets it join.
"""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from image_builder.definition import load_inventory
from image_builder.events import Monitor
from image_builder.lab import pause
from image_builder.machine.vm import Vm, VmOptions
from image_builder.verify.boot import (
    GROWTH_BYTES,
    LOCAL_DISK,
    find_disk,
    start_pod,
    virtual_size,
    wait_for_system,
)
from image_builder.verify.runner import definition_facts, write_facts
from tests.support import servers
from tests.support.images import programs
from tests.support.images.builds import REPO, Workplace, offered_packages
from tests.support.images.fixtures import WHOLE
from tests.support.nodes import booted

pytestmark = [
    pytest.mark.root,
    pytest.mark.boot,
    pytest.mark.nightly,
    pytest.mark.image(WHOLE),
    programs.needs_programs,
]

LAYERS = ["system", "container_runtime", "node", "kubernetes", "gate"]
# How QEMU guests reach this host's 127.0.0.1.
HERE = "10.0.2.2"
# For an emulated machine on a busy host.
_SHUTDOWN_SECONDS = 600


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path, **directories: Path) -> Iterator[str]:
    """Serve directories by name; yield the address for guests."""
    folder.mkdir()
    for name, directory in directories.items():
        (folder / name).symlink_to(directory)
    handler = functools.partial(_Files, directory=os.fspath(folder))
    with servers.running(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://{HERE}:{server.server_port}"


@contextmanager
def running(image: str, disk: Path, folder: Path) -> Iterator[Vm]:
    """Boot a disk with a blank local disk attached."""
    folder.mkdir()
    size = virtual_size(disk) + GROWTH_BYTES
    options = VmOptions(image, disk, extra_disks=(LOCAL_DISK,), secure_boot=True, disk_size=size)
    with Vm(options, folder) as vm:
        assert wait_for_system(vm.wait_for_ssh()) == "running"
        yield vm


def declare(inventory: Path, image: str, address: str) -> None:
    """Write an inventory on top of the lab's that makes an image a worker of today with programs from ``address``."""
    declared = {
        "image_layers": LAYERS,
        "image_preload": [],
        "container_runtime_engine": "containerd",
        **programs.role_variables(address),
    }
    inventory.write_text(json.dumps({"current": {"hosts": {image: declared}}}))


def facts_of(machine: Workplace, inventory: Path, worker: Workplace) -> dict[str, Any]:
    """Return the expected facts: what is declared, with a worker's packages, and the build that the machine booted."""
    definition = load_inventory([REPO / "inventories/lab", inventory]).define(machine.image)
    build_id = json.loads((machine.artefact / "facts.json").read_bytes())["build_id"]
    packages = json.loads((worker.artefact / "facts.json").read_bytes())["packages"]
    return definition_facts(definition, build_id, packages, preload=[])


def test_layers_make_a_running_machine_a_worker(
    minimal: Workplace, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    worker: Workplace = request.getfixturevalue(WHOLE)
    inventory, facts = tmp_path / "worker.json", tmp_path / "facts.json"
    assert programs.DIRECTORY
    with (
        offered_packages(worker) as packages,
        served(tmp_path / "served", packages=packages, programs=programs.DIRECTORY) as address,
        running(minimal.image, find_disk(minimal.artefact), tmp_path / "machine") as vm,
    ):
        declare(inventory, minimal.image, f"{address}/programs")
        expected = facts_of(minimal, inventory, worker)
        write_facts(facts, expected)
        apply_layers(vm, inventory, f"{address}/packages", tmp_path)
        # Their units act at boot, and from then on the local disk hides what an engine had at its mount point.
        vm.shutdown(_SHUTDOWN_SECONDS)
        vm.power_on()
        assert wait_for_system(vm.wait_for_ssh()) == "running"
        start_pod(vm, vm.target, expected["variables"], Monitor(), pause.archive)
        done = subprocess.run(
            [REPO / "image-builder", "verify", vm.target.url, "--facts", facts, "--output", tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def apply_layers(vm: Vm, inventory: Path, packages: str, folder: Path) -> None:
    """Apply every layer, with packages only from this source."""
    ssh = vm.target
    # The image has no package sources of its own.
    sources = "/etc/apt/sources.list"
    ssh.run(["sh", "-euc", f"echo 'deb [trusted=yes] {packages} ./' >{sources}; apt-get update"])
    booted.write_inventory(folder, vm.options.name, ssh.address)
    with tempfile.TemporaryDirectory(prefix="ssh-", dir="/tmp") as sockets:
        for layer in LAYERS:
            done = booted.play(
                folder,
                REPO / f"playbooks/layers/{layer}.yml",
                *("-i", REPO / "inventories/lab", "-i", inventory, "-e", "target_hosts=nodes"),
                ANSIBLE_ROLES_PATH=os.fspath(REPO / "roles"),
                ANSIBLE_SSH_CONTROL_PATH_DIR=sockets,
                # In memory: the default is the user's home, where the suite would find it.
                ANSIBLE_REMOTE_TMP="/tmp/.ansible",
            )
            assert done.status == 0, done.output
    ssh.run(["rm", sources])
