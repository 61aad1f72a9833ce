"""The eviction of one pod, and what the API server's answer means. Pods are never deleted."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from image_builder.drain.fence import is_denied
from image_builder.drain.pods import Pod
from image_builder.node.net.kube import CONFLICT, NOT_FOUND, Client, KubeError

_TOO_MANY, _FORBIDDEN, _ERROR = 429, 403, 500
# As long as kubectl waits if the server doesn't say how long.
RETRY_SECONDS = 5.0
_TWO_BUDGETS = "more than one PodDisruptionBudget"
# Reasons of causes; the message of the first names the budget.
_BUDGET = "DisruptionBudget"
_NAMESPACE_ENDS = "NamespaceTerminating"


class Answer(enum.Enum):
    ACCEPTED = "accepted"  # it ends within its grace period
    GONE = "gone"  # it no longer exists, or another pod has its name
    LATER = "later"  # a budget or a webhook doesn't allow it now, or its namespace is being deleted
    REFUSED = "refused"  # it can never be evicted: several budgets match it


@dataclass(frozen=True)
class Reply:
    answer: Answer
    message: str = ""
    retry_seconds: float = RETRY_SECONDS


def evict(client: Client, pod: Pod, *, dry_run: bool = False) -> Reply:
    """Request a pod's eviction. Raises KubeError if the failure isn't about this pod: missing rights, no server."""
    try:
        client.evict(pod.namespace, pod.name, pod.uid, dry_run=dry_run)
    except KubeError as error:
        return _reply(error)
    return Reply(Answer.ACCEPTED)


def _reply(error: KubeError) -> Reply:
    if error.status in (NOT_FOUND, CONFLICT):
        return Reply(Answer.GONE)
    if error.status == _TOO_MANY:
        message = error.causes.get(_BUDGET) or _shortened(error)
        return Reply(Answer.LATER, message, error.retry_after or RETRY_SECONDS)
    if error.status == _FORBIDDEN and _NAMESPACE_ENDS in error.causes:
        return Reply(Answer.LATER, "it is being deleted with its namespace")
    if error.status == _ERROR and _TWO_BUDGETS in error.message:
        return Reply(Answer.REFUSED, "several PodDisruptionBudgets match it, so it can't be evicted")
    if error.status == _ERROR or is_denied(error):
        # A webhook refuses it or fails, which concerns only this pod.
        return Reply(Answer.LATER, _shortened(error))
    raise error


def _shortened(error: KubeError) -> str:
    """Return the server's message without the request."""
    return error.message.partition(f": {error.status} ")[2] or error.message
