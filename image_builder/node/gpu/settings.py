"""The GPUs' settings: ``/etc/node-agent/gpu.json``, as the role gpu_preflight writes it.

    {"expect": "gpus", "vm_size": "Standard_ND96isr_H100_v5", "count": null, "allow_unknown_size": false,
     "driver_version": "580.159.04", "driver_flavour": "open", "kernel": "6.1.0-40-amd64", "mig": "disabled",
     "overrides": {"hbm_floor_gbps": {"value": 2400, "from": "bench of 2026-10-02, 64 nodes, lowest 0.97"}},
     "waived": {"pcie.link": "the platform hides the link, ticket 123"},
     "own_processes": ["nvidia-persistenced"], "fabric_wait_seconds": 180,
     "infiniband_wait_seconds": 120, "mode": "observe",
     "calibrations": [{"size": "Standard_ND96isr_H100_v5", "driver": "580.159.04", "agent": "0123456789ab",
                       "from": "16 nodes, ten runs each, 2026-10-02"}]}

Every key has a default; unknown keys are rejected. Driver, flavor and kernel default to what the role nvidia recorded
at the bake in ``gpu-driver.json``, next to this file. If neither file exists, the preflight expects no GPUs; this
program, started by hand, expects them, and asks the platform for the size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from image_builder.node import settings as settings_files
from image_builder.node.decode import one_of, shown, within
from image_builder.node.gpu.sizes import FLAVOURS, OVERRIDABLE, Floor

# A GPU that computes wrongly or has lost memory never passes, whatever the pool's settings say.
NEVER_WAIVED = ("kat.", "det.", "mem.", "ecc.", "remap", "gpu.", "sku.", "xid.")


@dataclass(frozen=True)
class Calibration:
    """A record that healthy machines passed. It says nothing about another size, driver or program.

    ``agent`` is the document's ``tool_version``; ``source`` says who tested how many machines, and when.
    """

    size: str
    driver: str
    agent: str
    source: str = field(metadata={"key": "from"})

    def problems(self) -> Iterator[str]:
        """Yield a problem for each value that is empty."""
        values = {"size": self.size, "driver": self.driver, "agent": self.agent, "from": self.source}
        yield from (f"{key} must not be empty" for key, text in values.items() if not text.strip())

    def is_about(self, size: str, driver: str, agent: str) -> bool:
        """Return whether the record covers machines of this size, with this driver and program."""
        return (self.size.lower(), self.driver, self.agent) == (size.lower(), driver, agent)


@dataclass(frozen=True)
class Settings:
    """The GPUs' settings. ``expect`` none: this pool has no GPUs, and finding one is a configuration error.

    ``vm_size`` empty: the platform is asked. ``driver_version``, ``driver_flavour`` and ``kernel`` are what was
    baked, empty if that isn't known. ``count`` is how many GPUs an unknown size has. ``waived`` has, by check id, the
    reason why a failure of that check only warns. ``own_processes`` may use a GPU before the test.

    ``mode`` observe: wrong answers and low speeds only warn until ``calibrations`` has a record for this size, driver
    and program.
    """

    expect: Literal["gpus", "none"] = "gpus"
    vm_size: str = ""
    count: int | None = None
    allow_unknown_size: bool = False
    driver_version: str = ""
    driver_flavour: str = ""
    kernel: str = ""
    mig: Literal["enabled", "disabled"] = "disabled"
    overrides: Mapping[str, Floor] = field(default_factory=dict)
    waived: Mapping[str, str] = field(default_factory=dict)
    own_processes: tuple[str, ...] = ("nvidia-persistenced",)
    fabric_wait_seconds: float = 180
    infiniband_wait_seconds: float = 120
    mode: Literal["observe", "enforce"] = "observe"
    calibrations: tuple[Calibration, ...] = ()

    def problems(self) -> Iterator[str]:
        """Yield the rules that these settings break."""
        yield from one_of("driver_flavour", self.driver_flavour, ("", *FLAVOURS))
        if not re.fullmatch(r"(\d+(\.\d+)+)?", self.driver_version):
            yield f"driver_version must be a version, not {shown(self.driver_version)}"
        if self.count is not None:
            yield from within("count", self.count, 1, 16)
        elif self.allow_unknown_size:
            yield "count is missing: allow_unknown_size needs it"
        yield from within("fabric_wait_seconds", self.fabric_wait_seconds, 0, 600)
        yield from within("infiniband_wait_seconds", self.infiniband_wait_seconds, 0, 600)
        for number, name in enumerate(self.own_processes):
            if not name:
                yield f"own_processes[{number}] must not be empty"
        for key in self.overrides:
            if key not in OVERRIDABLE:
                yield f"overrides.{key} must be one of {', '.join(OVERRIDABLE)}"
        for check, reason in self.waived.items():
            if check.startswith(NEVER_WAIVED):
                yield f"waived.{check} can't be waived"
            if not reason.strip():
                yield f"waived.{check} needs a reason"


def load(directory: Path = settings_files.DIRECTORY) -> Settings:
    """Return the node's settings; raises NodeError (``settings``, ``gpu.settings``)."""
    baked = settings_files.load("gpu-driver", directory)
    keys = {"driver_version": "driver", "driver_flavour": "flavour", "kernel": "kernel"}
    defaults = {key: baked[name] for key, name in keys.items() if name in baked}
    return parse({**defaults, **settings_files.load("gpu", directory)})


def are_expected(directory: Path = settings_files.DIRECTORY) -> bool:
    """Return whether this node should have GPUs: one of the two files exists, and ``expect`` isn't ``none``.

    Raises NodeError (``settings``).
    """
    has_files = any((directory / f"{name}.json").exists() for name in ("gpu", "gpu-driver"))
    return has_files and settings_files.load("gpu", directory).get("expect", "gpus") != "none"


def parse(document: Mapping[str, Any]) -> Settings:
    """Return the settings. Raises NodeError (``gpu.settings``) that lists all problems at once."""
    return settings_files.parse(Settings, document, "gpu", code="gpu.settings")
