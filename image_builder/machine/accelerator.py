"""The accelerator for a guest: the processor itself, by KVM, or QEMU's emulation of one."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from pathlib import Path

from image_builder.errors import HostError
from image_builder.machine import monitor, qemu
from image_builder.machine.qemu import Accelerator
from image_builder.system import process
from image_builder.system.environment import environment

_SECONDS = 20.0
_LOOK_SECONDS = 0.05


@functools.cache
def accelerator() -> Accelerator:
    """Return ``kvm`` when a guest really runs with it, else ``tcg``.

    That /dev/kvm can be opened proves nothing, nor does a first instruction: in a VM whose own hypervisor is
    incomplete, QEMU dies while it sets up the processor, or KVM gives up in the firmware. The probe takes as long as
    the firmware does.
    """
    return "kvm" if os.access("/dev/kvm", os.R_OK | os.W_OK) and works("kvm") else "tcg"


def works(accel: Accelerator, seconds: float = _SECONDS) -> bool:
    """Tell whether the firmware of a machine without a disk comes to where it speaks on the console.

    Raises HostError when QEMU or the firmware isn't there.
    """
    if shutil.which(qemu.PROGRAM, path=environment()["PATH"]) is None:
        raise HostError(f"{qemu.PROGRAM} is missing", hint="install the package qemu-system-x86")
    code, template = qemu.find_firmware()
    with tempfile.TemporaryDirectory(prefix="image-builder-probe-") as directory:
        folder = Path(directory)
        variables = folder / "variables.fd"
        shutil.copyfile(template, variables)
        machine = qemu.Machine(
            name="probe",
            firmware=qemu.Firmware(code, variables),
            drives=(),
            console=folder / "console.log",
            monitor=monitor.socket_path(folder / "monitor"),
            accelerator=accel,
            cpus=min(2, os.cpu_count() or 1),
            memory_mib=256,
        )
        with process.background(qemu.command_line(machine), log=folder / "qemu.log") as child:
            deadline = time.monotonic() + seconds
            while child.poll() is None and time.monotonic() < deadline:
                # It has been through every mode of the processor by then, as a kernel will.
                if machine.console.exists() and machine.console.stat().st_size:
                    return True
                if monitor.gave_up(machine.monitor):
                    return False
                time.sleep(_LOOK_SECONDS)
            return False
