"""Plain hosts, and the layers of an image pushed to them by Ansible, as one would do without the image.

A plain host is the base of the image plus what is needed to reach it: sshd, sudo, ip. Its packages come from a local
directory, so that nothing is downloaded, and its disk is in memory. It hasn't booted: the roles detect that by
themselves, and enable units without starting any, as in a bake.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from image_builder.bake.lock.model import Lock
from image_builder.bake.lock.repository import APT_CONFIG, write_repository
from image_builder.bake.store import Store
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.system import namespace
from image_builder.system.sandbox import Root, open_root
from tests.support.images.builds import REPO, Workplace
from tests.support.pools.fleet import SITE, Fleet, fleet

_INVENTORY = REPO / "inventories/lab"
_GROUP = "images"
_REACHED_BY = ("iproute2", "openssh-server", "sudo")
# Room for the packages of the small image and the files that its initramfs is made of.
_DISK = "1g"
_FILES = {
    "etc/apt/sources.list": f"deb [trusted=yes] file:{SITE} ./\n",
    # As in the builder, including the disabled fsync, except for its paths.
    "etc/apt/apt.conf.d/90pushed": "".join(
        f"{line}\n" for line in APT_CONFIG.splitlines() if not line.startswith("Dir::")
    ),
    # Without systemd a package would start its daemon by itself, for example a second sshd.
    "usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",
}
# One file for each role of the small image: azure_guest, system, network_accounting, hardening.
_WRITTEN = (
    "/etc/cloud/cloud.cfg.d/95_image.cfg",
    "/etc/sysctl.d/90-image.conf",
    "/etc/systemd/system/network-accounting.service",
    "/etc/ssh/sshd_config.d/10-hardening.conf",
)
_WHAT_IS_THERE = f"""
dpkg-query --show --showformat '${{db:Status-Abbrev}} ${{Package}} ${{Version}}\\n'
sha256sum {" ".join(_WRITTEN)}
ls /boot
systemctl list-unit-files --state=enabled,masked --no-legend
"""


def define(image: str) -> ImageDefinition:
    """Return the definition of a lab image that has the variables of all images and no others."""
    definition = load_inventory([_INVENTORY]).define(image)
    assert definition.variables["group_names"] == [_GROUP], "the hosts would lack the other groups' variables"
    return definition


@contextmanager
def plain_hosts(place: Workplace, folder: Path, count: int, definition: ImageDefinition) -> Iterator[Fleet]:
    """Start ``count`` plain hosts with the packages of the image's layers available. Call from the main thread."""
    # Next to the store: packages are linked from there, and a layer of an overlay needs a real filesystem.
    with tempfile.TemporaryDirectory(prefix="plain-hosts-", dir=place.store.parent) as name:
        work, base = Path(name), place.object("base") / "product/tree"
        with Store(place.store).in_use():
            _write_repository(place, definition, work / "repo")
            _make_reachable(base, work)
            trees = (work / "tree", base)
            with fleet(place, folder, count, trees=trees, disk=_DISK, site=work / "repo") as pool:
                yield pool


def _write_repository(place: Workplace, definition: ImageDefinition, target: Path) -> None:
    lock = Lock.load(place.lock)
    packages = [package for layer in definition.layers for package in lock.group(layer).packages]
    write_repository(packages, definition.base.suite, place.store / "debs", target)


def _make_reachable(base: Path, work: Path) -> None:
    """Write what plain hosts have beyond the base, including the index of their packages, to ``work``/tree."""
    tree = work / "tree"
    tree.mkdir()

    def run() -> int:
        with open_root([base], work / "root", upper=tree, binds={SITE: work / "repo"}) as root:
            _install(root, work / "apt.log")
        return 0

    assert namespace.run_isolated(run) == 0, "the root of the plain hosts could not be made"


def _install(root: Root, log: Path) -> None:
    for name, text in _FILES.items():
        (root.path / name).write_text(text)
    (root.path / "usr/sbin/policy-rc.d").chmod(0o755)
    root.run(["apt-get", "update", "--error-on=any"], log=log)
    root.run(["apt-get", "install", "--yes", *_REACHED_BY], log=log)


def push(pool: Fleet, folder: Path, definition: ImageDefinition) -> float:
    """Run the playbooks of an image's layers on all hosts at once, in one process; return the seconds that took.

    ansible.cfg is the project's own, with pipelining; connections are kept open, as is Ansible's default.
    """
    sockets, extra, log = (folder / name for name in ("cp", "extra.json", "push.log"))
    extra.write_text(json.dumps(definition.play_variables))
    playbooks = [REPO / f"playbooks/layers/{layer}.yml" for layer in definition.layers]
    argv: list[str | Path] = [sys.executable, "-m", "ansible.cli.playbook"]
    argv += ["--inventory", _write_inventory(pool, folder), "--extra-vars", f"@{extra}"]
    argv += ["--forks", str(len(pool.hosts)), *playbooks]
    settings = {
        "ANSIBLE_CONFIG": os.fspath(REPO / "ansible.cfg"),
        "ANSIBLE_HOME": os.fspath(folder / "home"),
        "ANSIBLE_SSH_CONTROL_PATH_DIR": os.fspath(sockets),
        "ANSIBLE_SSH_ARGS": "-F none -C -o ControlMaster=auto -o ControlPersist=60s",
    }
    try:
        with log.open("w") as sink:
            began = time.monotonic()
            done = subprocess.run(
                argv,
                cwd=REPO,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                check=False,
            )
            seconds = time.monotonic() - began
    finally:
        _close_connections(sockets)
    assert done.returncode == 0, log.read_text()[-5000:]
    return seconds


def _write_inventory(pool: Fleet, folder: Path) -> Path:
    """Copy the lab's inventory, with the hosts as its only images, so that they get what the image gets."""
    inventory = folder / "inventory"
    shutil.copytree(_INVENTORY, inventory)
    hosts = {host.name: {**pool.variables(host), "ansible_become": True} for host in pool.hosts}
    (inventory / "hosts.yml").write_text(json.dumps({_GROUP: {"hosts": hosts}}))
    return inventory


def _close_connections(sockets: Path) -> None:
    for socket in sockets.glob("*"):
        # A connection that has already closed by itself isn't an error.
        argv = ["ssh", "-F", "none", "-O", "exit", "-o", f"ControlPath={socket}", "host"]
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)


def what_is_there(pool: Fleet, number: int) -> frozenset[str]:
    """Return what the roles put on a host, as lines: packages, a file of each role, kernels, enabled units."""
    return frozenset(pool.run(number, "sh", "-ec", _WHAT_IS_THERE).splitlines())
