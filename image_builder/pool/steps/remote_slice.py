"""A slice on a worker host: ansible-runner's ``transmit | worker | process``, the middle one over OpenSSH.

It is run by the process of the slice (slice.py) in place of Ansible, so that all that holds for a slice holds here: one
process to end, one line for each task that ended on a host, as it ends. The private data directory is sent; of what is
secret only the key that hosts let in goes with it, within the stream, and ansible-runner gives it to an agent of its
own there. What surrounds the runner on the worker is worker_guard.py.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from image_builder.errors import UsageError
from image_builder.pool.plan.policy import WORKER_ENDS_SECONDS
from image_builder.pool.steps import worker_guard

# In a slice's directory: what to run it on, and what is sent there.
WORKER, DATA = "worker.json", "data"
# Signs of life to the worker, within the time in which it wants one.
_BEATS = 6
# Questions without an answer after which OpenSSH gives a connection up: the worker has ended its slice by then.
_UNANSWERED = 3
# For OpenSSH to end by itself, which it does once the worker has cleaned up.
_END_SECONDS = 10.0
_MOST = 2000
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

Tell = Callable[[Mapping[str, Any]], bool]


class Worker(NamedTuple):
    """A host that runs slices: OpenSSH's command line up to what to run, and ansible-runner's name there.

    After ``silent_seconds`` without a sign of life it ends a slice.
    """

    name: str
    login: tuple[str, ...]
    runner: str
    silent_seconds: float


def workers(urls: Sequence[str], runner: str, silent_seconds: float) -> tuple[Worker, ...]:
    """Return the workers at these addresses (ssh://user@host:22?key=FILE&known_hosts=FILE); raises UsageError."""
    return tuple(_worker(url, runner, silent_seconds) for url in urls)


def _worker(url: str, runner: str, silent_seconds: float) -> Worker:
    from image_builder.machine.ssh import parse

    address = parse(url)
    if not address.key or not address.known_hosts:
        raise UsageError(f"{url}: a worker needs a key and known_hosts", hint="…?key=FILE&known_hosts=FILE")
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
    """Return the description of its worker for the process of a slice: paths and names, nothing secret."""
    return json.dumps({"worker": worker._asdict(), "key": os.fspath(key)})


def run(folder: Path, playbook: str, seconds: float, tell: Tell) -> tuple[int, str]:
    """Run the slice in ``folder`` on its worker; return 0 or 1, and why it ended where that can't be said per host.

    ``tell`` gets each event as it comes. When this returns or raises, the worker's side has ended, or nothing was
    heard of it for longer than it lives on by itself. Raises OSError.
    """
    from ansible_runner.streaming import Processor

    description = json.loads((folder / WORKER).read_text())
    worker = Worker(**description["worker"])
    explained: list[str] = []

    def status(data: Mapping[str, Any], **_: object) -> None:
        explained.append(str(data.get("job_explanation", "")))

    with (
        _transmitted(folder / DATA, playbook, Path(description["key"])) as stream,
        (folder / "stderr").open("w+b") as err,
    ):
        beat = worker.silent_seconds / _BEATS
        with _connected(_argv(worker, seconds), stream, err, beat) as output:
            processor = Processor(
                _input=output,
                private_data_dir=os.fspath(folder / "told"),
                event_handler=tell,
                status_handler=status,
                settings={},
                quiet=True,
            )
            processor.run()
        err.seek(0)
        message = " ".join(err.read()[-_MOST:].decode("utf-8", "replace").split())
    if processor.status in _REGULAR:
        return int(processor.status != "successful"), ""
    return 1, f"worker {worker.name}: {message or ' '.join(filter(None, explained)) or processor.status}"


def _argv(worker: Worker, seconds: float) -> list[str]:
    source = Path(worker_guard.__file__).read_text(encoding="utf-8")
    command = shlex.join(
        ["exec", "python3", "-c", source, worker.runner, f"{seconds:.0f}", str(worker.silent_seconds)]
    )
    return [*worker.login, command]


@contextmanager
def _transmitted(data: Path, playbook: str, key: Path) -> Iterator[IO[bytes]]:
    """Return what ansible-runner sends to a worker. It holds the key, so it is only in memory."""
    from ansible_runner.streaming import Transmitter

    with os.fdopen(os.memfd_create("slice", os.MFD_CLOEXEC), "w+b") as stream:
        Transmitter(
            _output=stream, private_data_dir=os.fspath(data), playbook=playbook, ssh_key=key.read_text()
        ).run()
        stream.seek(0)
        yield stream


@contextmanager
def _connected(argv: Sequence[str], stream: IO[bytes], err: IO[bytes], beat: float) -> Iterator[IO[bytes]]:
    """Run a program that is given ``stream`` and then signs of life, one each ``beat`` seconds; return its output.

    It ends before this does.
    """
    over = threading.Event()
    # Both of its ends are streams meanwhile, which image_builder.system.process has no use for otherwise.
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err)
    assert child.stdin and child.stdout
    feed = threading.Thread(target=_feed, args=(child.stdin, stream, over, beat), daemon=True)
    feed.start()
    try:
        yield child.stdout
    finally:
        over.set()
        feed.join(_END_SECONDS)  # its end is the end of the worker's input
        child.stdout.close()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        feed.join()


def _feed(pipe: IO[bytes], stream: IO[bytes], over: threading.Event, beat: float) -> None:
    with suppress(BrokenPipeError):  # it ended; why, its output and its errors say
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
