"""Run the real ``node-agent disk`` for one disk after another. Runs on the node; prints one JSON object.

Each run has its own settings and status directory, in its own mount namespace, so the node's stay as they are.
Argument: the settings of each run as JSON, {"name": {...disk.json...}}; the answer is {"name": its section}.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

BASE = Path("/run/boot-matrix/probe")
SCRIPT = """
mount --bind "$1/etc" /etc/node-agent
mount --bind "$1/run" /run/node
exec node-agent disk
"""


def main() -> None:
    found = {}
    for name, settings in json.loads(sys.argv[1]).items():
        shutil.rmtree(BASE, ignore_errors=True)
        for folder in ("etc", "run"):
            (BASE / folder).mkdir(parents=True)
        (BASE / "etc/disk.json").write_text(json.dumps({**settings, "mount_point": "/mnt/boot-matrix"}))
        argv = ["unshare", "--mount", "sh", "-euc", SCRIPT, "probe", os.fspath(BASE)]
        done = subprocess.run(argv, capture_output=True, text=True)
        section = json.loads((BASE / "run/status.json").read_text())["disk"]
        environment = (BASE / "run/kubelet.env").read_text()
        found[name] = {**section, "exit": done.returncode, "said": done.stdout, "kubelet": environment}
    shutil.rmtree(BASE)
    print(json.dumps(found))


main()
