"""QEMU's command line for a test machine, as a pure function, and what the host offers for it."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from image_builder.errors import BootError, HostError
from image_builder.machine import monitor
from image_builder.system import process
from image_builder.system.environment import environment

PROGRAM = "qemu-system-x86_64"
MEMORY_MIB = 3072
# The verification suite recognizes such a machine by this serial.
_SEED_SERIAL = "image-builder-seed"
# Debian 12 and 13, Ubuntu 24.04 (package ovmf).
_FIRMWARE_DIRECTORY = Path("/usr/share/OVMF")
_FIRMWARE_FILES = {
    False: ("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"),
    True: ("OVMF_CODE_4M.ms.fd", "OVMF_VARS_4M.ms.fd"),
}

# QEMU before 8.0 emulates cmpxchg16b with stale condition codes: an interrupt right after it saves flags that
# were never set, and Linux, whose memory allocator depends on that instruction, dies with "double fault" or
# "Fatal exception in interrupt" on nearly every boot. Without the CPU feature, Linux doesn't use it.
_EMULATED_CPU = "max,cx16=off"
# How long the firmware has to reach the console, and how often to check.
_PROBE_SECONDS, _LOOK_SECONDS = 20.0, 0.05

DiskBus = Literal["virtio", "nvme", "scsi"]
Accelerator = Literal["kvm", "tcg"]


@dataclass(frozen=True)
class Firmware:
    """UEFI's code and a private, writable copy of its variables."""

    code: Path
    variables: Path
    secure_boot: bool = False


@dataclass(frozen=True)
class Drive:
    """A disk of the machine: a file that QEMU may write to.

    ``serial`` is visible in the guest. So are ``model`` and ``vendor``, but only on SCSI: QEMU's NVMe disk
    always calls itself "QEMU NVMe Ctrl". ``durable`` passes the guest's flushes on to the host's disk; without
    it they are ignored, which is faster and still survives the guest, but not a killed QEMU. ``rate`` limits
    reads and writes together, in bytes per second (0: no limit).
    """

    path: Path
    bus: DiskBus = "nvme"
    format: Literal["raw", "qcow2"] = "raw"
    serial: str = ""
    model: str = ""
    vendor: str = ""
    durable: bool = False
    rate: int = 0


@dataclass(frozen=True)
class Machine:
    """Everything that the command line depends on. The first drive is the one that boots.

    ``clock`` is what the hardware clock shows at power-on (``1970-01-01T00:00:00``), by default the host's time.
    """

    name: str
    firmware: Firmware
    drives: tuple[Drive, ...]
    console: Path
    monitor: Path
    seed: Path | None = None
    accelerator: Accelerator = "tcg"
    cpus: int = 2
    memory_mib: int = MEMORY_MIB
    restrict_network: bool = False
    clock: str = ""
    extra: tuple[str, ...] = ()


def command_line(machine: Machine) -> list[str]:
    """Return the command that starts ``machine``.

    The guest's port 22 is forwarded from a port on 127.0.0.1 that the kernel chooses; the monitor knows it
    (``forwarded_port``). Raises ValueError for a drive that QEMU can't describe.
    """
    secure = machine.firmware.secure_boot
    cpu = "host" if machine.accelerator == "kvm" else _EMULATED_CPU
    accel = "kvm" if machine.accelerator == "kvm" else "tcg,thread=multi"
    restrict = "on" if machine.restrict_network else "off"
    argv = [
        *(PROGRAM, "-name", _escaped(machine.name), "-nodefaults", "-no-user-config", "-display", "none"),
        *("-machine", f"q35,smm={'on' if secure else 'off'}", "-accel", accel, "-cpu", cpu),
        *("-smp", str(machine.cpus), "-m", str(machine.memory_mib)),
        *(
            "-chardev",
            f"file,id=console,path={_escaped(machine.console)},append=on",
            "-serial",
            "chardev:console",
        ),
        *("-qmp", f"unix:{_escaped(machine.monitor)},server=on,wait=off"),
        *("-device", "virtio-rng-pci"),
        *("-netdev", f"user,id=net,restrict={restrict},hostfwd=tcp:127.0.0.1:0-:22"),
        *("-device", "virtio-net-pci,netdev=net,mac=52:54:00:12:34:56,romfile="),
        *_firmware(machine.firmware),
    ]
    if machine.clock:
        argv += ["-rtc", f"base={_escaped(machine.clock)}"]
    if any(drive.bus == "scsi" for drive in machine.drives):
        argv += ["-device", "virtio-scsi-pci,id=scsi"]
    for index, drive in enumerate(machine.drives):
        argv += _drive(drive, index)
    if machine.seed:
        # QEMU itself presents the directory as a FAT volume, so the host needs no mkisofs or mkfs.vfat.
        argv += [
            "-blockdev",
            f"driver=vvfat,node-name=seed,dir={_escaped(machine.seed)},label=CIDATA,read-only=on",
            *("-device", f"virtio-blk-pci,drive=seed,serial={_SEED_SERIAL}"),
        ]
    return [*argv, *machine.extra]


