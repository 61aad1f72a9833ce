"""One listing of a target's root filesystem, and what checks ask it.

It has some ten thousand entries, and hundreds of machines are looked at at once: what few checks ask of few entries is
worked out when they ask, and nothing is done for each entry that can be done for all of them by one call.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from beginnings import beginnings
from testinfra.host import Host


class Status(NamedTuple):
    """What many entries share: ``kind`` as find has it (%y), ``points_to`` a link's target's (N: nothing, L: loop)."""

    kind: str
    points_to: str
    mode: int
    uid: int
    gid: int


class Entry(NamedTuple):
    """One file; the first fields after its path are its Status."""

    path: str
    kind: str
    points_to: str
    mode: int
    uid: int
    gid: int
    size: int
    link: str


# Of each entry four fields; a path or a link may have anything in it but NUL.
_PRINTED = r"'%y%Y %m %U %G\0%s\0%p\0%l\0'"
# Where a unit is linked that another one pulls in.
_PULLED_IN = r"/(etc|usr/lib)/systemd/system/[^/]+\.(wants|requires|upholds)/[^/]+"


class Tree:
    """Every entry of the root filesystem, by path."""

    def __init__(self, listing: bytes) -> None:
        """Take what find prints by ``_PRINTED``; an assertion fails where that can't be a whole system."""
        fields = os.fsdecode(listing).split("\0")[:-1]
        self._statuses, self._sizes, self._printed, self._links = (fields[n::4] for n in range(4))
        self._rows = dict(zip(self._printed, range(len(self._links)), strict=True))
        assert len(self._rows) > 1000, f"find saw only {len(self._rows)} files"

    @classmethod
    def read(cls, host: Host, containers: Iterable[str] = ()) -> Tree:
        """List the target's root filesystem, other mounts excepted.

        ``containers`` are directories whose content belongs to running containers: it is not listed.
        """
        pruned = "".join(rf" -not \( -path '{path}/*' -prune \)" for path in containers)
        # In large pieces: each is a packet, for which both sides do more than for what is in it.
        done = host.run(f"stdbuf -o 64K find / -ignore_readdir_race -xdev{pruned} -printf {_PRINTED}")
        assert done.rc == 0, f"find failed: {done.stderr}"
        return cls(done.stdout_bytes)

    def __contains__(self, path: str) -> bool:
        return path in self._rows

    def __getitem__(self, path: str) -> Entry:
        assert path in self._rows, f"{path} does not exist"
        row = self._rows[path]
        return Entry(path, *_status(self._statuses[row]), int(self._sizes[row]), self._links[row])

    def get(self, path: str) -> Entry | None:
        """Return an entry, or nothing where there is none."""
        return self[path] if path in self._rows else None

    def below(self, *folders: str) -> Iterator[str]:
        """Yield the paths below the folders, not the folders' own."""
        return (path for folder in folders for path in self._beginning(f"{folder.rstrip('/')}/"))

    def under(self, *folders: str) -> Iterator[Entry]:
        """Yield what lies below the folders, not the folders themselves."""
        return (self[path] for path in self.below(*folders))

    def matching(self, pattern: str, *, having: str = "") -> list[str]:
        """Return the paths that a regular expression matches as a whole, in order.

        ``having`` is what each match has somewhere: to look for that first is a hundredth of the work.
        """
        match = re.compile(pattern, re.DOTALL).fullmatch
        found = [self._having(having)] if having else map(self._beginning, beginnings(pattern))
        return [path for paths in found for path in paths if match(path)]

    def where(self, condition: Callable[[Status], bool], *folders: str) -> list[Entry]:
        """Return the entries whose status fulfils a condition, in order; only those below the folders, if any."""
        starts = tuple(f"{folder.rstrip('/')}/" for folder in folders) or ("",)
        wanted = {status for status in self._kinds if condition(_status(status))}
        paths = compress(self._printed, map(wanted.__contains__, self._statuses))
        return [self[path] for path in sorted(path for path in paths if path.startswith(starts))]

    @cached_property
    def pulled_in(self) -> frozenset[str]:
        """The systemd units that another unit pulls in, by name."""
        return frozenset(path.rpartition("/")[2] for path in self.matching(_PULLED_IN))

    @cached_property
    def _kinds(self) -> frozenset[str]:
        """Each status that some entry has, of which there are few."""
        return frozenset(self._statuses)

    @cached_property
    def _paths(self) -> list[str]:
        return sorted(self._rows)

    @cached_property
    def _text(self) -> str:
        """All paths in their order, each between two NULs."""
        return "\0".join(["", *self._paths, ""])

    def _having(self, part: str) -> Iterator[str]:
        """Yield the paths with a text somewhere in them, in order."""
        at = self._text.find(part)
        while at >= 0:
            end = self._text.index("\0", at)
            yield self._text[self._text.rindex("\0", 0, at) + 1 : end]
            at = self._text.find(part, end)

    def _beginning(self, start: str) -> list[str]:
        """Return the paths that begin so, in order."""
        paths = self._paths
        if not start:
            return paths
        end = start[:-1] + chr(ord(start[-1]) + 1)
        return paths[bisect_left(paths, start) : bisect_left(paths, end)]


def _status(printed: str) -> Status:
    kinds, mode, uid, gid = printed.split(" ")
    return Status(kinds[0], kinds[1], int(mode, 8), int(uid), int(gid))
