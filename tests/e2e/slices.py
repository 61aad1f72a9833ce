"""The slices of a wave as a Kubernetes Job, with the how-to's commands, on a real node with a real control plane.

    .venv/bin/python -m tests.e2e.slices [--json] [--update-docs] [--artefact DIR]

Needs root, a store (--store), Debian's archive, and the current Kubernetes (IMAGE_BUILDER_PROGRAMS). Builds
`worker_join_current` of inventories/lab unless the directory of a build is given, boots it against the lab's control
plane, gives its containerd an image with ansible-runner, and runs the commands of docs/how-to/run-slices-elsewhere.md,
word for word, for real sshd hosts, one of which is dead. Exits with status 1 unless every fact of
`tests.e2e.slices_facts` holds. With an emulated machine that takes ten minutes, which is why CI doesn't run it.

--update-docs replaces its rows of docs/reference/proofs.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from image_builder.events import Monitor
from image_builder.machine.qemu import accelerator
from image_builder.settings import REPO_ROOT, Settings
from image_builder.system import process
from tests.boot.node import Instance, read_image
from tests.e2e import command, slices_image, slices_run
from tests.e2e.command import say
from tests.e2e.join import IMAGE, keep_logs
from tests.e2e.join_lab import JoinLab
from tests.e2e.slices_facts import facts, figures
from tests.support.control_plane.programs import obtain
from tests.support.images import programs
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import fleet
from tests.support.pools.rollouts import install


def play(settings: Settings, artefact: Path, staging: Path) -> dict[str, Any]:
    """Get all prerequisites, start hosts, control plane and machine; return the observations."""
    places = {name: staging / name for name in ("image", "hosts", "plane", "machine", "work")}
    for place in places.values():
        place.mkdir()
    obtain(settings, Monitor(), controllers=True)
    say("an image with ansible-runner")
    debs = slices_image.get_packages(settings, places["image"])
    kubectl = slices_image.unpack_kubectl(debs.pop(slices_image.KUBECTL), places["image"] / "kubectl")
    archive = places["image"] / "worker.tar"
    slices_image.write_archive(list(debs.values()), slices_run.reference(), places["image"], archive)
    version = process.run([kubectl, "version", "--client", "--short"]).stdout.strip()
    made = Workplace(settings.store, settings.output, IMAGE)
    pool = {"join_labels": slices_run.labels(), "join_taints": []}
    with (
        fleet(made, places["hosts"], len(slices_run.HOSTS), trees=made.trees("system")) as hosts,
        # In the hosts' network, so that the machine's connections end up there.
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
        "accelerator": accelerator(),
        "kubectl": f"kubectl {version.rpartition(' ')[2]}",
        **seen,
    }


def main() -> int:
    parser = command.options(__doc__)
    parser.add_argument("--artefact", type=Path, metavar="DIR", help="a build of it, instead of a new one")
    told = parser.parse_args()
    settings = command.settings_of(told)
    if programs.DIRECTORY is None:
        parser.error(programs.ABSENT)

    artefact = (told.artefact or command.build(IMAGE, [REPO_ROOT / "inventories/lab"], settings)).resolve()
    record = command.measure("slices", settings, lambda staging: play(settings, artefact, staging))
    return command.conclude(told, "slices", record, figures(record), facts(record))


if __name__ == "__main__":
    sys.exit(main())
