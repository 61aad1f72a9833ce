"""Rollouts on many real hosts with every fault, with the driver killed again and again. CI only does a few of these.

    .venv/bin/python -m tests.e2e.pool_kills [--hosts 60] [--points 50] [--seed 1] [--update-docs]

Needs root and the small image, which it builds if it doesn't exist. First a rollout over all hosts that is disturbed
only by the faults: each of them occurs at least once, and some sound hosts break in the middle of it (midst.py), some
of them permanently. Then rollouts whose driver is killed after a random number of step results, and resumed, until it
was killed --points times. Each time every host must end in its class and join at most once, and nothing may be left on
either end; in the first rollout, hosts that don't break need one attempt only.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from image_builder.pool.plan.model import STEPS
from image_builder.pool.run.records import Intent, Record, Result
from image_builder.settings import DEFAULT_STORE
from tests.support.images.builds import Workplace
from tests.support.pages import proofs
from tests.support.pools import fleet
from tests.support.pools.fleet import Fault, Fleet
from tests.support.pools.midst import Moment, cut, prepare, undo
from tests.support.pools.rollouts import (
    FAILING,
    FULL,
    Rollout,
    ended,
    fill,
    install,
    let_fail,
    make,
    results,
    signature,
    wait,
)
from tests.support.pools.traces import here, wait_until_hosts_are_bare

# A rollout tells hosts to join, which takes some disk space.
CLASSES: dict[Fault, str] = {**fleet.CLASSES, "disk full": FULL}
# What breaks in the middle of a rollout, and the class of a host that stays broken.
MOMENTS: dict[Moment, str] = {
    "told": "unknown",
    "joining": "unknown",
    "verified": "timeout",
    "sudo": "sudo",
}
CHECKED = 5  # this host fails the suite
# A driver is killed after fewer than this many further results of a step.
AFTER = (("probe", 40), ("bootstrap", 12), ("verify", 5))
POLICY = {
    "waves": ["6", "100%"],
    "straggler_factor": 100,
    "deadlines": {"probe": 30, "bootstrap": 60, "verify": 60},
}


def expected(count: int) -> tuple[dict[int, Fault], dict[int, str]]:
    """Return the faults of ``count`` hosts, three in ten, and the class of each; the second-last host's agent fails."""
    kinds = list(CLASSES)
    faulty = [n for n in range(count - 2) if n % 10 in (3, 6, 9)]
    faults = {n: kinds[i % len(kinds)] for i, n in enumerate(faulty)}
    assert set(faults.values()) == set(kinds), "too few hosts for all faults"
    classes = {n: CLASSES[faults[n]] if n in faults else "ok" for n in range(count)}
    return faults, classes | {count - 2: FAILING}


class Hosts:
    """The hosts, prepared for their classes."""

    def __init__(self, pool: Fleet, faults: dict[int, Fault], classes: dict[int, str]) -> None:
        self.pool, self.classes = pool, classes
        kinds = {n: faults.get(n, "") for n in classes}
        self.sound = [n for n, kind in kinds.items() if kind in ("", "slow") and classes[n] == "ok"]
        self.hanging = [n for n, kind in kinds.items() if kind == "sudo hangs"]
        self.other = [n for n, kind in kinds.items() if kind == "disk full" or classes[n] == FAILING]
        sudo = [n for n, kind in kinds.items() if kind.startswith("sudo")]
        install(pool, (*self.sound, *self.other, *sudo))
        for number in self.other:
            (let_fail if classes[number] == FAILING else fill)(pool, number)

    def plan(self, folder: Path, agent: str, **policy: Any) -> Rollout:
        """Reset the hosts and plan a rollout of all of them."""
        for number in self.hanging:
            self.pool.hang_sudo(number, answers=False)
        for number in self.other:
            self.pool.run(number, "rm", "-rf", "/var/joins", "/run/node")
        numbers = range(len(self.classes))
        return make(self.pool, folder, numbers, policy=POLICY | policy, agent=agent, sound=self.sound)

    def free(self) -> None:
        """Let the hanging sudo calls return, and wait until nothing runs on any host."""
        for number in self.hanging:
            self.pool.free_sudo(number)
        wait_until_hosts_are_bare(self.pool)


def ended_as(classes: dict[int, str], report: dict[str, Any]) -> None:
    """Assert that the hosts ended in their classes."""
    outcomes = {int(n.rpartition("-")[2]): r["outcome"] for n, r in report["results"].items()}
    assert outcomes.keys() == classes.keys()
    wrong = {n: outcome for n, outcome in outcomes.items() if signature(outcome) != classes[n]}
    assert not wrong, f"ended otherwise: {wrong}"


def told_once(rollout: Rollout, classes: dict[int, str], joined: Collection[int] = ()) -> None:
    """Assert that each host was told to join as its class implies; ``joined`` are hosts whose class doesn't show it.

    A host whose agent fails before the kubelet is told again if a killed driver lost that result: it certainly didn't
    join.
    """
    expected = {n: int(n in joined or kind in ("ok", "unknown", FAILING)) for n, kind in classes.items()}
    joins = {n: min(times, 1) if classes[n] == FAILING else times for n, times in rollout.joins().items()}
    wrong = {n: times for n, times in joins.items() if times != expected[n]}
    assert not wrong, f"told to join as often: {wrong}"


