"""A machine in QEMU that boots an artifact without writing to it.

    with Vm(VmOptions(name="worker", disk=Path("worker.qcow2")), directory) as vm:
        ssh = vm.wait_for_ssh()
        ssh.run(["systemctl", "is-system-running", "--wait"])
        assert not vm.problems()

The machine dies with this process (and with the thread that powered it on), however that ends. Everything it writes
is in ``directory``: overlay, firmware variables, blank disks, keys, console.

While its power is off, the machine can be given other disks. So one machine is an instance with its OS disk, whatever
happens to its local ones: ``set_disks((blank,))`` does what a deallocation does. A new machine that is given the file
of an earlier one's disk is a reimaged instance.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from image_builder.errors import BootError, UsageError
from image_builder.machine import console, monitor, qemu
from image_builder.machine.qemu import accelerator
from image_builder.machine.ssh import SshAddress, SshTarget
from image_builder.system import process
from image_builder.text import human_bytes

# Give up on a machine once its console has been quiet for this long, or after this long in all (seconds).
QUIET_SECONDS = 180.0
TOTAL_SECONDS = 900.0
_TAIL_LINES = 20
_BANNER_SECONDS = 3.0


@dataclass(frozen=True)
class ExtraDisk:
    """An additional disk: blank with ``size`` bytes, or a raw file ``path`` that the machine writes to.

    A file that doesn't exist yet is created, blank and sparse. ``rate`` is as in ``qemu.Drive``.
    """

    serial: str
    size: int = 0
    path: Path | None = None
    bus: qemu.DiskBus = "nvme"
    model: str = ""
    vendor: str = ""
    rate: int = 0


@dataclass(frozen=True)
class VmOptions:
    """What machine to create. ``user`` is the image's default user, to whom cloud-init gives the key.

    ``disk_size`` (bytes, 0: that of ``disk``) is the size that the platform would give. ``durable`` honors the guest's
    flushes, which only tests of power loss need: if QEMU is then killed, data that it reported as
    written is in the host's page cache, and the guest's own cache is lost. ``restrict_network`` allows only SSH: the
    machine then has an address, but no default route and no name server.
    """

    name: str
    disk: Path
    bus: qemu.DiskBus = "virtio"
    extra_disks: tuple[ExtraDisk, ...] = ()
    secure_boot: bool = False
    restrict_network: bool = False
    user: str = "debian"
    memory_mib: int = qemu.MEMORY_MIB
    disk_size: int = 0
    durable: bool = False


@dataclass(frozen=True)
class Seed:
    """The cloud-init NoCloud seed of a test machine: ``directory`` is what the guest sees, ``key`` is outside it.

    The user is the image's own default user (cloud-init's ``default``); the seed only adds a new key. No part of it
    ever goes into an image.
    """

    directory: Path
    key: Path


def write_key(path: Path, comment: str) -> str:
    """Write a new ed25519 private key (OpenSSH's format, mode 0600) to ``path``; return the public key's line."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return f"{public.decode('ascii')} {comment}"


def user_data(public_key: str) -> str:
    """Return cloud-init's user data as JSON, which is valid YAML and can't be quoted wrong."""
    return "#cloud-config\n" + json.dumps({"ssh_authorized_keys": [public_key]}, indent=1) + "\n"


def meta_data(instance_id: str, hostname: str) -> str:
    """Return cloud-init's meta data."""
    return json.dumps({"instance-id": instance_id, "local-hostname": hostname}, indent=1) + "\n"


def write_seed(directory: Path, *, instance_id: str, hostname: str) -> Seed:
    """Create a seed below ``directory``: ``seed/`` for the guest and ``id_ed25519`` next to it."""
    seed = directory / "seed"
    seed.mkdir()
    key = directory / "id_ed25519"
    public = write_key(key, f"image-builder {instance_id}")
    (seed / "meta-data").write_text(meta_data(instance_id, hostname), encoding="utf-8")
    (seed / "user-data").write_text(user_data(public), encoding="utf-8")
    return Seed(seed, key)


def create_blank(path: Path, size: int) -> None:
    """Create a sparse file for a blank disk. Raises UsageError if its filesystem has no files of that size."""
    try:
        with path.open("xb") as file:
            file.truncate(size)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno != errno.EFBIG:
            raise
        raise UsageError(
            f"a disk of {human_bytes(size)} is larger than a file in {path.parent} can be",
            hint="a smaller --local-disk, or another --store",
        ) from None


class Vm:
    """A machine as a context manager: powered on inside the block, killed at its end.

    ``console_kept`` is where the caller keeps a copy of ``console_log`` if ``directory`` is deleted: errors name it.
    """

    def __init__(self, options: VmOptions, directory: Path, console_kept: Path | None = None) -> None:
        self.options = options
        self.directory = directory
        self.console_log = directory / "console.log"
        self._console_named = console_kept or self.console_log
        self.accelerator = accelerator()
        self.seconds_to_ssh: float | None = None
        self._qemu_log = directory / "qemu.log"
        self._monitor = monitor.socket_path(directory / "monitor")
        self._power = ExitStack()
        self._process: process.Child | None = None
        self._powered_on_at = 0.0
        self._console_start = 0
        self._target: SshTarget | None = None
        self._prepare()

    def _prepare(self) -> None:
        options, directory = self.options, self.directory
        code, template = qemu.find_firmware(options.secure_boot)
        variables = directory / "firmware-variables.fd"
        shutil.copyfile(template, variables)
        root = directory / "disk0.qcow2"
        qemu.overlay(options.disk.resolve(), qemu.disk_format(options.disk), root, options.disk_size)
        os_disk = qemu.Drive(root, options.bus, "qcow2", "os", durable=options.durable)
        self._seed = write_seed(
            directory,
            instance_id=f"{options.name}-{os.urandom(4).hex()}",
            hostname=options.name.replace("_", "-").lower(),
        )
        self._machine = qemu.Machine(
            name=options.name,
            firmware=qemu.Firmware(code, variables, options.secure_boot),
            drives=(os_disk, *self._blank_or_given(options.extra_disks)),
            console=self.console_log,
            monitor=self._monitor,
            seed=self._seed.directory,
            accelerator=self.accelerator,
            cpus=min(2, os.cpu_count() or 1),
            memory_mib=options.memory_mib,
            restrict_network=options.restrict_network,
        )

    def _blank_or_given(self, disks: Sequence[ExtraDisk], first: int = 1) -> list[qemu.Drive]:
        drives = []
        for number, disk in enumerate(disks, first):
            path = disk.path or self.directory / f"disk{number}.raw"
            if disk.path is None:
                path.unlink(missing_ok=True)
            if not path.exists():
                create_blank(path, disk.size)
            drives.append(
                qemu.Drive(
                    path,
                    disk.bus,
                    "raw",
                    disk.serial,
                    disk.model,
                    disk.vendor,
                    durable=self.options.durable,
                    rate=disk.rate,
                )
            )
        return drives

    # -- disks -------------------------------------------------------------------------------------------

    def set_disks(self, disks: Sequence[ExtraDisk]) -> None:
        """Remove all additional disks and attach these; a disk without a path is a new, blank one.

        Raises BootError while the machine is on.
        """
        if self.running:
            raise BootError(f"{self.options.name} is running: its disks can't be changed")
        drives = (self._machine.drives[0], *self._blank_or_given(disks))
        self._machine = replace(self._machine, drives=drives)

    def plug(self, disk: ExtraDisk) -> None:
        """Attach one more SCSI disk while the machine runs, until it is given others. Raises BootError.

        It needs the controller of another SCSI disk that was attached at power-on.
        """
        index = len(self._machine.drives)
        (drive,) = self._blank_or_given((disk,), index)
        content, device = qemu.plugged(drive, index)
        monitor.execute(self._monitor, "blockdev-add", content)
        monitor.execute(self._monitor, "device_add", device)
        self._machine = replace(self._machine, drives=(*self._machine.drives, drive))

    def break_disk(self, serial: str) -> None:
        """Make every read and write of a disk fail from now on, until the power is cut. Raises BootError.

        The guest sees the same controller, which answers each command with an error.
        """
        serials = [drive.serial for drive in self._machine.drives]
        if serial not in serials:
            raise BootError(f"{self.options.name} has no disk {serial}; it has {', '.join(serials)}")
        index = serials.index(serial)
        layer = qemu.failing(index)
        monitor.execute(self._monitor, "blockdev-add", layer)
        where = {"path": f"/machine/peripheral/{qemu.device_id(index)}", "property": "drive"}
        monitor.execute(self._monitor, "qom-set", {**where, "value": layer["node-name"]})

    # -- power -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self.power_on()
        except BaseException:  # __exit__ doesn't run for a block that never began
            self.power_off()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.power_off()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def power_on(self, *, clock: str = "") -> None:
        """Start the machine. Raises BootError if QEMU doesn't start. ``clock`` is as in ``qemu.Machine``."""
        if self.running:
            return
        self.power_off()
        self._monitor.unlink(missing_ok=True)
        self._console_start = self.console_log.stat().st_size if self.console_log.exists() else 0
        argv = qemu.command_line(replace(self._machine, clock=clock))
        self._process = self._power.enter_context(process.background(argv, log=self._qemu_log))
        self._powered_on_at = time.monotonic()
        self.seconds_to_ssh = None
        self._await(lambda: monitor.listens(self._monitor), 30, "QEMU didn't start")
        usernet = monitor.execute(self._monitor, "human-monitor-command", {"command-line": "info usernet"})
        port = qemu.forwarded_port(str(usernet))
        self._target = SshTarget(SshAddress(self.options.user, "127.0.0.1", port, self._seed.key))

    def power_off(self) -> None:
        """Cut the power: kill QEMU. Anything the guest hasn't written yet is lost, as with a real machine."""
        if self._target is not None:
            self._target.close()
            self._target = None
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._power.close()
        self._process = None

    def shutdown(self, seconds: float = 120) -> None:
        """Press the power button and wait for the machine to power off. Raises BootError if it doesn't."""
        monitor.execute(self._monitor, "system_powerdown")
        deadline = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > deadline:
                raise BootError(f"{self.options.name} did not power off within {seconds:g} s")
            time.sleep(0.1)
        self.power_off()

    def reset(self) -> None:
        """Press the reset button; the port forward stays."""
        if self._target is not None:
            self._target.close()
        self._console_start = self.console_log.stat().st_size
        self._powered_on_at = time.monotonic()
        self.seconds_to_ssh = None
        monitor.execute(self._monitor, "system_reset")

    @property
    def seconds(self) -> float:
        """Return the seconds since the machine was powered on or reset."""
        return time.monotonic() - self._powered_on_at

    # -- console -----------------------------------------------------------------------------------------

    def console(self) -> str:
        """Return what the console has shown since the last power-on or reset."""
        if not self.console_log.exists():
            return ""
        with self.console_log.open("rb") as file:
            file.seek(self._console_start)
            return file.read().decode("utf-8", "replace")

    def last_line(self) -> str:
        """Return the last line of the console that isn't empty."""
        lines = console.plain(self.console()).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def problems(self) -> list[str]:
        """Return the problems that the console shows."""
        return console.problems(self.console(), emulated=self.accelerator == "tcg")

    # -- access ------------------------------------------------------------------------------------------

    @property
    def target(self) -> SshTarget:
        """Return the SSH connection. Raises BootError if the machine is off."""
        if self._target is None:
            raise BootError(f"{self.options.name} is not powered on")
        return self._target

    def wait_for_ssh(
        self,
        *,
        quiet_seconds: float = QUIET_SECONDS,
        total_seconds: float = TOTAL_SECONDS,
        on_line: Callable[[str], None] | None = None,
    ) -> SshTarget:
        """Wait until a login works, and return the connection.

        A growing console is progress. ``on_line`` gets its last line as it changes. Raises BootError with the
        console's last lines if QEMU ends, a fatal line appears, there is no progress, or it takes too long.
        """
        target, size, grown_at, refusal, pause = self.target, -1, time.monotonic(), "", 0.25
        while True:
            if not self.running:
                raise self._failure("QEMU ended")
            if self.accelerator == "kvm" and monitor.gave_up(self._monitor):
                raise self._failure("KVM gave the machine up")
            text = self.console()
            if len(text) != size:
                size, grown_at = len(text), time.monotonic()
                if on_line:
                    on_line(self.last_line())
                if (trouble := console.fatal(text)) is not None:
                    raise self._failure(f"it can't come up any more: {trouble}")
            try:
                # Short: QEMU accepts connections for a guest that isn't up yet, and the console must be watched.
                target.connect(banner_seconds=_BANNER_SECONDS)
            except BootError as error:
                refusal = error.message
            else:
                break
            if time.monotonic() - grown_at > quiet_seconds:
                raise self._failure(f"no login and a still console for {quiet_seconds:g} s; {refusal}")
            if self.seconds > total_seconds:
                raise self._failure(f"no login within {total_seconds:g} s; {refusal}")
            # sshd blocks an address for a while after several refused logins, so each refusal lengthens the pause.
            pause = min(pause * 1.5, 10) if "uthentication" in refusal else 0.25
            time.sleep(pause)
        self.seconds_to_ssh = self.seconds
        target.save_known_hosts(self.directory / "known_hosts")
        return target

    def _await(self, done: Callable[[], bool], seconds: float, failure: str) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            if not self.running or time.monotonic() > deadline:
                raise self._failure(failure)
            time.sleep(0.02)

    def _failure(self, failure: str) -> BootError:
        """Return an error with the last lines of the console, or of QEMU's log if the console is empty."""
        text = console.plain(self.console()).strip() or self._read_qemu_log()
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-_TAIL_LINES:])
        return BootError(
            f"{self.options.name}: {failure}\n{tail}", hint=f"the whole console: {self._console_named}"
        )

    def _read_qemu_log(self) -> str:
        return self._qemu_log.read_text(errors="replace").strip() if self._qemu_log.exists() else ""
