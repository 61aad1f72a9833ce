"""The gate of a run: whether the next hosts may be started, decided from a reading of the control plane.

A failed reading is red: a control plane that doesn't answer must not get more nodes.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from image_builder.pool.plan.model import Strict, at_least
from image_builder.pool.plan.policy import GateLimits

Verdict = Literal["go", "hold", "stop"]


class Reading(Strict):
    """What was seen of a control plane since the previous reading.

    ``requests`` counts all that its API servers answered, ``throttled`` those with 429, ``errors`` those with 5xx.
    ``csr_seconds`` is the age of the oldest pending certificate request of a joining node, 0 if there is none.
    ``not_ready`` counts nodes that registered more than five minutes ago and aren't Ready: nodes that are just joining
    are no cause for alarm. ``unread`` says why there is no reading, ``unwatched`` that the control plane isn't watched;
    the numbers mean nothing then.
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

    ``hold`` passes by itself, or becomes a stop after the policy's patience; ``stop`` doesn't pass: nodes that are no
    longer Ready are the damage that waves exist to limit. ``not_ready_before`` is the number of NotReady nodes before
    the wave, ``hosts`` that of all hosts of the run, ``away`` that of those that a roll itself took out of service.
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
        # Out of few requests, a single one may exceed the limit, but isn't a storm.
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
