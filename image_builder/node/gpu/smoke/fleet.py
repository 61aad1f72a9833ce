"""The workers: a process per GPU, all in parallel, each with a deadline.

A CUDA call can hang out of reach of any signal, so a worker is killed at its deadline, and one that survives SIGKILL
is abandoned: both are findings about that GPU. A worker's output is validated before it counts.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import IO, TypeVar

from image_builder.node.child import PIPE, Child
from image_builder.node.decode import decode
from image_builder.node.gpu.model import Measurement, Tier, Worker
from image_builder.node.gpu.smoke import program

OUTPUT_BYTES = 1 << 20  # more than any worker prints
ERROR_BYTES = 4096  # the end of standard error
REAP_SECONDS = 5.0
# Reserved for the links between GPUs: a GPU that hangs must not use up the time for the other GPUs' links.
LINKS_SECONDS = 15.0
TICK_SECONDS = 0.5
_POLL_SECONDS = 0.1
_EXCERPT = 300  # characters of standard error in an outcome

_Line = TypeVar("_Line", Measurement, Worker)
Argv = Callable[[str, Tier, int, Sequence[str]], list[str]]


@dataclass(frozen=True)
class Ended:
    """The end of a process: its status (negative: a signal, None: still running), and why it was killed."""

    status: int | None
    late: bool = False
    flooded: bool = False


def judge(uuid: str, output: bytes, errors: bytes, ended: Ended) -> Worker:
    """Return the outcome of one GPU's process, with everything that it measured."""
    measured, summary, complaint = _read(uuid, output)
    ending = _outcome(errors, ended) or complaint
    if summary is None:
        return Worker(uuid, ending or "error: it ended without a summary", measured)
    return replace(summary, ended=ending or summary.ended, measurements=measured)


def _outcome(errors: bytes, ended: Ended) -> str:
    """Return what is wrong with the way a process ended, or an empty string."""
    if ended.status is None:
        return "hung: unkillable"
    if ended.late:
        return "killed: deadline"
    if ended.flooded:
        return f"error: more than {OUTPUT_BYTES} bytes of output"
    if ended.status < 0:
        return f"crashed: signal {-ended.status}"
    if ended.status:
        complaint = " ".join(errors.decode(errors="replace").split())[-_EXCERPT:]
        return f"error: exit status {ended.status}: {complaint or '(no output)'}"
    return ""


def _read(uuid: str, output: bytes) -> tuple[tuple[Measurement, ...], Worker | None, str]:
    """Return the measurements, the summary, and what is wrong with the first line that is neither."""
    measured: list[Measurement] = []
    summary = None
    lines = output.split(b"\n")
    rest = lines.pop()  # what follows the last newline: nothing, or half a line
    for number, line in enumerate(lines, 1):
        try:
            if summary is not None:
                raise ValueError("it follows the summary")
            value = json.loads(line, parse_constant=_finite, parse_float=_finite)
            if isinstance(value, dict) and "ended" in value:
                summary = _own(uuid, decode(Worker, value))
            else:
                measured.append(_own(uuid, decode(Measurement, value)))
        except (ValueError, RecursionError) as error:
            return tuple(measured), None, f"error: line {number} is not a worker's: {error}"[:_EXCERPT]
    complaint = f"error: line {len(lines) + 1} is cut off" if rest else ""
    return tuple(measured), summary, complaint


def _own(uuid: str, line: _Line) -> _Line:
    if line.gpu != uuid:
        raise ValueError(f"it is about {line.gpu}")
    return line


def _finite(word: str) -> float:
    """Return a measurement's number. Raises ValueError if it isn't finite."""
    if not math.isfinite(value := float(word)):
        raise ValueError(f"{word} is not a finite number")
    return value


# -- processes -------------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A running worker. ``output`` and ``errors`` are what its two pipes have delivered so far."""

    uuid: str
    process: Child
    end: float
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    killed_at: float | None = None
    late: bool = False

    @property
    def flooded(self) -> bool:
        return len(self.output) > OUTPUT_BYTES

    def pipes(self) -> list[IO[bytes]]:
        """Return its standard output and standard error."""
        return [pipe for pipe in (self.process.stdout, self.process.stderr) if pipe]

    def take(self, pipe: IO[bytes]) -> int | None:
        """Read what is available; return the number of bytes, 0 at the end, None if nothing is available yet."""
        try:
            data = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return None
        if pipe is self.process.stdout:
            self.output += data[: OUTPUT_BYTES + 1 - len(self.output)]
        else:
            self.errors = (self.errors + data)[-ERROR_BYTES:]
        return len(data)

    def kill(self, now: float) -> None:
        """Kill the process and everything that it started, once."""
        if self.killed_at is None:
            self.killed_at = now
            self.process.kill()


