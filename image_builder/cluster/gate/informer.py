"""All nodes of the gate: what the API server knows of them, kept up to date."""

from __future__ import annotations

from collections.abc import Callable

from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.cluster.gate.watcher import Watcher
from image_builder.node.kube import Client

Changed = Callable[[Node], None]


class Informer(Watcher[Node]):
    """Keeps ``nodes`` by name. Nothing else asks for nodes."""

    def __init__(
        self,
        client: Client,
        rules: Rules,
        changed: Changed,
        removed: Callable[[str], None],
        tell: Callable[[str], None],
    ) -> None:
        super().__init__(
            client,
            "/api/v1/nodes",
            {"labelSelector": rules.label},
            lambda item: node_from(item, rules),
            changed,
            removed,
            tell,
        )
        self.nodes = self.known
