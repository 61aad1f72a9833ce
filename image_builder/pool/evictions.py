"""What a roll does about hosts that don't become empty by themselves: the jobs that it evicts after a deadline, the
operator's confirmation that it may, and the hosts that it can never empty.
"""

from __future__ import annotations

from image_builder.drain.jobs import Job, evicted_jobs
from image_builder.drain.observe import Looker
from image_builder.drain.pods import Class
from image_builder.errors import UsageError
from image_builder.node.net.kube import Client
from image_builder.pool.plan.plan import Plan


def jobs(client: Client, plan: Plan, now: float) -> list[Job]:
    """Return the jobs on a roll's hosts that would be evicted if its deadline had passed; raises KubeError.

    ``now`` is in seconds since the epoch.
    """
    assert plan.policy.rolls is not None
    looker = Looker(client, plan.policy.rolls.drain, overrules=True)
    return evicted_jobs(looker.tenants_of(plan.host, now))


def never_empty(client: Client, plan: Plan, now: float) -> dict[str, str]:
    """Return the roll's hosts with a pod that never ends and that the policy doesn't evict, and one such pod of each.

    ``now`` is in seconds since the epoch. Raises KubeError.
    """
    assert plan.policy.rolls is not None
    drain, is_due = plan.policy.rolls.drain, bool(plan.deadline)
    evicts = is_due or drain.mode == "evict"
    looker = Looker(client, drain, overrules=is_due)
    stuck: dict[str, str] = {}
    for host, tenants in sorted(looker.tenants_of(plan.host, now).items()):
        for tenant in tenants:
            verdict = tenant.verdict.kind
            if tenant.pod.never_ends and (verdict is Class.WAIT or (verdict is Class.EVICT and not evicts)):
                owner = f" of {tenant.pod.owner}" if tenant.pod.owner else ""
                stuck.setdefault(host, f"{tenant.pod}{owner}: {tenant.verdict.reason}")
    return stuck


def require_confirmation(plan: Plan, confirmed: str) -> None:
    """Raise UsageError if a roll evicts jobs and ``confirmed`` doesn't name it, or names a roll without a deadline."""
    if plan.deadline and confirmed != plan.run:
        raise UsageError(
            f"after {plan.deadline} this roll evicts jobs whose owners didn't allow it; nothing was started",
            hint=f"to confirm: --evict {plan.run}",
        )
    if confirmed and not plan.deadline:
        raise UsageError(
            "--evict is for a roll with a deadline, and this plan has none",
            hint="image-builder pool plan --deadline TIME",
        )
