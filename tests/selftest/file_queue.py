"""The queue of test files that several runs of pytest share: each lane takes the next file when it is free.

The order is a pure function (``choose``) of the files, the state of all lanes and the asking lane. The state is kept in
a file, under a lock, since each lane is a separate process.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# For a file that no run has timed yet.
UNKNOWN_SECONDS = 60.0
# What only one lane may do at a time: an emulated machine occupies a processor, and a pool's hosts fill the memory.
BOOT, HOSTS = "boot", "hosts"


@dataclass(frozen=True)
class TestFile:
    """A test file: how long it took, and what it can't share.

    ``turn`` is what only one lane may do at a time ("" for nothing). A file that is ``alone`` inspects the whole
    machine: the first lane runs it before anything else, while other lanes only boot machines. A file that is ``light``
    waits for at least half of its time. ``images`` are the baked images that it needs.
    """

    __test__ = False  # pytest would collect it by its name

    name: str
    seconds: float = UNKNOWN_SECONDS
    turn: str = ""
    alone: bool = False
    light: bool = False
    images: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Lane:
    """A run of pytest: its number, and whether it prefers light files, taking others only when no light one is left."""

    number: int
    light: bool = False


@dataclass(frozen=True)
class State:
    """The running files, those that have ended, the images baked so far, and whether the first lane has ended."""

    running: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()
    first_is_over: bool = False


def choose(files: Sequence[TestFile], state: State, lane: Lane) -> TestFile | None:
    """Return the file that a lane takes next; None if it has to wait, or if nothing is left for it."""
    running = [file for file in files if file.name in state.running]
    waiting = [file for file in files if file.name not in state.running | state.ended]
    alone = [file for file in (*running, *waiting) if file.alone]
    if alone and not state.first_is_over:
        if lane.number == 0:
            return next((file for file in alone if file in waiting), None)
        waiting = [file for file in waiting if file.turn == BOOT]
    turns = {file.turn for file in running if file.turn}
    waiting = [file for file in waiting if file.turn not in turns]
    if lane.light:
        # An emulated machine occupies a processor, so it isn't for the light lanes.
        others = [file for file in waiting if file.turn != BOOT]
        waiting = [file for file in waiting if file.light] or others
    # This lane would only wait for an image that another lane is baking.
    baked = state.images.union(*(file.images for file in files if file.name in state.ended))
    baking = frozenset().union(*(file.images for file in running)) - baked
    return min(
        waiting,
        key=lambda file: (
            bool(file.images & baking),
            file.light,
            file.turn != BOOT,
            -file.seconds,
            file.name,
        ),
        default=None,
    )


def is_exhausted(files: Sequence[TestFile], state: State) -> bool:
    """Return whether no lane needs to wait, since every file has been taken."""
    return all(file.name in state.running | state.ended for file in files)


@dataclass
class _Record:
    """The notes of all lanes: which process took which file, which files have ended, which images exist."""

    taken: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    first_is_over: bool = False

    def state(self) -> State:
        """Return the current state: a file has also ended if the process that took it is gone."""
        ended = {name for name, pid in self.taken.items() if name in self.ended or not _is_alive(pid)}
        images = frozenset(self.images)
        return State(frozenset(self.taken) - ended, frozenset(ended), images, self.first_is_over)


class Queue:
    """A queue of files that several processes share, kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "queue.json"

    def take(self, files: Sequence[TestFile], lane: Lane) -> tuple[TestFile | None, bool]:
        """Take the next file for a lane, None if there is none now; also return whether the queue is exhausted."""
        with self._record() as record:
            state = record.state()
            chosen = choose(files, state, lane)
            if chosen:
                record.taken[chosen.name] = os.getpid()
            return chosen, not chosen and is_exhausted(files, state)

    def end(self, name: str) -> None:
        """Record that a file has ended."""
        with self._record() as record:
            record.ended.append(name)

    def have_image(self, name: str) -> None:
        """Record that an image is baked."""
        with self._record() as record:
            record.images.append(name)

    def end_first_lane(self) -> None:
        """Record that the first lane has ended, even if it failed: others don't wait for files that only it runs."""
        with self._record() as record:
            record.first_is_over = True

    @contextmanager
    def _record(self) -> Iterator[_Record]:
        with self._path.open("a+", encoding="utf-8") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.seek(0)
            record = _Record(**json.loads(stream.read() or "{}"))
            yield record
            stream.truncate(0)
            json.dump(asdict(record), stream)


def _is_alive(pid: int) -> bool:
    try:
        # A zombie has no command line.
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
