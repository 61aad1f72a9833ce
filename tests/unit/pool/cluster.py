"""An API server that answers from a dictionary, for what a roll or a repair does to one Node."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from image_builder.drain import fence
from image_builder.node.net.kube import NOT_FOUND, Client, KubeError, path_of_node
from image_builder.node.net.kubeconfig import Access, Pem
from tests.unit.drain.manifests import PATCH_FAILED, node_object


def applied(document: dict[str, Any], patch: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an object after a JSON patch; raises KubeError if one of its tests fails."""
    changed: dict[str, Any] = copy.deepcopy(document)
    for step in patch:
        *parents, last = [part.replace("~1", "/") for part in step["path"].split("/")[1:]]
        target: Any = changed
        for parent in parents:
            target = target.setdefault(parent, {})
        place = int(last) if isinstance(target, list) else last
        if step["op"] == "test":  # the API omits empty values
            found = target[place] if isinstance(target, list) else target.get(place)
            if (found or None) != step["value"]:
                raise KubeError(PATCH_FAILED, 422)
        elif step["op"] == "add":
            target[place] = step["value"]
        else:
            del target[place]
    return changed


class Cluster(Client):
    """Objects by their paths: Nodes, changed by JSON patches; pods, Leases, ConfigMaps.

    The next ``away`` requests fail; ``log`` has the methods and paths of all.
    """

    def __init__(self) -> None:
        super().__init__(Access("https://lab", Pem(text="")))
        self.objects: dict[str, dict[str, Any]] = {}
        self.events: list[str] = []
        self.log: list[tuple[str, str]] = []
        self.away = 0

    def request(self, method: str, path: str, body: Any = None, _type: str = "") -> dict[str, Any]:
        self._note(method, path)
        if path.endswith("/events"):
            self.events.append(body["reason"])
            return {}
        if method == "POST":
            path += f"/{body['metadata']['name']}"
        if method in ("POST", "PUT"):
            self.objects[path] = body
        if path not in self.objects:
            raise KubeError("not found", NOT_FOUND)
        if method == "PATCH":
            self.objects[path] = applied(self.objects[path], body)
        return self.objects[path]

    def each_page(
        self, path: str, _query: Mapping[str, str], take: Callable[[dict[str, Any]], None], _limit: int = 500
    ) -> None:
        self._note("LIST", path)
        for place, item in list(self.objects.items()):
            if place.startswith(f"{path}/"):
                take(item)

    def each(self, path: str, take: Callable[[dict[str, Any]], None]) -> str:
        self.each_page(path.partition("?")[0], {}, take)
        return "100"

    def _note(self, method: str, path: str) -> None:
        self.log.append((method, path))
        if self.away:
            self.away -= 1
            raise KubeError("no answer")

    def close(self) -> None:
        pass

    def add(self, name: str, run: str) -> None:
        """Add an empty Node with the cordon of a run."""
        node = node_object({"a": "b"})
        node["metadata"]["name"] = name
        self.objects[path_of_node(name)] = applied(node, fence.cordon(node, run, 1.0)[1])
