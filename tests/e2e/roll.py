"""A running baked node is rolled to another build from the command line: its OS disk is swapped, its local disk stays.

    .venv/bin/python -m tests.e2e.roll [--json] [--update-docs] [--old DIR] [--new DIR]

Needs root and a store (--store). Builds the worker that joins twice, the second time with `tests/e2e/roll.yml`, unless
the directories of builds are given. The first one boots, joins the lab's control plane and is admitted by the gate.
Then `image-builder pool plan` and `pool run` roll it, with the waits and the suite of a real roll. Azure is simulated,
and its reimage is a power cut, another OS disk and the same local one. The first reimage brings back the old image,
which the roll must detect. With each OS disk cloud-init installs another host key and a certificate of the host CA.
Exits with status 1 unless every fact of `tests.e2e.roll_facts` holds. With an emulated machine it takes half an hour,
which is why CI doesn't run it.

--update-docs replaces its rows of docs/reference/proofs.md.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.machine.qemu import accelerator
from image_builder.node.net.kube import MERGE_PATCH, path_of_node
from image_builder.settings import REPO_ROOT, Settings
from tests.boot.node import Image, Instance, Local, read_image
from tests.e2e import command
from tests.e2e.command import LARGE_LAB, say
from tests.e2e.join import IMAGE, keep_logs
from tests.e2e.join_lab import MACHINE, JoinLab
from tests.e2e.join_machine import Member
from tests.e2e.link import Link
from tests.e2e.roll_facts import facts, figures
from tests.support.arm.fleet import NEW, OLD, NoDisks, actions, add_version
from tests.support.arm.limits import Limits
from tests.support.arm.scale_sets import ScaleSets
from tests.support.arm.service import Arm
from tests.support.arm.serving import Served, served
from tests.support.control_plane import gates
from tests.support.nodes import joins
from tests.support.pools.fleet import new_key, sign
from tests.support.pools.rolls import ACCOUNT, RIGHTS

OTHER = REPO_ROOT / "tests/e2e/roll.yml"
POLICY = {
    "mode": "roll",
    "waves": ["100%"],
    "soak_seconds": [0],
    "cadence_seconds": 0,
    # An emulated machine is ten times slower than the defaults allow for.
    "deadlines": {"probe": 120, "verify": 2400},
    "roll": {"max_unavailable": "1", "reimage_seconds": 5400},
}
_KEY = "/etc/ssh/ssh_host_ed25519_key.pub"
_SSH = 22
_AT_ONCE = 1e9  # bytes per second
_LOCAL = Local("local")


@dataclass
class Reimaged:
    """The machine: an OS disk of an image, one local disk, one address; ``images`` are by gallery version."""

    lab: JoinLab
    place: Path
    images: dict[str, Image]
    instance: Instance | None = None
    seen: list[dict[str, Any]] = field(default_factory=list)
    # The versions of the OS disks that Azure gives it.
    due: queue.Queue[str] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        new_key(self.place / "user")
        authority = new_key(self.place / "authority")
        (self.place / "authorities").write_text(f"@cert-authority * {authority}\n")

    @property
    def now(self) -> Instance:
        assert self.instance is not None
        return self.instance

    def swap(self, version: str, link: Link) -> None:
        """Cut the power, and power on with the OS disk of another image and the same local disk."""
        if self.instance is not None:
            self.instance.forget()
            # QEMU's firmware has no id, so the node's is that of its OS disk; Azure's has the VM's.
            path = path_of_node(Member(self.lab, self.instance, say).name)
            status = {"status": {"nodeInfo": {"systemUUID": joins.VM_ID}}}
            self.lab.admin.request("PATCH", f"{path}/status", status, MERGE_PATCH)
        folder = self.place / f"os-{len(self.seen)}"
        self.instance = Instance(self.images[version], folder)
        self._seed(folder)
        self.instance.insert([_LOCAL], self.place)
        self.instance.vm.power_on()
        link.target = ("127.0.0.1", self.instance.ssh.address.port)
        self.seen.append({"build": self.instance.image.told["build_id"]})

    def _seed(self, folder: Path) -> None:
        """Have cloud-init install the operator's key, and a host key that the authority signed for this machine."""
        key = folder / "host"
        public = new_key(key)
        certificate = sign(self.place / "authority", folder / "host.pub", "-n", joins.VM_ID)
        file = folder / "seed/user-data"
        content = json.loads(file.read_text().partition("\n")[2])
        content["ssh_authorized_keys"].append((self.place / "user.pub").read_text().strip())
        content["ssh_keys"] = {
            "ed25519_private": key.read_text(),
            "ed25519_public": public,
            "ed25519_certificate": certificate.read_text().strip(),
        }
        file.write_text(f"#cloud-config\n{json.dumps(content)}\n")

    def look(self) -> dict[str, Any]:
        """Return the machine's current state."""
        shell = self.now.shell
        return {
            "boot": shell("cat /proc/sys/kernel/random/boot_id").strip(),
            "release": shell("cat /etc/image-release"),
            "host_key": shell(f"cut -d' ' -f2 {_KEY}").strip(),
            "disk": self.now.status()["disk"],
            "seed": self.now.status().get("seed", {}),
            "provision": json.loads(shell("cat /run/node/provision.json")),
        }


