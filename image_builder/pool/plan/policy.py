"""What an operator decides of a rollout: sizes of waves, rates, budgets, deadlines, limits of the control plane."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from image_builder.pool.plan.model import Share, Step, Strict

# Ansible's cost for a host and task is flat up to here, and grows beyond: measured, see docs/explanation/waves.md.
MAX_SLICE = 500
# A worker whose patience is over asks what it started to end, and then kills what is left: in less than that.
WORKER_ENDS_SECONDS = 4.0

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class _Limits(Strict):
    # YAML has infinity, which no deadline of a process and no JSON can be.
    model_config = ConfigDict(allow_inf_nan=False)


class GateLimits(_Limits):
    """What the control plane may show while a wave runs and until its soak is over."""

    throttled: float = Field(default=0.01, ge=0, le=1, description="Share of requests answered with 429.")
    errors: float = Field(default=0.01, ge=0, le=1, description="Share of requests answered with 5xx.")
    csr_seconds: Positive = Field(
        default=60.0, description="Age of the oldest certificate request of a joining node that is pending."
    )
    not_ready: Share = Field(
        default="1%", description="Nodes NotReady beyond those before the wave; stops the run."
    )
    interval_seconds: Positive = Field(default=30.0, description="How often the control plane is asked.")
    patience_seconds: Seconds = Field(
        default=600.0, description="How long it may be red until the run stops."
    )


class Deadlines(_Limits):
    """Seconds for one step on one host; the join slot comes on top."""

    probe: Positive = Field(
        default=60.0, description="To be reached and asked; who was told has its time to join."
    )
    bootstrap: Positive = Field(default=900.0, description="From being told to join until it joined.")
    verify: Positive = Field(default=300.0, description="For the whole suite on one host.")

    def of(self, step: Step) -> float:
        return {"probe": self.probe, "bootstrap": self.bootstrap, "verify": self.verify}[step]


class Policy(_Limits):
    """All of it. A list that is shorter than the waves are many goes on with its last item."""

    mode: Literal["bootstrap", "verify", "check"] = Field(
        default="bootstrap",
        description="`verify` where the image does it all at first boot: nothing is pushed, and who is no member"
        " has failed. `check`: nobody need be one.",
    )
    canaries: int = Field(default=1, ge=1, description="Canaries of each VM size x zone x image.")
    waves: tuple[Share, ...] = Field(
        default=("1%", "5%", "600"), min_length=1, description="Sizes after the canaries."
    )
    slice_hosts: int = Field(
        default=MAX_SLICE, ge=1, le=MAX_SLICE, description="Hosts of one Ansible process."
    )
    workers: tuple[str, ...] = Field(
        default=(), description="Hosts that run slices, in turn: `ssh://USER@HOST?key=FILE&known_hosts=FILE`."
    )
    worker_runner: str = Field(default="ansible-runner", description="ansible-runner on the workers.")
    worker_silent_seconds: float = Field(
        default=20.0,
        ge=1,
        description="Without a word from here for so long a worker ends its slice; a little later it is given up.",
    )
    join_rate: Positive = Field(default=5.0, description="Hosts that join in a second, at most.")
    max_unavailable: Share = Field(
        default="10%", description="Hosts in work, failed or unreached at once, all pools."
    )
    wave_budget: Share = Field(default="2%", description="Failed hosts of a wave that don't stop the run.")
    budget: Share = Field(default="2%", description="Failed hosts of the run that don't stop it.")
    same_least: int = Field(default=3, ge=1, description="Identical failures that stop the run, at least,")
    same_share: Share = Field(default="1%", description="and as a share of the wave, and of the run.")
    soak_seconds: tuple[Seconds, ...] = Field(
        default=(900.0, 600.0, 600.0, 0.0),
        min_length=1,
        description="What a wave's end and the next one lie apart.",
    )
    cadence_seconds: Seconds = Field(default=240.0, description="What the beginnings of two waves lie apart.")
    deadlines: Deadlines = Deadlines()
    retries: int = Field(default=2, ge=0, description="Repetitions of a step on a host, where that is safe.")
    retry_seconds: Seconds = Field(
        default=10.0, description="Before the first repetition; doubled for each further one."
    )
    straggler_factor: float = Field(
        default=3.0, ge=1, description="x p95 of the wave: who is slower isn't waited for."
    )
    verify: Share = Field(default="100%", description="Hosts of a wave that are verified; canaries all are.")
    gate: GateLimits = GateLimits()

    @property
    def worker_gone_seconds(self) -> float:
        """Return how long after the last word to a worker a slice may still be at work there; 0 without workers."""
        return self.worker_silent_seconds + WORKER_ENDS_SECONDS if self.workers else 0.0
