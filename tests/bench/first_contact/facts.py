"""The machine around the GPUs: what it is, its driver and kernel, and how its parts are connected."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from image_builder.node import child, files
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.gpu import machine, nvml, readings, sizes, xids
from image_builder.node.gpu.model import Machine, Xid
from image_builder.node.net import imds
from image_builder.node.net.retry import Deadline
from tests.bench.first_contact.context import FACTS, Context

# The platform's metadata service answers at once or doesn't exist; nothing else is queried over a network.
PLATFORM_SECONDS = 3.0
_PROGRAM_SECONDS = 12.0
_FILES = ("version", "cmdline", "meminfo", "driver/nvidia/version", "driver/nvidia/params", "1/cgroup")
_PCI = (
    "class",
    "current_link_speed",
    "current_link_width",
    "device",
    "local_cpulist",
    "max_link_speed",
    "max_link_width",
    "numa_node",
    "subsystem_device",
)
_DMI = ("sys_vendor", "product_name", "product_version", "bios_version")
_PROGRAMS = (
    ("nvidia-smi", "-q"),
    ("nvidia-smi", "topo", "-m"),
    ("nvidia-smi", "nvlink", "-s"),
    ("lspci", "-tv"),
)
_CHARACTERS = 400_000  # of one program's output


def step(context: Context) -> dict[str, Any]:
    """Write ``facts.json`` first without the output of the programs, which may hang, then with it."""
    places = context.places
    node = machine.look(places, context.vm_size, _platform)
    facts: dict[str, Any] = {
        "machine": asdict(node),
        "user": os.geteuid(),
        "processors": os.cpu_count(),
        "usable_processors": len(os.sched_getaffinity(0)),
        "uname": list(platform.uname()),
        "python": sys.version,
        "os": _text(places.root / "etc/os-release"),
        "container": [name for name in (".dockerenv", "run/.containerenv") if (places.root / name).exists()],
        "files": {name: _text(places.proc / name) for name in _FILES},
        "gpu_information": {
            path.parent.name: _text(path)
            for path in sorted(places.proc.glob("driver/nvidia/gpus/*/information"))
        },
        "dmi": {name: _text(places.sys / "class/dmi/id" / name) for name in _DMI},
        "numa": {
            path.name: {name: _text(path / name) for name in ("cpulist", "distance", "meminfo")}
            for path in sorted((places.sys / "devices/system/node").glob("node[0-9]*"))
        },
        "pci": {gpu.address: _pci(places.sys / "bus/pci/devices" / gpu.address) for gpu in node.pci},
        "size": _size(node),
    }
    files.write_json(context.out / FACTS, facts)
    facts["programs"] = {}
    for argv in _PROGRAMS if context.root == Path("/") else ():
        facts["programs"][" ".join(argv)] = _said(argv, context.left(_PROGRAM_SECONDS))
        files.write_json(context.out / FACTS, facts)
    return {"gpus": len(node.pci), "driver": node.driver_loaded, "size": facts["size"]}


def _platform() -> Mapping[str, Any]:
    import json

    answer = json.loads(imds.answer(machine._IMDS_PATH, Deadline.after(PLATFORM_SECONDS)).body)
    if not isinstance(answer, dict):
        raise ValueError("the metadata service must answer with an object")
    return answer


def _size(node: Machine) -> str:
    """Return the size's name if the table has it; empty if unknown."""
    row = sizes.load().find(node.vm_size)
    return row[0].name if row else ""


def _pci(device: Path) -> dict[str, Any]:
    """Return the kernel's data on a GPU's place, up to the root of the bus, which shows which GPUs share a switch."""
    return {"path": str(device.resolve()), **{name: _text(device / name) for name in _PCI}}


def _said(argv: tuple[str, ...], seconds: float) -> dict[str, Any]:
    try:
        done = child.run(argv, timeout=max(1.0, seconds), ok=range(256))
    except ProgramError as error:
        return {"error": error.message}
    return {"status": done.status, "output": (done.stdout + done.stderr)[:_CHARACTERS]}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        return f"({error.strerror})"


# -- the driver and the kernel ---------------------------------------------------------------------------------


def look(context: Context) -> dict[str, Any]:
    """Return what the smoke test reads of all GPUs, some samples as it takes under load, and the kernel's Xids."""
    with nvml.opened() as library:
        answers = readings.look(library)
        samples = [
            asdict(readings.sample(library, readings.handle_of(library, gpu.index), gpu.uuid, float(number)))
            for number in range(3)
            for gpu in answers.gpus
        ]
    return {"nvml": asdict(answers), "samples": samples, **kernel(context)}


def kernel(context: Context) -> dict[str, Any]:
    """Return the Xids of this boot, or why they can't be read."""
    try:
        return {"xids": [asdict(xid) for xid in read_xids(context)]}
    except NodeError as error:
        return {"xids": None, "kernel_log": error.message}


def read_xids(context: Context) -> tuple[Xid, ...]:
    """Return this boot's Xids, from the journal or, as in a container, from /dev/kmsg. Raises NodeError."""
    reason = ""
    if context.root == Path("/"):
        try:
            return machine.read_xids(machine.boot_id(context.places.proc))
        except NodeError as error:
            reason = f"{error.message}; "
    path = context.places.dev / "kmsg"
    try:
        return tuple(xid for xid in map(_xid, _records(path)) if xid)
    except OSError as error:
        raise NodeError("gpu.journal", f"{reason}{path}: {error.strerror}") from error


def _records(path: Path) -> list[str]:
    """Return the records of the kernel's log; each read returns one of them."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    records: list[str] = []
    try:
        while data := os.read(descriptor, 8192):
            records += data.decode("utf-8", "replace").splitlines()
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)
    return records


def _xid(record: str) -> Xid | None:
    """Return the Xid of a record ``priority,number,microseconds,flags;message``."""
    head, _, message = record.partition(";")
    fields = head.split(",")
    return xids.parse_message(message, int(fields[2])) if len(fields) > 2 and fields[2].isdigit() else None
