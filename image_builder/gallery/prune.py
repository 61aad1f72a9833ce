"""Which versions may be deleted, and what forbids it for the others. Pure: the proof is what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from image_builder.canonical import JSON
from image_builder.gallery.uses import LATEST, Use
from image_builder.gallery.versions import Version


@dataclass(frozen=True)
class Verdict:
    """A version, and every reason to keep it; without any it is proven unused."""

    version: Version
    reasons: tuple[str, ...]

    @property
    def is_unused(self) -> bool:
        return not self.reasons

    def as_json(self) -> dict[str, JSON]:
        return {"version": self.version.name, "unused": self.is_unused, "reasons": list(self.reasons)}


def judge(versions: Sequence[Version], uses: Sequence[Use], now: datetime) -> list[Verdict]:
    """Return a verdict on each of a definition's versions, which are in order, the newest first."""
    return [
        Verdict(version, tuple(_reasons(version, is_newest=number == 0, uses=uses, now=now)))
        for number, version in enumerate(versions)
    ]


def _reasons(version: Version, *, is_newest: bool, uses: Sequence[Use], now: datetime) -> list[str]:
    reasons = []
    if not version.build:
        reasons.append("it wasn't published by image-builder")
    if is_newest:
        reasons.append("it is the newest")
    if version.in_latest:
        reasons.append("it is in latest")
    if not version.end_of_life:
        reasons.append("it has no end of life")
    elif datetime.fromisoformat(version.end_of_life) > now:
        reasons.append(f"its life ends {version.end_of_life[:10]}")
    for use in uses:
        owner = use.owner.rsplit("/", 1)[1]
        if use.version == version.name:
            reasons.append(
                f"{owner} has it as its model"
                if use.kind == "model"
                else f"{use.machines} machines of {owner} run it"
            )
        elif use.version == LATEST and version.in_latest:
            reasons.append(f"{owner} takes whatever is latest")
    return reasons
