"""What became of a request to replace an instance's OS disk, judged by what Azure and the node tell.

An answer can be lost, and the process that waited for it killed. Nothing is ever sent again because no answer came:
only an instance that was twice read as untouched, with a minute between, wasn't reached by the request.
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

# Seconds that an instance has to be read as untouched: a list may lag behind what was accepted.
SETTLE_SECONDS = 60.0
_PREEMPTED = "OperationPreempted"


@dataclass(frozen=True)
class Operation:
    """A long-running operation, as its address tells; ``code`` and ``message`` are the error's."""

    status: str
    code: str = ""
    message: str = ""

    @property
    def has_ended(self) -> bool:
        return self.status.lower() in ("succeeded", "failed", "canceled")


@dataclass(frozen=True)
class Node:
    """What a node tells of itself: its boot, and the build that it runs."""

    boot_id: str
    build: str


@dataclass(frozen=True)
class Look:
    """An instance and its node at a moment, in seconds; None for one that isn't there or doesn't answer."""

    at: float
    instance: Instance | None
    node: Node | None


def judge(
    sent: Replacement, operation: Operation | None, looks: Sequence[Look], settle: float = SETTLE_SECONDS
) -> Verdict:
    """Return what became of a request.

    ``operation`` is None where its address was lost or leads nowhere; ``looks`` are those since the request, the last
    one now. `unknown` can become anything else with another look.
    """
    last = looks[-1]
    instance = last.instance
    if instance is None or instance.vm_id != sent.vm_id:
        return "gone"
    if operation is not None and not operation.has_ended:
        return "running"
    # An operation that another one preempted may have reached the instance before: it counts like a lost answer.
    if operation is not None and operation.code != _PREEMPTED:
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
    """Tell whether a look shows what the request was to bring about. It wasn't so before the request."""
    if sent.verb == "upgrade":
        return look.instance is not None and look.instance.runs(sent.version)
    return look.node is not None and look.node.boot_id != sent.boot_id and look.node.build == sent.build


def _was_replaced(sent: Replacement, looks: Sequence[Look]) -> bool:
    """Tell whether a reimage, or a restart, was seen in work and is over, and the node has yet to boot."""
    instance, node = looks[-1].instance, looks[-1].node
    was_in_work = any(look.instance is not None and not look.instance.is_at_rest for look in looks)
    is_over = instance is not None and instance.runs(sent.version)
    return sent.verb != "upgrade" and was_in_work and is_over and node is None


def _is_untouched(sent: Replacement, look: Look) -> bool:
    """Tell whether a look shows an instance at rest and the boot before the request.

    Where the node didn't answer before, so that its boot isn't known, another build than the new one is that boot's.
    """
    return (
        look.instance is not None
        and look.instance.vm_id == sent.vm_id
        and look.instance.state.lower() == "succeeded"
        and look.node is not None
        and (look.node.boot_id == sent.boot_id if sent.boot_id else look.node.build != sent.build)
    )
