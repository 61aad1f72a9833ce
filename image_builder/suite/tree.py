"""A target's root filesystem as find lists it, with the queries that checks need.

Few of the many entries are ever looked at, so an ``Entry`` is created only on request.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from testinfra.host import Host

# The links to units that another unit pulls in.
_PULLED_IN = r"/(etc|usr/lib)/systemd/system/[^/]+\.(wants|requires|upholds)/[^/]+"
# Four fields per entry; a path or a link may contain anything but NUL.
_PRINTED = r"'%y%Y %m %U %G\0%s\0%p\0%l\0'"
_FEWEST = 1000


class Status(NamedTuple):
    """What many entries share: ``kind`` is find's %y, ``points_to`` that of a link's target (N: missing, L: loop)."""

    kind: str
    points_to: str
    mode: int
    uid: int
    gid: int


class Entry(NamedTuple):
    """One entry; the first fields after its path are its Status."""

    path: str
    kind: str
    points_to: str
    mode: int
    uid: int
    gid: int
    size: int
    link: str


class Tree:
    """Every entry of the root filesystem, by path."""

    def __init__(self, printed: bytes) -> None:
        """Parse find's output in the format of ``read``. Raises AssertionError if it can't be a whole system."""
        fields = os.fsdecode(printed).split("\0")[:-1]
        self._statuses, self._sizes, paths, self._links = (fields[n::4] for n in range(4))
        self._rows = dict(zip(paths, range(len(paths)), strict=True))
        assert len(self._rows) > _FEWEST, f"find saw only {len(self._rows)} files"

    @classmethod
    def read(cls, host: Host, containers: Iterable[str] = ()) -> Tree:
        """List the target's root filesystem, without other mounts.

        ``containers`` are directories whose contents belong to running containers and aren't listed.
        """
        patterns = " -o ".join(f"-path '{folder}/*'" for folder in containers)
        pruning = rf" \( {patterns} \) -prune -o" if patterns else ""
        listed = host.run(f"find / -ignore_readdir_race -xdev{pruning} -printf {_PRINTED}")
        assert listed.rc == 0, f"find failed: {listed.stderr}"
        return cls(listed.stdout_bytes)

    def __contains__(self, path: str) -> bool:
        return path in self._rows

    def __getitem__(self, path: str) -> Entry:
        entry = self.get(path)
        assert entry, f"{path} does not exist"
        return entry

    def get(self, path: str) -> Entry | None:
        """Return an entry, or None if it doesn't exist."""
        row = self._rows.get(path)
        if row is None:
            return None
        return Entry(path, *_status(self._statuses[row]), int(self._sizes[row]), self._links[row])

    def below(self, *folders: str) -> Iterator[str]:
        """Yield the paths below the folders, without the folders themselves, in order."""
        starts = tuple(f"{folder.rstrip('/')}/" for folder in folders)
        return (path for path in self._paths if path.startswith(starts))

    def under(self, *folders: str) -> Iterator[Entry]:
        """Yield the entries below the folders, without the folders themselves, in order."""
        return (self[path] for path in self.below(*folders))

    def matching(self, pattern: str, *, having: str = "") -> list[str]:
        """Return the paths that a regular expression fully matches, in order.

        ``having`` is a string that every match contains: looking for it first takes a hundredth of the work.
        """
        match = re.compile(pattern, re.DOTALL).fullmatch
        return [path for path in self._paths if having in path and match(path)]

    def where(self, condition: Callable[[Status], bool], *folders: str) -> list[Entry]:
        """Return the entries whose status meets a condition, in order; if folders are given, only those below them."""
        starts = tuple(f"{folder.rstrip('/')}/" for folder in folders) or ("",)
        chosen = {status for status in self._by_status if condition(_status(status))}
        paths = (path for status in chosen for path in self._by_status[status])
        return [self[path] for path in sorted(path for path in paths if path.startswith(starts))]

    def without(self, folder: str, paths: Collection[str]) -> list[str]:
        """Return the paths below a folder that aren't among the given ones, in order."""
        return [path for path in self.below(folder) if path not in paths]

    @cached_property
    def pulled_in(self) -> frozenset[str]:
        """The systemd units that another unit pulls in, by name."""
        return frozenset(
            path.rpartition("/")[2] for path in self.matching(_PULLED_IN, having="/systemd/system/")
        )

    @cached_property
    def _paths(self) -> list[str]:
        return sorted(self._rows)

    @cached_property
    def _by_status(self) -> dict[str, list[str]]:
        """The paths by status; there are few different ones."""
        paths: dict[str, list[str]] = {status: [] for status in self._statuses}
        for path, status in zip(self._rows, self._statuses, strict=True):
            paths[status].append(path)
        return paths


def _status(printed: str) -> Status:
    kinds, mode, uid, gid = printed.split(" ")
    return Status(kinds[0], kinds[1], int(mode, 8), int(uid), int(gid))
