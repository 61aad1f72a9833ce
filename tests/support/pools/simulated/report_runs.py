"""Runs that are hard to report: hosts with hostile names, and 7,500 of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from image_builder.pool.plan.model import OK, Host, failed
from image_builder.pool.plan.plan import Plan, PlannedFrom, make_plan
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.progress import replay
from image_builder.pool.run.records import Began, Intent, Opened, Passed, Record, Result
from image_builder.pool.run.state import Progress
from tests.support.pools.simulated import rolls
from tests.support.pools.simulated.rollouts import START, Faults, make, make_hosts, simulate

# Each of them would take effect where it isn't escaped, or is escaped for the wrong context.
HOSTILE = (
    "<script>window.hacked=1</script>",
    "\"><img src=x onerror='window.hacked=2'>",
    "</script><script>window.hacked=3</script>",
    "</style></title></svg><b>bold",
    "host' onmouseover='window.hacked=4",
    "&amp;lt;&#60;",
    "{{ 7 * 7 }}{% raw %}",
    "-->\u202egpj.exe",
)


def _hostile_plan(names: tuple[str, ...] = HOSTILE) -> Plan:
    hosts: list[Host] = []
    for host, name in zip(make_hosts(len(names)), names, strict=True):
        place = {"scale_set": f"set {name}", "zone": f"zone {name}", "vm_size": f"size {name}"}
        hosts.append(host.model_copy(update={"name": name, "image": "i", **place}))
    policy = Policy(
        wave_budget="100%", budget="100%", same_least=100, max_unavailable="100%", waves=("100%",)
    )
    return make_plan(PlannedFrom(paths=("hosts.yml",), digest="d"), [], hosts, policy)


def hostile_run(names: tuple[str, ...] = HOSTILE) -> tuple[Progress, list[Record]]:
    """Return a run of hosts with such names, each of which repeats its name as it fails."""
    plan = _hostile_plan(names)
    fates: dict[str, Any] = {name: failed(f"phase {name}", 61, f"detail {name}") for name in names}
    progress, _, records = simulate(plan, Faults(fates=fates))
    return progress, records


def deadline_run() -> tuple[Progress, list[Record]]:
    """Return a roll of 60 busy hosts beyond its deadline: evictions, a disruption budget that holds, a cordon."""
    at = datetime.fromtimestamp(START + 6 * 3600.0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    plan = rolls.plan(60, deadline=at, max_unavailable="10%", max_wait_seconds=86_400.0)
    fates: dict[str, rolls.Fate] = {
        plan.hosts[7].name: "disruption budget",
        plan.hosts[8].name: "foreign cordon",
    }
    return rolls.roll(rolls.World(plan, fates, jobs=rolls.mixed_jobs(4, 864_000.0)))


def large_run(failing: int) -> tuple[Progress, list[Record]]:
    """Return a run of 7,500 hosts that were all told to join; every ``failing``-th failed with a long message."""
    plan = make(7500)
    records: list[Record] = [Opened(at=START, plan=plan.digest)]
    for number, wave in enumerate(plan.waves):
        at = START + 600 * number
        records += [Began(at=at, wave=number), Intent(at=at, step="bootstrap", hosts=wave.hosts)]
        for name in wave.hosts:
            bad = int(name[-6:]) % failing == 0
            outcome = failed("disk", 31, f"{name}: {'x' * 400}") if bad else OK
            records.append(
                Result(
                    at=at + 60,
                    host=name,
                    step="bootstrap",
                    attempt=1,
                    outcome=outcome,
                    joined="yes",
                    seconds=60.0,
                )
            )
        records.append(Passed(at=at + 60, wave=number, failed=0))
    return replay(plan, records), records