@contextmanager
def azure(machine: Reimaged, folder: Path) -> Iterator[tuple[Served, ScaleSets, str]]:
    """Serve Resource Manager with a scale set that contains only this machine."""
    arm = Arm(NoDisks(), url="https://arm", limits=Limits.boundless(), actions=actions())
    for version, image in machine.images.items():
        add_version(arm, version)["tags"]["image-builder-build"] = image.told["build_id"][:12]
    seconds = {"upgrade": 1.0, "reimage": 5.0, "service": 0.1}
    scale_sets = ScaleSets(arm, seconds=seconds, reimaged=lambda _, instance: machine.due.put(instance.disk))
    path = scale_sets.add("gpu", OLD, 1)
    (instance,) = scale_sets.sets[path.lower()].machines.values()
    instance.vm_id = joins.VM_ID
    folder.mkdir()
    with served(arm, folder) as service:
        yield service, scale_sets, path


def operate(
    machine: Reimaged, link: Link, service: Served, scale_set: str, node: str
) -> tuple[dict[str, Any], int]:
    """Plan and run a roll, as an operator does; return its report, and how many times the disk was swapped."""
    place, image = machine.place, machine.now.image
    user = str(image.variables.get("azure_guest_default_user", "debian"))
    variables = {
        "ansible_host": MACHINE,
        "pool_vm_id": joins.VM_ID,
        "pool_scale_set_id": scale_set,
        "pool_instance_id": "0",
        "pool_image": image.told["image"],
        "pool_vm_size": joins.INSTANCE["compute"]["vmSize"],
    }
    (place / "hosts.json").write_text(
        json.dumps({"all": {"children": {"gpu": {"hosts": {node: variables}}}}})
    )
    (place / "policy.yml").write_text(json.dumps(POLICY))
    environment = {**os.environ, "CI": "1", **service.environment}

    def start(*argv: str | Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "image_builder.cli", "pool", *argv, "--endpoint", service.url]
        return subprocess.Popen(words, cwd=REPO_ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    inventory, plan = place / "hosts.json", place / "roll.json"
    with start(
        "plan",
        "gpu",
        "-i",
        inventory,
        "--to",
        NEW,
        "--unproven",
        "the service is simulated",
        "--policy",
        place / "policy.yml",
        "--out",
        plan,
    ):
        pass  # only wait for its end; without a plan `run` fails
    account = machine.lab.plane.kubeconfig(ACCOUNT, "system:serviceaccounts")
    login: list[str | Path] = ["--user", user, "--key", place / "user", "--host-ca", place / "authorities"]
    more: list[str | Path] = ["--kubeconfig", account, "--facts", machine.images[NEW].facts, "--json"]
    swaps = 0
    with start("run", plan, "-i", inventory, *login, *more) as run:
        while run.poll() is None:
            try:
                version = machine.due.get(timeout=1)
            except queue.Empty:
                continue
            swaps += 1
            # The first one brings back the old image.
            version = OLD if swaps == 1 else version
            say(f"reimage {swaps}: {version.rpartition('/')[2]}")
            machine.swap(version, link)
        assert run.stdout
        return json.loads(run.stdout.read()), swaps


def play(lab: JoinLab, old: Path, new: Path, place: Path) -> dict[str, Any]:
    """Let the machine join with one image, and roll it to another."""
    gates.give_rights(lab.admin, RIGHTS)
    before, after = read_image(old), read_image(new)
    machine = Reimaged(lab, place, {OLD: before, NEW: after})
    with Link((MACHINE, _SSH), ("127.0.0.1", _SSH), _AT_ONCE) as link, azure(machine, place / "arm") as cloud:
        service, scale_sets, path = cloud
        try:
            say("the first boot")
            machine.swap(OLD, link)
            member = Member(lab, machine.now, say)
            member.enter()
            machine.now.wait_until_started()
            first, first_node = machine.look(), member.node()
            machine.now.shell("echo kept > /mnt/local/of-the-operator && sync")
            say("the roll")
            began = time.monotonic()
            report, swaps = operate(machine, link, service, path, member.name)
            seconds = time.monotonic() - began
            machine.now.vm.wait_for_ssh()
            last = machine.look()
            kept = machine.now.shell("cat /mnt/local/of-the-operator", ok=(0, 1)).strip()
            group = scale_sets.sets[path.lower()]
            return {
                "image": before.told["image"],
                "accelerator": accelerator(),
                "builds": [before.told["build_id"], after.told["build_id"]],
                "first": {**first, "node": _of_node(first_node)},
                "last": {**last, "node": _of_node(member.node())},
                "report": report,
                "swaps": swaps,
                "roll_seconds": round(seconds),
                "file_kept": kept == "kept",
                "model": group.image,
                "services": dict(group.services),
                "tags": dict(group.content.get("tags") or {}),
            }
        except BaseException:
            keep_logs(lab)
            raise
        finally:
            if machine.instance is not None:
                machine.instance.end()


def _of_node(node: Mapping[str, Any] | None) -> dict[str, Any]:
    assert node is not None
    spec, status = node["spec"], node["status"]
    return {
        "uid": node["metadata"]["uid"],
        "boot": status["nodeInfo"]["bootID"],
        "cordoned": bool(spec.get("unschedulable")),
        "taints": [taint["key"] for taint in spec.get("taints", [])],
        "info": status["nodeInfo"],
    }


def roll(settings: Settings, old: Path, new: Path, staging: Path) -> dict[str, Any]:
    """Start the control plane and roll the machine against it."""
    places = [staging / part for part in ("control-plane", "machine")]
    for place in places:
        place.mkdir()
    with JoinLab(settings, places[0]) as lab:
        return play(lab, old, new, places[1])


def main() -> int:
    parser = command.options(__doc__)
    parser.add_argument("--old", type=Path, metavar="DIR", help="the build that runs, instead of a new one")
    parser.add_argument("--new", type=Path, metavar="DIR", help="the build that it is rolled to")
    told = parser.parse_args()
    settings = command.settings_of(told)

    lab = LARGE_LAB[:1]
    old = (told.old or command.build(IMAGE, lab, settings)).resolve()
    new = (told.new or command.build(IMAGE, (*lab, OTHER), settings)).resolve()
    record = command.measure("roll", settings, lambda staging: roll(settings, old, new, staging))
    return command.conclude(told, "roll", record, figures(record), facts(record))


if __name__ == "__main__":
    sys.exit(main())
