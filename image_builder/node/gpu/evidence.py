"""The rules' evidence: expectations, and readings before, under and after the load; and helpers that build checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from image_builder.node.finding import Action
from image_builder.node.gpu.model import (
    DETAIL_CHARACTERS,
    Check,
    Gpu,
    Measurement,
    Sample,
    Seen,
    Tier,
    Worker,
)
from image_builder.node.gpu.settings import Settings
from image_builder.node.gpu.sizes import GpuModel, Size
from image_builder.node.gpu.xids import Catalogue

# The check doesn't apply to this node, and counts as made. A check skipped for any other reason was not made.
NOT_APPLICABLE = "not-applicable"
# Nothing was put under load, for a reason that another check reports.
NOT_RUN = "not-run"


@dataclass(frozen=True)
class Expected:
    """The expectations for this node. ``size`` and ``gpu`` are None for a size that the table doesn't have.

    ``count`` is None if unknown. ``overridden`` names the floors that the pool overrides. ``calibrated``: the
    test was tried on healthy machines like this one; ``stale``: it was, but with another driver or program.
    ``observes``: failures under load condemn no machine.
    """

    settings: Settings
    table_version: str = ""
    size: Size | None = None
    gpu: GpuModel | None = None
    count: int | None = None
    overridden: tuple[str, ...] = ()
    calibrated: bool = False
    stale: bool = False
    observes: bool = True


@dataclass(frozen=True)
class Evidence:
    """Everything that was observed. ``after`` is None if nothing was put under load; ``idle_why`` says why.

    ``began_us`` is when the load began, by CLOCK_MONOTONIC. ``idle_by_policy``: the pool's policy rules out a load.
    """

    tier: Tier
    expected: Expected
    catalogue: Catalogue
    before: Seen
    after: Seen | None = None
    samples: tuple[Sample, ...] = ()
    workers: tuple[Worker, ...] = ()
    began_us: int | None = None
    idle_why: str = ""
    idle_by_policy: bool = False

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.before.nvml.gpus

    @property
    def latest(self) -> Seen:
        return self.after or self.before

    def later(self, uuid: str) -> Gpu | None:
        """Return a GPU's readings after the load; None if there was no load, or the GPU is gone."""
        gpus = self.after.nvml.gpus if self.after else ()
        return next((gpu for gpu in gpus if gpu.uuid == uuid), None)

    def worker(self, uuid: str) -> Worker | None:
        return next((worker for worker in self.workers if worker.gpu == uuid), None)

    def measurements(self, id: str, uuid: str) -> list[Measurement]:
        worker = self.worker(uuid)
        return [measurement for measurement in worker.measurements if measurement.id == id] if worker else []

    @property
    def load_seconds(self) -> float:
        """Return how long the load took, judging by the last sample; 0 without samples."""
        return max((sample.seconds for sample in self.samples), default=0.0)

    def samples_of(self, uuid: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.gpu == uuid]


def good(gpu: str = "", detail: str = "", **more: Any) -> Check:
    """Return a check that passed; the rule's id is set later. ``more`` are fields of Check."""
    return Check("", gpu, "pass", detail=detail[:DETAIL_CHARACTERS], **more)


def bad(action: Action, code: str, detail: str, gpu: str = "", **more: Any) -> Check:
    """Return a check that failed, with the action to take."""
    return Check("", gpu, "fail", action=action, code=code, detail=detail[:DETAIL_CHARACTERS], **more)


def doubtful(code: str, detail: str, gpu: str = "", **more: Any) -> Check:
    """Return a check that warns."""
    return Check("", gpu, "warn", code=code, detail=detail[:DETAIL_CHARACTERS], **more)


def absent(detail: str, gpu: str = "") -> Check:
    """Return a check that doesn't apply to this node."""
    return Check("", gpu, "skip", code=NOT_APPLICABLE, detail=detail[:DETAIL_CHARACTERS])


def not_made(code: str, detail: str, gpu: str = "") -> Check:
    """Return a check that should have been made but couldn't be, though nothing failed."""
    return Check("", gpu, "skip", code=code, detail=detail[:DETAIL_CHARACTERS])


def broken(code: str, detail: str, gpu: str = "", **more: Any) -> Check:
    """Return a check that couldn't be made because of an error."""
    return Check("", gpu, "error", code=code, detail=detail[:DETAIL_CHARACTERS], **more)


def compared(
    measured: float | str | None, op: str, threshold: float | str | None, unit: str = ""
) -> dict[str, Any]:
    """Return fields of Check: the measured value, and the threshold that it is compared with."""
    return {"measured": measured, "threshold": threshold, "op": op, "unit": unit}


def not_run(evidence: Evidence, gpu: Gpu, why: str = "nothing was put under load") -> Check:
    """Return the check of a GPU that was not put under load; ``why`` is the reason if the evidence has none."""
    return not_made(NOT_RUN, evidence.idle_why or why, gpu.uuid)


def unanswered(gpu: Gpu, *names: str) -> Check | None:
    """Return the check that can't be made because one of these readings is missing; None if the GPU has them all."""
    for name in names:
        if getattr(gpu, name) is None:
            reason = gpu.missing.get(name, "not recorded")
            if reason.startswith("error"):
                return broken("nvml.error", f"{name}: {reason}", gpu.uuid)
            return not_made("not-supported", f"{name}: {reason}", gpu.uuid)
    return None


def without_gpus(evidence: Evidence) -> Iterator[Check]:
    """Yield a check that says why a rule has no GPU to judge; nothing if there is one."""
    nvml = evidence.before.nvml
    if nvml.error:
        yield broken("nvml.unavailable", nvml.error)
    elif not nvml.gpus:
        yield broken("nvml.unavailable", "NVML opens no GPU")