def _firmware(firmware: Firmware) -> list[str]:
    argv = []
    if firmware.secure_boot:
        argv += ["-global", "driver=cfi.pflash01,property=secure,value=on"]
        argv += ["-global", "ICH9-LPC.disable_s3=1"]
    code, variables = _escaped(firmware.code), _escaped(firmware.variables)
    argv += ["-drive", f"if=pflash,unit=0,format=raw,readonly=on,file={code}"]
    argv += ["-drive", f"if=pflash,unit=1,format=raw,file={variables}"]
    return argv


def node_name(index: int) -> str:
    """Return QEMU's name for a drive's content."""
    return f"disk{index}"


def device_id(index: int) -> str:
    """Return QEMU's name for a drive as the guest's device."""
    return f"device{index}"


def failing(index: int) -> dict[str, Any]:
    """Return a layer on top of a drive that fails every read and write (EIO), as ``blockdev-add`` expects it."""
    errors = [
        {"event": "none", "iotype": kind, "errno": errno.EIO, "once": False}
        for kind in ("read", "write", "write-zeroes", "flush")
    ]
    return {
        "driver": "blkdebug",
        "node-name": f"failing{index}",
        "image": node_name(index),
        "inject-error": errors,
    }


def plugged(drive: Drive, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of ``blockdev-add`` and ``device_add`` for a SCSI disk added while the machine runs.

    The machine must have had one from the start, since its controller is needed. Raises ValueError for another bus
    or a rate limit.
    """
    if drive.bus != "scsi" or drive.rate:
        raise ValueError("only SCSI disks without a limit can be plugged in")
    cache = {"no-flush": not drive.durable}
    content = {
        "driver": drive.format,
        "node-name": node_name(index),
        "discard": "unmap",
        "cache": cache,
        "file": {"driver": "file", "filename": os.fspath(drive.path), "cache": cache},
    }
    device = {
        "driver": "scsi-hd",
        "bus": "scsi.0",
        "id": device_id(index),
        "drive": node_name(index),
        "serial": drive.serial or node_name(index),
    }
    return content, device


def _drive(drive: Drive, index: int) -> list[str]:
    if drive.bus != "scsi" and (drive.model or drive.vendor):
        raise ValueError(f"a {drive.bus} disk can't have a custom model or vendor; use scsi")
    # NVMe requires a serial, 20 characters at most; virtio takes 20 as well.
    serial = _escaped(drive.serial or node_name(index))
    if len(drive.serial) > 20:
        raise ValueError(f"the serial {drive.serial!r} has more than 20 characters")
    device = {"virtio": "virtio-blk-pci", "nvme": "nvme", "scsi": "scsi-hd,bus=scsi.0"}[drive.bus]
    device += f",id={device_id(index)},drive={node_name(index)},serial={serial},bootindex={index}"
    if drive.vendor:
        device += f",vendor={_escaped(drive.vendor)}"
    if drive.model:
        device += f",product={_escaped(drive.model)}"
    return [*_content(drive, index), "-device", device]


def _content(drive: Drive, index: int) -> list[str]:
    """Return the options for the node that a drive's device uses: the file, and any rate limit above it."""
    flush = "off" if drive.durable else "on"
    name = node_name(index)
    if not drive.rate:
        options = f"driver={drive.format},node-name={name},discard=unmap,cache.no-flush={flush}"
        return ["-blockdev", f"{options},{_file(drive, 'file.')}"]
    group = f"throttle{index}"
    options = f"driver=throttle,node-name={name},discard=unmap,cache.no-flush={flush},throttle-group={group}"
    below = f"file.driver={drive.format},file.cache.no-flush={flush},{_file(drive, 'file.file.')}"
    limit = f"throttle-group,id={group},x-bps-total={drive.rate}"
    return ["-object", limit, "-blockdev", f"{options},{below}"]


def _file(drive: Drive, prefix: str) -> str:
    flush = "off" if drive.durable else "on"
    options = ("driver=file", f"filename={_escaped(drive.path)}", f"cache.no-flush={flush}")
    return ",".join(prefix + option for option in options)


def _escaped(value: str | Path) -> str:
    """Return ``value`` for an option list, in which commas must be doubled."""
    return os.fspath(value).replace(",", ",,")


def find_firmware(secure_boot: bool = False, directory: Path = _FIRMWARE_DIRECTORY) -> tuple[Path, Path]:
    """Return UEFI's code and the template of its variables. Raises HostError if one is missing."""
    code, variables = (directory / name for name in _FIRMWARE_FILES[secure_boot])
    for path in (code, variables):
        if not path.is_file():
            raise HostError(f"{path} is missing", hint="install the package ovmf")
    return code, variables


def overlay(backing: Path, format: str, path: Path, size: int = 0) -> None:
    """Create a qcow2 file on top of ``backing`` that takes all writes. Raises CommandError.

    ``size`` (bytes) makes the disk larger than ``backing``, as a cloud does with an image.
    """
    argv = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        format,
        "-b",
        os.fspath(backing),
        os.fspath(path),
    ]
    process.run([*argv, str(size)] if size else argv)


