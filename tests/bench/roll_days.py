"""A roll of 7,500 hosts with jobs that last days, in simulated time: only the driver, without servers.

    .venv/bin/python tests/bench/roll_days.py [--hosts 7500] [--smallest] [--json]

The jobs are those of tests/support/pools/simulated/days.py: the queue is never empty, and the end of a job isn't known
in advance.

    roll_days               days until every host has its image
    gpu_hours_idle_percent  host-hours without a job because of the roll, as a share of all, goal <= 1
    throttle_share          the busiest ten minutes of Azure's tightest bucket, as a share of its refill in that time,
                            goal <= 0.5; a scale set's first minute takes more, from what its bucket holds
    throttled               requests that Azure would have refused, goal 0

The requests for a host are those that the real client sends to the simulator for one; a list of one scale set's
instances counts once for all its hosts in progress.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.pool.plan.model import Host  # noqa: E402
from image_builder.pool.scale_set.records import open_journal  # noqa: E402
from image_builder.pool.scale_set.roll import Patience, driving, roll_instance  # noqa: E402
from image_builder.pool.show.report import counts  # noqa: E402
from tests.bench import report  # noqa: E402
from tests.support.arm.fleet import NEW  # noqa: E402
from tests.support.arm.limits import Limits  # noqa: E402
from tests.support.arm.model import Request  # noqa: E402
from tests.support.arm.rolling import Rolling  # noqa: E402
from tests.support.pools.simulated.days import Days  # noqa: E402
from tests.support.pools.simulated.rolls import plan, roll  # noqa: E402

GOALS = {"gpu_hours_idle_percent": ("<=", 1.0), "throttle_share": ("<=", 0.5), "throttled": ("<=", 0.0)}
_SPAN = 600.0
_LIST = "/virtualMachines"
# Time (seconds), method, path.
Sent = tuple[float, str, str]


def requests_of_hosts(folder: Path) -> tuple[list[Sent], list[Sent]]:
    """Return the requests that the real client sends for the first host of a scale set, and for another one."""
    rolling = Rolling(folder)
    sent: list[Sent] = []
    rolling.fleet.arm.faults.append(
        lambda request: sent.append((rolling.clock(), request.method, request.path))
    )
    samples: list[list[Sent]] = []
    with (
        open_journal(rolling.journal) as journal,
        driving(rolling.client, rolling.fleet.path, "run", journal) as drive,
    ):
        drive.set_image(rolling.client.scale_set(rolling.fleet.path), NEW)
        version = rolling.client.version(NEW)
        assert version is not None
        for number in ("1", "2"):
            began = sent[0][0] if number == "1" else rolling.clock()
            machine, node = rolling.fleet.machine(number), rolling.fleet.node(number)
            if roll_instance(drive, number, machine.vm_id, version, node).kind != "ok":
                raise SystemExit(f"the sample's host {number} did not get its image")
            samples.append([(at - began, method, path) for at, method, path in sent])
            sent.clear()
    first, other = (
        [(at, method, path.replace(rolling.fleet.path, "SET")) for at, method, path in sample]
        for sample in samples
    )
    return first, other


def busiest(reimaged: list[tuple[float, Host]], first: list[Sent], other: list[Sent]) -> dict[str, float]:
    """Return the busiest ten minutes of each Azure policy, as a share of its refill, and the number of refusals."""
    requests: list[Sent] = []
    driven: set[str] = set()
    listed: dict[str, float] = defaultdict(lambda: float("-inf"))
    for began, host in reimaged:
        path = f"/virtualMachineScaleSets/{host.scale_set}"
        sample = other if path in driven else first
        driven.add(path)
        requests += [(began + at, method, text.replace("SET", path)) for at, method, text in sample]
    limits = Limits()
    moment = [0.0]
    limits.clock = lambda: moment[0]
    for at, method, path in sorted(requests):
        if method == "GET" and path.endswith(_LIST):
            if at - listed[path] < Patience().look:
                continue
            listed[path] = at
        moment[0] = at
        limits.take(Request(method, path))
    shares: dict[str, float] = {}
    for (policy, _), bucket in limits.buckets.items():
        most = _most(bucket.taken, _SPAN) / (bucket.policy.refill * _SPAN / 60)
        shares[policy] = max(shares.get(policy, 0.0), most)
    return {name: round(share, 3) for name, share in shares.items()} | {"refused": limits.refused}


def _most(taken: list[float], span: float) -> int:
    """Return the largest number of these moments, given in order, within any ``span`` seconds."""
    first, most = 0, 0
    for last, at in enumerate(taken):
        while taken[first] <= at - span:
            first += 1
        most = max(most, last - first + 1)
    return most


def measure(hosts: int) -> dict[str, Any]:
    began = time.process_time()
    world = Days(plan(hosts))
    start = world.time
    progress, records = roll(world)
    cpu = time.process_time() - began
    totals = counts(progress.hosts.values())
    with tempfile.TemporaryDirectory(prefix="bench-roll-days-") as folder:
        shares = busiest(world.reimaged, *requests_of_hosts(Path(folder)))
    refused = shares.pop("refused")
    assert progress.finished and not world.lost
    last = progress.waves[-1]
    return {
        "hosts": hosts,
        "ok": totals["ok"],
        "skipped": totals["skipped"],
        "roll_days": round((world.time - start) / 86400, 2),
        "waves": len(progress.waves),
        "rest_began_hours": round(((last.began or start) - start) / 3600, 1),
        "rest_hosts": len(last.names("ended")),
        "most_unavailable": world.most_unavailable,
        "most_fenced": world.most_fenced,
        "gpu_hours_idle_percent": round(100 * world.idle_seconds / (hosts * (world.time - start)), 2),
        "throttle": shares,
        "throttle_share": max(shares.values()),
        "throttled": refused,
        "records": len(records),
        "driver_cpu_seconds": round(cpu),
    }


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--hosts", type=int, default=7500)
    options = report.parse(parser, hosts=200)
    figures = measure(options.hosts)
    return report.conclude(options, figures, GOALS)


if __name__ == "__main__":
    sys.exit(main())
