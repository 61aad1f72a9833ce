"""Measurements of verifying, bootstrapping and resuming on real hosts, for the benchmark ``tests/bench/pools.py``.

The hosts are those of fleet.py: their sshds, and all that the checks run there, share the processors with the client.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from tests.bench import pushed
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import USER, Fleet, fleet
from tests.support.pools.rollouts import (
    JOINED,
    POLICY,
    command,
    install,
    make,
    put,
    results,
    wait,
    write_plan,
)

# Files with checks that can't all pass on hosts that haven't booted.
NOT_BOOTED = frozenset(
    f"test_{name}.py"
    for name in (
        "boot",
        "cloud",
        "hardening",
        "identity",
        "kernel",
        "network_accounting",
        "sysctl",
        "system",
    )
)
_NEVER = "#!/bin/sh\nexit 1\n"
_ROUNDS = 5
# A number of hosts between one and all, to see the cost of each additional one.
_SOME = 8
# These hosts have no init: when the processes that a check leaves behind are reaped, and by which process, is chance.
_OF_AN_INIT = "test_boot.py::test_no_zombies"
_JOIN_SECONDS = 20
# For the stand-in: more than the real agent takes without emulation, which is about a second and a half.
_BAKED_JOIN_SECONDS = 2


def be_quick(pool: Fleet, numbers: Iterable[int]) -> None:
    """Make hosts report at once that they never joined and that cloud-init isn't done: they haven't booted.

    The real cloud-init command would wait for minutes.
    """
    numbers = list(numbers)
    install(pool, numbers, _NEVER)
    for number in numbers:
        put(pool, number, "/usr/local/bin/cloud-init", _NEVER)


class Took(NamedTuple):
    """Seconds of a run: wall-clock time, CPU time of the client, and CPU time of all hosts."""

    wall: float
    client: float
    hosts: float


def verify(place: Workplace, folder: Path, count: int) -> dict[str, Any]:
    """Time `pool verify`, the whole command with the real suite, on one host, on some, and on ``count``.

    The ratio is the median of several rounds: in each, one host is verified right before and right after all of them,
    since a machine's speed may differ by half from one minute to the next.
    """
    rounds: list[dict[int, list[Took]]] = []
    turns = _ROUNDS if count > _SOME else 1
    with fleet(place, folder, count) as pool:
        be_quick(pool, range(count))
        checks = 0
        for number in range(turns):
            runs: dict[int, list[Took]] = {}
            for turn, hosts in enumerate((min(_SOME, count), 1, count, 1)):
                work = folder / f"{number}-{turn}"
                work.mkdir()
                seconds, checks = _verify(pool, place.artefact / "facts.json", work, hosts)
                runs.setdefault(hosts, []).append(seconds)
            rounds.append(runs)
    ratios = [fmean(t.wall for t in runs[count]) / fmean(t.wall for t in runs[1]) for runs in rounds]
    middle = {hosts: _middle([took for runs in rounds for took in runs[hosts]]) for hosts in rounds[0]}
    single, many = middle[1], middle[count]
    return {
        "verify_hosts": count,
        "verify_checks": checks,
        "verify_one_seconds": round(single.wall, 2),
        "verify_many_seconds": round(many.wall, 2),
        "verify_ratio": round(median(ratios), 2),
        "verify_ratios": [round(ratio, 2) for ratio in ratios],
        "verify_runs": {
            str(hosts): {f"{side}_seconds": round(value, 2) for side, value in seconds._asdict().items()}
            for hosts, seconds in sorted(middle.items())
        },
        "verify_cpu_seconds_of_a_further_host": {
            side: round((getattr(many, side) - getattr(single, side)) / max(1, count - 1), 3)
            for side in ("client", "hosts")
        },
    }


def _middle(runs: Sequence[Took]) -> Took:
    return Took(*map(median, zip(*runs, strict=True)))


def _verify(pool: Fleet, facts: Path, work: Path, hosts: int) -> tuple[Took, int]:
    """Verify the first hosts of a fleet; return the time that took, and the number of checks on each."""
    login = ("--user", USER, "--key", pool.key, "--known-hosts", pool.pinned.path)
    plan = write_plan(pool, work, range(hosts), POLICY)
    before, began = (_of_children(), pool.cpu_seconds()), time.monotonic()
    done = command("verify", plan, *login, "--facts", facts, "--reports", work / "r", "--json")
    wall = time.monotonic() - began
    seconds = Took(wall, _of_children() - before[0], pool.cpu_seconds() - before[1])
    # Some checks fail on hosts that haven't booted, the same ones on each.
    assert json.loads(done.stdout)["counts"]["failed"] == hosts, done.stderr
    figures = {
        tuple(
            (check["name"], check["outcome"])
            for check in json.loads(file.read_text())["checks"]
            if check["name"] != _OF_AN_INIT
        )
        for file in (work / "r").glob("*/verify.json")
    }
    assert len(figures) == 1, "the hosts differ"
    return seconds, len(figures.pop())


def _of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def resume(place: Workplace, folder: Path, count: int) -> dict[str, Any]:
    """Time an undisturbed rollout, and one whose driver is killed when half of its hosts have joined.

    A host takes 20 s to join, since the stand-in for its agent does. ``resume_overhead`` is how much longer both parts
    of the killed rollout took together, as a share of the undisturbed one.
    """
    policy = {"waves": ["25%", "100%"], "verify": "100%"}
    agent = f"seconds={_JOIN_SECONDS}\n"
    with fleet(place, folder, count) as pool:
        install(pool, range(count))
        times = []
        for name in ("whole", "killed"):
            work = folder / name
            work.mkdir()
            rollout = make(pool, work, range(count), policy=policy, agent=agent, sound=range(count))
            began = time.monotonic()
            if name == "killed":
                with rollout.start() as child:
                    half = count // 2
                    wait(lambda: child.poll() is not None or results(rollout.records, "bootstrap") >= half)  # noqa: B023
                    child.kill()
                    child.communicate()
            report = rollout.finish(is_resumed=name == "killed")
            times.append(time.monotonic() - began)
            assert report["state"] == "finished" and rollout.joins() == dict.fromkeys(range(count), 1)
    whole, killed = times
    return {
        "resume_hosts": count,
        "resume_whole_seconds": round(whole, 2),
        "resume_killed_seconds": round(killed, 2),
        "resume_overhead": round(killed / whole - 1, 3),
    }


def bootstrap(place: Workplace, folder: Path, count: int) -> dict[str, Any]:
    """Time a rollout of hosts with the image, and the push of the same layers to as many hosts with only its base.

    The rollout is one slice, with all its steps: hosts are probed, told to join, waited for, and one check runs on
    each. The push isn't followed by a join. Afterwards the pushed hosts must match the image.
    """
    for name in ("baked", "pushed"):
        (folder / name).mkdir()
    definition = pushed.define(place.image)
    with pushed.plain_hosts(place, folder / "pushed", count, definition) as pool:
        plain = pushed.push(pool, folder / "pushed", definition)
        states = [pushed.what_is_there(pool, number) for number in range(count)]
    # The tree as the roles left it: the roles don't push what sealing does to an image.
    with fleet(place, folder / "baked", count, trees=place.trees("system")) as pool:
        baked = _roll_out(pool, folder / "baked", count)
        image = pushed.what_is_there(pool, 0)
    differences = {line for host in states for line in host ^ image}
    assert not differences, f"pushed hosts are not as the image: {sorted(differences)}"
    return {
        "bootstrap_hosts": count,
        "bootstrap_baked_seconds": round(baked, 2),
        "bootstrap_pushed_seconds": round(plain, 2),
        "bootstrap_ratio": round(baked / plain, 3),
    }


def _roll_out(pool: Fleet, folder: Path, count: int) -> float:
    """Bring up all hosts in one slice; return the seconds that took."""
    numbers = range(count)
    install(pool, numbers)
    # Each host is a canary: there is one wave, and no host has to wait for another.
    policy = {"canaries": count}
    agent = f"seconds={_BAKED_JOIN_SECONDS}\n"
    rollout = make(pool, folder, numbers, policy=policy, agent=agent, sound=numbers, check=JOINED)
    began = time.monotonic()
    report = rollout.finish()
    seconds = time.monotonic() - began
    assert {r["outcome"]["kind"] for r in report["results"].values()} == {"ok"}, report["results"]
    assert rollout.joins() == dict.fromkeys(numbers, 1)
    return seconds
