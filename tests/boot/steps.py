"""The steps of the matrix's rows. Each step returns the facts that it found, by name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.events import Monitor
from image_builder.lab import pause
from image_builder.node import layout
from image_builder.verify.boot import SUITE_SECONDS, start_pod
from image_builder.verify.runner import observe_suite
from tests.boot.engines import engine_of
from tests.boot.node import BOOT_SECONDS, GIB, MIB, SHELL_SECONDS, Image, Instance, Local, allocated

Facts = dict[str, Any]
DISK_LINE, SEED_LINE = "node-agent: disk: ", "node-agent: seed: "
# cloud-init's network stage has ended: the user exists, and the filesystem's journal was just committed or will be.
USERS_LINE = "Finished \x1b[0;1;39mcloud-init-network.service"
USERS_SECONDS = 6.0
PROMOTION_SECONDS = 1200.0
EVICTION_SECONDS = 600.0
MORE = "more.lab.internal/built-here:1"  # an image that isn't from a bake
_PRESSURE = Path("/run/systemd/system/kubelet.service.d/pressure.conf")
_SETTLED = 20.0  # the kubelet deletes one image after the other
_CRASHES = 12
_AT_ONCE = 0.005


@dataclass
class Lab:
    """One run of the matrix: instances and local disks by name, in a directory that is removed at the end."""

    image: Image
    folder: Path
    instances: dict[str, Instance] = field(default_factory=dict)
    identities: dict[str, dict[str, str]] = field(default_factory=dict)

    def instance(self, name: str) -> Instance:
        """Return an instance, made from the image with a fresh OS disk if there is none; switch off the others."""
        if name not in self.instances:
            self.instances[name] = Instance(self.image, self.folder / name)
        for other, one in self.instances.items():
            if other != name:
                one.end()
        return self.instances[name]

    def end(self) -> None:
        for one in self.instances.values():
            one.forget()
        self.instances.clear()


@dataclass(frozen=True)
class Place:
    """The context of a step: the run, its row's instance, and the row's disks (None: those that the instance has)."""

    lab: Lab
    name: str
    disks: tuple[Local, ...] | None

    @property
    def node(self) -> Instance:
        return self.lab.instance(self.name)

    @property
    def folder(self) -> Path:
        return self.lab.folder

    def file(self, number: int = 0) -> Path:
        """Return the file of one of the row's disks."""
        assert self.disks is not None
        return self.folder / f"{self.disks[number].file}.raw"


Step = Callable[[Place], Facts]


# -- boots -----------------------------------------------------------------------------------------------------


def boot(place: Place) -> Facts:
    """Insert the row's disks and boot."""
    return _boot(place)


def boot_in_1970(place: Place) -> Facts:
    """Boot with a hardware clock at 1970, as after its battery died."""
    return _boot(place, clock="1970-01-01T00:00:00")


def restart(place: Place) -> Facts:
    """Shut down cleanly and boot again."""
    return _observe(place.node, place.node.restart())


def _boot(place: Place, clock: str = "") -> Facts:
    _insert(place)
    place.node.end()
    return _observe(place.node, place.node.boot(clock=clock))


def _insert(place: Place) -> None:
    if place.disks is not None:
        place.node.insert(place.disks, place.folder)


def _observe(node: Instance, state: str) -> Facts:
    found = node.status()
    disk, seed, preload = (found.get(name, {}) for name in ("disk", "seed", "preload"))
    kubelet = node.shell("cat /run/node/kubelet.env")
    return {
        "system": state,
        "boot_seconds": round(node.vm.seconds),
        "console": node.vm.problems(),
        "ready": found["ready"],
        "disk": disk.get("code") or disk.get("action"),
        "disk_state": disk.get("state"),
        "disk_seconds": disk.get("seconds"),
        "members": len(disk.get("members", [])),
        "seed": seed.get("code") or seed.get("action"),
        "seed_seconds": seed.get("seconds"),
        "preload": preload.get("state"),
        "archive": sorted(preload.get("loaded", {})),
        "tainted": "--register-with-taints=" in kubelet and "image-builder/local-disk=" in kubelet,
        "broken_links": found["layers"]["broken"],
    }


# -- second attempts -------------------------------------------------------------------------------------------


