"""Let the agent continue with disks as power cuts left them: ``disk``, then ``seed``. Runs on the node; prints JSON.

Arguments: the serials of the disks. The agent is given one at a time, with the serial and the model that the
disk had when the power was cut. The resulting data root is compared, byte by byte, with one that it makes in
a fresh directory. The answer: {"serial": {"disk": action, "seed": action, "left": [...], "different": [...]}}.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, "/usr/local/sbin/node-agent")

from image_builder.node import preload_settings, store
from image_builder.node.disk import command, find
from image_builder.node.disk.model import Places
from image_builder.node.seed import command as seeding

BASE = Path("/run/boot-matrix/recover")
ROOT = Path("/mnt/boot-matrix")
ETC = BASE / "etc"


def main() -> None:
    shutil.rmtree(BASE, ignore_errors=True)
    ETC.mkdir(parents=True)
    settings = json.loads(Path("/etc/node-agent/disk.json").read_text())
    settings |= {"mount_point": os.fspath(ROOT), "binds": []}
    (ETC / "disk.json").write_text(json.dumps(settings))
    baked = store.read_manifest()
    reference = Path("/var/tmp/boot-matrix-reference")
    shutil.rmtree(reference, ignore_errors=True)
    seed_at(reference, baked)
    found = {serial: recover(serial, baked, reference) for serial in sys.argv[1:]}
    shutil.rmtree(reference)
    sys.stdout = sys.__stdout__
    print(json.dumps(found))


def seed_at(mount_point: Path, baked: store.Store) -> dict[str, Any]:
    mount_point.mkdir(exist_ok=True)
    (mount_point / ".node").mkdir(exist_ok=True)
    real = preload_settings.load()
    made = dataclasses.replace(real, mount_point=mount_point, data_root=mount_point / real.data_root.name)
    return seeding.seed(made, baked)


def recover(serial: str, baked: store.Store, reference: Path) -> dict[str, Any]:
    places = Places(run=BASE / serial, etc=ETC)
    (disk,) = [one for one in find.disks(places) if one.serial == serial]
    disk = dataclasses.replace(disk, serial="local0", model="QEMU NVMe Ctrl", found_by="configuration")
    command.run(places=places, disks=lambda: [disk])
    told = json.loads((places.run / "status.json").read_text())["disk"]
    if told["state"] != "ok":
        return {"disk": f"{told['code']}: {told['reason']}"}
    left = sorted(path.name for path in (ROOT / ".node").iterdir())
    section = seed_at(ROOT, baked)
    name = preload_settings.load().data_root.name
    different = differences(reference / name, ROOT / name)
    subprocess.run(["umount", ROOT], check=True)
    return {"disk": told["action"], "seed": section["action"], "left": left, "different": different[:10]}


def differences(wanted: Path, got: Path) -> list[str]:
    done = subprocess.run(["diff", "-r", "--no-dereference", wanted, got], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line]


sys.stdout = sys.stderr  # the agent's output is for people
main()
