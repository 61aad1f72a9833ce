"""The change that a roll makes to running hosts: its target, names, connections and limits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from image_builder.drain.policy import Policy
from image_builder.node.net.kube import Client as Kube
from image_builder.pool.plan.model import Target
from image_builder.pool.scale_set.client import Client as Azure
from image_builder.pool.scale_set.roll import Patience

# Between the taint and the last look: a pod that was bound before it has appeared by then.
_SETTLE_SECONDS = 30.0


@dataclass(frozen=True)
class Change:
    """What a roll is done with.

    ``run`` names it on nodes, ``holder`` on scale sets. ``kube`` opens a connection to the API server, for one thread
    each; ``journal`` holds what is sent to Azure. ``max_fenced``: most hosts of the last wave that are cordoned at
    work. After ``deadline``, in seconds of the epoch, busy hosts are emptied whatever the owners of their pods say.
    ``asks_nodes``: a node that says itself that it works is not empty. ``force_ephemeral``: ephemeral OS disks are
    replaced too.
    """

    target: Target
    run: str
    holder: str
    kube: Callable[[], Kube]
    azure: Azure
    journal: Path
    policy: Policy
    max_fenced: int = 0
    deadline: float = math.inf
    asks_nodes: bool = True
    force_ephemeral: bool = False
    patience: Patience = field(default_factory=Patience)
    settle_seconds: float = _SETTLE_SECONDS
