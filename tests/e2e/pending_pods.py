"""The problem that this project exists for, reproduced and solved: the same pods on an old node and on ours.

    .venv/bin/python -m tests.e2e.pending_pods [--json] [--update-docs] [--before DIR] [--ours DIR]

Needs root and a store (--store). Boots two machines, one after the other: `before` of tests/e2e/inventory and `worker`
of inventories/lab with the large image, built first unless the directory of a build is given. Each gets
the same four pods, from the lab's registry behind a link of limited rate; the kubelet's own events show what happened
to them. Exits with status 1 unless every fact of `tests.e2e.pending_pods_facts` holds. With emulated machines that
takes half an hour or, on a busy host, a whole one, which is why CI doesn't run it.

--update-docs replaces its rows of docs/reference/proofs.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from image_builder.bake.build import obtain_lock
from image_builder.bake.plan.resolve import supplier_plan
from image_builder.bake.store import Store
from image_builder.cli.command import extensions
from image_builder.definition import load_inventory
from image_builder.events import Monitor
from image_builder.settings import REPO_ROOT, Settings
from tests.e2e import command
from tests.e2e.machine import observe
from tests.e2e.pending_pods_facts import facts, figures
from tests.e2e.registry import CONNECTION_RATE, LINK_RATE, Registry
from tests.support.registries.pulls import leave_the_network

# Image and inventories; and whether its kubelet pulls one image at a time, which is the kubelet's default.
MACHINES = {
    "before": ("before", [REPO_ROOT / "tests/e2e/inventory"], True),
    "ours": ("worker", command.LARGE_LAB, False),
}


def lab_products(settings: Settings) -> tuple[Path, Path]:
    """Return the tools tree and the storage of the lab's registry from the store."""
    image, inventories, _ = MACHINES["ours"]
    definition = load_inventory(inventories).define(image)
    lock = obtain_lock(definition, settings, Monitor(), extensions())
    plan = supplier_plan(definition, lock, REPO_ROOT, extensions())
    tools, made = (Store(settings.store).product(stage.id) for stage in plan.stages)
    if not (made / "registry").is_dir():
        raise SystemExit(
            "the store lacks the large image: "
            "`image-builder lab up -i inventories/lab -i tests/e2e/large.yml` makes it"
        )
    return tools / "tree", made / "registry"


def measure(name: str, artefact: Path, settings: Settings) -> dict[str, Any]:
    """Boot one of the machines and give it the pods; return what was seen of it."""
    tools, storage = lab_products(settings)

    def play(staging: Path) -> dict[str, Any]:
        # The machine can only reach this registry, and port 443 is free.
        leave_the_network()
        places = [staging / part for part in ("registry", "machine")]
        for place in places:
            place.mkdir()
        with Registry(tools, storage, places[0]) as registry:
            return observe(artefact, registry, places[1], serial=MACHINES[name][2], say=command.say)

    command.say(f"== {name}: {artefact}")
    rates = {"link_bytes_per_second": LINK_RATE, "connection_bytes_per_second": CONNECTION_RATE}
    return {**command.measure("pending-pods", settings, play), **rates}


def main() -> int:
    parser = command.options(__doc__)
    for name in MACHINES:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="a build of it, instead of a new one")
    told = parser.parse_args()
    settings = command.settings_of(told)
    artefacts = {
        name: getattr(told, name) or command.build(image, inventories, settings)
        for name, (image, inventories, _) in MACHINES.items()
    }
    record: dict[str, Any] = {
        name: measure(name, artefact.resolve(), settings) for name, artefact in artefacts.items()
    }
    record["began"] = record["before"]["began"]
    return command.conclude(told, "pending_pods", record, figures(record), facts(record))


if __name__ == "__main__":
    sys.exit(main())
