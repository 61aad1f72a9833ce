"""The cost of a roll of a thousand nodes for its driver, the API server and Azure.

    .venv/bin/python tests/bench/roll.py [--nodes 1000] [--sets 12] [--speed 60] [--away 10%]
        [--only roll|back] [--json]

The API server, scheduler and controllers are real; kubelets and Azure are simulated. Azure's delays, and all pauses and
patience of the driver, are a sixtieth of those in a data center, so that each node is polled as often as there.
The driver has a process of its own, and only that is measured. Each query to a node costs it a request to the
simulator instead of an SSH login (tests/bench/pools.py measures those). All nodes are idle. Needs root, and
IMAGE_BUILDER_PROGRAMS for the current Kubernetes.

    jobs_lost            pods that ran on a node when its disk was replaced, goal 0
    driver_cpu_seconds   goal <= 60
    driver_peak_mib      its largest resident size, goal <= 300
    requests_a_node      the driver's requests to Kubernetes for a node that goes from one image to the other,
                         from the API server's audit log, goal <= 12
    azure_requests_a_node  the same to Azure, including reads and operations, from the simulator's log, goal <= 4
    back_seconds         from the third failure of a kind until all models name the previous image again, with Azure
                         not delaying, goal <= 30

All invariants of a roll (tests/support/pools/invariants.py) are checked afterwards; `broken` counts the violations.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from image_builder.pool.plan.plan import load, save  # noqa: E402
from image_builder.pool.plan.policy import Roll, WaveDrain  # noqa: E402
from image_builder.pool.run.records import Finished, Result  # noqa: E402
from image_builder.pool.scale_set.roll import Patience  # noqa: E402
from tests.support.arm.fleet import OLD  # noqa: E402
from tests.support.control_plane import gates  # noqa: E402
from tests.support.pools import invariants, rolls  # noqa: E402
from tests.support.pools.recorder import Log  # noqa: E402

_GOALS = {
    "jobs_lost": 0.0,
    "broken": 0.0,
    "driver_cpu_seconds": 60.0,
    "driver_peak_mib": 300.0,
    "requests_a_node": 12.0,
    "azure_requests_a_node": 4.0,
    "back_seconds": 30.0,
}
# Seconds in a data center, as far as is known (docs/explanation/scale-sets.md).
_AZURE = {"upgrade": 60.0, "reimage": 360.0, "service": 30.0, "boot": 480.0}
_DRAIN = WaveDrain()
_SETTLE = 30.0


def _patience(speed: float) -> Patience:
    real = Patience()
    # The lifetime of a scale set's mark isn't scaled, or a slow machine would lose it.
    return Patience(
        look=real.look / speed,
        settle=real.settle / speed,
        request=real.request,
        boot=real.boot,
        hold=real.hold,
        # The duration of a request can't be scaled.
        minute=real.minute / speed + 1.0,
    )


def _policy(speed: float, share: str) -> dict[str, Any]:
    drain = WaveDrain(
        settle_seconds=_DRAIN.settle_seconds / speed,
        poll_seconds=_DRAIN.poll_seconds / speed,
        looks_per_second=_DRAIN.looks_per_second * speed,
    )
    return {
        "waves": (share,),
        "roll": Roll(max_unavailable=share, drain=drain),
        "deadlines": {"probe": 120.0},
        "wave_budget": "2%",
        "budget": "2%",
    }


def drive(folder: Path, url: str, account: Path, speed: float) -> None:
    """Act as the driver."""
    rolls.drive(
        folder,
        url,
        load(folder / "plan.json"),
        account,
        patience=_patience(speed),
        settle_seconds=_SETTLE / speed,
    )


def measure(nodes: int, sets: int, speed: float, share: str, folder: Path) -> dict[str, Any]:
    seconds = {name: value / speed for name, value in _AZURE.items()}
    with (
        gates.running(controllers=True) as cluster,
        rolls.world(cluster, sets, nodes // sets, folder, seconds) as world,
    ):
        os.environ.update(world.served.environment)
        operations: Counter[str] = Counter()
        world.served.arm.observers.append(lambda request, _: operations.update(_operation(request.path)))
        rolled = rolls.plan(world, **_policy(speed, share))
        save(rolled, folder / "plan.json")
        account = world.account()
        began = time.monotonic()
        argv = [sys.executable, __file__, "--driver", str(folder), world.served.url, str(account)]
        argv += ["--speed", str(speed)]
        with (folder / "driver.log").open("w") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=output)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit((folder / "driver.log").read_text())
        log = world.log(rolled)
        wall = time.monotonic() - began
    return {
        "nodes": len(rolled.hosts),
        "ended": sum(isinstance(record, Finished) for record in log.run),
        "jobs_lost": len(invariants.lost_jobs(log)),
        "broken": _broken(log, speed),
        "driver_cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "driver_peak_mib": round(usage.ru_maxrss / 1024),
        "requests_a_node": round(len(log.audit) / len(rolled.hosts), 2),
        "azure_requests_a_node": round((len(log.sent) + operations.total()) / len(rolled.hosts), 2),
        "seconds": round(wall),
        "shares": {name: round(share, 3) for name, share in invariants.shares(log, speed).items()},
        "kubernetes": _kinds(log),
        "azure": dict(operations + Counter(f"{sent.method} {_form(sent.path)}" for sent in log.sent)),
    }


def _broken(log: Log, speed: float) -> int:
    broken = invariants.violations(log, speed=speed)
    print("\n".join(broken[:20]), file=sys.stderr)
    return len(broken)


def _kinds(log: Log) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for event in log.audit:
        target = event.get("objectRef") or {}
        kinds[f"{event['verb']} {target.get('resource', event['requestURI'])}"] += 1
    return dict(kinds)


def _operation(path: str) -> list[str]:
    return ["GET operation"] if path.startswith("/operations/") else []


def _form(path: str) -> str:
    parts = path.partition("/virtualMachineScaleSets/")[2].split("/")
    return "/".join("N" if part.isdigit() else part for part in ["SET", *parts[1:]])


def back(folder: Path) -> dict[str, Any]:
    """Make hosts of twelve sets fail for the same reason; measure the time until the last model is restored."""
    with (
        gates.running(controllers=True) as cluster,
        rolls.world(cluster, 12, 2, folder, {}) as world,
    ):
        os.environ.update(world.served.environment)
        rolled = rolls.plan(world, wave_budget="100%", budget="100%", same_least=3, canaries=12)
        world.broken |= {host.name for host in world.hosts}
        progress = world.drive(rolled)
        log = world.log(rolled)
        assert "failed alike" in progress.stopped and world.models() == {OLD}
    alike = [r.at for r in log.run if isinstance(r, Result) and r.step == "verify" and r.outcome.is_failure]
    models = [sent.at for sent in log.sent if sent.verb == "model"]
    changed = [at for at in models if at > alike[2]]
    return {
        "back_seconds": round(max(changed) - alike[2], 1),
        "back_sets": len(changed),
        "back_broken": len(invariants.violations(log)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--sets", type=int, default=12)
    parser.add_argument("--speed", type=float, default=60.0)
    parser.add_argument("--away", default="10%", help="hosts that may be away at once")
    parser.add_argument("--only", choices=("roll", "back"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--driver", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.driver:
        folder, url, account = options.driver
        drive(Path(folder), url, Path(account), options.speed)
        return 0
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-roll-", dir="/var/tmp") as work:
        for name in ("roll", "back"):
            (Path(work) / name).mkdir()
        if options.only != "back":
            figures |= measure(options.nodes, options.sets, options.speed, options.away, Path(work) / "roll")
        if options.only != "roll":
            figures |= back(Path(work) / "back")
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            goal = f"  goal <= {_GOALS[name]:g}" if name in _GOALS else ""
            print(f"{name:<24}{value!s:>10}{goal}")
    is_good = figures.get("ended", 1) == 1 and not figures.get("back_broken")
    return 0 if is_good and all(figures.get(key, 0) <= goal for key, goal in _GOALS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
