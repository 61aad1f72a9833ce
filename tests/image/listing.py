"""What find has listed: many entries, of which few are ever looked at.

What checks ask of few entries is worked out when they ask, and nothing is done for each entry that can be done for all
of them by one call. The answers stay: a listing may be that of many machines.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from beginnings import beginnings


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
PRINTED = r"'%y%Y %m %U %G\0%s\0%p\0%l\0'"


class Listing:
    """Some entries, by path."""

    def __init__(self, printed: bytes) -> None:
        """Take what find prints by ``PRINTED``."""
        fields = os.fsdecode(printed).split("\0")[:-1]
        self._statuses, self._sizes, paths, self._links = (fields[n::4] for n in range(4))
        self._rows = dict(zip(paths, range(len(self._links)), strict=True))
        self._matched: dict[tuple[str, str], list[str]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, path: str) -> bool:
        return path in self._rows

    def __getitem__(self, path: str) -> Entry:
        row = self._rows[path]
        return Entry(path, *_status(self._statuses[row]), int(self._sizes[row]), self._links[row])

    def beginning(self, start: str) -> list[str]:
        """Return the paths that begin so, in order."""
        paths = self._paths
        if not start:
            return paths
        end = start[:-1] + chr(ord(start[-1]) + 1)
        return paths[bisect_left(paths, start) : bisect_left(paths, end)]

    def matching(self, pattern: str, having: str) -> list[str]:
        """Return the paths that a regular expression matches as a whole; ``having`` as ``Tree.matching`` has it."""
        key = (pattern, having)
        if key not in self._matched:
            match = re.compile(pattern, re.DOTALL).fullmatch
            found = [self._having(having)] if having else map(self.beginning, beginnings(pattern))
            self._matched[key] = [path for paths in found for path in paths if match(path)]
        return self._matched[key]

    def where(self, condition: Callable[[Status], bool]) -> Iterator[str]:
        """Yield the paths of the entries whose status fulfils a condition."""
        for status, paths in self._by_status.items():
            if condition(status):
                yield from paths

    def without(self, paths: Collection[str]) -> Iterable[str]:
        """Return the paths that are not among others."""
        return self._rows.keys() - paths

    @cached_property
    def _by_status(self) -> dict[Status, list[str]]:
        """The paths of each status that some entry has, of which there are few."""
        paths: dict[str, list[str]] = {status: [] for status in self._statuses}
        for path, status in zip(self._rows, self._statuses, strict=True):
            paths[status].append(path)
        return {_status(status): found for status, found in paths.items()}

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


def _status(printed: str) -> Status:
    kinds, mode, uid, gid = printed.split(" ")
    return Status(kinds[0], kinds[1], int(mode, 8), int(uid), int(gid))
