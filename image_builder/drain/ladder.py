"""The next step for each host of a drain: idle-only, fence, ask, evict. Pure, based on one look at all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from image_builder.drain.gangs import units
from image_builder.drain.pods import Class, Pod, Verdict
from image_builder.drain.policy import Policy

PATIENCE = "still busy at the timeout"

Verb = Literal["fence", "ask", "evict", "empty", "skip"]


@dataclass(frozen=True)
class Tenant:
    """A pod on a host, what it means for the drain, and its gang."""

    pod: Pod
    verdict: Verdict
    gang: str = ""
    # Why evicting it is no use: the API will never do it, or its controller puts it back on the same host.
    refusal: str = ""
    # The last answer to its eviction, such as the budget that doesn't allow it.
    blocked: str = ""
    is_asked: bool = False

    @property
    def is_evictable(self) -> bool:
        return self.verdict.kind is Class.EVICT and not self.pod.is_leaving


@dataclass(frozen=True)
class Host:
    """A host as it was last seen.

    Times are monotonic seconds: it was taken on at ``began``, has had our cordon since ``fenced`` and no tenants since
    ``idle_since``. ``obstacle`` is why it can't be drained, such as somebody else's cordon. ``tenants`` are
    the pods that keep it busy.
    """

    name: str
    began: float
    fenced: float | None = None
    idle_since: float | None = None
    obstacle: str = ""
    tenants: tuple[Tenant, ...] = ()

    @property
    def is_busy(self) -> bool:
        return bool(self.tenants)


@dataclass(frozen=True)
class Action:
    """What to do with a host; ``tenants`` are those to ask or evict, ``reason`` is why it is skipped."""

    verb: Verb
    host: str
    reason: str = ""
    tenants: tuple[Tenant, ...] = ()


def spread_of(hosts: Iterable[Host], elsewhere: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    """Return the hosts of each gang; ``elsewhere`` has their hosts outside the drain."""
    spread: dict[str, set[str]] = {}
    for host in hosts:
        for tenant in host.tenants:
            if tenant.gang:
                spread.setdefault(tenant.gang, set(elsewhere.get(tenant.gang, ()))).add(host.name)
    return {gang: frozenset(names) for gang, names in spread.items()}


def decide(
    hosts: Mapping[str, Host], elsewhere: Mapping[str, Iterable[str]], policy: Policy, now: float
) -> list[Action]:
    """Return what to do now; a host without an action is waited for. Gangs are fenced as a whole or not at all."""
    spread = spread_of(hosts.values(), elsewhere)
    actions = _skips(hosts, spread, policy, now)
    skipped = {action.host for action in actions}
    for host in hosts.values():
        if host.name not in skipped and host.fenced is not None:
            actions += _of_fenced(host, hosts, spread, policy, now)
    room = None if policy.max_fenced is None else policy.max_fenced - sum(map(_holds_up, hosts.values()))
    for unit in sorted(units(hosts, spread), key=lambda unit: _end(unit, hosts)):
        waiting = [hosts[name] for name in sorted(unit & hosts.keys()) if hosts[name].fenced is None]
        if not waiting or skipped & unit or not all(_may_fence(host, policy, now) for host in waiting):
            continue
        busy = sum(host.is_busy for host in waiting)
        if room is not None and busy > max(room, 0):
            continue
        room = None if room is None else room - busy
        actions += [Action("fence", host.name) for host in waiting]
    return actions


def _skips(
    hosts: Mapping[str, Host], spread: Mapping[str, frozenset[str]], policy: Policy, now: float
) -> list[Action]:
    """Return the hosts to give up on, and with them all hosts of their gangs."""
    reasons = {host.name: reason for host in hosts.values() if (reason := _obstacle(host, policy, now))}
    for gang, members in sorted(spread.items()):
        outside = sorted(members - hosts.keys())
        # An idle host is in no gang, and a fenced one waits for its own pods, wherever others have gone since.
        if outside and not policy.whole_gangs and policy.mode != "idle-only":
            for name in members & hosts.keys():
                if hosts[name].fenced is None:
                    reasons.setdefault(name, f"{gang} also runs on {', '.join(outside)}: drain them together")
    for unit in units(hosts, spread):
        culprits = sorted(unit & reasons.keys())
        for name in sorted(unit & hosts.keys() - reasons.keys()) if culprits else ():
            reasons[name] = f"it shares a gang with {culprits[0]}: {reasons[culprits[0]]}"
    return [Action("skip", name, reason) for name, reason in sorted(reasons.items())]


def _obstacle(host: Host, policy: Policy, now: float) -> str:
    if host.obstacle or not host.is_busy:
        return host.obstacle
    if host.fenced is None:
        patience = policy.mode == "idle-only" and now - host.began >= policy.max_wait_seconds
        return PATIENCE if patience else ""
    if policy.mode == "idle-only":
        return "it became busy again"
    for tenant in host.tenants:
        if tenant.refusal and policy.mode == "evict":
            return f"{tenant.pod}: {tenant.refusal}"
    return PATIENCE if now - host.fenced >= policy.max_wait_seconds else ""


def _holds_up(host: Host) -> bool:
    return host.fenced is not None and host.is_busy


def _end(unit: Iterable[str], hosts: Mapping[str, Host]) -> tuple[float, list[str]]:
    """Return a sort key: when the hosts' last job ends, infinity if one doesn't say. Idle hosts come first."""
    tenants = [tenant for name in unit if name in hosts for tenant in hosts[name].tenants]
    ends = [float("inf") if tenant.pod.deadline is None else tenant.pod.deadline for tenant in tenants]
    return max(ends, default=0.0), sorted(unit)


def _may_fence(host: Host, policy: Policy, now: float) -> bool:
    if policy.mode != "idle-only":
        return True
    return host.idle_since is not None and now - host.idle_since >= policy.settle_seconds


def _of_fenced(
    host: Host,
    hosts: Mapping[str, Host],
    spread: Mapping[str, frozenset[str]],
    policy: Policy,
    now: float,
) -> list[Action]:
    """Return what to do with a host that has our cordon."""
    assert host.fenced is not None
    if not host.is_busy:
        settling = max(host.fenced, host.fenced if host.idle_since is None else host.idle_since)
        return [Action("empty", host.name)] if now - settling >= policy.settle_seconds else []
    actions: list[Action] = []
    if policy.mode == "ask" or (policy.mode == "evict" and policy.checkpoint_seconds):
        unasked = tuple(t for t in host.tenants if not t.is_asked and not t.pod.is_leaving)
        actions += [Action("ask", host.name, tenants=unasked)] if unasked else []
    if policy.mode == "evict" and now - host.fenced >= policy.checkpoint_seconds:
        bound = _bound_gangs(hosts, spread)
        evicted = tuple(t for t in host.tenants if t.is_evictable and t.gang not in bound)
        actions += [Action("evict", host.name, tenants=evicted)] if evicted else []
    return actions


def _bound_gangs(hosts: Mapping[str, Host], spread: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the gangs of which no pod may be evicted: one of them may not, or is on a host without our cordon."""
    bound = {
        gang
        for gang, members in spread.items()
        if any(name not in hosts or hosts[name].fenced is None for name in members)
    }
    bound |= {t.gang for h in hosts.values() for t in h.tenants if t.gang and t.verdict.kind is Class.WAIT}
    return bound
