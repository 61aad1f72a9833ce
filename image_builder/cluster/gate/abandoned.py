"""Rolls that nobody drives any more, but whose marks are still on nodes: reported, never undone.

A driver that was killed leaves cordons and taints behind, for its next process. Who may have the new image is known to
its journal and Azure only, so the gate frees nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from image_builder.cluster.gate.model import Node
from image_builder.drain import event
from image_builder.drain.lease import NAMESPACE, Holders, lease_of, leases_path
from image_builder.drain.pods import moment
from image_builder.node.errors import NodeError
from image_builder.node.net.kube import Client, path_of_node

ROLL = "roll-"
REASON = "RollAbandoned"
# A driver that is restarted by hand takes some minutes.
PATIENCE = 600.0
# An API server keeps Events for an hour.
_AGAIN = 3600.0
_NAMED = 3


@dataclass(frozen=True)
class Marks:
    """The nodes of a scale set (its id in lower case) with the cordon or the taint of a roll, by name."""

    run: str
    scale_set: str
    nodes: tuple[str, ...]

    @property
    def words(self) -> str:
        """Return in words what is wrong, and the remedy."""
        names = ", ".join(self.nodes[:_NAMED]) + (", …" if len(self.nodes) > _NAMED else "")
        count = f"{len(self.nodes)} node{'s' if len(self.nodes) > 1 else ''}"
        return (
            f"nobody drives {self.run}, whose marks keep work off {count} of {self.scale_set.rpartition('/')[2]}"
            f" ({names}): `pool resume` its plan, or `pool abort --run {self.run}`"
        )


def marks(nodes: Collection[Node]) -> list[Marks]:
    """Return what rolls have left on nodes; a node outside a scale set isn't a roll's."""
    by_run: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        health = node.health
        runs = {run for run in (health.cordon, health.barred_by) if run.startswith(ROLL)}
        for run in runs if health.scale_set else ():
            by_run.setdefault((run, health.scale_set), []).append(node.name)
    return [Marks(run, path, tuple(sorted(names))) for (run, path), names in sorted(by_run.items())]


def abandoned(client: Client, nodes: Collection[Node], now: float) -> list[Marks]:
    """Return the marks of rolls whose Leases nobody has renewed for some minutes before ``now`` (Unix time).

    Unlike the controller, this can only compare clocks. Raises NodeError.
    """
    if not (left := marks(nodes)):
        return []
    renewed: dict[str, float] = {}

    def take(lease: Mapping[str, Any]) -> None:
        renewed[lease["metadata"]["name"]] = moment((lease.get("spec") or {}).get("renewTime")) or 0.0

    client.each(leases_path(NAMESPACE), take)
    return [mark for mark in left if now - renewed.get(lease_of(mark.scale_set), 0.0) > PATIENCE]


class Watch:
    """Reports abandoned rolls, in the log and by an Event on their first node. ``clock`` is monotonic."""

    def __init__(self, client: Client, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._client, self._tell, self._clock = client, tell, clock
        self._holders = Holders(clock)
        # Since when nobody drives a roll, and when that was last reported, by run and scale set.
        self._since: dict[tuple[str, str], float] = {}
        self._told: dict[tuple[str, str], float] = {}

    def turn(self, nodes: Sequence[Node], now: float, *, advises: bool = False) -> None:
        """Look at the Leases of the scale sets that rolls have left marks on. Failures are reported."""
        left = {(mark.run, mark.scale_set): mark for mark in marks(nodes)}
        try:
            if left:
                self._holders.look(self._client)
        except NodeError as error:
            self._tell(f"the leases of scale sets: {error.message}")
            return
        free = {key for key in left if not self._holders.holder(lease_of(key[1]))}
        at = self._clock()
        self._since = {key: self._since.get(key, at) for key in free}
        self._told = {key: told for key, told in self._told.items() if key in free}
        for key, since in self._since.items():
            if at - since >= PATIENCE and at - self._told.get(key, float("-inf")) >= _AGAIN:
                self._told[key] = at
                self._report(left[key], now, advises=advises)

    def _report(self, mark: Marks, now: float, *, advises: bool) -> None:
        self._tell(mark.words)
        if advises:
            return
        name = mark.nodes[0]
        try:
            document = self._client.find(path_of_node(name))
            if document is not None:
                uid = document["metadata"]["uid"]
                event.post(self._client, event.event(name, uid, REASON, mark.words, now, kind="Warning"))
        except NodeError as error:
            self._tell(f"{name}: no Event {REASON}: {error.message}")
