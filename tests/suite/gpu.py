"""Mutations for test_gpu.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.suite.booted import record_booted
from tests.suite.offline import Mutation, append, both, change, given, link, mkdir, record, remove, write

CONFIG = "/etc/modprobe.d/nvidia-image.conf"
RULES = "/etc/udev/rules.d/71-nvidia.rules"
RECORD = "/etc/node-agent/gpu-driver.json"
STATUS = "/var/lib/dpkg/status"


def _module(root: Path, name: str) -> Path:
    """Return a module's file, whichever package installed it."""
    return next((root / "usr/lib/modules").rglob(f"{name}.ko"))


def bytes_of(name: str, old: bytes, new: bytes) -> Mutation:
    """Replace bytes in a module's file with others of the same length. Raises ValueError if they aren't there."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        path = _module(root, name)
        data = path.read_bytes()
        if old not in data or len(old) != len(new):
            raise ValueError(f"{name} has no {old!r}, or {new!r} is of another length")
        path.write_bytes(data.replace(old, new))

    return mutate


def _without_kernel_option(name: str) -> Mutation:
    """Mark an option as not set in the kernel's configuration."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        (path,) = (root / "boot").glob("config-*")
        lines = path.read_text(encoding="utf-8").splitlines()
        rest = [line for line in lines if not line.startswith(f"CONFIG_{name}=")]
        if rest == lines:
            raise ValueError(f"{path} has no CONFIG_{name}")
        path.write_text("\n".join([*rest, f"# CONFIG_{name} is not set", ""]), encoding="utf-8")

    return mutate


def without_module(name: str) -> Mutation:
    """Remove a module's file; the index still names it."""
    return lambda root, _variables: _module(root, name).unlink()


def twice(name: str) -> Mutation:
    """Add a second module of that name where another package would install it."""

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        place = _module(root, name)
        second = place.parents[2] / "extra"
        second.mkdir()
        shutil.copyfile(place, second / place.name)

    return mutate


def _other_interface(root: Path, _variables: dict[str, Any]) -> None:
    """Change the module's checksum of the kernel's structures, as if it were built against other headers."""
    path = _module(root, "nvidia-uvm")
    data = bytearray(path.read_bytes())
    # struct modversion_info: the checksum in 8 bytes, then the symbol's name.
    at = data.index(b"module_layout\0") - 8
    data[at] ^= 1
    path.write_bytes(bytes(data))


def _longer_module(root: Path, _variables: dict[str, Any]) -> None:
    """Append a byte to a module: it can still be loaded, but is no longer the one that was built."""
    with _module(root, "nvidia-modeset").open("ab") as stream:
        stream.write(b"\0")


def _initramfs(*names: str) -> Mutation:
    """Replace the initramfs with one (cpio, "newc") that contains only these empty files."""

    def entry(name: str, mode: int) -> bytes:
        fields = (0, mode, 0, 0, 1, 0, 0, 0, 0, 0, 0, len(name) + 1, 0)
        data = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        return data + bytes(-len(data) % 4)

    def mutate(root: Path, _variables: dict[str, Any]) -> None:
        image = next((root / "boot").glob("initrd.img-*"))
        content = b"".join(entry(name, 0o100644) for name in names) + entry("TRAILER!!!", 0)
        image.write_bytes(content + bytes(-len(content) % 512))

    return mutate


def _first_library(root: Path, _variables: dict[str, Any]) -> None:
    """Make CUDA's library one left over from another driver."""
    place = root / "usr/lib/x86_64-linux-gnu"
    (place / "libcuda.so.1").unlink()
    shutil.copyfile(place / "libc.so.6", place / "libcuda.so.525.1.2")
    (place / "libcuda.so.1").symlink_to("libcuda.so.525.1.2")


def installed(package: str, version: str = "1") -> Mutation:
    """Make dpkg believe that a package is installed."""
    return append(
        STATUS,
        f"\nPackage: {package}\nStatus: install ok installed\nPriority: optional\nSection: misc\n"
        f"Maintainer: x <x@y>\nArchitecture: amd64\nVersion: {version}\nDescription: x\n",
    )


def _first_unit(variables: dict[str, Any]) -> str:
    return str(variables["__nvidia_services"][0])


