"""Our cordon: set on a Node and removed in one request each, whose preconditions the API server tests.

An annotation set along with it says whose it is and what was there before. The mark that keeps the cluster autoscaler
from removing a host that is being worked on comes and goes with the cordon. A cordon without our annotation is somebody
else's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.node.net.kube import CONFLICT, JSON_PATCH, Client, KubeError, path_of_node
from image_builder.node.net.retry import backoff

CORDON = "image-builder/cordon"
SCALE_DOWN = "cluster-autoscaler.kubernetes.io/scale-down-disabled"
# Status of a JSON patch whose test fails or whose path doesn't exist, and the API server's words for it. An admission
# policy's denial and an invalid Node have the same status.
_UNPROCESSABLE = 422
_PATCH_FAILED = "the server rejected our request due to an error in our request"
_FORBIDDEN = 403
# Answers with that status that aren't an admission policy's: to a missing right, by an API server that has just
# started, by a proxy (without a Status object there is only the status line).
_NO_DENIAL = re.compile(r' cannot \w+ resource "|: not yet ready to handle request|: 403 Forbidden$')
# Errors in parsing an annotation: each node writes its own, and a broken one must not stop anything for all nodes.
MALFORMED = (ValueError, KeyError, TypeError, OverflowError, RecursionError)
# How often a change is tried, and the longest pause between, in seconds: about a minute.
_ATTEMPTS, _LONGEST_PAUSE = 12, 10.0
_sleep = time.sleep
# The end of the year 9999.
_LATEST = 253402300799.0


@dataclass(frozen=True)
class Record:
    """The contents of the annotation. ``since``: Unix time; ``scale_down``: the autoscaler's mark from before."""

    run: str
    since: float
    was_unschedulable: bool = False
    scale_down: str | None = None

    def text(self) -> str:
        return json.dumps(vars(self), sort_keys=True)


def record_of(document: Mapping[str, Any]) -> Record | None:
    """Return the record in a Node's annotation; None if there is none, or it is malformed."""
    try:
        fields = json.loads(_annotations(document)[CORDON])
        mark = fields["scale_down"]
        return Record(
            str(fields["run"]),
            unix_time(fields["since"]),
            fields["was_unschedulable"] is True,
            None if mark is None else str(mark),
        )
    except MALFORMED:
        return None


def unix_time(value: Any) -> float:
    """Return a time from JSON that can also be written as a date. Raises one of ``MALFORMED``."""
    seconds = float(value)
    if not 0 <= seconds <= _LATEST:  # nor is NaN, which Python accepts in JSON
        raise ValueError(f"{seconds} is no time")
    return seconds


def is_cordoned(document: Mapping[str, Any]) -> bool:
    """Return whether a Node takes no new pods."""
    return bool((document.get("spec") or {}).get("unschedulable"))


def _annotations(document: Mapping[str, Any]) -> Mapping[str, str]:
    return document["metadata"].get("annotations") or {}


def pointer(annotation: str) -> str:
    """Return the path of an annotation as a JSON pointer (RFC 6901)."""
    return "/metadata/annotations/" + annotation.replace("~", "~0").replace("/", "~1")


def cordon(document: Mapping[str, Any], run: str, now: float) -> tuple[Record, list[dict[str, Any]]]:
    """Return the record of a new cordon, and the patch that sets it on exactly this Node.

    The patch is refused if the cordon or our annotation has changed meanwhile, so two drains can't both take a Node.
    """
    annotations = _annotations(document)
    record = Record(run, now, is_cordoned(document), annotations.get(SCALE_DOWN))
    return record, recordon(document, record)


def recordon(document: Mapping[str, Any], record: Record) -> list[dict[str, Any]]:
    """Return the patch that sets a cordon with this record, as on a Node that was deleted and registered again."""
    ours = {CORDON: record.text(), SCALE_DOWN: "true"}
    tests: list[dict[str, Any]] = [
        {"op": "test", "path": "/metadata/uid", "value": document["metadata"]["uid"]},
        {"op": "test", "path": "/spec/unschedulable", "value": True if is_cordoned(document) else None},
    ]
    annotations = _annotations(document)
    if annotations:
        tests.append({"op": "test", "path": pointer(CORDON), "value": annotations.get(CORDON)})
        marks: list[dict[str, Any]] = [
            {"op": "add", "path": pointer(key), "value": value} for key, value in ours.items()
        ]
    else:
        tests.append({"op": "test", "path": "/metadata/annotations", "value": None})
        marks = [{"op": "add", "path": "/metadata/annotations", "value": ours}]
    return [*tests, *marks, {"op": "add", "path": "/spec/unschedulable", "value": True}]


def uncordon(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the patch that removes what is ours and restores what was there before; empty if there is no record.

    If somebody has already uncordoned the host, only our marks are removed.
    """
    record, annotations = record_of(document), _annotations(document)
    if record is None:
        return []
    patch: list[dict[str, Any]] = [
        {"op": "test", "path": pointer(CORDON), "value": annotations[CORDON]},
        {"op": "remove", "path": pointer(CORDON)},
    ]
    if is_cordoned(document) and not record.was_unschedulable:
        patch += [
            {"op": "test", "path": "/spec/unschedulable", "value": True},
            {"op": "remove", "path": "/spec/unschedulable"},
        ]
    if SCALE_DOWN in annotations and record.scale_down is None:
        patch.append({"op": "remove", "path": pointer(SCALE_DOWN)})
    elif record.scale_down is not None:
        patch.append({"op": "add", "path": pointer(SCALE_DOWN), "value": record.scale_down})
    return patch


def send(client: Client, name: str, patch: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Send a patch of a Node; return the patched Node, None if it has changed meanwhile. Raises KubeError."""
    try:
        return client.request("PATCH", path_of_node(name), patch, JSON_PATCH)
    except KubeError as error:
        if error.status == CONFLICT or (error.status == _UNPROCESSABLE and _PATCH_FAILED in error.message):
            return None
        raise


def attempts(name: str) -> Iterator[None]:
    """Yield once for each attempt at changing a Node that others change meanwhile, after a pause from the third one on.

    Raises KubeError in the end: something changes it back each time, such as a webhook.
    """
    for attempt in range(_ATTEMPTS):
        if attempt > 1:
            _sleep(backoff(attempt - 2, cap=_LONGEST_PAUSE))
        yield
    raise KubeError(
        f"{path_of_node(name)} was changed by something else each of {_ATTEMPTS} times that it was to be patched",
        CONFLICT,
    )


def is_denied(error: KubeError) -> bool:
    """Return whether only this object's change is refused: an admission policy denies it, or it is invalid."""
    return error.is_hopeless or (error.status == _FORBIDDEN and not _NO_DENIAL.search(error.message))


def free(client: Client, name: str, run: str, seen: dict[str, Any] | None = None) -> str:
    """Remove our cordon, though the Node may change meanwhile (``attempts``); return the Node's uid, empty if it has no
    cordon of this run. Raises KubeError.

    ``seen`` is the Node as it was last read: it is read again only if it has changed.
    """
    document = seen or client.find(path_of_node(name))
    for _ in attempts(name):
        record = record_of(document) if document else None
        if document is None or record is None or record.run != run:
            return ""
        if send(client, name, uncordon(document)):
            return str(document["metadata"]["uid"])
        document = client.find(path_of_node(name))
    raise AssertionError("attempts() ends")
