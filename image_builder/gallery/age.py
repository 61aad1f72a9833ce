"""The age of the versions that machines run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from image_builder.canonical import JSON
from image_builder.gallery.packages import Behind
from image_builder.gallery.uses import Use
from image_builder.gallery.versions import Version


@dataclass(frozen=True)
class Age:
    """Machines of an owner that run a version; ``days`` since it was published, -1 if unknown.

    ``behind`` lists packages that have newer versions. ``problem`` says what is wrong, or is empty.
    """

    owner: str
    version: str
    machines: int
    days: int
    problem: str
    behind: tuple[str, ...] = ()

    def as_json(self) -> dict[str, JSON]:
        return asdict(self) | {"behind": list(self.behind)}


def ages(
    versions: Sequence[Version],
    uses: Sequence[Use],
    now: datetime,
    longest: int,
    behind: Callable[[Version], Behind] = lambda _: Behind(),
) -> list[Age]:
    """Return the age of what machines run, unknown ages first, then the oldest; ``longest`` is in days.

    ``behind`` compares a version's packages with today's.
    """
    known = {version.name: version for version in versions}
    run = {use.version for use in uses if use.kind == "machines"}
    compared = {name: behind(version) for name, version in known.items() if name in run}
    table = [
        _age(known.get(use.version), compared.get(use.version, Behind()), use, now, longest)
        for use in uses
        if use.kind == "machines"
    ]
    return sorted(table, key=lambda age: (-age.days if age.days >= 0 else float("-inf"), age.owner))


def _age(version: Version | None, behind: Behind, use: Use, now: datetime, longest: int) -> Age:
    problem, days = "", -1
    if version is None:
        problem = "the gallery has no such version"
    elif not version.published:
        problem = "its publication date is unknown"
    else:
        days = (now - datetime.fromisoformat(version.published)).days
        if version.withdrawn:
            problem = f"withdrawn: {version.withdrawn}"
        elif version.end_of_life and datetime.fromisoformat(version.end_of_life) <= now:
            problem = f"its life ended {version.end_of_life[:10]}"
        elif days > longest:
            problem = f"older than {longest} days"
    owner, problem = use.owner.rsplit("/", 1)[1], "; ".join(filter(None, (problem, str(behind))))
    return Age(owner, use.version, use.machines, days, problem, behind.packages)