def disk_format(path: Path) -> Literal["raw", "qcow2"]:
    """Return a disk file's format, from its first bytes; anything that isn't qcow2 is raw (including a fixed VHD)."""
    with path.open("rb") as file:
        return "qcow2" if file.read(4) == b"QFI\xfb" else "raw"


def forwarded_port(usernet: str) -> int:
    """Return the host port that leads to the guest's port 22, from the monitor's ``info usernet``.

    An example line: ``  TCP[HOST_FORWARD]  14       127.0.0.1 45119       10.0.2.15    22   0      0``. Raises
    BootError if there is none.
    """
    for line in usernet.splitlines():
        fields = line.split()
        if fields[:1] == ["TCP[HOST_FORWARD]"] and fields[5:6] == ["22"]:
            return int(fields[3])
    raise BootError("QEMU forwards no port to the guest's SSH")


@functools.cache
def accelerator() -> Accelerator:
    """Return ``kvm`` if a guest really runs with it, else ``tcg``.

    Being able to open /dev/kvm proves nothing, nor does a first instruction: in a VM whose own hypervisor is
    incomplete, QEMU dies while it sets up the processor, or KVM gives up in the firmware. The probe takes as long as
    the firmware does.
    """
    return "kvm" if os.access("/dev/kvm", os.R_OK | os.W_OK) and works("kvm") else "tcg"


def works(accel: Accelerator, seconds: float = _PROBE_SECONDS) -> bool:
    """Return whether the firmware of a machine without a disk gets as far as writing to the console.

    Raises HostError if QEMU or the firmware is missing.
    """
    if shutil.which(PROGRAM, path=environment()["PATH"]) is None:
        raise HostError(f"{PROGRAM} is missing", hint="install the package qemu-system-x86")
    code, template = find_firmware()
    with tempfile.TemporaryDirectory(prefix="image-builder-probe-") as directory:
        folder = Path(directory)
        variables = folder / "variables.fd"
        shutil.copyfile(template, variables)
        machine = Machine(
            name="probe",
            firmware=Firmware(code, variables),
            drives=(),
            console=folder / "console.log",
            monitor=monitor.socket_path(folder / "monitor"),
            accelerator=accel,
            cpus=min(2, os.cpu_count() or 1),
            memory_mib=256,
        )
        with process.background(command_line(machine), log=folder / "qemu.log") as child:
            deadline = time.monotonic() + seconds
            while child.poll() is None and time.monotonic() < deadline:
                # By then it has been through every processor mode, as a kernel will be.
                if machine.console.exists() and machine.console.stat().st_size:
                    return True
                if monitor.gave_up(machine.monitor):
                    return False
                time.sleep(_LOOK_SECONDS)
            return False
