"""The time that another run of ``node-agent join`` takes on a node that has joined, and the files it changes there.

For the benchmark ``tests/bench/pools.py``. The node is an unmodified root of the baked image `worker_join_current`
(`worker_join` without today's programs): its own agent, compiled by its own Python, its own settings, its own running
engine. Its surroundings are those of
tests/support/nodes/joining_machine.py, at the addresses where the image looks for them: servers with real TLS, and a
thread in place of the kubelet. What other units leave behind in a boot (a local disk, images, a preflight) is written
here.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from image_builder.bake.pull import containerd_engine, docker_engine
from image_builder.bake.store import Store
from image_builder.node import status
from image_builder.system import namespace
from image_builder.system.sandbox import Root, open_root
from tests.support.images import programs
from tests.support.images.builds import Workplace
from tests.support.nodes.joining_machine import Seen, World, files, served
from tests.support.registries.pulls import leave_the_network

IMAGE = "worker_join_current" if programs.DIRECTORY else "worker_join"
_engine: Any = containerd_engine if programs.DIRECTORY else docker_engine
# Where a machine in Azure finds its metadata service, and where a kubelet reports its health.
_IMDS, _HEALTHZ = "169.254.169.254", 10248


class Ran(NamedTuple):
    """One run of the agent, in seconds."""

    wall: float
    cpu: float


def measure(store: Path, folder: Path, runs: int) -> dict[str, Any]:
    """Let a node join, and then ``runs`` times more; return the slowest of these, and how many files they changed.

    The image is built as far as needed. The results go through a file in ``folder``; everything else is in the store's
    staging area, for the engine's sake.
    """
    place = Workplace(store, folder / "output", IMAGE)
    lowers = place.build_until("seal")
    out = folder / "rejoin.json"

    def work() -> int:
        leave_the_network(_IMDS)
        artefacts = Store(store)
        with artefacts.in_use(), artefacts.staging() as staging:
            out.write_text(json.dumps(_join(lowers, staging, runs)))
        return 0

    assert namespace.run_isolated(work) == 0
    measured: dict[str, Any] = json.loads(out.read_text())
    return measured


def _join(lowers: tuple[Path, ...], work: Path, runs: int) -> dict[str, Any]:
    for name in ("world", "engine", "upper"):
        (work / name).mkdir()
    with served(work / "world", imds=(_IMDS, 80), healthz=("127.0.0.1", _HEALTHZ)) as world:
        world.by_broker()
        _boot(world)
        places = {
            _engine.DATA_ROOT: work / "engine",
            os.fspath(world.directory): world.directory,
            os.fspath(status.DIRECTORY): world.directory / "run",
            "/etc/kubernetes": world.kubernetes,
        }
        with (
            open_root(
                lowers, work / "root", upper=work / "upper", writable_binds=places, network=True
            ) as root,
            _engine.running(root, downloads=1, endpoints={}, log=work / "engine.log"),
        ):
            # As the pod guard leaves it in a boot.
            subprocess.run(root.argv(["touch", "/run/azure-pod-guard"]), check=True)
            bare = _files(world, work)
            first, joined = _run(root), _files(world, work)
            requests = len(world.asked_api)
            again, after = [_run(root) for _ in range(runs)], _files(world, work)
            # Each run sent at least one request to the API server.
            assert len(world.asked_api) >= requests + runs and world.record["state"] == "ok"
    return {
        "rejoin_runs": runs,
        "join_seconds": round(first.wall, 2),
        "rejoin_seconds": round(max(ran.wall for ran in again), 2),
        "join_cpu_seconds": round(first.cpu, 2),
        "rejoin_cpu_seconds": round(max(ran.cpu for ran in again), 2),
        "join_changed": len(_changed(bare, joined)),
        "rejoin_changed": len(_changed(joined, after)),
    }


def _changed(before: Mapping[str, Seen], after: Mapping[str, Seen]) -> set[str]:
    """Return the files that are new, gone, or changed in any way."""
    return {path for path, _ in before.items() ^ after.items()}


def _boot(world: World) -> None:
    """Write what the units that a boot starts before the join leave behind."""
    run, boot = world.directory / "run", status.boot_id()
    for section in ("disk", "preload"):
        verdict = {"state": status.OK, "code": "", "reason": "as the bench says"}
        status.update(section, verdict, status.Places(run, world.directory / "etc"))
    verdict = {"boot_id": boot, "state": "passed", "code": "", "reason": "", "action": "none"}
    (run / "preflight.json").write_text(
        json.dumps({**verdict, "started": "2026-11-22T00:00:00+00:00", "seconds": 3.0})
    )


def _files(world: World, work: Path) -> dict[str, Seen]:
    """Return the node's files that aren't the image's: those written since it booted."""
    return world.tree() | files(work / "upper")


def _run(root: Root) -> Ran:
    """Run the agent as its unit does; it must succeed."""
    began = time.monotonic()
    with subprocess.Popen(root.argv(["node-agent", "join"]), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        output = process.stdout.read()
        _, ended, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(ended)
    assert process.returncode == 0, output
    return Ran(wall, usage.ru_utime + usage.ru_stime)