def fail_once(unit: str) -> Step:
    """Return a step that has only this unit fail at its first start in each boot from now on."""
    drop_in = Path(f"/etc/systemd/system/{unit}.service.d/00-fails-once.conf")
    marker = f"/run/failed-{unit}"
    command = f"ExecStartPre=/bin/sh -c 'test -e {marker} || {{ touch {marker}; exit 1; }}'"

    def step(place: Place) -> Facts:
        place.node.shell(
            f"rm -f {drop_in.parents[1]}/*/{drop_in.name}\nmkdir -p {drop_in.parent}\n"
            f"printf '%s\\n' '[Service]' \"{command}\" > {drop_in}\nsync"
        )
        return {}

    return step


def drop_archive(place: Place) -> Facts:
    """Turn the image into one without an archive of its container images."""
    edit = "v = json.load(open(p)); v['archive'] = None; json.dump(v, open(p, 'w'))"
    place.node.shell(
        f"python3 -c \"import json; p = '{layout.LIST}'; {edit}\"\nrm -f {layout.LIST.with_suffix('.tar')}\nsync"
    )
    return {}


def boot_blank(place: Place) -> Facts:
    """Boot with the row's disks erased, as after a deallocation."""
    place.node.end()
    for number in range(len(place.disks or ())):
        place.file(number).unlink(missing_ok=True)
    return _boot(place)


def recovered(unit: str) -> Step:
    """Return a step that waits for a unit's second attempt and for what follows it."""

    def step(place: Place) -> Facts:
        node = place.node

        def is_ready() -> bool:
            state = node.shell(f"systemctl is-active {unit}.service kubelet.service", ok=(0, 3)).split()
            return state == ["active", "active"] and bool(node.status()["ready"])

        node.wait(is_ready, SHELL_SECONDS, f"{unit} has recovered", poll=5)
        restarts = node.shell(f"systemctl show --property=NRestarts --value {unit}.service").strip()
        said = node.shell("journalctl --boot --no-pager --grep='action: (replace|reimage|reboot)'", ok=(0, 1))
        facts = _observe(node, "")
        return {
            **facts,
            "restarts": restarts,
            "condemned": [line for line in said.splitlines() if "action" in line],
        }

    return step


# -- power cuts ------------------------------------------------------------------------------------------------


def cut_while_formatting(place: Place) -> Facts:
    """Kill QEMU at a write to the local disk before the agent's line about it.

    Until then only mkfs writes there; which of its writes is hit depends on how busy the host is.
    """
    _insert(place)
    node, disk = place.node, place.file()
    node.vm.power_on()
    before = disk.stat().st_mtime_ns
    node.wait(lambda: disk.stat().st_mtime_ns != before, BOOT_SECONDS, "mkfs writes")
    node.end()
    return {"formatted": node.said(DISK_LINE)}


def cut_while_seeding(place: Place) -> Facts:
    """Kill QEMU at a write between the agent's line about the disk and the one about the seed.

    Until the first line, the disk is copied to ``crashes/`` after each write: each copy is a power cut as well.
    """
    _insert(place)
    node, disk = place.node, place.file()
    node.vm.power_on()
    copies = place.folder / "crashes"
    count = node.copy_when_written(disk, copies, lambda: node.said(DISK_LINE), _CRASHES)
    seen = disk.stat().st_mtime_ns
    # A seed is one sync and then its marker, so it is done soon after its first write.
    node.wait(
        lambda: disk.stat().st_mtime_ns != seen or node.said(SEED_LINE),
        BOOT_SECONDS,
        "seed writes",
        poll=_AT_ONCE,
    )
    node.end()
    return {"disk": _action(node), "seeded": node.said(SEED_LINE), "copies": count > 0}


def copy_while_seeding(place: Place) -> Facts:
    """Boot, and copy the disk after each write until the seed is done."""
    _insert(place)
    node, disk = place.node, place.file()
    node.vm.power_on()
    count = node.copy_when_written(disk, place.folder / "crashes", lambda: node.said(SEED_LINE), _CRASHES)
    return {"disk": _action(node), "copies": count > 0}


def _action(node: Instance) -> str:
    """Return what the agent did with the disk, according to its line: ``ok: format: ...``."""
    line = next((words for words in node.vm.console().splitlines() if DISK_LINE in words), "")
    words = line.partition(DISK_LINE)[2].split(": ")
    return words[1] if len(words) > 2 else line


