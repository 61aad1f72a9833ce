"""A target's root filesystem as find lists it, and what checks ask it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property, partial

from alike import alike
from listing import PRINTED, Entry, Listing, Status
from testinfra.host import Host

# Where a unit is linked that another one pulls in.
_PULLED_IN = r"/(etc|usr/lib)/systemd/system/[^/]+\.(wants|requires|upholds)/[^/]+"
# Nine tenths of all, which machines of an image have in common.
_ALIKE = "/usr"


class Tree:
    """Every entry of the root filesystem, by path."""

    def __init__(self, *listings: Listing) -> None:
        """Take listings that have no path in common; an assertion fails where they can't be a whole system."""
        self._listings = listings
        count = sum(map(len, listings))
        assert count > 1000, f"find saw only {count} files"

    @classmethod
    def read(cls, host: Host, containers: Iterable[str] = ()) -> Tree:
        """List the target's root filesystem, other mounts excepted.

        ``containers`` are directories whose content belongs to running containers: it is not listed.
        """
        done = host.run(_find("/", _ALIKE, *(f"{folder}/*" for folder in containers)))
        assert done.rc == 0, f"find failed: {done.stderr}"
        return cls(Listing(done.stdout_bytes), alike(host, _find(_ALIKE), Listing))

    def __contains__(self, path: str) -> bool:
        return any(path in listing for listing in self._listings)

    def __getitem__(self, path: str) -> Entry:
        entry = self.get(path)
        assert entry, f"{path} does not exist"
        return entry

    def get(self, path: str) -> Entry | None:
        """Return an entry, or nothing where there is none."""
        return next((listing[path] for listing in self._listings if path in listing), None)

    def below(self, *folders: str) -> Iterator[str]:
        """Yield the paths below the folders, not the folders' own."""
        for start in (f"{folder.rstrip('/')}/" for folder in folders):
            yield from self._each(partial(Listing.beginning, start=start))

    def under(self, *folders: str) -> Iterator[Entry]:
        """Yield what lies below the folders, not the folders themselves."""
        return (self[path] for path in self.below(*folders))

    def matching(self, pattern: str, *, having: str = "") -> list[str]:
        """Return the paths that a regular expression matches as a whole, in order.

        ``having`` is what each match has somewhere: to look for that first is a hundredth of the work.
        """
        return self._each(lambda listing: listing.matching(pattern, having))

    def where(self, condition: Callable[[Status], bool], *folders: str) -> list[Entry]:
        """Return the entries whose status fulfils a condition, in order; only those below the folders, if any."""
        starts = tuple(f"{folder.rstrip('/')}/" for folder in folders) or ("",)
        found = self._each(lambda listing: [p for p in listing.where(condition) if p.startswith(starts)])
        return [self[path] for path in found]

    def without(self, folder: str, paths: Collection[str]) -> list[str]:
        """Return the paths below a folder that are not among others, in order."""
        start = f"{folder.rstrip('/')}/"
        return self._each(lambda listing: [p for p in listing.without(paths) if p.startswith(start)])

    @cached_property
    def pulled_in(self) -> frozenset[str]:
        """The systemd units that another unit pulls in, by name."""
        return frozenset(path.rpartition("/")[2] for path in self.matching(_PULLED_IN))

    def _each(self, ask: Callable[[Listing], Iterable[str]]) -> list[str]:
        """Return what each listing answers, in order."""
        return sorted(path for listing in self._listings for path in ask(listing))


def _find(folder: str, *pruned: str) -> str:
    """Return the command that lists a folder, but not what fits one of some patterns."""
    # So that each entry is compared and no more: a negation of each costs twice the rest.
    but = " -o ".join(f"-path '{pattern}'" for pattern in pruned)
    pruning = rf" \( {but} \) -prune -o" if but else ""
    return f"find {folder} -ignore_readdir_race -xdev{pruning} -printf {PRINTED}"
