"""The slices of a wave as Kubernetes Jobs, by the commands of the how-to, on a real node before a real control plane.

    .venv/bin/python -m tests.e2e.slices [--json] [--update-docs] [--render] [--artefact DIR]

Needs root, a store (--store) and Debian's archive. Builds `worker_join` of inventories/lab unless the directory of a
build is given, boots it before the lab's control plane, gives its Docker an image with ansible-runner, and runs what
docs/how-to/run-slices-elsewhere.md says, word for word, for real sshd hosts of which one is dead. Ends with status 1
unless every fact of `tests.e2e.slices_facts` holds. With an emulated machine that takes six to ten minutes, and
the first time five minutes more to compile the control plane, which is why CI does not run it.

--update-docs keeps the record (tests/e2e/slices.json) and makes docs/reference/slices-results.md anew.
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

from image_builder import failure, namespace, process
from image_builder.settings import DEFAULT_STORE, REPO_ROOT, Settings
from image_builder.store import Store
from image_builder.target import qemu
from tests.boot.node import Instance, read_image
from tests.builds import Workplace
from tests.e2e import slices_image, slices_page, slices_run
from tests.e2e.join import IMAGE, keep_logs
from tests.e2e.join_lab import JoinLab, programs
from tests.e2e.pending_pods import build, say
from tests.e2e.slices_facts import broken
from tests.pools.fleet import fleet
from tests.pools.rollouts import install

RECORD = REPO_ROOT / "tests/e2e/slices.json"


def play(settings: Settings, artefact: Path, staging: Path) -> dict[str, Any]:
    """Get all that is needed, start hosts, control plane and machine; return what was seen."""
    places = {name: staging / name for name in ("image", "hosts", "plane", "machine", "work")}
    for place in places.values():
        place.mkdir()
    programs(settings)
    say("an image with ansible-runner")
    debs = slices_image.get_packages(settings, places["image"])
    kubectl = slices_image.unpack_kubectl(debs.pop(slices_image.KUBECTL), places["image"] / "kubectl")
    archive = places["image"] / "worker.tar"
    slices_image.write_archive(list(debs.values()), slices_run.reference(), places["image"], archive)
    version = process.run([kubectl, "version", "--client", "--short"]).stdout.strip()
    made = Workplace(settings.store, settings.output, IMAGE)
    pool = {"join_labels": slices_run.labels(), "join_taints": []}
    with (
        fleet(made, places["hosts"], len(slices_run.HOSTS)) as hosts,
        # In the hosts' network, so that the machine's connections come out there.
        JoinLab(settings, places["plane"], more=pool, is_apart=True) as lab,
    ):
        install(hosts, slices_run.HOSTS)
        instance = Instance(read_image(artefact), places["machine"] / "instance")
        try:
            seen = slices_run.Acts(lab, hosts, places["work"], kubectl.parent, say).play(instance, archive)
        except BaseException:
            keep_logs(lab)
            raise
        finally:
            instance.end()
    return {
        "build": artefact.name,
        "accelerator": qemu.accelerator(),
        "kubectl": f"kubectl {version.rpartition(' ')[2]}",
        **seen,
    }


def measure(artefact: Path, settings: Settings) -> dict[str, Any]:
    """Do it in namespaces of its own; return the record."""
    with tempfile.TemporaryDirectory(prefix="slices-") as folder:
        out = Path(folder, "record.json")

        def work() -> int:
            store = Store(settings.store)
            with store.in_use(), store.staging() as staging:
                try:
                    seen = play(settings, artefact, staging)
                except AssertionError:
                    traceback.print_exc()
                    return 1
            out.write_text(json.dumps(seen), encoding="utf-8")
            return 0

        def guarded() -> int:
            return failure.guard(work, json_wanted=False, command="slices")

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
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    parser.add_argument(
        "--output", type=Path, default=Path.cwd() / "output", help="where builds are published"
    )
    told = parser.parse_args()
    if told.render:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    else:
        artefact = told.artefact or build(IMAGE, REPO_ROOT / "inventories/lab", told.store, told.output)
        record = measure(artefact.resolve(), Settings(store=told.store, output=told.output))
    if told.update_docs:
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        slices_page.PAGE.write_text(slices_page.text(record), encoding="utf-8")
    print(json.dumps(record, indent=1) if told.json else slices_page.results(record))
    wrong = broken(record)
    for text in wrong:
        say(f"does not hold: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
