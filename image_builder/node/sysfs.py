"""Reading /sys without errors: the kernel's device files come and go with the devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # VGA and 3D controllers, the first two bytes of the class


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand device. ``state`` and ``physical`` are the kernel's words: ``ACTIVE``, ``LinkUp``.

    ``rate_gbit`` is in Gbit/s. ``layer`` is the link layer: the kernel lists Ethernet devices here, too.
    """

    device: str
    number: int
    state: str = ""
    physical: str = ""
    rate_gbit: float = 0.0
    layer: str = ""

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"

    @property
    def is_up(self) -> bool:
        return (self.state, self.physical) == ("ACTIVE", "LinkUp")

    @property
    def is_infiniband(self) -> bool:
        return self.layer == "InfiniBand"


def text(path: Path) -> str:
    """Return a file's text, stripped; empty if the file doesn't exist or can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(path: Path) -> int:
    """Return the number in a file; 0 if there is none."""
    value = text(path)
    return int(value) if value.isdigit() else 0


def nvidia_gpus(sys: Path) -> list[Path]:
    """Return the NVIDIA GPUs on the PCI bus, named by their address, whether or not a driver is bound to them."""
    return [
        entry
        for entry in sorted((sys / "bus/pci/devices").glob("*"))
        if text(entry / "vendor") == _NVIDIA and text(entry / "class").startswith(_DISPLAY)
    ]


def ports(sys: Path) -> tuple[Port, ...]:
    """Return the ports of InfiniBand devices, including their Ethernet ports."""
    return tuple(_port(entry) for entry in sorted((sys / "class/infiniband").glob("*/ports/*")))


def _port(entry: Path) -> Port:
    # "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)"
    state, physical = (text(entry / name).partition(": ")[2] for name in ("state", "phys_state"))
    rate = text(entry / "rate").partition(" ")[0]
    gigabits = float(rate) if rate.replace(".", "", 1).isdigit() else 0.0
    layer = text(entry / "link_layer")
    return Port(entry.parents[1].name, int(entry.name), state, physical, gigabits, layer)
