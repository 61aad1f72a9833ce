"""One slice in a process of its own: ``python -m image_builder.pool.steps.slice DIRECTORY SECONDS PARENT``.

The directory is ansible-runner's private data directory. Each task result of a host becomes a line on standard output.
Ansible's workers and OpenSSH's masters leave their process group and outlive their parents: those of a killed driver
would still tell hosts to join, at the same time as the driver that resumed its run. So this process adopts them all
(``PR_SET_CHILD_SUBREAPER``) and ends with its parent (``PR_SET_PDEATHSIG``); however it ends, it first ends them and
removes the directory. Meanwhile it holds a lock on the directory, which the next driver waits for.

On a worker host a slice is ansible-runner's ``transmit | worker | process``, the middle one over OpenSSH: everything
said above about a slice applies to it too. The private data directory is sent; the only secret that goes with it,
within the stream, is the key that hosts accept, which ansible-runner hands to an agent of its own there.
worker_guard.py wraps the runner on the worker.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from image_builder.errors import UsageError
from image_builder.pool.plan.policy import WORKER_ENDS_SECONDS
from image_builder.pool.steps import worker_guard
from image_builder.system.trees import remove_tree

PLAYBOOK = "bootstrap.yml"
CONTROL = "control"
# In a slice's directory: the worker to run it on, and the data that is sent there.
WORKER, DATA = "worker.json", "data"
# Heartbeats to the worker within the time in which it expects one.
_BEATS = 6
# Unanswered keepalives after which OpenSSH gives up a connection: the worker has ended its slice by then.
_UNANSWERED = 3
# Time for OpenSSH to end by itself, which it does once the worker has cleaned up.
_END_SECONDS = 10.0
_MOST_MESSAGE = 2000
_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "15",
    "GlobalKnownHostsFile": "none",
    "IdentitiesOnly": "yes",
    "IdentityAgent": "none",
    "LogLevel": "ERROR",
    "StrictHostKeyChecking": "yes",
    "UpdateHostKeys": "no",
}
_REGULAR = ("successful", "failed")
_ENDS_OF_TASKS = {
    "runner_on_ok": "ok",
    "runner_on_failed": "failed",
    "runner_on_unreachable": "unreachable",
}
_EXCERPT = ("msg", "rc", "stdout", "stderr", "module_stderr")
# Limit for each part of a host's answer: a provision.json has a few kilobytes.
_MOST = 65536


def main(argv: list[str]) -> int:
    """Run the slice; return Ansible's exit status."""
    folder, seconds, parent = Path(argv[0]), float(argv[1]), int(argv[2])
    # Locked until this process ends, when nothing that it started is left.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_EX)
    try:
        with worker_guard.adopting():
            worker_guard.die_with_parent(signal.SIGTERM)
            if os.getppid() != parent:
                return 1  # the parent ended before the signal was set up
            _say({"pid": os.getpid()})
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return _run_remotely(folder, seconds) if (folder / WORKER).exists() else _run(folder)
    finally:
        remove_tree(folder)


