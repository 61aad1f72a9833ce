"""The reasons why a stage will run: what differs from the last time its image was built."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.bake.plan.model import Plan, value_digests
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
    options: dict[str, Any] = dict(now["options"])  # type: ignore[arg-type]
    earlier: dict[str, Any] = dict(before.get("options", {}))
    reported: dict[str, str] = {}
    for part in ("variables", "values"):  # as the inventory has them; and as roles' templates evaluate them
        reported = _changed_values(options.pop(part, {}), earlier.pop(part, {})) | reported
    yield from reported.values()
    yield from _differences("file", _flat(now["code"]), _flat(before.get("code", {})))
    yield from _differences("option", _flat(options), _flat(earlier))
    if list(now["lowers"]) != list(before.get("lowers", [])):  # type: ignore[arg-type]
        yield "below: a stage that it stands on changed"
    if _flat(now["inputs"]) != _flat(before.get("inputs", {})):
        yield "below: a stage whose product it uses changed"


def _changed_values(now: Mapping[str, str], before: Mapping[str, JSON]) -> dict[str, str]:
    """Return a sentence for each variable whose digest differs. Records of earlier versions have the values."""
    of_values, changes = value_digests(before), {}
    for name in sorted(now.keys() | before.keys()):
        if name not in before:
            changes[name] = f"variable {name} is new"
        elif name not in now:
            changes[name] = f"variable {name} is gone"
        elif now[name] not in (before[name], of_values[name]):
            changes[name] = f"variable {name} changed"
    return changes


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
