"""The plan of a rollback: hosts that a roll gave a new image, and the version that their scale sets named before it.

It is a roll like any other, except for three things: all models are changed first, the roll's cordons are taken over,
and a failure isn't rolled back in turn. Azure, not the journal, says which hosts have the new image.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from image_builder.errors import DefinitionError, ImageBuilderError, Problem, UsageError
from image_builder.pool.plan.inventory import Fleet
from image_builder.pool.plan.model import Host, Target
from image_builder.pool.plan.plan import Plan, make_plan
from image_builder.pool.plan.waves import plan_waves
from image_builder.pool.run.state import HostStatus, Progress
from image_builder.pool.scale_set.client import Client, claim_of
from image_builder.pool.scale_set.model import is_same_id
from image_builder.pool.scale_set.target import read_target
from image_builder.system.identity import name_of
from image_builder.text import short_list


class Rollback(NamedTuple):
    """A plan, and the reasons why hosts that the roll touched aren't in it."""

    plan: Plan
    omitted: dict[str, str]


def plan_rollback(
    progress: Progress, fleet: Fleet, client: Client, *, only_failed: bool, to: str = ""
) -> Rollback:
    """Return the plan of a roll's rollback, to the version ``to`` if its scale sets had several.

    ``fleet`` is the current inventory. Raises UsageError if no rollback is possible or no host needs one,
    ImageBuilderError if a driver that was killed still holds scale sets, DefinitionError with everything that prevents
    it, FetchError.
    """
    before = progress.plan
    if before.target is None:
        raise UsageError("this plan isn't a roll: no host got another image")
    if before.target.undoes:
        raise UsageError("this plan is a rollback itself", hint="image-builder pool plan --to VERSION")
    target = before.target
    touched = [s for s in progress.hosts.values() if _is_touched(s, only_failed=only_failed)]
    hosts, omitted = _present(touched, fleet.hosts, client, target.version)
    version, named_it = _way_back(target, hosts, to)
    others = [host for host in hosts if not is_same_id(target.before[host.scale_set_id], version)]
    omitted |= {host.name: f"its scale set named {target.before[host.scale_set_id]}" for host in others}
    hosts = [host for host in hosts if host not in others]
    sets = {path: client.scale_set(path) for path in target.before}
    if held := sorted(
        path for path, scale_set in sets.items() if name_of(claim_of(scale_set)[0]) == before.run
    ):
        raise ImageBuilderError(
            f"the driver of this roll was killed, and holds {short_list(held)}",
            hint=f"image-builder pool abort --run {before.run} --to {target.version} releases them",
        )
    models = [path for path in named_it if is_same_id(sets[path].image, target.version)]
    is_forced = before.policy.rolls is not None and before.policy.rolls.force_ephemeral
    goal = read_target(client, hosts, version, more=models, force_ephemeral=is_forced)
    broken = sorted(s.host.name for s in touched if s.outcome and s.outcome.is_failure)
    goal = goal.model_copy(
        update={"undoes": before.run, "broken": tuple(name for name in broken if name not in omitted)}
    )
    return Rollback(_plan(before, fleet, hosts, goal), omitted)


def _is_touched(status: HostStatus, *, only_failed: bool) -> bool:
    """Return whether a host was given the new image and has not been restored since."""
    if status.state == "gone" or not status.touched or status.restored:
        return False
    return not only_failed or (status.outcome is not None and status.outcome.is_failure)


def _present(
    touched: Iterable[HostStatus], current: Iterable[Host], client: Client, version: str
) -> tuple[list[Host], dict[str, str]]:
    """Return the hosts that Azure has on a version or in transition, or that failed, and why others are left out."""
    inventory = {host.name: host for host in current}
    sets: dict[str, dict[str, str]] = {}
    hosts, omitted = list[Host](), dict[str, str]()
    for status in touched:
        path = status.host.scale_set_id
        if path not in sets:
            running = (i for i in client.instances(path) if i.runs(version) or not i.is_at_rest)
            sets[path] = {instance.id: instance.vm_id for instance in running}
        host = inventory.get(status.host.name)
        if host is None or host.vm_id != status.host.vm_id:
            omitted[status.host.name] = "the inventory no longer has this machine"
        elif sets[path].get(host.instance) == host.vm_id.lower() or _failed(status):
            # Resource Manager ignores the case of ids: the plan's spelling counts.
            hosts.append(host.model_copy(update={"scale_set_id": path}))
        else:
            omitted[host.name] = "it has another version"
    return hosts, omitted


def _failed(status: HostStatus) -> bool:
    # A failed host is cordoned, whatever it runs.
    return status.outcome is not None and status.outcome.is_failure


def _way_back(target: Target, hosts: list[Host], to: str) -> tuple[str, list[str]]:
    """Return the version that scale sets named before a roll, and the scale sets that named it."""
    if not hosts:
        raise UsageError("no host needs a rollback", hint="image-builder pool status PLAN")
    before = {path: target.before.get(path, "") for path in {host.scale_set_id for host in hosts}}
    unknown = (path for path, version in before.items() if not version or is_same_id(version, target.version))
    reason = f"didn't name another version than {target.version} before: what its hosts ran isn't known"
    if problems := [Problem(path, "plan", reason) for path in sorted(unknown)]:
        raise DefinitionError(problems, hint="image-builder pool plan --to VERSION")
    versions = {version.lower(): version for version in before.values() if not to or is_same_id(version, to)}
    if len(versions) != 1:
        had = ", ".join(sorted(set(before.values())))
        raise UsageError(f"the scale sets named {had} before", hint="choose one for this plan: --to VERSION")
    (version,) = versions.values()
    return version, [path for path, named in target.before.items() if is_same_id(named, version)]


def _plan(before: Plan, fleet: Fleet, hosts: list[Host], target: Target) -> Plan:
    """Return a plan with the roll's own limits: as many hosts may be unavailable, or fail, as in the roll."""
    rolls = before.policy.rolls
    assert rolls is not None
    # A rollback doesn't inherit the deadline: an operator who wants one gives it again.
    rolls = rolls.model_copy(
        update={"restore": "never", "max_unavailable": str(before.max_unavailable), "deadline": ""}
    )
    policy = before.policy.model_copy(update={"roll": rolls, "budget": str(before.budget)})
    # This version ran on these hosts before: no canary has to prove it.
    cells = {host.cell for host in hosts}
    waves = plan_waves(hosts, policy, seed=fleet.inventory.digest, covered=cells, waves_before=1)
    return make_plan(fleet.inventory, fleet.pools, hosts, policy, waves, target)
