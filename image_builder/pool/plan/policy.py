"""The policy of a rollout: sizes of waves, rates, budgets, deadlines, limits of the control plane."""

from __future__ import annotations

import math
import operator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from image_builder.drain.pods import moment
from image_builder.drain.policy import Policy as DrainPolicy
from image_builder.pool.plan.model import Mode, Share, Step, Strict, at_least, at_most

# Ansible's cost per host and task is constant up to here, and grows beyond: measured, see docs/explanation/waves.md.
MAX_SLICE = 500
# A drain that has run out of time frees its hosts within this, unless the API server is down.
DRAIN_ENDS_SECONDS = 600.0
# A wave doesn't wait for jobs: hosts that are still working go to a last one.
_WAVE_SECONDS = 600.0
# A worker that has run out of patience terminates what it started, and then kills what is left, within this.
WORKER_ENDS_SECONDS = 4.0

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class _Limits(Strict):
    # YAML has infinity, which neither a process's deadline nor JSON can represent.
    model_config = ConfigDict(allow_inf_nan=False)


class GateLimits(_Limits):
    """Limits of the control plane while a wave runs and until its soak is over."""

    throttled: float = Field(default=0.01, ge=0, le=1, description="Share of requests answered with 429.")
    errors: float = Field(default=0.01, ge=0, le=1, description="Share of requests answered with 5xx.")
    csr_seconds: Positive = Field(
        default=60.0, description="Age of the oldest pending certificate request of a joining node."
    )
    not_ready: Share = Field(
        default="1%",
        description="Hosts that were fine in this run and are NotReady now: more stop it. Of all other nodes, as many"
        " may become NotReady within `patience_seconds`: more hold it.",
    )
    interval_seconds: Positive = Field(default=30.0, description="How often the control plane is read.")
    patience_seconds: Seconds = Field(
        default=600.0,
        description="How long the gate may stay red before the run stops. A roll waits instead, and frees the hosts"
        " that it has fenced by then. Nodes that fell and requests that are pending for longer don't count.",
    )


class Deadlines(_Limits):
    """Seconds for one step on one host, not counting the join slot."""

    probe: Positive = Field(
        default=60.0,
        description="Time to connect and probe. Hosts that are already joining get the join deadline instead.",
    )
    bootstrap: Positive = Field(
        default=900.0, description="From the order to join until the host has joined."
    )
    verify: Positive = Field(default=300.0, description="The whole suite on one host.")


class WaveDrain(DrainPolicy):
    """The drain of a host in its wave, which doesn't wait for jobs."""

    max_wait_seconds: Positive = Field(
        default=_WAVE_SECONDS, description=DrainPolicy.model_fields["max_wait_seconds"].description
    )


class Roll(_Limits):
    """Settings that only a roll needs: a new image on working nodes."""

    max_unavailable: Share = Field(
        default="2%",
        description="For rolls, replaces `max_unavailable`: a working fleet can spare fewer hosts.",
    )
    drain: WaveDrain = Field(
        default=WaveDrain(),
        description="The drain of a host in its wave. Hosts busy for longer are rolled in the wave `rest`.",
    )
    max_wait_seconds: Positive = Field(
        default=432_000.0,
        description="How long a host of the wave `rest` may take to become idle; after that it is skipped.",
    )
    deadline: str = Field(
        default="",
        exclude_if=operator.not_,
        description="For an emergency: after this time, such as `2026-11-27T08:00:00Z`, busy hosts are drained by"
        " evictions that the pods' owners did not allow. `pool run` lists their jobs, and requires `--evict`.",
    )
    ask_nodes: bool = Field(
        default=True,
        exclude_if=bool,
        description="Leave a host alone if its node reports that it is busy (`busy` of its health endpoint): leases,"
        " and programs on its GPUs that no pod shows.",
    )
    force_ephemeral: bool = Field(
        default=False,
        exclude_if=operator.not_,
        description="Roll scale sets with ephemeral OS disks too: their disks are replaced by force. Otherwise they are"
        " refused, since their reimage brings the old version back.",
    )
    max_fenced: Share = Field(
        default="50%",
        description="Maximum hosts of the wave `rest` that are cordoned while they still work, so that nothing starts"
        " there when that ends.",
    )
    skip_budget: Share = Field(default="2%", description="Skipped hosts a roll tolerates.")
    reimage_seconds: Positive = Field(
        default=2700.0, description="From the request for a new image until the node runs it."
    )
    free_seconds: Positive = Field(default=120.0, description="Time to let pods onto a host again.")
    restore: Literal["failed", "never"] = Field(
        default="failed", description="Which hosts get the previous image back when the run stops by itself."
    )

    @field_validator("deadline")
    @classmethod
    def _has_zone(cls, text: str) -> str:
        if text and moment(text) is None:
            raise ValueError("must be a time with its zone, such as 2026-11-27T08:00:00Z")
        return text

    @property
    def deadline_at(self) -> float:
        """Return the deadline in seconds since the epoch; infinity if there is none."""
        at = moment(self.deadline)
        return math.inf if at is None else at


def _is_none(value: object) -> bool:
    return value is None


