"""A real systemd without a machine: a user's instance, in namespaces and in control groups of its own.

It removes empty control groups below the one in which it starts, those of a container that another test is creating
included; so it doesn't start at the top.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_HIERARCHIES = ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified")
_NAMESPACES = ("--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private")
# Goes before a test's driver, which ends with the manager, in its own time: that takes its control groups away.
_PREAMBLE = """
import json, os, subprocess, sys, time
from pathlib import Path
here, arguments = Path(sys.argv[1]), sys.argv[2:]
for group in os.environ.pop("CONTROL_GROUPS").split(":"):
    Path(group, "cgroup.procs").write_text("0")
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
# A user's instance starts where a system's runs, by this directory.
for name in ("systemd/system", "user"):
    Path("/run", name).mkdir(parents=True)
os.environ |= {"XDG_RUNTIME_DIR": "/run/user", "XDG_CONFIG_HOME": str(here / "config")}
os.environ.pop("DBUS_SESSION_BUS_ADDRESS", None)
log = (here / "systemd.log").open("w")
manager = subprocess.Popen(["/usr/lib/systemd/systemd", "--user", "--log-target=console"], stdout=log, stderr=log)

def ctl(*words):
    return subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True).stdout.strip()

def until(what, seconds=60):
    end = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < end:
        time.sleep(0.1)
    return result

until(lambda: Path("/run/user/systemd/private").exists())
# A user's basic.target, unlike a system's, comes after all timers: none can be started before it has been reached.
is_up = until(lambda: ctl("is-active", "default.target") == "active")
"""


def drive(directory: Path, driver: str, *arguments: str, seconds: float) -> dict[str, Any]:
    """Return what a driver prints as JSON, next to a manager of the units in ``directory``/config/systemd/user.

    The driver has ``here``, its ``arguments``, ``ctl``, ``until`` and ``is_up``, whether the manager came up.
    """
    with _control_groups(directory) as groups:
        done = subprocess.run(
            ["unshare", *_NAMESPACES, sys.executable, "-c", _PREAMBLE + driver, directory, *arguments],
            env={
                "PATH": os.environ["PATH"],
                "HOME": "/root",
                "LC_ALL": "C.UTF-8",
                "CONTROL_GROUPS": ":".join(map(os.fspath, groups)),
            },
            capture_output=True,
            text=True,
            timeout=seconds,
        )
    log = directory / "systemd.log"
    assert done.returncode == 0, done.stderr + (log.read_text()[-4000:] if log.exists() else "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def _control_groups(directory: Path) -> Iterator[list[Path]]:
    groups = [
        Path(top, f"manager-{os.getpid()}-{directory.name}") for top in _HIERARCHIES if os.path.ismount(top)
    ]
    assert groups, "no hierarchy of systemd's is mounted here"
    for group in groups:
        group.mkdir()
    try:
        yield groups
    finally:
        for group in groups:
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
