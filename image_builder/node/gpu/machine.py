"""The node around the GPUs: the kernel, its files, the journal, and the platform."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from image_builder.node import child, files, settings, sysfs
from image_builder.node.errors import NodeError, ProgramError
from image_builder.node.gpu import xids
from image_builder.node.gpu.model import INFINIBAND_MODULES, Machine, PciGpu, Xid
from image_builder.node.net import imds
from image_builder.node.net.retry import Deadline
from image_builder.node.sysfs import text

MODULES = (
    "nvidia",
    "nvidia_uvm",
    "nvidia_modeset",
    "nvidia_drm",
    "nvidia_peermem",
    "nouveau",
    *INFINIBAND_MODULES,
)
LIBRARIES: Mapping[str, str] = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
LIBRARY_DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
_FABRIC_MANAGER = "usr/bin/nv-fabricmanager"
_LOCAL_NVME = "Microsoft NVMe Direct Disk"
_IMDS_PATH = "/metadata/instance/compute?api-version=2021-02-01"
# How long to keep asking the platform. Its answer is kept for the boot; without one, the next test asks again.
PLATFORM_SECONDS = 60.0
_VERSION = re.compile(r"\b(\d{3}(?:\.\d+){1,2})\b")


@dataclass(frozen=True)
class Places:
    """The system's directories; tests use their own trees. ``run`` belongs to the agent."""

    root: Path = Path("/")
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    run: Path = Path("/run/node")
    cdi: tuple[Path, ...] = (Path("/run/cdi"), Path("/etc/cdi"))


Ask = Callable[[], Mapping[str, Any]]


def look(places: Places, vm_size: str = "", ask: Ask | None = None) -> Machine:
    """Return the node's readings. ``vm_size`` is the configured size, or the one that the platform has already named in
    this boot; without one, ``ask`` queries the platform.

    Values that can't be found are empty: the checks decide what that means.
    """
    compute = _platform(places, ask, may_ask=not vm_size)
    of_platform = str(compute.get("vmSize", ""))
    size = vm_size or of_platform
    loaded, flavour = driver_version(text(places.proc / "driver/nvidia/version"))
    libraries = {name: library_version(places.root, file) for name, file in LIBRARIES.items()}
    manager = _fabric_manager_version(places.root)
    return Machine(
        name=os.uname().nodename,
        boot_id=boot_id(places.proc),
        kernel=os.uname().release,
        vm_size=size,
        vm_size_from=("platform" if size == of_platform else "configuration") if size else "",
        vm_id=str(compute.get("vmId", "")),
        zone=str(compute.get("zone", "")),
        image=settings.build_id(places.root / "etc/image-release"),
        driver_loaded=loaded,
        flavour=flavour,
        modules=modules(places.sys),
        libraries={
            name: version for name, version in {**libraries, "fabricmanager": manager}.items() if version
        },
        pci=pci_gpus(places.sys),
        nodes=tuple(sorted(path.name for path in places.dev.glob("nvidia*"))),
        cdi_gpus=cdi_gpus(places.cdi),
        fabric_manager=_unit_state("nvidia-fabricmanager.service") if manager else "",
        ports=sysfs.ports(places.sys),
        local_nvme=local_nvme(places.sys),
        memory_bytes=memory_bytes(text(places.proc / "meminfo")),
    )


def driver_version(lines: str) -> tuple[str, str]:
    """Return the loaded driver's version and flavor from /proc/driver/nvidia/version; empty if it has none."""
    line = next((line for line in lines.splitlines() if line.startswith("NVRM version:")), "")
    version = _VERSION.search(line)
    if not version:
        return "", ""
    return version[1], "open" if "Open Kernel Module" in line else "proprietary"


def boot_id(proc: Path) -> str:
    """Return this boot's id, as the kernel writes it."""
    return text(proc / "sys/kernel/random/boot_id")


def modules(sys: Path) -> dict[str, str]:
    """Return the versions of the loaded modules that matter, empty for a module without one."""
    return {
        name: text(sys / "module" / name / "version") for name in MODULES if (sys / "module" / name).is_dir()
    }


