"""One slice in a process of its own: ``python -m image_builder.pool.steps.slice DIRECTORY SECONDS``.

The directory is ansible-runner's private data directory. Each end of a task on a host becomes a line on standard
output. Ansible's workers and OpenSSH's masters leave their process group and outlive whom they work for: a driver
that was killed would still tell hosts to join, beside the one that took its run up. So this process adopts them all
(``PR_SET_CHILD_SUBREAPER``), ends with its parent (``PR_SET_PDEATHSIG``), and whatever ends it, ends them first and
removes the directory. It holds a lock on that meanwhile, which the next driver waits for.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from image_builder.pool.steps import remote_slice
from image_builder.pool.steps.worker_guard import end_children
from image_builder.system.trees import remove_tree

PLAYBOOK = "bootstrap.yml"
CONTROL = "control"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
_ENDS_OF_TASKS = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
}
_EXCERPT = ("msg", "rc", "stdout", "stderr", "module_stderr")
# Of a host's answer: a provision.json is some kilobytes.
_MOST = 65536


def main(argv: list[str]) -> int:
    """Run the slice; return Ansible's exit status."""
    folder, seconds, parent = Path(argv[0]), float(argv[1]), int(argv[2])
    for number in _ENDS:
        signal.signal(number, _end)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Until this process ended, when nothing that it started is left.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_EX)
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            return 1  # it ended before it could take us along
        _say({"pid": os.getpid()})
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return _run_remotely(folder, seconds) if (folder / remote_slice.WORKER).exists() else _run(folder)
    finally:
        for number in _ENDS:
            signal.signal(number, signal.SIG_IGN)
        end_children()
        remove_tree(folder)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _run(folder: Path) -> int:
    import ansible_runner

    # By a descriptor: the name of a socket may have 108 bytes, and a directory may lie deep. Ansible's % is doubled.
    control = os.open(folder / CONTROL, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.environ["ANSIBLE_SSH_CONTROL_PATH"] = f"/proc/{os.getpid()}/fd/{control}/%%C"
    config = ansible_runner.RunnerConfig(
        private_data_dir=os.fspath(folder), playbook=PLAYBOOK, quiet=True, rotate_artifacts=0
    )
    config.prepare()
    config.command[0] = os.fspath(Path(sys.executable).parent / "ansible-playbook")
    runner = ansible_runner.Runner(config, event_handler=_tell, remove_partials=True)
    _, code = runner.run()
    _say({"end": code, "tail": _tail(runner) if code else ""})
    return int(code)


def _run_remotely(folder: Path, seconds: float) -> int:
    code, why = remote_slice.run(folder, PLAYBOOK, seconds, _tell)
    _say({"end": code, "tail": why})
    return code


def _tell(event: Mapping[str, Any]) -> bool:
    """Say how a task ended on a host; the runner need not keep it."""
    if end := _ENDS_OF_TASKS.get(str(event["event"])):
        data = event["event_data"]
        result = data.get("res") or {}
        excerpt = {key: str(result[key])[:_MOST] for key in _EXCERPT if key in result}
        _say({"host": data["host"], "task": data["task"], "what": end, "result": excerpt})
    return False


def _say(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _tail(runner: Any) -> str:
    with runner.stdout as stream:
        return str(stream.read()[-2000:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
