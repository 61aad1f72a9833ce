"""The queue of test files that several runs of pytest share: each lane takes the next file when it is free.

The order is a pure function (``choose``) of the files, of what runs and of the lane that asks. What is taken is kept in
one file, under a lock, since the lanes are processes of their own.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Of a file that no run has timed yet.
UNKNOWN_SECONDS = 60.0
# What only one lane may do at a time: an emulated machine computes all the time, and a pool's hosts fill the memory.
BOOT, HOSTS = "boot", "hosts"


@dataclass(frozen=True)
class TestFile:
    """A file of tests: how long it took, and what it can't share.

    ``turn`` is what only one lane may use at a time ("" for nothing). A file that is ``alone`` looks at the whole
    machine: the first lane runs it before anything else, and beside it only machines are booted. One that is ``light``
    waits about half of its time or longer. ``images`` are the baked images that it needs.
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
    """A run of pytest: its place among all, and whether it takes others' files only where no light one is left."""

    number: int
    light: bool = False


@dataclass(frozen=True)
class State:
    """Files that run now, files that were run, the images that are baked by now; whether the first lane is over."""

    running: frozenset[str] = frozenset()
    ended: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()
    first_is_over: bool = False


def choose(files: Sequence[TestFile], state: State, lane: Lane) -> TestFile | None:
    """Return the file that a lane takes next; None where it has to wait, or where nothing is left for it."""
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
        # An emulated machine computes all the time: it is for the lanes that do.
        others = [file for file in waiting if file.turn != BOOT]
        waiting = [file for file in waiting if file.light] or others
    # An image that another lane is baking would only be waited for.
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
    """Return whether no lane need wait: whatever there was is taken."""
    return all(file.name in state.running | state.ended for file in files)


@dataclass
class _Record:
    """What all lanes have noted: who took which file, which were run, which images there are."""

    taken: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    first_is_over: bool = False

    def state(self) -> State:
        """Return it as of now: a file has ended, too, if the process that took it has."""
        ended = {name for name, pid in self.taken.items() if name in self.ended or not _is_alive(pid)}
        images = frozenset(self.images)
        return State(frozenset(self.taken) - ended, frozenset(ended), images, self.first_is_over)


class Queue:
    """What several processes take files from, kept in a directory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "queue.json"

    def take(self, files: Sequence[TestFile], lane: Lane) -> tuple[TestFile | None, bool]:
        """Take the next file for a lane: None where there is none now; also return whether none will come any more."""
        with self._record() as record:
            state = record.state()
            chosen = choose(files, state, lane)
            if chosen:
                record.taken[chosen.name] = os.getpid()
            return chosen, not chosen and is_exhausted(files, state)

    def end(self, name: str) -> None:
        """Note that a file was run."""
        with self._record() as record:
            record.ended.append(name)

    def have_image(self, name: str) -> None:
        """Note that an image is baked."""
        with self._record() as record:
            record.images.append(name)

    def end_first_lane(self) -> None:
        """Note that the first lane is over, however it ended: nobody waits for what it alone should have run."""
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
        # One that has ended and that nobody has waited for has no command line any more.
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
