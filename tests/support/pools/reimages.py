"""Real hosts that are rolled: each has its own sshd, in a real cluster, and in scale sets of the simulated Azure.

A reimage makes the host vanish with everything that runs on it, and come back as another boot of another image, with
another host key, signed for it by the host CA: what its node, its sshd and the suite report is its real state.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node.settings import RELEASE
from image_builder.pool.plan.model import Host
from image_builder.pool.reach.hostkeys import known_as
from tests.bench.measures import NOT_BOOTED, be_quick
from tests.support.arm.fleet import NEW, OLD, NoDisks, actions, add_version
from tests.support.arm.limits import Limits
from tests.support.arm.scale_sets import Machine, SetState
from tests.support.arm.service import Arm
from tests.support.control_plane.gates import Cluster
from tests.support.images.builds import REPO, Workplace
from tests.support.pools.fleet import USER, Fleet, new_key, sign
from tests.support.pools.rolls import World, surroundings

OLD_BUILD = "0" * 64
BOOT_ID = "/proc/sys/kernel/random/boot_id"
_KEY = "/etc/ssh/ssh_host_ed25519_key"
# All hosts share one kernel, and would therefore report the same boot.
_BOOT = f"""\
umount {BOOT_ID} 2>/dev/null || true
echo "$0" >/run/boot_id
mount --bind /run/boot_id {BOOT_ID}
"""
# As in a power cut: only the first process is left, which is sshd.
_CUT = "kill -9 -1 || true"


@dataclass
class RealWorld(World):
    """``release`` is the new image's release file. ``stubborn`` hosts return with the image that they had,
    ``unsigned`` ones with an unsigned key. ``reimaged`` lists the hosts that were reimaged, each time.
    """

    pool: Fleet = field(kw_only=True)
    facts: Path = field(kw_only=True)
    release: str = field(kw_only=True)
    suite: Path = field(kw_only=True)
    stubborn: set[str] = field(default_factory=set)
    unsigned: set[str] = field(default_factory=set)
    reimaged: list[str] = field(default_factory=list)

    @property
    def old_release(self) -> str:
        text = re.sub(r"(?m)^IMAGE_BUILD=.*", f'IMAGE_BUILD="{OLD_BUILD[:12]}"', self.release)
        return re.sub(r"(?m)^IMAGE_BUILD_ID=.*", f'IMAGE_BUILD_ID="{OLD_BUILD}"', text)

    def number(self, name: str) -> int:
        return int(name.rpartition("-")[2])

    def tells(self, name: str) -> tuple[str, str]:
        """Return the boot and the build that a host reports, bypassing SSH."""
        number = self.number(name)
        release = self.pool.run(number, "cat", os.fspath(RELEASE))
        (build,) = re.findall(r'(?m)^IMAGE_BUILD="?(\w+)', release)
        return self.pool.run(number, "cat", BOOT_ID).strip(), build

    def key(self, name: str) -> str:
        """Return the public key of a host's sshd."""
        return self.pool.run(self.number(name), "ssh-keygen", "-y", "-f", _KEY)

    def run_image(self, name: str, boot_id: str, release: str) -> None:
        """Make a host look like a boot of an image."""
        number = self.number(name)
        self.pool.run(number, "sh", "-ec", 'cat >"$0"', os.fspath(RELEASE), input=release)
        self.pool.run(number, "sh", "-ec", _BOOT, boot_id)

    def reimage(self, group: SetState, machine: Machine) -> None:
        """Reimage the host of an instance to which Azure has given another OS disk."""
        self.recorder.reimaged(group, machine)
        path = group.content["id"]
        host = next(h for h in self.hosts if (h.scale_set_id, h.instance) == (path, machine.id))
        threading.Thread(target=self._replace, args=(host, machine)).start()

    def _replace(self, host: Host, machine: Machine) -> None:
        number, folder = self.number(host.name), self.pool.folder
        self.pool.cut(number)
        self.pool.run(number, "sh", "-c", _CUT)
        is_new = machine.disk == NEW and host.name not in self.stubborn
        boot_id = self.kubelets.boot(host.name)
        self.run_image(host.name, boot_id, self.release if is_new else self.old_release)
        new = folder / f"host-{number}-{len(self.reimaged)}"
        new_key(new)
        sign(folder / "authority", new.with_name(f"{new.name}.pub"), "-n", known_as(host))
        certificate = new.with_name(f"{new.name}-cert.pub")
        if host.name in self.unsigned:
            certificate.write_text("")
        self.pool.run(number, "sh", "-ec", f"cat >{_KEY}-cert.pub", input=certificate.read_text())
        self.pool.restore_key(number, new.read_text())
        self.reimaged.append(host.name)
        self.pool.mend(number)

    # -- as an operator ------------------------------------------------------------------------------------

    @property
    def login(self) -> list[str]:
        return ["--user", USER, "--key", os.fspath(self.pool.key)]

    @property
    def authority(self) -> list[str]:
        return ["--host-ca", os.fspath(self.pool.authority.path)]

    def inventory(self, folder: Path, names: Sequence[str]) -> Path:
        """Write an inventory of hosts, as ``pool snapshot`` does."""
        groups: dict[str, Any] = {}
        for host in map(self.host, names):
            entry = {
                "ansible_host": host.address,
                "pool_vm_id": host.vm_id,
                "pool_instance_id": host.instance,
            }
            shared = {
                "pool_image": host.image,
                "pool_vm_size": host.vm_size,
                "pool_scale_set_id": host.scale_set_id,
            }
            group = groups.setdefault(host.scale_set.replace("-", "_"), {"hosts": {}, "vars": shared})
            group["hosts"][host.name] = entry
        file = folder / "hosts.json"
        file.write_text(json.dumps({"all": {"children": {"gpu": {"children": groups}}}}))
        return file

    def start(self, *argv: str | Path, **more: Any) -> subprocess.Popen[str]:
        """Start a ``pool`` command."""
        command = [sys.executable, "-m", "tests.support.pools.operator", self.suite, "pool", *argv]
        own = {n: v for n, v in os.environ.items() if not n.startswith(("AZURE_", "IDENTITY_", "MSI_"))}
        environment = {**own, "CI": "1", **self.served.environment}
        return subprocess.Popen(command, cwd=REPO, env=environment, text=True, **more)

    def operate(self, *argv: str | Path, status: int = 0) -> tuple[str, str]:
        """Run a ``pool`` command, which must exit with ``status``; return its output and its errors."""
        with self.start(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            out, err = child.communicate(timeout=540)
        assert child.returncode == status, f"{out}\n{err}"
        return out, err

    def plan(self, folder: Path, names: Sequence[str], policy: Mapping[str, Any]) -> Path:
        """Plan a roll of hosts to the new version; return the plan."""
        inventory, plan = self.inventory(folder, names), folder / "roll.json"
        (folder / "policy.yml").write_text(json.dumps(POLICY | dict(policy)))
        place: list[str | Path] = [
            "--policy",
            folder / "policy.yml",
            "--out",
            plan,
            "--endpoint",
            self.served.url,
        ]
        self.operate(
            "plan", "gpu", "-i", inventory, "--to", NEW, "--unproven", "the service is simulated", *place
        )
        return plan

    def driving(self, plan: Path) -> list[str | Path]:
        """Return the arguments of ``run`` and ``resume``, except those about host keys."""
        facts: list[str | Path] = ["--facts", self.facts, "--endpoint", self.served.url]
        return [plan, "-i", plan.with_name("hosts.json"), *self.login, "--kubeconfig", self.account(), *facts]


POLICY: dict[str, Any] = {
    "mode": "roll",
    "waves": ["100%"],
    "soak_seconds": [0],
    "cadence_seconds": 0,
    "wave_budget": "100%",
    "budget": "100%",
    "same_least": 100,
    "retry_seconds": 0.5,
    "deadlines": {"probe": 30, "verify": 300},
    "roll": {
        "max_unavailable": "50%",
        "max_wait_seconds": 10,
        "drain": {"settle_seconds": 1, "poll_seconds": 0.3, "max_wait_seconds": 8},
    },
}


def suite_of_the_running(folder: Path) -> Path:
    """Return the real suite without its checks for booted machines."""
    folder.mkdir()
    for path in (REPO / "image_builder/suite").iterdir():
        if path.is_file() and path.name not in NOT_BOOTED:
            (folder / path.name).symlink_to(path)
    return folder


@contextmanager
def rolling(
    cluster: Cluster, pool: Fleet, built: Workplace, sets: Sequence[int], folder: Path
) -> Iterator[RealWorld]:
    """Make scale sets of these sizes from a pool's hosts, all with the old image. Call it from the main thread."""
    arm = Arm(NoDisks(), url="https://arm", limits=Limits.boundless(), actions=actions())
    facts = built.artefact / "facts.json"
    builds = {OLD: OLD_BUILD[:12], NEW: json.loads(facts.read_text())["build_id"][:12]}
    for path, build in builds.items():
        add_version(arm, path)["tags"]["image-builder-build"] = build
    be_quick(pool, range(len(pool.hosts)))
    names = [host.name for host in pool.hosts]
    with surroundings(cluster, arm, names, folder) as place:
        _, kubelets, _, scale_sets, recorder = place
        world = RealWorld(
            *(*place, folder),
            pool=pool,
            facts=facts,
            release=pool.run(0, "cat", os.fspath(RELEASE)),
            suite=suite_of_the_running(folder / "suite"),
        )
        scale_sets.reimaged = world.reimage
        hosts = iter(pool.hosts)
        for number, count in enumerate(sets):
            path = scale_sets.add(f"gpu-{number}", OLD, count)
            for machine in scale_sets.sets[path.lower()].machines.values():
                host = next(hosts)
                machine.vm_id = host.vm_id
                update = {"scale_set": f"gpu-{number}", "scale_set_id": path, "instance": machine.id}
                world.hosts += (host.model_copy(update=update),)
                world.run_image(host.name, kubelets.nodes[host.name], world.old_release)
        with recorder:
            yield world
