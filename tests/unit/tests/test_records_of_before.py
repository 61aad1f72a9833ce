"""Records that the release before wrote are read as they were: tests/data/before.

A bake of `worker_current` with its stages, an export, a roll of forty simulated hosts with its journals, and what a
node reported when it joined and was rolled (really, in an emulated machine).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake import manifest
from image_builder.bake.export import read_index
from image_builder.bake.lock.model import Lock
from image_builder.node.join import config
from image_builder.pool.plan import plan as plans
from image_builder.pool.plan.plan import Plan
from image_builder.pool.run.driver import run
from image_builder.pool.run.journal import journal_of, read_journal, requests_of
from image_builder.pool.run.progress import apply, begin, replay
from image_builder.pool.run.records import Intent, Opened, Record, Result
from image_builder.pool.scale_set import records as requests
from image_builder.settings import REPO_ROOT
from image_builder.verify import result, runner
from tests.support.pools.simulated.rolls import NEW, OLD, Fate, World, check_end

BEFORE = REPO_ROOT / "tests/data/before"


def document(path: str) -> Any:
    return json.loads((BEFORE / path).read_bytes())


def test_a_manifest_and_what_it_refers_to() -> None:
    made = manifest.load((BEFORE / "bake/manifest.json").read_bytes())
    lock = Lock.load(BEFORE / "bake/lock.json")
    facts = runner.read_facts(BEFORE / "bake/facts.json")
    assert made.image == facts["image"] == "worker_current"
    assert made.build_id == facts["build_id"]
    assert len(lock.groups) == len(document("bake/lock.json")["groups"]) > 3
    assert [stage.id for stage in made.stages if stage.name == "seal"] == [
        document("bake/stages/seal.json")["id"]
    ]


def test_a_verification_without_a_red_check() -> None:
    seen = result.from_json(document("bake/verify.json"))
    result.require_passed(seen)
    assert result.junit_outcomes((BEFORE / "bake/junit.xml").read_text()).keys()
    assert len(seen.checks) == 176


@pytest.mark.parametrize("path", sorted((BEFORE / "bake/stages").iterdir()), ids=lambda path: path.stem)
def test_a_stage_has_what_a_later_build_asks_of_it(path: Path) -> None:
    meta = json.loads(path.read_bytes())
    assert meta["name"] == path.stem and meta["id"] in document("bake/worker_current.builds")[-1]
    assert {
        "kind",
        "inputs",
        "options",
        "lowers",
        "bytes",
        "entries",
        "seconds",
        "facts",
        "manifest_sha256",
    } <= meta.keys()


def test_an_export() -> None:
    index = read_index(BEFORE / "export")
    assert index.objects and [name.partition("@")[0] for name in index.images] == ["minimal"]


def test_a_roll_is_replayed_to_its_end() -> None:
    path = BEFORE / "roll/plan.json"
    plan = plans.load(path)
    records = read_journal(journal_of(path))
    progress = replay(plan, records)
    assert progress.finished and not progress.stopped and len(records) == 563
    failed = {name for name, host in progress.hosts.items() if host.outcome and host.outcome.is_failure}
    assert (len(plan.hosts), failed) == (40, {plan.hosts[7].name})


def in_the_midst(plan: Plan, records: Sequence[Record]) -> World:
    """Return the fleet as it is after these records of the release before, whose driver was killed then."""
    results = [r for r in read_journal(journal_of(BEFORE / "roll/plan.json")) if isinstance(r, Result)]
    fates: dict[str, Fate] = {r.host: "foreign cordon" for r in results if r.outcome.kind == "skipped"}
    fates |= {r.host: "never back" for r in results if (r.step, r.outcome.kind) == ("probe", "timeout")}
    world = World(plan, fates, time=records[-1].at)
    for record in records:
        if isinstance(record, Intent):
            for name in record.hosts:
                node = world.nodes[name]
                if record.step == "drain":
                    node.cordoned = node.cordoned or "us"
                elif record.step == "reimage":
                    node.build = NEW
                    node.reimages[NEW] += 1
                    node.away = fates.get(name) == "never back"
        elif isinstance(record, Result):
            node = world.nodes[record.host]
            if (record.step, record.outcome.ok, node.cordoned) == ("free", True, "us"):
                node.cordoned = ""
            elif (record.step, record.joined) == ("reimage", "no"):
                node.build, node.reimages[NEW] = OLD, 0
    if any(node.build == NEW for node in world.nodes.values()):
        world.models = dict.fromkeys(world.models, NEW)
    world.cordoned_before = {name for name, node in world.nodes.items() if node.cordoned == "us"}
    return world


def each_state() -> list[int]:
    """Return after how many records hosts of the roll were first, and last, in each state."""
    path = BEFORE / "roll/plan.json"
    records = read_journal(journal_of(path))
    progress, seen = begin(plans.load(path)), dict[str, list[int]]()
    for number, record in enumerate(records, 1):
        apply(progress, record)
        for state in {status.state for status in progress.hosts.values()}:
            seen.setdefault(state, []).append(number)
    return sorted(
        {moment for moments in seen.values() for moment in (moments[0], moments[-1])} - {len(records)}
    )


@pytest.mark.parametrize("moment", each_state())
def test_a_roll_of_the_release_before_goes_on_with_this_one(moment: int) -> None:
    """An upgrade in flight: the old driver ends, and the new one resumes with its plan and its journal."""
    path = BEFORE / "roll/plan.json"
    plan = plans.load(path)
    records: list[Record] = list(read_journal(journal_of(path))[:moment])
    world = in_the_midst(plan, records)
    records.append(Opened(at=world.time, plan=plan.digest))
    progress = replay(plan, records)
    run(progress, world, records.append)
    assert progress.finished and not progress.stopped
    bad = {name for name, host in progress.hosts.items() if host.outcome and host.outcome.is_failure}
    assert bad == {plan.hosts[7].name}
    # No host got it twice.
    assert all(node.reimages[NEW] <= 1 for node in world.nodes.values())
    check_end(world, progress)
    assert replay(plan, records).hosts == progress.hosts


def test_the_requests_of_a_roll() -> None:
    sent = requests.read_journal(requests_of(BEFORE / "roll/plan.json"))
    assert [type(record).__name__ for record in sent] == ["Suspension", "Suspension", "Model"] + [
        "Replacement",
        "Settled",
    ] * 2 + ["Replacement", "Accepted", "Settled", "Suspension", "Suspension"]


def test_the_configuration_of_a_node_that_joined() -> None:
    told = config.parse(json.dumps(document("node/join.json")["told"]).encode())
    assert told.generation == 1 and told.credentials.kind == "broker"
