"""``/etc/node-agent/gpu.json``: what the pool's image says of its GPUs.

    {"expect": "gpus", "vm_size": "Standard_ND96isr_H100_v5", "count": null, "allow_unknown_size": false,
     "driver_version": "580.159.04", "driver_flavour": "open", "kernel": "6.1.0-40-amd64", "mig": "disabled",
     "overrides": {"hbm_floor_gbps": {"value": 2400, "from": "bench of 2026-10-02, 64 nodes, lowest 0.97"}},
     "waived": {"pcie.link": "the platform hides the link, ticket 123"},
     "own_processes": ["nvidia-persistenced"], "fabric_wait_seconds": 180,
     "infiniband_wait_seconds": 120, "mode": "observe",
     "calibrations": [{"size": "Standard_ND96isr_H100_v5", "driver": "580.159.04", "agent": "0123456789ab",
                       "from": "16 nodes, ten runs each, 2026-10-02"}]}

Every key has a default; an unknown one is refused. Driver, flavour and kernel are by default what the role nvidia has
recorded of the bake, in ``gpu-driver.json`` beside it. Without either file no GPU is expected by the preflight; this
program, started by hand, expects them, and asks the platform for the size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from image_builder.node import settings as files
from image_builder.node.errors import NodeError
from image_builder.node.gpu import calibration
from image_builder.node.gpu.calibration import Calibration
from image_builder.node.gpu.sizes import FLAVOURS, OVERRIDABLE, Floor, read_floor

EXPECTATIONS = ("gpus", "none")
MODES = ("observe", "enforce")
# What computes wrongly or has lost memory is never let pass, whatever a pool says.
NEVER_WAIVED = ("kat.", "det.", "mem.", "ecc.", "remap", "gpu.", "sku.", "xid.")


@dataclass(frozen=True)
class Settings:
    """``expect`` none: this pool has no GPUs, and finding one is an error of the configuration.

    ``vm_size`` empty: asked of the platform. ``driver_version``, ``driver_flavour`` and ``kernel`` are what was
    baked, empty where nothing was told. ``count`` is how many GPUs an unknown size has. ``waived``: a check by its
    id that fails is a warning instead, with the reason why. ``own_processes`` may use a GPU before the test.

    ``mode`` observe: what the GPUs compute and how fast they are only warns, until ``calibrations`` has a record of
    this size, driver and program.
    """

    expect: str = "gpus"
    vm_size: str = ""
    count: int | None = None
    allow_unknown_size: bool = False
    driver_version: str = ""
    driver_flavour: str = ""
    kernel: str = ""
    mig: str = "disabled"
    overrides: Mapping[str, Floor] = field(default_factory=dict)
    waived: Mapping[str, str] = field(default_factory=dict)
    own_processes: tuple[str, ...] = ("nvidia-persistenced",)
    fabric_wait_seconds: float = 180
    infiniband_wait_seconds: float = 120
    mode: str = "observe"
    calibrations: tuple[Calibration, ...] = ()


def load(directory: Path = files.DIRECTORY) -> Settings:
    """Return the node's settings; raises NodeError (``settings``, ``gpu.settings``)."""
    baked = files.load("gpu-driver", directory)
    known = {"driver_version": "driver", "driver_flavour": "flavour", "kernel": "kernel"}
    defaults = {key: baked[name] for key, name in known.items() if name in baked}
    return parse({**defaults, **files.load("gpu", directory)})


def are_expected(directory: Path = files.DIRECTORY) -> bool:
    """Tell whether this node is one with GPUs: it has their driver or settings of them, and they don't say `none`.

    Raises NodeError (``settings``).
    """
    there = [(directory / f"{name}.json").exists() for name in ("gpu", "gpu-driver")]
    return any(there) and files.load("gpu", directory).get("expect", "gpus") != "none"


def parse(found: Mapping[str, Any]) -> Settings:
    """Return the settings; raises NodeError (``gpu.settings``) with all that is wrong at once."""
    unknown = sorted(set(found) - set(Settings.__dataclass_fields__))
    problems = [f"{name}: there is no such setting" for name in unknown]
    made = Settings()
    try:
        made = _build(found)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problems.append(f"it has another shape than it should: {error}")
    problems += _problems(made)
    if problems:
        raise NodeError("gpu.settings", "gpu.json: " + "; ".join(problems))
    return made


def _build(found: Mapping[str, Any]) -> Settings:
    known = {key: value for key, value in found.items() if key in Settings.__dataclass_fields__}
    default = Settings()
    for key in ("expect", "vm_size", "driver_version", "driver_flavour", "kernel", "mig", "mode"):
        if not isinstance(known.get(key, ""), str):
            raise TypeError(f"{key}: {known[key]!r} is no text")
    if not isinstance(known.get("allow_unknown_size", False), bool):
        raise TypeError("allow_unknown_size: neither true nor false")
    count = known.get("count")
    if count is not None and (isinstance(count, bool) or not isinstance(count, int)):
        raise TypeError(f"count: {count!r} is no whole number")
    own = known.get("own_processes", default.own_processes)
    if isinstance(own, str):
        raise TypeError(f"own_processes: {own!r} is no list")
    known["own_processes"] = tuple(str(name) for name in own)
    known["overrides"] = {key: read_floor(value) for key, value in dict(known.get("overrides") or {}).items()}
    known["waived"] = {str(key): str(value) for key, value in dict(known.get("waived") or {}).items()}
    known["calibrations"] = tuple(map(calibration.read, known.get("calibrations") or ()))
    for key in ("fabric_wait_seconds", "infiniband_wait_seconds"):
        known[key] = float(known.get(key, getattr(default, key)))
    return Settings(**known)


def _problems(made: Settings) -> list[str]:
    floors = ", ".join(OVERRIDABLE)
    rules = {
        f"expect: {made.expect!r} is none of {', '.join(EXPECTATIONS)}": made.expect in EXPECTATIONS,
        f"mode: {made.mode!r} is none of {', '.join(MODES)}": made.mode in MODES,
        f"mig: {made.mig!r} is neither enabled nor disabled": made.mig in ("enabled", "disabled"),
        f"driver_flavour: {made.driver_flavour!r} is none of {', '.join(FLAVOURS)}": made.driver_flavour
        in ("", *FLAVOURS),
        f"driver_version: {made.driver_version!r} is no version": bool(
            re.fullmatch(r"(\d+(\.\d+)+)?", made.driver_version)
        ),
        "count: not 1 to 16": made.count is None or 1 <= made.count <= 16,
        "count: needed, as allow_unknown_size is set": not made.allow_unknown_size or made.count is not None,
        "fabric_wait_seconds: not 0 to 600": 0 <= made.fabric_wait_seconds <= 600,
        "infiniband_wait_seconds: not 0 to 600": 0 <= made.infiniband_wait_seconds <= 600,
        "own_processes: a name is empty": all(made.own_processes),
        **{f"overrides: {key}: not one of {floors}": key in OVERRIDABLE for key in made.overrides},
        **{f"waived: {key}: this can't be waived": not _is_never_waived(key) for key in made.waived},
        **{f"waived: {key}: no reason is given": bool(why.strip()) for key, why in made.waived.items()},
    }
    return [words for words, is_kept in rules.items() if not is_kept]


def _is_never_waived(check: str) -> bool:
    return check.startswith(NEVER_WAIVED)
