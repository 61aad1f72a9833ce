"""The smoke test itself, as a node runs it, in each of its modes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from image_builder.node import files
from image_builder.node.gpu.model import Tier, Worker
from image_builder.node.gpu.smoke import command, fleet
from tests.bench.first_contact import facts
from tests.bench.first_contact.context import Context, peers, read_json, worker_argv

SEED = 20261124
# The time for reading the GPUs after the load and writing the document: seconds, and the share of a short step's time.
_AFTER_SECONDS, _AFTER_SHARE = 8.0, 0.25
_LINKS_SECONDS = 20.0
_FABRIC_SECONDS, _PORTS_SECONDS = 60.0, 20.0


def step(tier: Tier, mode: str) -> Callable[[Context], dict[str, Any]]:
    """Return the step that runs one tier of the smoke test."""

    def work(context: Context) -> dict[str, Any]:
        return tested(context, tier, mode)

    return work


def tested(context: Context, tier: Tier, mode: str, **more: Any) -> dict[str, Any]:
    """Run ``gpu-smoke --json``; return its exit status, seconds and document. Its output goes to this step's output."""
    directory = context.directory / "settings"
    directory.mkdir(parents=True, exist_ok=True)
    files.write_json(directory / "gpu.json", {**settings(context), "mode": mode, **more})
    system = command.System(
        places=context.places,
        directory=directory,
        load=_load(context),
        read_xids=lambda _: facts.read_xids(context),
        ask=_nobody,
    )
    began = time.monotonic()
    status = command.run(tier, as_json=True, seed=SEED, system=system)
    spent = round(time.monotonic() - began, 3)
    document = read_json(context.places.run / command.RESULT)
    return {"tier": tier, "mode": mode, "exit_status": status, "seconds": spent, "document": document}


def settings(context: Context) -> dict[str, Any]:
    """Return the smoke test's settings for this machine: its size, or the counted GPUs if the size is unknown."""
    contact = context.facts()
    defaults: dict[str, Any] = {
        "fabric_wait_seconds": _FABRIC_SECONDS * context.pace,
        "infiniband_wait_seconds": _PORTS_SECONDS * context.pace,
    }
    configured = read_json(context.places.root / "etc/node-agent/gpu.json") if context.root.parts[1:] else {}
    if contact.get("size"):
        return {**defaults, "vm_size": contact["size"], **configured}
    count = len(contact.get("machine", {}).get("pci", ())) or len(gpus(context))
    return {**defaults, "allow_unknown_size": True, "count": min(max(count, 1), 16), **configured}


def gpus(context: Context) -> list[str]:
    """Return the UUIDs of all GPUs, as NVML reported them first. Raises RuntimeError if it reported none."""
    devices = context.result_of("readings").get("nvml", {}).get("gpus", [])
    if not devices:
        raise RuntimeError("NVML reported no GPU to test")
    return [gpu["uuid"] for gpu in devices]


def _load(context: Context) -> command.Load:
    def load(
        uuids: Sequence[str], tier: Tier, seed: int, deadline_seconds: float, on_tick: Callable[[], None]
    ) -> Sequence[Worker]:
        # A document about workers that were cut short is better than none.
        left = context.left()
        after = min(_AFTER_SECONDS, _AFTER_SHARE * left)
        return fleet.run(
            uuids,
            tier,
            seed,
            min(deadline_seconds, left - after),
            on_tick,
            argv=lambda gpu, tier, seed, others: worker_argv(context, gpu, seed, *peers(others), tier=tier),
            links_seconds=_LINKS_SECONDS * context.pace,
        )

    return load


def _nobody() -> Mapping[str, Any]:
    """Raise OSError: the platform was queried at the start."""
    raise OSError("the platform is not asked again")
