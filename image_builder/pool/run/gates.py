"""The gate of a run: whether the next hosts may be started, decided from a reading of the control plane.

A failed reading is red: a control plane that doesn't answer must not get more nodes. Only hosts of the run that were
fine and fell stop it: everything else may have other causes, and holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from image_builder.pool.plan.model import Strict, at_least
from image_builder.pool.plan.policy import GateLimits

Verdict = Literal["go", "hold", "stop"]
# What a node is to a run: one of its hosts that is fine, one that it is changing, or none of the two.
Role = Literal["fine", "changing", "other"]
_NAMED = 5


class Reading(Strict):
    """What was seen of a control plane since the previous reading.

    ``requests`` counts all that its API servers answered, ``throttled`` those with 429, ``errors`` those with 5xx.
    ``csr_seconds`` is the age of the oldest pending certificate request of a joining node, 0 if there is none; requests
    that are stuck don't count. ``not_ready`` counts the run's hosts that were fine and aren't Ready, ``elsewhere`` the
    other nodes that aren't, of ``nodes`` in all. Nodes that registered less than five minutes ago are just joining, and
    no cause for alarm. ``unread`` says why there is no reading, ``unwatched`` that the control plane isn't watched; the
    numbers mean nothing then.

    ``fallen`` are the names of all nodes that aren't Ready, ``pending`` the ages of all pending requests: what the
    numbers are counted from, not part of a journal.
    """

    requests: int = Field(default=0, ge=0)
    throttled: int = Field(default=0, ge=0)
    errors: int = Field(default=0, ge=0)
    csr_seconds: float = Field(default=0.0, ge=0)
    not_ready: int = Field(default=0, ge=0)
    elsewhere: int = Field(default=0, ge=0)
    nodes: int = Field(default=0, ge=0)
    fallen: tuple[str, ...] = Field(default=(), exclude=True)
    pending: tuple[float, ...] = Field(default=(), exclude=True)
    unread: str = ""
    unwatched: bool = False


def count(reading: Reading, limits: GateLimits, role: Callable[[str], Role]) -> Reading:
    """Return a reading with its numbers, for a run to which ``role`` says what a node is.

    A request that has been pending for longer than the gate's patience is stuck: it says nothing about new ones.
    """
    roles = [role(name) for name in reading.fallen]
    oldest = limits.csr_seconds + limits.patience_seconds
    return reading.model_copy(
        update={
            "not_ready": roles.count("fine"),
            "elsewhere": roles.count("other"),
            "csr_seconds": max([0.0, *(age for age in reading.pending if age <= oldest)]),
            "fallen": tuple(n for n, is_of in zip(reading.fallen, roles, strict=True) if is_of == "fine"),
        }
    )


def judge(
    reading: Reading, limits: GateLimits, *, hosts: int, elsewhere_before: int
) -> tuple[Verdict, tuple[str, ...]]:
    """Return whether hosts may be started, and every reason against it, for a counted reading.

    ``hold`` passes by itself; ``stop`` doesn't: hosts that were fine and no longer are Ready are the damage that waves
    exist to limit. ``hosts`` is the number of all hosts of the run, ``elsewhere_before`` that of other NotReady nodes
    within the policy's patience.
    """
    if reading.unwatched:
        return "go", ("the control plane is not watched: no kubeconfig was given",)
    if reading.unread:
        return "hold", (f"the control plane can't be read: {reading.unread}",)
    held: list[str] = []
    for number, limit, answer in (
        (reading.throttled, limits.throttled, "answered with 429"),
        (reading.errors, limits.errors, "answered with 5xx"),
    ):
        # Out of few requests, a single one may exceed the limit, but isn't a storm.
        if number > max(1, limit * reading.requests):
            held.append(f"{number} of {reading.requests} requests {answer}, limit {limit:.1%}")
    if reading.csr_seconds > limits.csr_seconds:
        held.append(
            f"a certificate request has been pending for {reading.csr_seconds:.0f} s, limit {limits.csr_seconds:.0f} s"
        )
    allowed = at_least(limits.not_ready, max(1, reading.nodes))
    if (more := reading.elsewhere - elsewhere_before) > allowed:
        held.append(
            f"{more} nodes that this run didn't change became NotReady within {limits.patience_seconds:.0f} s,"
            f" limit {allowed}"
        )
    if reading.not_ready > (allowed := at_least(limits.not_ready, hosts)):
        names = ", ".join(sorted(reading.fallen)[:_NAMED])
        fell = f"{reading.not_ready} hosts of this run that were fine are NotReady, limit {allowed}: {names}"
        return "stop", (fell, *held)
    return ("hold" if held else "go"), tuple(held)
