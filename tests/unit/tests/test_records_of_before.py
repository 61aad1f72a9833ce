"""Records that the release before wrote are read as they were: tests/data/before.

A bake of `worker_current` with its stages, an export, a roll of forty simulated hosts with its journals, and what a
node reported when it joined and was rolled (really, in an emulated machine).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake import manifest
from image_builder.bake.export import read_index
from image_builder.bake.lock.model import Lock
from image_builder.node.join import config
from image_builder.pool.plan import plan as plans
from image_builder.pool.run.journal import journal_of, read_journal, requests_of
from image_builder.pool.run.progress import replay
from image_builder.pool.scale_set import records as requests
from image_builder.settings import REPO_ROOT
from image_builder.verify import result, runner

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


def test_the_requests_of_a_roll() -> None:
    sent = requests.read_journal(requests_of(BEFORE / "roll/plan.json"))
    assert [type(record).__name__ for record in sent] == ["Suspension", "Suspension", "Model"] + [
        "Replacement",
        "Settled",
    ] * 2 + ["Replacement", "Accepted", "Settled", "Suspension", "Suspension"]


def test_the_configuration_of_a_node_that_joined() -> None:
    told = config.parse(json.dumps(document("node/join.json")["told"]).encode())
    assert told.generation == 1 and told.credentials.kind == "broker"