class Fleet:
    """Worker processes, each of which has ended or been abandoned by the end of the block."""

    def __init__(self, reap_seconds: float = REAP_SECONDS) -> None:
        self._reap_seconds = reap_seconds
        self._selector = selectors.DefaultSelector()
        self._running: dict[str, _Running] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self._running.values()):
            self._settle(worker, self._reap_seconds)
        self._selector.close()

    def start(self, uuid: str, argv: Sequence[str], environment: Mapping[str, str], end: float) -> None:
        """Start one GPU's process, to be killed at ``end`` on the monotonic clock. Raises OSError."""
        process = Child(
            argv,
            stdout=PIPE,
            stderr=PIPE,
            environment=environment,
            directory=program.checkout(),
            own_group=True,
        )
        worker = self._running[uuid] = _Running(uuid, process, end)
        for pipe in worker.pipes():
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, worker)

    def wait(self) -> Iterator[Worker]:
        """Yield the outcome of each process as it ends. Never waits longer than the deadline plus the reaping."""
        while self._running:
            for key, _ in self._selector.select(_POLL_SECONDS):
                if key.data.take(key.fileobj) == 0:
                    self._selector.unregister(key.fileobj)
            now = time.monotonic()
            for worker in list(self._running.values()):
                if worker.process.has_ended() or self._is_given_up(worker, now):
                    yield self._settle(worker, 0)
                elif worker.flooded:
                    worker.kill(now)
                elif now >= worker.end:
                    worker.late = True
                    worker.kill(now)

    def _is_given_up(self, worker: _Running, now: float) -> bool:
        return worker.killed_at is not None and now >= worker.killed_at + self._reap_seconds

    def _settle(self, worker: _Running, seconds: float) -> Worker:
        """Reap a process within that time, or abandon it; return its outcome."""
        del self._running[worker.uuid]
        # Kill what it left behind too, as long as its process group is still its own: until it is reaped.
        worker.process.kill()
        for pipe in worker.pipes():
            # Read only what is in the pipe now: a process that it left behind may still hold the other end.
            while not worker.flooded and worker.take(pipe):
                pass
            with suppress(KeyError):
                self._selector.unregister(pipe)
        worker.process.end(seconds)
        ended = Ended(worker.process.status, worker.late, worker.flooded)
        return judge(worker.uuid, bytes(worker.output), bytes(worker.errors), ended)


# -- the whole -------------------------------------------------------------------------------------------------


def run(
    uuids: Sequence[str],
    tier: Tier,
    seed: int,
    deadline_seconds: float,
    on_tick: Callable[[], None] = lambda: None,
    *,
    argv: Argv = program.worker_argv,
    reap_seconds: float = REAP_SECONDS,
    tick_seconds: float = TICK_SECONDS,
    links_seconds: float = LINKS_SECONDS,
) -> list[Worker]:
    """Test all GPUs in parallel, then the links between them; return each outcome, in the given order.

    ``on_tick`` is called about every ``tick_seconds``, in a thread of its own: if it hangs, it holds up nothing; if it
    raises, the error is raised here, after all workers have ended. The deadline is for the whole run; with several
    GPUs, the test of each by itself gets ``links_seconds`` less.
    """
    end = time.monotonic() + deadline_seconds
    alone = end - links_seconds if len(uuids) > 1 else end
    with _ticking(on_tick, tick_seconds), Fleet(reap_seconds) as fleet:
        workers = _round(fleet, {uuid: argv(uuid, tier, seed, ()) for uuid in uuids}, {}, alone)
        sound = [uuid for uuid in uuids if workers[uuid].ended == "done"]
        if len(sound) > 1:
            peers = {uuid: [*sound[at + 1 :], *sound[:at]] for at, uuid in enumerate(sound)}
            commands = {uuid: argv(uuid, tier, seed, peers[uuid]) for uuid in sound}
            for uuid, worker in _round(fleet, commands, peers, end).items():
                workers[uuid] = joined(workers[uuid], worker, seed)
    return [workers[uuid] for uuid in uuids]


def _round(
    fleet: Fleet, commands: Mapping[str, list[str]], peers: Mapping[str, Sequence[str]], end: float
) -> dict[str, Worker]:
    """Start all processes and return their outcomes."""
    workers: dict[str, Worker] = {}
    for uuid, argv in commands.items():
        try:
            fleet.start(uuid, argv, program.environment(uuid, peers.get(uuid, ())), end)
        except OSError as error:
            workers[uuid] = Worker(uuid, f"error: could not be started: {error}")
    for worker in fleet.wait():
        workers[worker.gpu] = worker
    return workers


def joined(first: Worker, links: Worker, seed: int) -> Worker:
    """Return a GPU's outcome with the links that its second worker measured."""
    if links.ended == "done":
        return replace(first, measurements=first.measurements + links.measurements)
    detail = f"the process that tried the links: {links.ended}"[:_EXCERPT]
    failed = Measurement("bw.p2p", first.gpu, "error", None, "GB/s", detail, seed)
    return replace(first, ended=links.ended, measurements=(*first.measurements, failed))


@contextmanager
def _ticking(on_tick: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call a function every few seconds until the block ends; then raise what it raised."""
    over, raised = threading.Event(), list[BaseException]()

    def ticks() -> None:
        try:
            on_tick()
            while not over.wait(seconds):
                on_tick()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=ticks, daemon=True, name="gpu-ticks")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(seconds)
    if raised:
        raise raised[0]