def pci_gpus(sys: Path) -> tuple[PciGpu, ...]:
    """Return the NVIDIA GPUs on the PCI bus, whether or not a driver is bound to them."""
    gpus = []
    for path in sysfs.nvidia_gpus(sys):
        driver = (path / "driver").resolve().name if (path / "driver").exists() else ""
        gpus.append(PciGpu(path.name, text(path / "device").removeprefix("0x"), driver))
    return tuple(gpus)


def library_version(root: Path, file: str) -> str:
    """Return the version in the name of the file that a library's symlink resolves to; empty if there is none."""
    for directory in LIBRARY_DIRECTORIES:
        path = root / directory / file
        if path.exists():
            version = _VERSION.search(path.resolve().name)
            return version[1] if version else ""
    return ""


def _fabric_manager_version(root: Path) -> str:
    if not (root / _FABRIC_MANAGER).exists():
        return ""
    try:
        version = _VERSION.search(child.run([str(root / _FABRIC_MANAGER), "--version"], timeout=10).stdout)
    except ProgramError:
        return "unknown"
    return version[1] if version else "unknown"


def _unit_state(unit: str) -> str:
    """Return a unit's state as systemd names it: ``active``, ``failed``, ``inactive`` etc.; empty without systemd."""
    try:
        return child.run(["systemctl", "is-active", unit], ok=(0, 3, 4), timeout=10).stdout.strip()
    except ProgramError:
        return ""


def cdi_gpus(directories: tuple[Path, ...]) -> int | None:
    """Return how many whole GPUs the CDI specs name, None if there is no spec. With MIG, they name only the parts.

    nvidia-ctk names each GPU by its index (and by other names, depending on its settings): the indices are counted,
    in YAML and in JSON.
    """
    specs = [path for place in directories for path in sorted(place.glob("nvidia*")) if path.is_file()]
    if not specs:
        return None
    names = {
        n
        for path in specs
        for n in re.findall(r"""\bname["']?:\s*["']?(\d+)["']?,?\s*$""", text(path), re.MULTILINE)
    }
    return len(names)


def local_nvme(sys: Path) -> int:
    """Return how many local NVMe disks the platform provides; remote disks report a different model."""
    return sum(text(path).startswith(_LOCAL_NVME) for path in (sys / "class/nvme").glob("*/model"))


def memory_bytes(meminfo: str) -> int:
    """Return the machine's memory as the kernel sees it, 0 if unknown."""
    total = re.search(r"^MemTotal:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(total[1]) * 1024 if total else 0


def process_name(proc: Path, pid: int) -> str:
    """Return a process's name, from its command line if possible; empty if it is gone."""
    argv = text(proc / str(pid) / "cmdline").split("\0")
    return Path(argv[0]).name if argv[0] else text(proc / str(pid) / "comm")


def read_xids(boot: str) -> tuple[Xid, ...]:
    """Return this boot's Xids from the journal. Raises NodeError (``gpu.journal``) if it can't be read."""
    try:
        done = child.run(["journalctl", "-k", "-b", "0", "-o", "json", "--no-pager"], timeout=60)
        return xids.parse_journal(done.stdout, boot)
    except (ProgramError, ValueError) as error:
        raise NodeError("gpu.journal", f"can't read the kernel log: {error}") from error


def _platform(places: Places, ask: Ask | None, *, may_ask: bool) -> Mapping[str, Any]:
    """Return the platform's answer, which is cached for the boot; empty if it gives none, or wasn't asked."""
    cache = places.run / "imds.json"
    boot = boot_id(places.proc)
    answers = files.read_json(cache)
    if answers.get("boot_id") == boot and isinstance(answers.get("compute"), dict):
        return dict(answers["compute"])
    if not may_ask:
        return {}
    try:
        answer = (ask or ask_imds)()
    except (OSError, ValueError):
        return {}
    few = {key: answer[key] for key in ("vmSize", "vmId", "zone") if isinstance(answer.get(key), str)}
    cache.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(cache, {"boot_id": boot, "compute": few}, durable=False)
    return few


def ask_imds() -> Mapping[str, Any]:
    """Query Azure's metadata service about this machine. Raises OSError or ValueError."""
    answer = json.loads(imds.answer(_IMDS_PATH, Deadline.after(PLATFORM_SECONDS)).body)
    if not isinstance(answer, dict):
        raise ValueError("the metadata service must answer with an object")
    return answer
