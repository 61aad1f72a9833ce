"""One control plane for all modules of a test process: whoever borrows it finds it as new.

Everything that a borrower created is deleted at its end: nodes, rights, workloads, whole namespaces. An object is the
control plane's own if it was there from the start, or if only the control plane's programs ever wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

from image_builder.node.net.kube import KubeError
from tests.support.control_plane.gates import Cluster

_OWN = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "api-priority-and-fairness")
_DELETE = {
    "apiVersion": "v1",
    "kind": "DeleteOptions",
    "gracePeriodSeconds": 0,
    "propagationPolicy": "Background",
}


class Lender:
    """A running control plane with controllers. Nobody may stop it."""

    def __init__(self, plane: Cluster) -> None:
        self._plane, self._admin = plane, plane.admin
        # Whether a type's objects can be deleted all at once, by the path of its list.
        self._kinds = dict(self._find_kinds())
        self._first = {path for kind in self._kinds for path in self._objects(kind)}

    @contextmanager
    def lent(self) -> Iterator[Cluster]:
        """Lend the control plane: its audit log begins anew, and it is emptied at the end."""
        cluster = Cluster(self._plane.process, self._plane.work)
        try:
            yield cluster
        finally:
            cluster.close()
            self.empty()

    def empty(self) -> None:
        """Delete everything that isn't the control plane's own, and wait until it is gone."""
        while [kind for kind in self._kinds if self._delete(kind)]:
            time.sleep(0.1)
        for namespace in ("default", "kube-system"):
            self._admin.request("DELETE", f"/api/v1/namespaces/{namespace}/events", _DELETE)

    def _delete(self, kind: str) -> bool:
        """Delete a type's objects that aren't the control plane's own; return whether there were any."""
        foreign = False
        for collection, paths in groupby(sorted(self._objects(kind).items()), lambda each: _folder(each[0])):
            items = list(paths)
            found = [path for path, item in items if path not in self._first and not _is_own(path, item)]
            is_all = self._kinds[kind] and len(found) == len(items)
            for path in [collection] if is_all else found:
                with suppress(KubeError):  # it is gone, or its namespace is on its way
                    self._admin.request("DELETE", path, _DELETE)
            foreign = foreign or bool(found)
        return foreign

    def _objects(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return a type's objects in all namespaces, by their paths."""
        root, _, plural = kind.rpartition("/")
        found = {}
        for item in self._admin.request("GET", kind)["items"] or []:
            namespace = item["metadata"].get("namespace")
            folder = f"{root}/namespaces/{namespace}/{plural}" if namespace else kind
            found[f"{folder}/{item['metadata']['name']}"] = item
        return found

    def _find_kinds(self) -> Iterator[tuple[str, bool]]:
        """Yield the types of objects that can be listed and deleted, except events: they are deleted at the end."""
        groups = self._admin.request("GET", "/apis")["groups"]
        for root in ("/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)):
            for resource in self._admin.request("GET", root)["resources"]:
                if {"list", "delete"} <= set(resource["verbs"]) and resource["name"] != "events":
                    yield f"{root}/{resource['name']}", "deletecollection" in resource["verbs"]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _is_own(path: str, item: Mapping[str, Any]) -> bool:
    """Return whether only the control plane's programs wrote an object. The pods that they make are somebody's."""
    writers = [entry["manager"] for entry in item["metadata"].get("managedFields") or ()]
    return "/pods/" not in path and all(writer.startswith(_OWN) for writer in writers)
