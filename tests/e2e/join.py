"""A baked node joins a real cluster by itself, runs a pod, loses its local disk, and does it all again.

    .venv/bin/python -m tests.e2e.join [--json] [--update-docs] [--artefact DIR] [--away SECONDS]

Needs root and a store (--store). Builds `worker_join_current` of inventories/lab with the large image, unless the
directory of a build is given, and boots it against a control plane of the lab (etcd, API server, controller manager,
scheduler) with the gate's controller. If IMAGE_BUILDER_PROGRAMS doesn't name a directory with the current Kubernetes,
it uses `worker_join` and Debian's Kubernetes. The node's user data is made by `pool render`. At the end the API server
is unavailable for some minutes. Exits with status 1 unless every fact of `tests.e2e.join_facts` holds. With an emulated
machine that takes a quarter of an hour, and the first time as long again to compile the control plane, which is why CI
doesn't run it.

--update-docs replaces its rows of docs/reference/proofs.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from image_builder.machine.qemu import accelerator
from image_builder.settings import Settings
from tests.boot.node import Instance, Local, read_image
from tests.e2e import command
from tests.e2e.command import say
from tests.e2e.join_facts import facts, figures
from tests.e2e.join_lab import JoinLab
from tests.e2e.join_machine import Member, deployment
from tests.support.images import programs

IMAGE = "worker_join_current" if programs.DIRECTORY else "worker_join"
AWAY_SECONDS = 180.0


def play(lab: JoinLab, artefact: Path, place: Path, away: float) -> dict[str, Any]:
    """Run the machine through its whole life; return the observations."""
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
            "image": str(instance.image.told["image"]),
            "build": artefact.name,
            "accelerator": accelerator(),
            "told": json.loads(lab.user_data),
            "wanted": lab.wanted,
            "refusal": lab.refusal() if lab.has_policies else None,
            "first": first,
            "again": again,
            "away": without,
        }
    except BaseException:
        keep_logs(lab)
        raise
    finally:
        instance.end()


def join(settings: Settings, artefact: Path, staging: Path, away: float) -> dict[str, Any]:
    """Start the control plane and run the machine against it."""
    places = [staging / part for part in ("control-plane", "machine")]
    for place in places:
        place.mkdir()
    with JoinLab(settings, places[0]) as lab:
        return play(lab, artefact, places[1], away)


def keep_logs(lab: JoinLab) -> None:
    """Print the end of the control plane's logs, which are removed with it."""
    for path in sorted(lab.work.glob("*.log")):
        if path.name != "audit.log":
            sys.stderr.write(f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}\n")


def main() -> int:
    parser = command.options(__doc__)
    parser.add_argument("--artefact", type=Path, metavar="DIR", help="a build of it, instead of a new one")
    parser.add_argument("--away", type=float, default=AWAY_SECONDS, help="seconds without the API server")
    told = parser.parse_args()
    settings = command.settings_of(told)

    artefact = (told.artefact or command.build(IMAGE, command.LARGE_LAB, settings)).resolve()
    record = command.measure("join", settings, lambda staging: join(settings, artefact, staging, told.away))
    return command.conclude(told, "join", record, figures(record), facts(record))


if __name__ == "__main__":
    sys.exit(main())
