"""The outcome of a request to replace an instance's OS disk, judged by what Azure and the node report.

A response can be lost, and the process that waits for it killed. A missing response is never a reason to send a
request again: only if an instance was read as untouched twice, a minute apart, did the request not reach it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Literal

from image_builder.pool.scale_set.model import Instance
from image_builder.pool.scale_set.records import Replacement

Verdict = Literal["done", "running", "not accepted", "failed", "gone", "unknown"]

# Seconds for which an instance has to be read as untouched: a list may lag behind accepted requests.
SETTLE_SECONDS = 60.0
_PREEMPTED = "OperationPreempted"


@dataclass(frozen=True)
class Operation:
    """A long-running operation, as reported at its address; ``code`` and ``message`` are those of its error."""

    status: str
    code: str = ""
    message: str = ""

    @property
    def is_preempted(self) -> bool:
        """Return whether another operation took its place: Azure says so in the code, or only in the message."""
        return _PREEMPTED.lower() in f"{self.code} {self.message}".lower()

    @property
    def has_ended(self) -> bool:
        return self.status.lower() in ("succeeded", "failed", "canceled")


@dataclass(frozen=True)
class Node:
    """What a node reports about itself: its boot, and the build that it runs."""

    boot_id: str
    build: str


@dataclass(frozen=True)
class Look:
    """An instance and its node at a time, in seconds; None for one that doesn't exist or doesn't answer."""

    at: float
    instance: Instance | None
    node: Node | None


def judge(
    sent: Replacement, operation: Operation | None, looks: Sequence[Look], settle: float = SETTLE_SECONDS
) -> Verdict:
    """Return what became of a request.

    ``operation`` is None if its address was lost or nothing is there; ``looks`` are those since the request, the last
    one being current. `unknown` can become anything else with another look.
    """
    last = looks[-1]
    instance = last.instance
    if instance is None or instance.vm_id != sent.vm_id:
        return "gone"
    if operation is not None and not operation.has_ended:
        return "running"
    # A preempted operation may have reached the instance before: it counts like a lost response.
    if operation is not None and not operation.is_preempted:
        if operation.status.lower() != "succeeded":
            return "failed"
        return "done" if instance.runs(sent.version) else "unknown"
    if not instance.is_at_rest:
        return "running"
    if shows(sent, last):
        return "done"
    if instance.state.lower() == "failed":
        return "failed"
    if _was_replaced(sent, looks):
        return "done"
    untouched = [look.at for look in takewhile(partial(_is_untouched, sent), reversed(looks))]
    if untouched and untouched[0] - untouched[-1] >= settle:
        return "not accepted"
    return "unknown"


def shows(sent: Replacement, look: Look) -> bool:
    """Return whether a look shows the result that the request was for, which wasn't there before it."""
    if sent.verb == "upgrade":
        return look.instance is not None and look.instance.runs(sent.version)
    return look.node is not None and look.node.boot_id != sent.boot_id and look.node.build == sent.build


def _was_replaced(sent: Replacement, looks: Sequence[Look]) -> bool:
    """Return whether a reimage or a restart was seen in progress and is over, and the node has yet to boot."""
    instance, node = looks[-1].instance, looks[-1].node
    was_in_work = any(look.instance is not None and not look.instance.is_at_rest for look in looks)
    is_over = instance is not None and instance.runs(sent.version)
    return sent.verb != "upgrade" and was_in_work and is_over and node is None


def _is_untouched(sent: Replacement, look: Look) -> bool:
    """Return whether a look shows an instance at rest and still in the boot before the request.

    If the node didn't answer before, so that this boot isn't known, any build other than the new one means that boot.
    """
    return (
        look.instance is not None
        and look.instance.vm_id == sent.vm_id
        and look.instance.state.lower() == "succeeded"
        and look.node is not None
        and (look.node.boot_id == sent.boot_id if sent.boot_id else look.node.build != sent.build)
    )
