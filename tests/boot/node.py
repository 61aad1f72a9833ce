"""An instance of a baked image in QEMU: one OS disk for life, and local disks that may change with each boot."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.machine import monitor, qemu
from image_builder.machine.ssh import SshTarget
from image_builder.machine.vm import ExtraDisk, Vm, VmOptions
from image_builder.verify.boot import GROWTH_BYTES, find_disk, virtual_size, wait_for_system
from tests.selftest.turns import machine_boots

GIB = 1 << 30
MIB = 1 << 20
GUEST = Path(__file__).with_name("guest")
# For a boot of an emulated machine on a busy host, up to the agent's first line (seconds).
BOOT_SECONDS = 900.0
# For a script in one; restarting its engine took 213 s by itself while another tenant had the processors.
SHELL_SECONDS = 900.0
_POLL = 0.05


def shell(ssh: SshTarget, script: str, *, ok: Sequence[int] = (0,), timeout: float = SHELL_SECONDS) -> str:
    """Run a script as root; return its output."""
    return ssh.run(["sh", "-euc", script], ok=ok, timeout=timeout).stdout


@dataclass(frozen=True)
class Image:
    """A published build: its disk, and its facts as a file and as a document."""

    disk: Path
    facts: Path
    told: dict[str, Any]

    @property
    def variables(self) -> dict[str, Any]:
        found: dict[str, Any] = self.told["variables"]
        return found


def read_image(artefact: Path) -> Image:
    """Return the build in a directory."""
    facts = artefact / "facts.json"
    return Image(find_disk(artefact), facts, json.loads(facts.read_bytes()))


@dataclass(frozen=True)
class Local:
    """A local disk: ``file`` is its name next to the machines, so that a disk can move from one to another.

    ``serial`` is what the guest sees; ``rate`` limits it to bytes per second.
    """

    file: str
    bytes: int = 16 * GIB
    serial: str = "local0"
    rate: int = 0
    bus: qemu.DiskBus = "nvme"

    def extra(self, folder: Path) -> ExtraDisk:
        return ExtraDisk(self.serial, self.bytes, folder / f"{self.file}.raw", self.bus, rate=self.rate)


def allocated(path: Path) -> int:
    """Return how many bytes of a sparse file are on the host's disk: what the guest has written."""
    return path.stat().st_blocks * 512


class Instance:
    """A machine that is switched on and off; ``end`` leaves nothing running."""

    def __init__(self, image: Image, folder: Path) -> None:
        folder.mkdir()
        self.image, self.folder = image, folder
        self.vm = Vm(
            VmOptions(
                name=str(image.told["image"]),
                disk=image.disk,
                secure_boot=bool(image.variables.get("image_secure_boot")),
                user=str(image.variables.get("azure_guest_default_user", "debian")),
                disk_size=virtual_size(image.disk) + GROWTH_BYTES,
                durable=True,
            ),
            folder,
        )

    @property
    def ssh(self) -> SshTarget:
        return self.vm.target

    def insert(self, disks: Sequence[Local], folder: Path) -> None:
        """Cut the power and replace the local disks."""
        self.vm.power_off()
        self.vm.set_disks([disk.extra(folder) for disk in disks])

    def boot(self, *, clock: str = "") -> str:
        """Switch it on and wait until it has started; return systemd's state."""
        with machine_boots():
            self.vm.power_on(clock=clock)
            return self.wait_until_started()

    def wait_until_started(self) -> str:
        """Wait until a machine that was switched on has started; return systemd's state."""
        self.vm.wait_for_ssh(total_seconds=BOOT_SECONDS, quiet_seconds=300)
        state = wait_for_system(self.ssh)
        assert state != "starting", f"not started: {self.shell('systemctl list-jobs --no-pager')}"
        return state

    def restart(self) -> str:
        """Shut it down cleanly and boot it again; return systemd's state."""
        self.vm.shutdown(SHELL_SECONDS)
        return self.boot()

    def wait(self, done: Callable[[], bool], seconds: float, what: str, *, poll: float = _POLL) -> None:
        """Wait until ``done``, checking every ``poll`` seconds.

        Raises AssertionError on a timeout, or if the machine ends.
        """
        deadline = time.monotonic() + seconds
        while not done():
            assert self.vm.running, f"the machine ended before {what}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
            time.sleep(poll)

    def said(self, words: str) -> bool:
        """Return whether the console has shown these words since power-on."""
        return words in self.vm.console()

    def copy_when_written(self, disk: Path, copies: Path, until: Callable[[], bool], most: int) -> int:
        """Copy a disk after each write, with the machine stopped, until ``until()``; return the number of all copies.

        Each copy is what a power cut at that moment would have left. At most ``most`` are added.
        """
        copies.mkdir(exist_ok=True)
        number, seen = len(list(copies.iterdir())), disk.stat().st_mtime_ns
        limit = number + most
        deadline = time.monotonic() + BOOT_SECONDS
        while not until():
            assert self.vm.running and time.monotonic() < deadline, "nothing happened any more"
            time.sleep(_POLL)
            if (now := disk.stat().st_mtime_ns) == seen or number >= limit:
                continue
            seen = now
            monitor.execute(self.vm.directory / "monitor", "stop")
            target = copies / f"{number:02}.raw"
            subprocess.run(["cp", "--sparse=always", disk, target], check=True)
            monitor.execute(self.vm.directory / "monitor", "cont")
            number += 1
        return number

    # -- the guest ---------------------------------------------------------------------------------------

    def python(self, script: str, *words: str, timeout: float = SHELL_SECONDS) -> Any:
        """Run a script from ``guest/`` as root, able to import the node's own agent; return the JSON that it prints."""
        text = (GUEST / f"{script}.py").read_text(encoding="utf-8")
        done = self.ssh.run(["python3", "-B", "-", *words], input=text, timeout=timeout)
        return json.loads(done.stdout)

    def shell(self, script: str, *, ok: Sequence[int] = (0,), timeout: float = SHELL_SECONDS) -> str:
        """Run a script as root; return its output."""
        return shell(self.ssh, script, ok=ok, timeout=timeout)

    def status(self) -> dict[str, Any]:
        """Return the output of ``node-agent status --json``."""
        done = self.ssh.run(["node-agent", "status", "--json"], ok=(0, 1), timeout=SHELL_SECONDS)
        assert done.stdout, f"node-agent status: {done.stderr}"
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def end(self) -> None:
        """Switch it off."""
        self.vm.power_off()

    def forget(self) -> None:
        """Switch it off and remove its OS disk."""
        self.end()
        shutil.rmtree(self.folder)