def wait_until_up(place: Place) -> Facts:
    """Wait until a machine that was switched on is up."""
    return _observe(place.node, place.node.wait_until_started())


def cut_after_users(place: Place) -> Facts:
    """Kill QEMU in the first boot, shortly after cloud-init has made the user."""
    _insert(place)
    node = place.node
    node.vm.power_on()
    node.wait(lambda: node.said(USERS_LINE), BOOT_SECONDS, "cloud-init makes the user")
    time.sleep(USERS_SECONDS)
    node.end()
    return {}


def first_boot_again(place: Place) -> Facts:
    """Return whether this boot started the first one over, and require that the first one is complete now."""
    node = place.node
    again = node.shell("systemctl show --property=ConditionResult --value first-boot-again.service").strip()
    node.shell("test -e /var/lib/cloud/instance/first-boot-is-on-disk")
    return {"first_boot_again": again == "yes"}


def cut_while_promoting(place: Place) -> Facts:
    """Kill QEMU when promotion has copied some of the layers."""
    node, disk = place.node, place.file()
    node.wait(lambda: allocated(disk) > 160 * MIB, PROMOTION_SECONDS, "promotion writes")
    running = bool(node.status()["promotion"].get("layers_left"))
    node.end()
    return {"promoting": running}


def _wait_for_copies(place: Place, amount: int) -> None:
    before, told = allocated(place.file()), place.node.status()
    assert not _is_through(told), f"the promotion is through: {told['promotion']}"
    place.node.wait(lambda: allocated(place.file()) > before + amount, PROMOTION_SECONDS, "promotion writes")


# -- what a node must be able to do ----------------------------------------------------------------------------


def run_images(place: Place) -> Facts:
    """Start a container of every preloaded image: the pause image's as a pod does, the others with a shell command."""
    node, variables = place.node, place.lab.image.variables
    engine = engine_of(variables)
    pause = str(variables["container_runtime_pause_image"])
    found = []
    for image in variables["image_preload"]:
        reference = image["ref"]
        if reference == pause:
            found.append(engine.runs_detached(node.ssh, reference))
        else:
            command = "cat /usr/lib/os-release && python3.13 --version && echo it runs"
            found.append(engine.run(node.ssh, reference, command).endswith("it runs\n"))
    return {"images": "run" if found and all(found) else found}


def promoted(place: Place) -> Facts:
    """Wait until promotion has ended."""
    node = place.node
    deadline = time.monotonic() + PROMOTION_SECONDS
    while not _is_through(told := node.status()):
        assert time.monotonic() < deadline, f"promotion goes on and on: {told['promotion']}"
        time.sleep(3)
    section = told["promotion"]
    return {"promotion": section.get("code") or section["state"], "links": told["layers"]["links"]}


def _is_through(told: Mapping[str, Any]) -> bool:
    section = told.get("promotion", {})
    return "state" in section and not section.get("running") and "waiting" not in section


def whole(place: Place) -> Facts:
    """Compare every layer on the disk with the store."""
    found = place.node.python("layers")
    return {"layers": found["layers"] > 0, "empty_files": found["empty"], "different": found["different"]}


def remember(place: Place) -> Facts:
    """Record the identities that must differ between instances."""
    keys = place.node.shell("cat /etc/ssh/ssh_host_*_key.pub | cut -d' ' -f2 | sort")
    seed = place.node.shell("sha256sum < /var/lib/systemd/random-seed")
    machine = place.node.shell("cat /etc/machine-id")
    place.lab.identities[place.name] = {"keys": keys, "machine-id": machine, "random seed": seed}
    return {}


def differs(place: Place) -> Facts:
    """Compare this instance's identities with those of the others."""
    remember(place)
    mine, *others = [place.lab.identities.pop(place.name), *place.lab.identities.values()]
    place.lab.identities[place.name] = mine
    shared = sorted({name for other in others for name in mine if mine[name] == other[name]})
    return {"compared": len(others), "shared": shared, "empty": [n for n, v in mine.items() if not v.strip()]}