record(
    "test_gpu_modules_are_for_the_kernel",
    bytes_of("nvidia", b"vermagic=6.", b"vermagic=5."),
    given(
        lambda v: bytes_of(
            "nvidia-uvm",
            f"version={v['nvidia_driver_version']}".encode(),
            b"version=" + b"1" * len(v["nvidia_driver_version"]),
        )
    ),
    without_module("nvidia-uvm"),
)
record(
    "test_gpu_modules_are_of_the_declared_flavour",
    bytes_of("nvidia", b"license=Dual MIT/GPL\0", b"license=NVIDIA\0......"),
)
record("test_gpu_modules_fit_the_kernels_interface", _other_interface)
record(
    "test_gpu_modules_would_be_loaded",
    write("/etc/modprobe.d/other.conf", "blacklist nvidia\n"),
    write("/etc/modprobe.d/other.conf", "install nvidia-uvm /bin/false\n"),
    remove("/usr/lib/modules/*/modules.alias.bin"),
    remove("/usr/lib/modules/*/modules.dep.bin"),
)
record("test_gpu_modules_are_there_once", twice("nvidia-uvm"), without_module("nvidia-modeset"))
record("test_gpu_modules_are_signed", bytes_of("nvidia", b"~Module signature appended~\n", b"~" * 28))
record("test_gpu_firmware_is_there", remove("/usr/lib/firmware/nvidia/*/gsp_*.bin"))
record(
    "test_gpu_libraries_are_the_drivers",
    _first_library,
    remove("/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ptxjitcompiler.so.*"),
)
record(
    "test_gpu_packages_are_of_one_version",
    change(STATUS, r"(Package: libcuda1\n(?:.+\n)*?Version:) .*", r"\1 535.1.1-1"),
    change(STATUS, r"(Package: nvidia-modprobe\n(?:.+\n)*?Version:) .*", r"\1 525.1.1-1"),
    change(STATUS, r"(Package: nvidia-smi\nStatus:) hold ok installed", r"\1 hold ok config-files"),
)
record(
    "test_gpu_packages_are_held",
    change(STATUS, r"(Package: libcuda1\nStatus:) hold ok installed", r"\1 install ok installed"),
)
record(
    "test_gpu_build_left_nothing",
    write("/usr/bin/gcc-12", mode=0o755),
    mkdir("/usr/src/linux-headers-6.1.0-1-common/include"),
    mkdir("/var/lib/dkms/nvidia/525.1.1"),
    installed("nvidia-kernel-dkms"),
)
record(
    "test_gpu_signing_key_is_not_there",
    write("/var/lib/dkms/mok.key", mode=0o600),
    write("/var/lib/shim-signed/mok/MOK.priv", mode=0o600),
)
record(
    "test_gpu_nouveau_is_denied",
    change(CONFIG, "^blacklist nouveau\n", ""),
    change(CONFIG, "^install .*\n", ""),
)
record(
    "test_gpu_nouveau_is_denied_in_the_initramfs",
    _initramfs("etc/modprobe.d/other.conf"),
    _initramfs(CONFIG.lstrip("/"), "usr/lib/modules/6/kernel/drivers/gpu/drm/nouveau/nouveau.ko"),
)
record(
    "test_gpu_nothing_of_a_machine_is_baked",
    both(mkdir("/etc/cdi"), write("/etc/cdi/nvidia.yaml")),
)
record(
    "test_gpu_starts_its_units",
    remove(RULES),
    change(RULES, "SYSTEMD_WANTS", "SYSTEMD_WISHES"),
    given(lambda v: link(f"/etc/systemd/system/multi-user.target.wants/{_first_unit(v)}", "/usr/lib/x")),
    given(lambda v: remove(f"/etc/systemd/system/{_first_unit(v)}.d/10-gpu.conf")),
)
record(
    "test_gpu_fabric_manager_is_where_it_belongs",
    given(
        lambda v: (
            change(
                STATUS,
                r"(Package: nvidia-fabric.*\nStatus:) hold ok installed",
                r"\1 deinstall ok config-files",
            )
            if v["__nvidia_fabric"]
            else installed("nvidia-fabricmanager-535")
        )
    ),
)
record(
    "test_gpu_record_is_true",
    _longer_module,
    change(RECORD, '"driver": ".*"', '"driver": "1.2.3"'),
    change(RECORD, '"kernel": ".*"', '"kernel": "6.1.0-1-amd64"'),
)
record(
    "test_gpu_rdma_is_there",
    remove("/etc/security/limits.d/91-nvidia-rdma.conf"),
    change("/etc/security/limits.d/91-nvidia-rdma.conf", "unlimited", "64"),
)

record(
    "test_gpu_rdma_has_its_kernel_options",
    _without_kernel_option("MLX5_INFINIBAND"),
    _without_kernel_option("INFINIBAND_USER_ACCESS"),
)

record_booted(
    "test_gpu_driver_wants_nothing_but_a_gpu",
    "truncate --size=1000 /usr/lib/modules/*/updates/dkms/nvidia.ko",
)
record_booted("test_gpu_units_follow_the_gpu", "! systemctl start nvidia-persistenced.service")
record_booted(
    "test_gpu_tools_say_that_there_is_none",
    "printf '#!/bin/sh\\nsleep 100\\n' > /run/smi; chmod +x /run/smi; mount --bind /run/smi $(readlink -f /usr/bin/nvidia-smi)",
)
