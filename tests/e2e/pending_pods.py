"""The problem that this project exists for, reproduced and solved: the same pods on a node of before and on ours.

    .venv/bin/python -m tests.e2e.pending_pods [--json] [--update-docs] [--only before|ours] [--before DIR] [--ours DIR]

Needs root and a store (--store). Boots two machines, one after the other: `before` of tests/e2e/inventory and `worker`
of inventories/lab, built first unless the directory of a build is given. Each gets the same four pods, from the lab's
registry behind a link of limited rate; kubelet's own events tell what became of them. Ends with status 1 unless every
fact of `tests.e2e.facts` holds. With emulated machines that takes half an hour or,
on a busy host, a whole one, which is why CI does not run it.

--update-docs keeps the record (tests/e2e/pending_pods.json), and makes the table and the plot of
docs/explanation/pending-pods.md anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from image_builder import namespace
from image_builder.build import obtain_lock
from image_builder.definition import load_inventory
from image_builder.events import NullMonitor
from image_builder.plan.resolve import lab_plan
from image_builder.settings import DEFAULT_STORE, REPO_ROOT, Settings
from image_builder.store import Store
from tests.e2e import page
from tests.e2e.facts import broken
from tests.e2e.machine import observe
from tests.e2e.registry import CONNECTION_RATE, LINK_RATE, Registry
from tests.pulls import leave_the_network

RECORD = REPO_ROOT / "tests/e2e/pending_pods.json"
# Image and inventory; and whether its kubelet pulls one image at a time, as kubelet's own default is.
MACHINES = {
    "before": ("before", REPO_ROOT / "tests/e2e/inventory", True),
    "ours": ("worker", REPO_ROOT / "inventories/lab", False),
}


def say(text: str) -> None:
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def build(image: str, inventory: Path, store: Path, output: Path) -> Path:
    """Build an image with the real command; return the directory of its artefacts."""
    say(f"building {image}")
    argv = [os.fspath(REPO_ROOT / "image-builder"), "build", image, "--json"]
    places = {"-i": inventory, "--store": store, "--output": output}
    done = subprocess.run(
        [*argv, *(word for name, path in places.items() for word in (name, os.fspath(path)))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "CI": "true"},
    )
    return Path(json.loads(done.stdout)["artefact"])


def lab_products(settings: Settings) -> tuple[Path, Path]:
    """Return the tools tree and the storage of the lab's registry from the store."""
    image, inventory, _ = MACHINES["ours"]
    definition = load_inventory([inventory]).define(image)
    plan = lab_plan(definition, obtain_lock(definition, settings, NullMonitor()), REPO_ROOT)
    tools, made = (Store(settings.store).product(stage.id) for stage in plan.stages)
    if not (made / "registry").is_dir():
        raise SystemExit("the store has no images of the lab: `image-builder lab up` makes them")
    return tools / "tree", made / "registry"


def measure(name: str, artefact: Path, settings: Settings) -> dict[str, Any]:
    """Boot one of the machines and give it the pods; return its part of the record."""
    tools, storage = lab_products(settings)
    with tempfile.TemporaryDirectory(prefix="pending-pods-") as folder:
        out = Path(folder, "record.json")

        def work() -> int:
            # The machine reaches this registry and nothing else, and port 443 is nobody else's.
            leave_the_network()
            store = Store(settings.store)
            with store.in_use(), store.staging() as staging:
                places = [staging / part for part in ("registry", "machine")]
                for place in places:
                    place.mkdir()
                with Registry(tools, storage, places[0]) as registry:
                    seen = observe(artefact, registry, places[1], serial=MACHINES[name][2], say=say)
            out.write_text(json.dumps(seen), encoding="utf-8")
            return 0

        say(f"== {name}: {artefact}")
        started = time.monotonic()
        if status := namespace.run_isolated(work):
            raise SystemExit(status)
        return {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "minutes": round((time.monotonic() - started) / 60, 1),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[2], 1),  # the last 15 minutes
            "link_bytes_per_second": LINK_RATE,
            "connection_bytes_per_second": CONNECTION_RATE,
            **json.loads(out.read_text(encoding="utf-8")),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--update-docs", action="store_true", help="keep the record, make the page anew")
    parser.add_argument(
        "--only", choices=MACHINES, help="measure one of them; the other one's record is taken"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing: take the record that was kept"
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    parser.add_argument(
        "--output", type=Path, default=Path.cwd() / "output", help="where builds are published"
    )
    for name in MACHINES:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help="a build of it, instead of a new one")
    told = parser.parse_args()
    record: dict[str, Any] = {}
    if told.only or told.render:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    wanted = [] if told.render else [told.only] if told.only else list(MACHINES)
    artefacts = {
        name: getattr(told, name) or build(*MACHINES[name][:2], told.store, told.output) for name in wanted
    }
    for name, artefact in artefacts.items():
        record[name] = measure(name, artefact.resolve(), Settings(store=told.store, output=told.output))
    if told.update_docs:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        page.write(record)
    print(json.dumps(record, indent=1) if told.json else page.table(record))
    wrong = broken(record)
    for text in wrong:
        say(f"does not hold: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
