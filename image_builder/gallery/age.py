"""How old the versions are that machines run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime

from image_builder.canonical import JSON
from image_builder.gallery.uses import Use
from image_builder.gallery.versions import Version


@dataclass(frozen=True)
class Age:
    """Machines of an owner that run a version; ``days`` since it was published, -1 where nobody knows.

    ``problem`` says what is wrong with that, or nothing.
    """

    owner: str
    version: str
    machines: int
    days: int
    problem: str

    def as_json(self) -> dict[str, JSON]:
        return asdict(self)


def ages(versions: Sequence[Version], uses: Sequence[Use], now: datetime, longest: int) -> list[Age]:
    """Return the age of what machines run, the oldest first; ``longest`` is in days."""
    known = {version.name: version for version in versions}
    table = [_age(known.get(use.version), use, now, longest) for use in uses if use.kind == "machines"]
    return sorted(table, key=lambda age: (-age.days if age.days >= 0 else float("-inf"), age.owner))


def _age(version: Version | None, use: Use, now: datetime, longest: int) -> Age:
    problem, days = "", -1
    if version is None:
        problem = "the gallery has no such version"
    elif not version.published:
        problem = "nobody knows when it was published"
    else:
        days = (now - datetime.fromisoformat(version.published)).days
        if version.withdrawn:
            problem = f"withdrawn: {version.withdrawn}"
        elif version.end_of_life and datetime.fromisoformat(version.end_of_life) <= now:
            problem = f"its life ended {version.end_of_life[:10]}"
        elif days > longest:
            problem = f"older than {longest} days"
    return Age(use.owner.rsplit("/", 1)[1], use.version, use.machines, days, problem)