def nothing_is_left(rollout: Rollout) -> None:
    """Assert that nothing is left on this end."""
    leftovers = here(rollout.pool) + rollout.left()
    assert not leftovers, leftovers


def undisturbed(hosts: Hosts, folder: Path) -> dict[int, str]:
    """Run a rollout without killing its driver, with some hosts breaking midway; return the hosts' classes.

    Some of those come back when all other hosts have ended.
    """
    rollout = hosts.plan(folder, "seconds=8\n", retries=4, retry_seconds=1, verify="100%")
    sound = iter(n for n in rollout.last_wave if n in hosts.sound and n != CHECKED)
    lost = {next(sound): moment for moment in MOMENTS}
    back = {next(sound): moment for moment in MOMENTS if moment != "sudo"}
    others = [n for n in hosts.sound if n not in lost | back]
    classes = (
        hosts.classes | {CHECKED: "failed verify 1"} | {n: MOMENTS[moment] for n, moment in lost.items()}
    )
    prepare(hosts.pool, lost | back)
    try:
        with rollout.start() as child:
            cut(rollout, lost | back, child)
            wait(lambda: child.poll() is not None or _have_ended(rollout.records, others, back), 300)
            for number in back:
                hosts.pool.mend(number)
            out, err = child.communicate(timeout=500)
        assert child.returncode == 0, err
        nothing_is_left(rollout)
    finally:
        undo(hosts.pool, lost | back)
    ended_as(classes, json.loads(out))
    attempts = {n: sum(len(ended(rollout.records, n, step)) for step in STEPS) for n in others}
    assert set(attempts.values()) == {len(STEPS)}, f"more attempts than one: {attempts}"
    hosts.free()
    told_once(rollout, classes, [CHECKED, *(n for n, moment in lost.items() if moment == "verified")])
    return classes


def _have_ended(records: list[Record], others: Collection[int], back: Mapping[int, Moment]) -> bool:
    """Return whether the others have ended, and the hosts that will come back are known to be lost."""
    unverified = (n for n, moment in back.items() if moment != "verified")
    return all(ended(records, n, "verify") for n in others) and all(
        ended(records, n, "bootstrap") for n in unverified
    )


def killed(hosts: Hosts, folder: Path, points: int, seed: int) -> list[list[Record]]:
    """Kill drivers ``points`` times; return the records in the journal at each kill."""
    drawn = random.Random(seed)
    killed_at: list[list[Record]] = []
    for number in count():
        if len(killed_at) >= points:
            break
        work = folder / f"killed-{number}"
        work.mkdir()
        rollout = hosts.plan(work, "seconds=2\n", verify="25%")
        ended = False
        while not ended and len(killed_at) < points:
            step, most = drawn.choice(AFTER)
            goal = results(rollout.records, step) + drawn.randrange(1, most)
            with rollout.start(is_resumed=bool(rollout.records)) as child:
                wait(lambda: child.poll() is not None or results(rollout.records, step) >= goal)  # noqa: B023  # of this round
                time.sleep(drawn.choice([0.0, 0.05, 0.3]))
                ended = child.poll() is not None
                child.kill()
                child.communicate()
            # What the driver started disappears by itself, before the next driver looks.
            wait(lambda: not here(hosts.pool))
            if not ended:
                killed_at.append(rollout.records)
        report = rollout.finish(is_resumed=bool(rollout.records))
        ended_as(hosts.classes, report)
        nothing_is_left(rollout)
        hosts.free()
        told_once(rollout, hosts.classes)
    return killed_at


def last_of(records: list[Record]) -> str:
    """Return the kind of a journal's last record, with its step if it has one."""
    if not records:
        return "none"
    last = records[-1]
    return f"{last.kind} of {last.step}" if isinstance(last, Intent | Result) else last.kind


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=60)
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--update-docs", action="store_true")
    options = parser.parse_args()
    began = proofs.stamp()
    faults, classes = expected(options.hosts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        place = Workplace(DEFAULT_STORE, folder / "images", "minimal")
        assert place.build().status == 0
        (folder / "whole").mkdir()
        # A disk is only filled after the installation on its host.
        at_start = {n: fault for n, fault in faults.items() if fault != "disk full"}
        with fleet.fleet(place, folder, options.hosts, faults=at_start) as pool:
            hosts = Hosts(pool, faults, classes)
            started = time.monotonic()
            kinds = undisturbed(hosts, folder / "whole").values()
            middle = time.monotonic()
            points = killed(hosts, folder, options.points, options.seed)
            seconds = middle - started, time.monotonic() - middle
    rollouts = len({records[0].at for records in points if records})
    shown = {
        f"one rollout of {options.hosts} hosts, {seconds[0]:.0f} s": _counted(kinds),
        f"the driver killed {len(points)} times in {rollouts} rollouts, {seconds[1]:.0f} s": (
            "none joined twice, none lost, nothing left behind"
        ),
        "journal records at each kill": ", ".join(str(len(records)) for records in points),
        "the last record at each kill": _counted(map(last_of, points)),
    }
    print("\n".join(f"{fact}: {found}" for fact, found in shown.items()))
    if options.update_docs:
        result = f"{options.hosts} hosts, {len(points)} kills: every host ended in its class"
        proofs.record("tests.e2e.pool_kills", shown, result, began)
    return 0


def _counted(kinds: Iterable[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in Counter(kinds).most_common())


if __name__ == "__main__":
    sys.exit(main())