def _run(folder: Path) -> int:
    import ansible_runner

    # Through a descriptor: a socket's path is limited to 108 bytes, and the directory may be deeply nested. Ansible
    # needs the % doubled.
    control = os.open(folder / CONTROL, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.environ["ANSIBLE_SSH_CONTROL_PATH"] = f"/proc/{os.getpid()}/fd/{control}/%%C"
    # The runner hands this environment on: what this process was started with isn't the play's.
    os.environ.pop("PYTHONPATH", None)
    config = ansible_runner.RunnerConfig(
        private_data_dir=os.fspath(folder), playbook=PLAYBOOK, quiet=True, rotate_artifacts=0
    )
    config.prepare()
    config.command[0] = os.fspath(Path(sys.executable).parent / "ansible-playbook")
    runner = ansible_runner.Runner(config, event_handler=_tell, remove_partials=True)
    _, code = runner.run()
    _say({"end": code, "tail": _tail(runner) if code else ""})
    return int(code)


def _tell(event: Mapping[str, Any]) -> bool:
    """Print a task's result on a host; the runner doesn't need to keep the event."""
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


class Worker(NamedTuple):
    """A host that runs slices: OpenSSH's command line up to the remote command, and the name of ansible-runner there.

    After ``silent_seconds`` without a heartbeat it ends a slice.
    """

    name: str
    login: tuple[str, ...]
    runner: str
    silent_seconds: float


def parse_workers(urls: Sequence[str], runner: str, silent_seconds: float) -> tuple[Worker, ...]:
    """Return the workers at these addresses (ssh://user@host:22?key=FILE&known_hosts=FILE); raises UsageError."""
    return tuple(_worker(url, runner, silent_seconds) for url in urls)


def _worker(url: str, runner: str, silent_seconds: float) -> Worker:
    from image_builder.machine.ssh import parse

    address = parse(url)
    if not address.key or not address.known_hosts:
        raise UsageError(f"{url}: a worker needs a key and known_hosts", hint="…?key=FILE&known_hosts=FILE")
    if address.jump:
        raise UsageError(f"{url}: a worker is not reached through a bastion", hint="run pool run next to it")
    if missing := [path for path in (address.key, address.known_hosts) if not path.is_file()]:
        raise UsageError(f"{url}: no such file: {', '.join(map(str, missing))}")
    options = _OPTIONS | {
        "ServerAliveCountMax": str(_UNANSWERED),
        "ServerAliveInterval": str(math.ceil((silent_seconds + WORKER_ENDS_SECONDS) / _UNANSWERED)),
        "UserKnownHostsFile": f'"{address.known_hosts.absolute()}"',
    }
    arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    login = (
        "ssh",
        "-F",
        "none",
        "-T",
        "-p",
        str(address.port),
        "-i",
        os.fspath(address.key.absolute()),
        *arguments,
    )
    name = f"{address.user}@{address.host}"
    return Worker(name, (*login, name, "--"), runner, silent_seconds)


def describe(worker: Worker, key: Path) -> str:
    """Return the description of a worker for the slice's process: paths and names, no secrets."""
    return json.dumps({"worker": worker._asdict(), "key": os.fspath(key)})


def _run_remotely(folder: Path, seconds: float) -> int:
    """Run the slice in ``folder`` on its worker; return 0 or 1. Print why it ended if hosts can't be told individually.

    When this returns or raises, the worker's side has ended, or has been silent for longer than it survives on its own.
    Raises OSError.
    """
    from ansible_runner.streaming import Processor

    description = json.loads((folder / WORKER).read_text())
    worker = Worker(**description["worker"])
    explained: list[str] = []

    def status(data: Mapping[str, Any], **_: object) -> None:
        explained.append(str(data.get("job_explanation", "")))

    with (
        _transmitted(folder / DATA, Path(description["key"])) as stream,
        (folder / "stderr").open("w+b") as err,
    ):
        beat = worker.silent_seconds / _BEATS
        with _connected(_argv(worker, seconds), stream, err, beat) as output:
            processor = Processor(
                _input=output,
                private_data_dir=os.fspath(folder / "told"),
                event_handler=_tell,
                status_handler=status,
                settings={},
                quiet=True,
            )
            processor.run()
        err.seek(0)
        message = " ".join(err.read()[-_MOST_MESSAGE:].decode("utf-8", "replace").split())
    is_regular, code = processor.status in _REGULAR, int(processor.status != "successful")
    why = message or " ".join(filter(None, explained)) or processor.status
    _say({"end": code, "tail": "" if is_regular else f"worker {worker.name}: {why}"})
    return code


def _argv(worker: Worker, seconds: float) -> list[str]:
    source = Path(worker_guard.__file__).read_text(encoding="utf-8")
    command = shlex.join(
        ["exec", "python3", "-c", source, worker.runner, f"{seconds:.0f}", str(worker.silent_seconds)]
    )
    return [*worker.login, command]


@contextmanager
def _transmitted(data: Path, key: Path) -> Iterator[IO[bytes]]:
    """Yield what ansible-runner sends to a worker. It contains the key, so it is kept only in memory."""
    from ansible_runner.streaming import Transmitter

    with os.fdopen(os.memfd_create("slice", os.MFD_CLOEXEC), "w+b") as stream:
        Transmitter(
            _output=stream, private_data_dir=os.fspath(data), playbook=PLAYBOOK, ssh_key=key.read_text()
        ).run()
        stream.seek(0)
        yield stream


@contextmanager
def _connected(argv: Sequence[str], stream: IO[bytes], err: IO[bytes], beat: float) -> Iterator[IO[bytes]]:
    """Run a program that is fed ``stream`` and then a heartbeat every ``beat`` seconds; yield its output.

    The program ends before this does.
    """
    over = threading.Event()
    # Input and output are both streamed at the same time, which image_builder.system.process doesn't support.
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err)
    assert child.stdin and child.stdout
    feed = threading.Thread(target=_feed, args=(child.stdin, stream, over, beat), daemon=True)
    feed.start()
    try:
        yield child.stdout
    finally:
        over.set()
        feed.join(_END_SECONDS)  # when it ends, so does the worker's input
        child.stdout.close()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        feed.join()


def _feed(pipe: IO[bytes], stream: IO[bytes], over: threading.Event, beat: float) -> None:
    with suppress(BrokenPipeError):  # the program ended; its output and errors say why
        try:
            size = os.fstat(stream.fileno()).st_size
            pipe.write(f"{size}\n".encode())
            shutil.copyfileobj(stream, pipe)
            pipe.flush()
            while not over.wait(beat):
                pipe.write(b"\n")
                pipe.flush()
        finally:
            pipe.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
