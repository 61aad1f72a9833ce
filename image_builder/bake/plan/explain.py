"""The reasons why a stage will run: what differs from the last time its image was built."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.bake.plan.model import Plan
from image_builder.canonical import JSON


@dataclass(frozen=True)
class Reason:
    """Why ``stage`` has a different id than before. ``changes`` are sentences, most informative first."""

    stage: str
    changes: tuple[str, ...]


def explain(
    plan: Plan, previous: Mapping[str, Mapping[str, Any]], stored: Collection[str] = ()
) -> list[Reason]:
    """Compare a plan with the parts of the previous build's stages (name -> parts), stage by stage.

    ``stored`` are the ids of stages that already exist, made for another image or by a build that failed later.
    """
    reasons = []
    for stage in plan.stages:
        before = previous.get(stage.name)
        if before is None:
            if stage.id not in stored:
                reasons.append(Reason(stage.name, ("it was never built before",)))
            continue
        changes = list(_changes(stage.parts, before))
        if changes:
            # A change below is reported for the stage that changed; here it is only named if there is nothing else.
            own = [c for c in changes if not c.startswith("below: ")]
            reasons.append(Reason(stage.name, tuple(own or changes[:1])))
    return reasons


def _changes(now: Mapping[str, JSON], before: Mapping[str, Any]) -> Iterator[str]:
    for part, shown in (("code", "file"), ("options", "option")):
        yield from _differences(shown, _flat(now[part]), _flat(before.get(part, {})))
    if list(now["lowers"]) != list(before.get("lowers", [])):  # type: ignore[arg-type]
        yield "below: a stage that it stands on changed"
    if _flat(now["inputs"]) != _flat(before.get("inputs", {})):
        yield "below: a stage whose product it uses changed"


def _differences(shown: str, now: Mapping[str, JSON], before: Mapping[str, JSON]) -> Iterator[str]:
    for key in sorted(now.keys() | before.keys()):
        if key not in before:
            yield f"{shown} {key} is new"
        elif key not in now:
            yield f"{shown} {key} is gone"
        elif now[key] != before[key]:
            if shown == "file":
                yield f"file {key} changed"
            else:
                yield f"option {key} changed: {_short(before[key])} -> {_short(now[key])}"


def _flat(value: JSON, prefix: str = "") -> dict[str, JSON]:
    """Flatten nested mappings to dotted keys; lists count as one value."""
    if not isinstance(value, Mapping):
        return {prefix: list(value) if isinstance(value, (list, tuple)) else value}
    flat: dict[str, JSON] = {}
    for key, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{key}" if prefix else key))
    return flat


def _short(value: JSON) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
