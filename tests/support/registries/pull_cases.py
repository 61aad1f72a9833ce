"""Shared by the tests of failing pulls: sizes, limits, and a way to place a fault on one layer of one image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull.model import Limits
from image_builder.errors import PullError
from tests.support.registries.plan import Fault
from tests.support.registries.pulls import MB

SIZE = 6 * MB
AFTER = 2_500_000
# Docker waits 5 s before it resumes a broken download. Where this ends an attempt, the test fails.
PATIENT = Limits(progress_seconds=120.0)
# For attempts after which one must succeed, on a busy machine too; and for those that all end this way.
HASTY, HASTIER = Limits(progress_seconds=4.0), Limits(progress_seconds=1.0)
# Twice what `slow` gets. containerd reports only whole MiB, of which one arrives in each `rate_seconds`.
PACED = Limits(progress_seconds=120.0, min_rate=900_000, rate_seconds=3.0)
# A tenth of what `drip` gets, which a busy machine doesn't fall below.
STEADY = Limits(progress_seconds=120.0, min_rate=200_000, rate_seconds=2.0)
ATTEMPTS = 3
REFUSED, EXPIRED, PRIVATE = "refused.lab.internal", "expired.lab.internal", "private.lab.internal"


def layer_fault(kind: Any, **more: Any) -> Fault:
    return Fault(kind, path="/blobs/{layer}", **{"after": AFTER, **more})


def unknown(image: LockedImage) -> LockedImage:
    digest = f"sha256:{'0' * 64}"
    return image.model_copy(update={"digest": digest, "manifest": digest})


def large_layer(image: LockedImage) -> str:
    return max(image.layers, key=lambda layer: layer.size).digest


def placed(fault: Fault, name: str, image: LockedImage) -> Fault:
    return replace(fault, path=f"^/v2/{name}{fault.path.replace('{layer}', large_layer(image))}")


def partial(state: Path) -> list[str]:
    """Return the partial blobs in a data root of either engine."""
    ingest = state / "io.containerd.content.v1.content/ingest"
    return [p.name for p in (*state.rglob("GetImageBlob*"), *ingest.glob("*"))]


def told(work: Callable[[], object]) -> list[str]:
    """Return the message and the hint of what ``work`` raises."""
    try:
        work()
    except PullError as error:
        return [error.message, error.hint or ""]
    return ["nothing was raised", ""]