def suite(place: Place) -> Facts:
    """Run the checks for booted machines."""
    lab, node = place.lab, place.node
    start_pod(node.vm, node.ssh, lab.image.variables, Monitor(), pause.archive)
    out = lab.folder / f"suite-{place.name}"
    out.mkdir(exist_ok=True)
    result = observe_suite(
        node.ssh.url,
        lab.image.facts,
        out,
        marker="booted",
        python=Path(sys.executable),
        log=out / "log",
        timeout=SUITE_SECONDS,
    )
    failed = [check.name for check in result.checks if check.outcome not in ("passed", "skipped")]
    return {"checks": len(result.checks) >= 30, "failed": failed}


# -- changes ---------------------------------------------------------------------------------------------------


def prefer(place: Place) -> Facts:
    """Change the settings so that a node without its disk works on the OS disk."""
    place.node.shell('sed -i \'s/"policy": "require"/"policy": "prefer"/\' /etc/node-agent/disk.json && sync')
    return {}


def rebuild(place: Place) -> Facts:
    """Change the settings so that an array with missing or additional members is rebuilt."""
    place.node.shell(
        'sed -i \'s/"incomplete_array": "keep"/"incomplete_array": "rebuild"/\' /etc/node-agent/disk.json\n'
        "sync\ngrep -q rebuild /etc/node-agent/disk.json"
    )
    return {}


def be_another_image(place: Place) -> Facts:
    """Give the OS disk another build id and another store id, so that the stale disk belongs to another image."""
    place.node.shell(
        "sed -i 's/^IMAGE_BUILD=.*/IMAGE_BUILD=another/' /etc/image-release\n"
        'sed -i \'0,/"id": "/s/"id": "[0-9a-f]*"/"id": "another"/\' /opt/preload/store.json\n'
        "sync\ngrep -q another /etc/image-release && grep -q another /opt/preload/store.json"
    )
    return {}


def grow(place: Place) -> Facts:
    """Enlarge the row's disk without changing its content."""
    place.node.end()
    os.truncate(place.file(), 24 * GIB)
    return {}


def pin_images(place: Place) -> Facts:
    """Declare every preloaded image as pinned, as a bake with ``pin: true`` does, and let the agent guard them."""
    place.node.shell(
        f'sed -i \'s/"pin": false/"pin": true/\' {layout.LIST}\n'
        f'sed -i \'s/"pin": false/"pin": true/\' {layout.MANIFEST}\nnode-agent preload'
    )
    return {}


def evict(place: Place) -> Facts:
    """Put the kubelet under disk pressure, so that it deletes every image it may, among them one added for this."""
    node, engine = place.node, engine_of(place.lab.image.variables)
    engine.add_image(node.ssh, MORE)
    before = engine.images(node.ssh)
    # Not in the agent's own file, which promotion rewrites with its reports.
    node.shell(
        f"mkdir -p {_PRESSURE.parent}\n"
        "printf '%s\\n' '[Service]' 'Environment=KUBELET_EXTRA_ARGS=--eviction-hard=imagefs.available<99%%' "
        f"> {_PRESSURE}\n"
        "systemctl daemon-reload\nsystemctl restart kubelet"
    )
    deadline = time.monotonic() + EVICTION_SECONDS
    while MORE in (after := engine.images(node.ssh)):
        assert time.monotonic() < deadline, "the kubelet deletes no image"
        time.sleep(5)
    time.sleep(_SETTLED)
    while (now := engine.images(node.ssh)) != after:
        after = now
        time.sleep(_SETTLED)
    node.shell(f"rm {_PRESSURE}\nsystemctl daemon-reload\nsystemctl restart kubelet")
    return {"deleted": sorted(name for name in before - after if "@" not in name)}


def break_disk(place: Place) -> Facts:
    """Make every access to the local disk fail in the middle of promotion, and return what the agent reports."""
    node = place.node
    _wait_for_copies(place, 100 * MIB)
    node.vm.break_disk("local0")
    facts = promoted(place)
    reason = str(node.status()["promotion"].get("reason", ""))
    return {"promotion": facts["promotion"], "reason": bool(reason), "said": reason}


def mismatches(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return a line for each fact that isn't as expected. A tuple means any of its members."""
    return [
        f"{name}: {found.get(name)!r}, not {wanted!r}"
        for name, wanted in expected.items()
        if not (found.get(name) in wanted if isinstance(wanted, tuple) else found.get(name) == wanted)
    ]
