"""A simulated machine with GPUs: our own libcuda and libnvidia-ml, and the files that a kernel would provide.

NVML's answers were recorded on a real H100 (tests/data/gpu); what the recording lacks is made up as in
``recordings``. The kernels are computed on the host, so speeds mean nothing, and nothing here proves what a GPU does.
What is proven is that the programs around it cope when a driver is slow, wrong, silent or gone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from image_builder.node.gpu import nvml
from image_builder.node.gpu.model import Gpu
from tests.bench.first_contact import nvml_answers, nvml_calls
from tests.support.gpu_stand_in import recordings
from tests.support.gpu_stand_in.libnvidia_ml import Node

SOURCES = Path(__file__).parent
LIBRARIES = {"cuda.c": "libcuda.so.1", "nvml.c": "libnvidia-ml.so.1"}
MIB = 96  # a GPU's memory as CUDA reports it; small, since what is tested has to be written
SMS = 6
# Functions that nvml.c implements itself.
_WRITTEN = {"nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetFieldValues"}
Record = dict[str, Any]


@dataclass(frozen=True)
class StandIn:
    """A machine's directory: ``root`` with its /proc, /sys and /dev, ``libraries``, and the GPUs' UUIDs."""

    directory: Path
    gpus: tuple[str, ...]

    @property
    def root(self) -> Path:
        return self.directory / "root"

    @property
    def libraries(self) -> Path:
        return self.directory / "lib"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for a program that is to find these GPUs."""
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return {**inherited, "LD_LIBRARY_PATH": os.fspath(self.libraries), "LC_ALL": "C.UTF-8"}


def sources(directory: Path) -> None:
    """Write what the compiler needs."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in (*LIBRARIES, "shared.h"):
        (directory / name).write_bytes((SOURCES / name).read_bytes())
    calls = [*nvml_calls.of_system(), *nvml_calls.of_gpu(0, 2)]
    names = sorted({call.function for call in calls} - _WRITTEN)
    (directory / "functions.h").write_text("".join(f"ANSWERED({name})\n" for name in names), encoding="utf-8")


def compile_in(directory: Path, run: Callable[[list[str]], object]) -> None:
    """Compile both libraries in the directory that has their sources; ``run`` runs a program."""
    system = "/usr/lib/x86_64-linux-gnu"
    for source, library in LIBRARIES.items():
        flags = ["-O1", "-w", "-fno-builtin", "-fPIC", "-shared", "-nostdlib"]
        libc = [f"{system}/libc.so.6", f"{system}/libm.so.6"]
        run(["gcc", *flags, "-o", f"{directory}/{library}", f"{directory}/{source}", *libc])


def machine(directory: Path, libraries: Path) -> StandIn:
    """Make a healthy machine with two GPUs of a recorded model; ``libraries`` has the compiled libraries."""
    evidence = recordings.node("H100")
    made_up: dict[str, Any] = {
        "memory_total_bytes": MIB << 20,
        "memory_used_bytes": 0,
        "memory_reserved_bytes": 0,
        "compute_capability": "9.0",
    }
    gpus = tuple(replace(gpu, **made_up) for gpu in evidence.gpus[:2])
    stand_in = StandIn(directory, tuple(gpu.uuid for gpu in gpus))
    stand_in.libraries.mkdir(parents=True)
    for name in LIBRARIES.values():
        os.link(libraries / name, stand_in.libraries / name)
    log = stand_in.root / "dev/kmsg"
    lines = [f"gpu {gpu.uuid} {gpu.pci[4:].lower()} {SMS} 9 0 {MIB}" for gpu in gpus]
    (stand_in.libraries / "cuda.txt").write_text("\n".join([*lines, f"kmsg {log}", ""]), encoding="utf-8")
    driver = evidence.before.machine.driver_loaded
    lines = [_line(record) for record in answers(gpus, driver) if "code" in record]
    (stand_in.libraries / "nvml.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _tree(stand_in.root, gpus, driver)
    return stand_in


def answers(gpus: Sequence[Gpu], driver: str) -> Iterator[Record]:
    """Yield NVML's answers about these GPUs, as a first contact records them. Unknown calls are not supported."""
    library = nvml.Library(_Known(Node(tuple(gpus), driver)))
    handles = {gpu.index: c_void_p(gpu.index + 1) for gpu in gpus}
    for record, ask in nvml_answers.questions(library, handles):
        yield {**record, **ask()}


class _Known:
    """The fake library, which answers ``not supported`` to calls that it doesn't know."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Callable[..., int]:
        def asked(*arguments: Any) -> int:
            try:
                return int(getattr(self._node, name)(*arguments))
            except (AttributeError, IndexError, KeyError, TypeError, ValueError):
                return nvml.NOT_SUPPORTED

        return asked


def _line(record: Record) -> str:
    gpu = -1 if record["gpu"] is None else record["gpu"]
    out = record.get("out", {})
    if record["call"] == "nvmlDeviceGetFieldValues":
        kind = int(out.get("type", 1)).to_bytes(4, "little").hex()
        outputs = [("3", kind), ("4", out["bytes"])] if out else []
    else:
        outputs = [(str(output["at"]), output["bytes"] or "-") for output in out.values()]
    numbers = record["numbers"]
    fields = [record["call"], gpu, record.get("peer", -1), len(numbers), *numbers, record["code"]]
    return " ".join(str(word) for word in [*fields, len(outputs), *(w for pair in outputs for w in pair)])


def _tree(root: Path, gpus: Sequence[Gpu], driver: str) -> None:
    """Write the files that a kernel and the driver's packages would provide."""
    version = (
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\nGCC version:  x\n"
    )
    files = {
        "proc/driver/nvidia/version": version,
        "proc/sys/kernel/random/boot_id": f"{recordings.BOOT}\n",
        "proc/meminfo": "MemTotal:       115343360 kB\n",
        "sys/module/nvidia/version": f"{driver}\n",
        "sys/module/nvidia_uvm/version": f"{driver}\n",
        "dev/kmsg": "",
        "dev/nvidiactl": "",
        "dev/nvidia-uvm": "",
        "etc/node-agent/gpu.json": json.dumps({"mode": "enforce"}),
        "etc/image-release": 'IMAGE_BUILD="stand-in"\n',
        f"usr/lib/x86_64-linux-gnu/libcuda.so.{driver}": "",
        f"usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{driver}": "",
    }
    for gpu in gpus:
        device = f"sys/bus/pci/devices/{gpu.pci[4:].lower()}"
        attributes = {"vendor": "0x10de", "class": "0x030200", "device": "0x2330", "numa_node": "0"}
        files |= {f"{device}/{name}": f"{value}\n" for name, value in attributes.items()}
        files[f"dev/nvidia{gpu.index}"] = ""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "sys/bus/pci/drivers/nvidia").mkdir(parents=True)
    for gpu in gpus:
        (root / f"sys/bus/pci/devices/{gpu.pci[4:].lower()}/driver").symlink_to("../../drivers/nvidia")
    for name in ("libcuda", "libnvidia-ml"):
        (root / f"usr/lib/x86_64-linux-gnu/{name}.so.1").symlink_to(f"{name}.so.{driver}")
