"""Directories of the local disk where programs expect them: what is mounted in them is there only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.images.builds import REPO

pytestmark = pytest.mark.root

# The disk is shared, as each mount of a machine is; a service with a view of its own gets what is mounted later.
SCRIPT = """
import json, subprocess, sys
from pathlib import Path
from image_builder.node import mounts
from image_builder.node.disk import apply
from image_builder.node.disk.settings import parse
disk, pods = (Path(sys.argv[1], name) for name in ("disk", "pods"))
for place in (disk, pods):
    place.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)
subprocess.run(["mount", "--make-shared", disk], check=True)
apply.furnish(parse({"mount_point": str(disk), "binds": [{"source": "pods", "target": str(pods)}]}), on_disk=True)
view = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", "echo; cat; exec cat /proc/self/mountinfo"]
service = subprocess.Popen(view, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
service.stdout.readline()
(pods / "volume").mkdir()
mounts.mount("tmpfs", pods / "volume", "tmpfs")
seen, _ = service.communicate("")
print(json.dumps({"disk": mounts.below(disk), "pods": mounts.below(pods), "service": f"{pods}/volume" in seen}))
"""


def test_what_is_mounted_in_a_bind_is_not_on_the_disk_as_well(tmp_path: Path) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", SCRIPT, tmp_path],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    disk, pods = str(tmp_path / "disk"), str(tmp_path / "pods")
    expected = {"disk": [disk], "pods": [pods, f"{pods}/volume"], "service": True}
    assert json.loads(done.stdout) == expected