class Sample(_Limits):
    """The share of a wave after the canaries that is verified, and the minimum number of its hosts."""

    share: Share = Field(default="10%", description="Sample of a wave: this share of its hosts,")
    least: int = Field(default=20, ge=0, description="and at least this many of them.")


class Policy(_Limits):
    """The whole policy. If a list is shorter than the number of waves, its last item repeats."""

    mode: Mode = Field(
        default="bootstrap",
        description="`verify`: the image does everything at first boot, so nothing is pushed, and a host that isn't a"
        " member has failed. `check`: hosts need not be members. `roll`: running nodes get another image.",
    )
    canaries: int = Field(default=1, ge=1, description="Canaries for each VM size x zone x image.")
    waves: tuple[Share, ...] = Field(
        default=("1%", "5%", "600"),
        min_length=1,
        description="Sizes of the waves after the canaries.",
    )
    slice_hosts: int = Field(default=MAX_SLICE, ge=1, le=MAX_SLICE, description="Hosts per Ansible process.")
    workers: tuple[str, ...] = Field(
        default=(), description="Hosts that run slices, in turn: `ssh://USER@HOST?key=FILE&known_hosts=FILE`."
    )
    worker_runner: str = Field(
        default="ansible-runner", description="Name or path of ansible-runner on the workers."
    )
    worker_silent_seconds: float = Field(
        default=20.0,
        ge=1,
        description="A worker that hears nothing from here for this long ends its slice and is then abandoned.",
    )
    join_rate: Positive = Field(default=5.0, description="Maximum hosts that join per second.")
    max_unavailable: Share = Field(
        default="10%", description="Maximum hosts in progress, failed or unreachable at once, over all pools."
    )
    wave_budget: Share = Field(default="2%", description="Failed hosts of a wave that the run tolerates.")
    budget: Share = Field(default="2%", description="Failed hosts of all waves that the run tolerates.")
    same_least: int = Field(
        default=3, ge=1, description="Identical failures that stop the run: at least this many,"
    )
    same_share: Share = Field(default="1%", description="and as a share of the wave, and of the run.")
    soak_seconds: tuple[Seconds, ...] = Field(
        default=(900.0, 600.0, 600.0, 0.0),
        min_length=1,
        description="Pause between the end of a wave and the start of the next.",
    )
    cadence_seconds: Seconds = Field(
        default=240.0, description="Minimum time between the starts of two waves."
    )
    deadlines: Deadlines = Deadlines()
    retries: int = Field(default=2, ge=0, description="Retries of a step on a host, where that is safe.")
    retry_seconds: Seconds = Field(
        default=10.0, description="Pause before the first retry; doubled for each further one."
    )
    straggler_factor: float = Field(
        default=3.0, ge=1, description="The wave doesn't wait for a host slower than this many times its p95."
    )
    verify: Share | None = Field(
        default=None,
        description="Hosts of a wave to verify; canaries are always verified. By default a sample of those that are"
        " told to join, and every host that was already a member; in the other modes all.",
    )
    sample: Sample = Sample()
    gate: GateLimits = GateLimits()
    roll: Roll | None = Field(default=None, exclude_if=_is_none, description="Only with mode `roll`.")

    @model_validator(mode="after")
    def _only_rolls(self) -> Policy:
        if self.roll and self.mode != "roll":
            raise ValueError("`roll` is only for mode `roll`")
        return self

    @property
    def rolls(self) -> Roll | None:
        """Return the settings of a roll; None in any other mode."""
        return (self.roll or Roll()) if self.mode == "roll" else None

    @property
    def most_unavailable(self) -> Share:
        """Return how many hosts may be unavailable at once."""
        return self.rolls.max_unavailable if self.rolls else self.max_unavailable

    def deadline(self, step: Step) -> float:
        """Return the seconds that a step on one host may take."""
        roll = self.rolls or Roll()
        return {
            "probe": self.deadlines.probe,
            # The drain ends by itself before that, and reports what it waited for.
            "drain": roll.drain.max_wait_seconds + roll.drain.settle_seconds + DRAIN_ENDS_SECONDS,
            "await": roll.max_wait_seconds + DRAIN_ENDS_SECONDS,
            "bootstrap": self.deadlines.bootstrap,
            "reimage": roll.reimage_seconds,
            "verify": self.deadlines.verify,
            "free": roll.free_seconds,
            "restore": roll.reimage_seconds,
        }[step]

    @property
    def changing_seconds(self) -> float:
        """Return how long the run's change to a host may take: joining, or a new image."""
        return self.deadline("reimage" if self.mode == "roll" else "bootstrap")

    def verified(self, hosts: int) -> int:
        """Return how many hosts of a wave without canaries are verified."""
        if self.verify is not None:
            return at_most(self.verify, hosts)
        if self.mode != "bootstrap":
            return hosts
        return min(hosts, max(self.sample.least, at_least(self.sample.share, hosts)))

    @property
    def worker_gone_seconds(self) -> float:
        """Return how long after the last message to a worker a slice may still run there; 0 without workers."""
        return self.worker_silent_seconds + WORKER_ENDS_SECONDS if self.workers else 0.0
