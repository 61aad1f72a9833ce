"""A node in quarantine: the taint that keeps work off it, and the annotation that says why, and how far its remedy is.

One request sets both, and one removes both, along with our cordon if a drain has set one. Pure, on a Node object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from image_builder.drain import fence
from image_builder.text import stamp

TAINT = MARK = "image-builder/quarantine"
# The owner of the gate's cordons (``fence.Record.run``).
RUN = "gate"

# What is done to a node: no work is put on it; it is emptied; then a person or another program is asked for more.
Remedy = Literal["taint", "drain", "reboot", "reimage", "hand-over"]
ASKING: tuple[Remedy, ...] = ("reboot", "reimage", "hand-over")
# What a person or another program is to do.
WANTED = {
    "reboot": "reboot it",
    "reimage": "reimage it",
    "hand-over": "return its machine to the platform",
}
# ``out``: it takes no more work. ``empty``: nor has it any. ``asked``: its remedy was requested. ``sent``: the request
# for it has been sent to Azure, or is about to be.
Stage = Literal["out", "empty", "asked", "sent"]
_LABEL_VALUE = re.compile(r"[^-A-Za-z0-9_.]+")


@dataclass(frozen=True)
class Record:
    """The contents of the annotation: the condition, by type and reason, that took the node out at ``since`` (Unix
    time).

    ``tested``: when the preflight had last been reported (Unix time, 0: never), ``boot_id``: the node's boot then.
    ``sent_at``: when the remedy was sent (Unix time, 0: never), ``sent_boot``: the boot that it is to end.
    ``host``: the physical machine that the node was on, empty if unknown.
    """

    condition: str
    reason: str
    detail: str
    remedy: Remedy
    since: float
    boot_id: str
    tested: float
    stage: Stage = "out"
    sent_at: float = 0.0
    sent_boot: str = ""
    host: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def words(self) -> str:
        """Return in words why the node is out, and how far its remedy is."""
        state = {
            "out": "to be drained" if self.is_drained else "takes no new work",
            "empty": "empty",
            "sent": f"{self.remedy} sent at {stamp(self.sent_at)}",
        }
        wanted = state.get(self.stage, f"empty: {WANTED.get(self.remedy, self.remedy)}")
        return f"{self.condition} {self.reason} since {stamp(self.since)}, {wanted}: {self.detail}"

    @property
    def is_drained(self) -> bool:
        """Return whether its remedy requires that it is empty."""
        return self.remedy != "taint"


def record_of(document: Mapping[str, Any]) -> Record | None:
    """Return the record in a Node's annotation; None if there is none, or it is malformed."""
    try:
        values = json.loads((document["metadata"].get("annotations") or {})[MARK])
        # A record of an earlier version lacks these fields.
        values = {"sent_at": 0.0, "sent_boot": "", "host": ""} | values
        record = Record(**{field.name: str(values[field.name]) for field in fields(Record)})  # type: ignore[arg-type]
        times = {name: fence.unix_time(values[name]) for name in ("since", "tested", "sent_at")}
        is_known = record.remedy in get_args(Remedy) and record.stage in get_args(Stage)
        return replace(record, **times) if is_known else None  # type: ignore[arg-type]
    except fence.MALFORMED:
        return None


def is_tainted(document: Mapping[str, Any]) -> bool:
    """Return whether a Node has the taint."""
    return any(map(_is_ours, _taints(document)))


def _is_ours(taint: Mapping[str, Any]) -> bool:
    return bool(taint["key"] == TAINT)


def _taints(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((document.get("spec") or {}).get("taints") or ())


def take_out(document: Mapping[str, Any], record: Record) -> list[dict[str, Any]]:
    """Return the patch that puts a node into quarantine, or moves it to a later stage.

    The patch is refused if the taints or our annotation have changed meanwhile.
    """
    annotations = document["metadata"].get("annotations") or {}
    pointer = fence.pointer(MARK)
    value = _LABEL_VALUE.sub("-", record.reason)[:63].strip("-_.")
    taint = {"key": TAINT, "value": value, "effect": "NoSchedule"}
    marks: list[dict[str, Any]]
    if annotations:
        marks = [
            {"op": "test", "path": pointer, "value": annotations.get(MARK)},
            {"op": "add", "path": pointer, "value": record.text()},
        ]
    else:
        marks = [
            {"op": "test", "path": "/metadata/annotations", "value": None},
            {"op": "add", "path": "/metadata/annotations", "value": {MARK: record.text()}},
        ]
    others = [other for other in _taints(document) if not _is_ours(other)]
    return [_same(document), *marks, *_set_taints(document, [*others, taint])]


def reach(document: Mapping[str, Any], record: Record, stage: Stage) -> list[dict[str, Any]]:
    """Return the patch that records how far a node's remedy is."""
    return take_out(document, replace(record, stage=stage))


def give_back(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the patch that ends a quarantine: the taint, the annotation and the gate's cordon go, and nothing else.

    The patch is empty if there is nothing to remove.
    """
    annotations = document["metadata"].get("annotations") or {}
    patch: list[dict[str, Any]] = []
    if MARK in annotations:
        pointer = fence.pointer(MARK)
        patch += [
            {"op": "test", "path": pointer, "value": annotations[MARK]},
            {"op": "remove", "path": pointer},
        ]
    if is_tainted(document):
        patch += _set_taints(document, [taint for taint in _taints(document) if not _is_ours(taint)])
    if (cordon := fence.record_of(document)) and cordon.run == RUN:
        patch += fence.uncordon(document)
    return [_same(document), *patch] if patch else []


def _same(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"op": "test", "path": "/metadata/uid", "value": document["metadata"]["uid"]}


def _set_taints(document: Mapping[str, Any], taints: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    path = "/spec/taints"
    return [
        {"op": "test", "path": path, "value": _taints(document) or None},
        {"op": "add", "path": path, "value": taints} if taints else {"op": "remove", "path": path},
    ]
