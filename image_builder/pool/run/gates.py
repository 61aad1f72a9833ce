"""The gate of a run: whether the next hosts may be started, decided from a reading of the control plane.

A reading that could not be had is red: a control plane that doesn't answer needs no more nodes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from image_builder.pool.plan.model import Strict, at_least
from image_builder.pool.plan.policy import GateLimits

Verdict = Literal["go", "hold", "stop"]


class Reading(Strict):
    """What was seen of a control plane since the reading before.

    ``requests`` are all that its API servers answered, ``throttled`` those with 429, ``errors`` those with 5xx.
    ``csr_seconds`` is the age of the oldest certificate request of a joining node that pends, 0 without one.
    ``not_ready`` are nodes that registered more than five minutes ago and aren't Ready: those that just join are no
    alarm. ``unread`` says why there is no reading, ``unwatched`` that nobody was to look; the numbers mean nothing
    then.
    """

    requests: int = Field(default=0, ge=0)
    throttled: int = Field(default=0, ge=0)
    errors: int = Field(default=0, ge=0)
    csr_seconds: float = Field(default=0.0, ge=0)
    not_ready: int = Field(default=0, ge=0)
    unread: str = ""
    unwatched: bool = False


def judge(
    reading: Reading, limits: GateLimits, *, not_ready_before: int, hosts: int, away: int = 0
) -> tuple[Verdict, tuple[str, ...]]:
    """Return whether hosts may be started, and every reason against it.

    ``hold`` passes by itself, or becomes a stop by the policy's patience; ``stop`` doesn't: nodes that were Ready
    and are not any more are the harm that waves are there to bound. ``not_ready_before`` is what was so before
    the wave, ``hosts`` all hosts of the run, ``away`` those of them that a roll has taken out of work itself.
    """
    if reading.unwatched:
        return "go", ("the control plane is not watched: no kubeconfig was given",)
    if reading.unread:
        return "hold", (f"the control plane can't be read: {reading.unread}",)
    held: list[str] = []
    for count, limit, answer in (
        (reading.throttled, limits.throttled, "answered with 429"),
        (reading.errors, limits.errors, "answered with 5xx"),
    ):
        # Of few requests one is soon a percent, yet a share that is exceeded by one request is no storm.
        if count > max(1, limit * reading.requests):
            held.append(f"{count} of {reading.requests} requests {answer}, limit {limit:.1%}")
    if reading.csr_seconds > limits.csr_seconds:
        held.append(
            f"a certificate request has been pending for {reading.csr_seconds:.0f} s, limit {limits.csr_seconds:.0f} s"
        )
    fallen = reading.not_ready - not_ready_before - away
    if fallen > (allowed := at_least(limits.not_ready, hosts)):
        return "stop", (f"{fallen} more nodes are NotReady than before, limit {allowed}", *held)
    return ("hold" if held else "go"), tuple(held)
