"""The kernel's files of devices, which come and go with these: /sys, read without an error."""

from __future__ import annotations

from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers, the first two bytes of the class


def text(path: Path) -> str:
    """Return a file's text without the line's end; empty where there is none or it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int:
    """Return a file's number, 0 where there is none."""
    value = text(path)
    return int(value) if value.isdigit() else 0


def nvidia_gpus(sys: Path) -> list[Path]:
    """Return the devices of NVIDIA's GPUs on the PCI bus, named by their address, whether a driver has them or not."""
    return [
        entry
        for entry in sorted((sys / "bus/pci/devices").glob("*"))
        if text(entry / "vendor") == _NVIDIA and text(entry / "class").startswith(_DISPLAY)
    ]
