"""The waves of a rollout, as pure functions over hosts and a policy.

Canaries come first and cover every VM size x zone x image; waves of the policy's sizes follow. Hosts are ordered by
a hash of their names: each wave is a random sample of all scale sets, yet the same in every plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from pydantic import Field

from image_builder.pool.plan.model import Cell, Host, Strict, at_least, at_most, rank
from image_builder.pool.plan.policy import Policy

_CANARIES, _REST = "canaries", "rest"


class Wave(Strict):
    """Hosts that are brought up together, split into slices of one Ansible process each.

    ``budget`` is the number of failed hosts that the run tolerates, ``same`` the number of identical failures that
    stops it. ``verify`` are the hosts whose verification is part of the wave.
    """

    name: str
    slices: tuple[tuple[str, ...], ...] = Field(min_length=1)
    verify: tuple[str, ...]
    budget: int
    same: int
    soak_seconds: float
    cadence_seconds: float

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(name for part in self.slices for name in part)

    @property
    def is_canary(self) -> bool:
        """Return whether its hosts represent their cells."""
        return self.name.startswith(_CANARIES)

    @property
    def is_rest(self) -> bool:
        """Return whether its hosts were busy in their own waves, and each is taken once it is idle."""
        return self.name == _REST


def plan_waves(
    hosts: Collection[Host],
    policy: Policy,
    *,
    seed: str = "",
    covered: Collection[Cell] = (),
    waves_before: int = 0,
) -> tuple[Wave, ...]:
    """Return the waves of these hosts: each host is in exactly one of them.

    ``covered`` are the cells that had their canaries in the ``waves_before`` earlier waves of the same run. No wave has
    more hosts than may be unavailable at once. The hosts to verify are drawn by their names and ``seed``: the same ones
    for the same inventory, others for the next.
    """
    ordered = sorted(hosts, key=lambda host: rank(host.name))
    canaries = choose_canaries(ordered, policy.canaries, covered)
    chosen = {host.name for host in canaries}
    rest = [host for host in ordered if host.name not in chosen]
    most = at_least(policy.most_unavailable, len(hosts))
    waves: list[Wave] = []
    for names, is_canary in [
        *((part, True) for part in _chunks([h.name for h in canaries], most)),
        *((part, False) for part in _sized([h.name for h in rest], policy, len(hosts), most)),
    ]:
        number = waves_before + len(waves)
        sample = names if is_canary else _sample(names, policy, seed)
        waves.append(_wave(number, names, policy, sample, is_canary=is_canary))
    return tuple(waves)


def rest_wave(number: int, names: Sequence[str], policy: Policy, seed: str) -> Wave:
    """Return the last wave of a roll: hosts that were busy in their own waves."""
    wave = _wave(number, names, policy, _sample(names, policy, seed), is_canary=False)
    return wave.model_copy(update={"name": _REST})


def choose_canaries(ordered: Iterable[Host], each: int, covered: Collection[Cell] = ()) -> list[Host]:
    """Return the first ``each`` hosts of every VM size x zone x image that isn't ``covered`` yet."""
    by_cell: dict[Cell, list[Host]] = defaultdict(list)
    for host in ordered:
        if host.cell not in covered and len(by_cell[host.cell]) < each:
            by_cell[host.cell].append(host)
    return [host for cell in sorted(by_cell) for host in by_cell[cell]]


def _sized(names: Sequence[str], policy: Policy, total: int, most: int) -> list[Sequence[str]]:
    """Split hosts into waves of the policy's sizes, the last of which repeats."""
    parts: list[Sequence[str]] = []
    start = 0
    while start < len(names):
        share = policy.waves[min(len(parts), len(policy.waves) - 1)]
        size = min(at_least(share, total), most)
        parts.append(names[start : start + size])
        start += size
    return parts


def _chunks(names: Sequence[str], most: int) -> list[Sequence[str]]:
    return [names[n : n + most] for n in range(0, len(names), most)]


def _sample(names: Sequence[str], policy: Policy, seed: str) -> list[str]:
    """Draw the hosts to verify: not the first ones, which are all in one slice."""
    drawn = sorted(names, key=lambda name: rank(f"{seed}\n{name}"))
    return drawn[: policy.verified(len(names))]


def _wave(
    number: int, names: Sequence[str], policy: Policy, sample: Sequence[str], *, is_canary: bool
) -> Wave:
    size = len(names)
    # Slices differ by at most one host: a slice of three would also cost a whole Ansible process.
    count = -(-size // policy.slice_hosts)
    bounds = [size * n // count for n in range(count + 1)]
    return Wave(
        name=(_CANARIES if not number else f"{_CANARIES} {number}") if is_canary else f"wave {number}",
        slices=tuple(tuple(names[a:b]) for a, b in pairwise(bounds)),
        verify=tuple(sample),
        budget=at_most(policy.wave_budget, size),
        same=max(policy.same_least, at_least(policy.same_share, size)),
        soak_seconds=policy.soak_seconds[min(number, len(policy.soak_seconds) - 1)],
        cadence_seconds=policy.cadence_seconds,
    )


def join_delays(names: Iterable[str], rate: float) -> dict[str, float]:
    """Return how many seconds after a slice's start each of its hosts joins: ``rate`` hosts per second.

    Slots are assigned by rank, not drawn: if each host drew its own, some seconds would get too many.
    """
    return {name: place / rate for place, name in enumerate(sorted(names, key=rank))}
