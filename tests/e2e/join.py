"""A baked node joins a real cluster by itself, runs a pod, loses its local disk, and does it again.

    .venv/bin/python -m tests.e2e.join [--json] [--update-docs] [--render] [--artefact DIR] [--away SECONDS]

Needs root and a store (--store). Builds `worker_join` of inventories/lab unless the directory of a build is given, and
boots it before a control plane of the lab (etcd, API server, controller manager, scheduler) with the gate's controller.
What the node is told is made by `pool render`. In the end the API server is away for some minutes. Ends with status 1
unless every fact of `tests.e2e.join_facts` holds. With an emulated machine that takes a quarter of an hour, and the
first time as long again to compile the control plane, which is why CI does not run it.

--update-docs keeps the record (tests/e2e/join.json) and makes docs/reference/join-results.md anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from image_builder import failure, namespace
from image_builder.settings import DEFAULT_STORE, REPO_ROOT, Settings
from image_builder.store import Store
from image_builder.target import qemu
from tests.boot.node import Instance, Local, read_image
from tests.e2e import join_page
from tests.e2e.join_facts import broken
from tests.e2e.join_lab import JoinLab
from tests.e2e.join_machine import Member, deployment
from tests.e2e.pending_pods import build, say

RECORD = REPO_ROOT / "tests/e2e/join.json"
IMAGE = "worker_join"
AWAY_SECONDS = 180.0


def play(lab: JoinLab, artefact: Path, place: Path, away: float) -> dict[str, Any]:
    """Let the machine live its life; return what was seen of it."""
    lab.admin.request("POST", "/apis/apps/v1/namespaces/default/deployments", deployment())
    instance = Instance(read_image(artefact), place / "machine")
    member = Member(lab, instance, say)
    try:
        say("the first boot")
        member.deallocate([Local("first")])
        first = member.boot()
        say("deallocated: the same OS disk, a blank local one")
        member.deallocate([Local("second")])
        again = member.boot()
        say(f"the API server is away for {away:g} s")
        without = member.without_api(away)
        return {
            "image": IMAGE,
            "build": artefact.name,
            "accelerator": qemu.accelerator(),
            "told": json.loads(lab.user_data),
            "wanted": lab.wanted,
            "first": first,
            "again": again,
            "away": without,
        }
    except BaseException:
        keep_logs(lab)
        raise
    finally:
        instance.end()


def keep_logs(lab: JoinLab) -> None:
    """Show how the logs of the control plane end, which are gone with it."""
    for path in sorted(lab.work.glob("*.log")):
        if path.name != "audit.log":
            sys.stderr.write(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}\n")


def measure(artefact: Path, settings: Settings, away: float) -> dict[str, Any]:
    """Do it in namespaces of its own; return the record."""
    with tempfile.TemporaryDirectory(prefix="join-") as folder:
        out = Path(folder, "record.json")

        def work() -> int:
            store = Store(settings.store)
            with store.in_use(), store.staging() as staging:
                places = [staging / part for part in ("control-plane", "machine")]
                for place in places:
                    place.mkdir()
                try:
                    with JoinLab(settings, places[0]) as lab:
                        seen = play(lab, artefact, places[1], away)
                except AssertionError:
                    traceback.print_exc()
                    return 1
            out.write_text(json.dumps(seen), encoding="utf-8")
            return 0

        def guarded() -> int:
            return failure.guard(work, json_wanted=False, command="join")

        started = time.monotonic()
        if status := namespace.run_isolated(guarded):
            raise SystemExit(status)
        return {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "minutes": round((time.monotonic() - started) / 60, 1),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[2], 1),  # the last 15 minutes
            **json.loads(out.read_text(encoding="utf-8")),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--update-docs", action="store_true", help="keep the record, make the page anew")
    parser.add_argument("--render", action="store_true", help="do nothing: take the record that was kept")
    parser.add_argument("--artefact", type=Path, metavar="DIR", help="a build of it, instead of a new one")
    parser.add_argument("--away", type=float, default=AWAY_SECONDS, help="seconds without the API server")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    parser.add_argument(
        "--output", type=Path, default=Path.cwd() / "output", help="where builds are published"
    )
    told = parser.parse_args()
    if told.render:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    else:
        artefact = told.artefact or build(IMAGE, REPO_ROOT / "inventories/lab", told.store, told.output)
        settings = Settings(store=told.store, output=told.output)
        record = measure(artefact.resolve(), settings, told.away)
    if told.update_docs:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        join_page.PAGE.write_text(join_page.text(record), encoding="utf-8")
    print(json.dumps(record, indent=1) if told.json else join_page.results(record))
    wrong = broken(record)
    for text in wrong:
        say(f"does not hold: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
