"""A survey of a roll's hosts before any is taken out of work: which are missing, and which are idle.

While the cluster is unavailable, it is retried until the run ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Any, TypeVar

from image_builder.drain import fence, quarantine
from image_builder.drain.observe import Looker
from image_builder.errors import PoolError
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client
from image_builder.node.net.retry import backoff
from image_builder.pool.plan.model import Host
from image_builder.pool.steps.control_plane import NODES, SHOWN_NODES, TABLE, shown_nodes
from image_builder.pool.steps.drains import TROUBLE_SECONDS, is_final

NOT_READY, NO_NODE = "its node was NotReady before the roll", "it had no Node before the roll"
IN_QUARANTINE = "the gate had taken it out before the roll"
_T = TypeVar("_T")


def missing_hosts(client: Client, names: Sequence[str], run: str, ending: threading.Event) -> dict[str, str]:
    """Return the hosts that can't take jobs, and why, except those that ``run`` has cordoned and is working on.

    A host cordoned by others may be at work, so it isn't missing, unless the gate is emptying it. Raises PoolError if
    the cluster refuses to answer.
    """

    def look() -> dict[str, str]:
        ready = {
            node.name: node.is_ready for node in shown_nodes(json.loads(client.text(SHOWN_NODES, TABLE)))
        }
        runs: dict[str, str] = {}

        def take(document: dict[str, Any]) -> None:
            if record := fence.record_of(document):
                runs[document["metadata"]["name"]] = record.run

        client.each_page(NODES, {"fieldSelector": "spec.unschedulable=true"}, take)
        reasons = {name: NOT_READY if name in ready else NO_NODE for name in names if not ready.get(name)}
        reasons |= {name: IN_QUARANTINE for name in names if runs.get(name) == quarantine.RUN}
        return {name: reason for name, reason in reasons.items() if runs.get(name) != run}

    try:
        return _answered(look, ending) or {}
    except NodeError as error:
        raise PoolError(error.message, hint="the rights that it needs are in deploy/roll.yml") from error


def quarantined_hosts(client: Client, names: Collection[str]) -> dict[str, str]:
    """Return the hosts that the gate has quarantined, each with the reason and progress in words.

    Raises KubeError.
    """
    words: dict[str, str] = {}

    def take(document: dict[str, Any]) -> None:
        name, record = document["metadata"]["name"], quarantine.record_of(document)
        if record is not None and name in names:
            words[name] = record.words

    client.each_page(NODES, {}, take)
    return dict(sorted(words.items()))


def idle_hosts(
    looker: Looker, cells: Sequence[Sequence[Host]], each: int, ending: threading.Event
) -> list[str]:
    """Look at the hosts of each cell until ``each`` of them are found idle; return these."""

    idle: list[str] = []
    for hosts in cells:
        idle += islice((host.name for host in hosts if _is_idle(looker, host.name, ending)), each)
    return idle


def _is_idle(looker: Looker, name: str, ending: threading.Event) -> bool:
    def look() -> bool:
        document = looker.node(name)
        is_free = document is not None and not fence.is_cordoned(document)
        return is_free and not looker.tenants(name, time.time())

    try:
        return bool(_answered(look, ending))
    except NodeError:
        return False  # its drain reports the error


def _answered(look: Callable[[], _T], ending: threading.Event) -> _T | None:
    """Return an answer, None if the run ends before there is one. Raises NodeError if it is final."""
    failures = 0
    while not ending.is_set():
        try:
            return look()
        except NodeError as error:
            if is_final(error, failures):
                raise
            failures += 1
            ending.wait(backoff(failures, cap=TROUBLE_SECONDS))
    return None
