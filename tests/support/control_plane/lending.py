"""One control plane for all modules of a test process: whoever borrows it finds it as new.

Everything that a borrower created is deleted at its end: nodes, rights, workloads, whole namespaces. An object is the
control plane's own if it was there from the start, or if only the control plane's programs ever wrote it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import Any

from image_builder.node.net.kube import KubeError
from tests.support.control_plane.gates import Cluster, wait_until

_OWN = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "api-priority-and-fairness")
_NAMESPACES = "/api/v1/namespaces"
# Without it, no pod is admitted.
_ACCOUNT = f"{_NAMESPACES}/default/serviceaccounts/default"
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
        assert wait_until(lambda: self._admin.find(_ACCOUNT) is not None), "no controller is at work"
        # Whether a type's objects can be deleted all at once, by the path of its list.
        self._kinds = dict(self._find_kinds())
        self._first = {path for kind in (*self._kinds, _NAMESPACES) for path in self._objects(kind)}

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
        spaces = [path for path, item in self._objects(_NAMESPACES).items() if self._is_foreign(path, item)]
        for space in spaces:
            with suppress(KubeError):  # a test deleted it, too
                self._admin.request("DELETE", space)
        # Nothing can be created in them now. Kubernetes itself would wait for five seconds before it empties them.
        while [kind for kind in self._kinds if self._delete(kind, spaces)]:
            time.sleep(0.1)
        for space in (f"{_NAMESPACES}/default", f"{_NAMESPACES}/kube-system", *spaces):
            self._admin.request("DELETE", f"{space}/events", _DELETE)
        while left := [space for space in spaces if self._admin.find(space)]:
            for space in left:
                body = {"metadata": {"name": space.rpartition("/")[2]}, "spec": {"finalizers": []}}
                with suppress(KubeError):  # it is gone
                    self._admin.request("PUT", f"{space}/finalize", body)

    def _delete(self, kind: str, spaces: Sequence[str]) -> bool:
        """Delete a type's objects that are foreign or in one of these namespaces; return whether there were any."""
        foreign = False
        for folder, paths in groupby(sorted(self._objects(kind).items()), lambda each: _folder(each[0])):
            items = list(paths)
            is_within = _folder(folder) in spaces
            found = [path for path, item in items if is_within or self._is_foreign(path, item)]
            is_all = self._kinds[kind] and len(found) == len(items)
            for path in [folder] if is_all else found:
                with suppress(KubeError):  # it is gone
                    self._admin.request("DELETE", path, _DELETE)
            foreign = foreign or bool(found)
        return foreign

    def _is_foreign(self, path: str, item: Mapping[str, Any]) -> bool:
        """Return whether an object came after the start, from others. Pods are, whoever made them."""
        writers = [entry["manager"] for entry in item["metadata"].get("managedFields") or ()]
        is_own = "/pods/" not in path and all(writer.startswith(_OWN) for writer in writers)
        return path not in self._first and not is_own

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
        """Yield the types that can be listed and deleted, except namespaces and events: they are the last."""
        groups = self._admin.request("GET", "/apis")["groups"]
        for root in ("/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)):
            for resource in self._admin.request("GET", root)["resources"]:
                is_last = resource["name"] in ("namespaces", "events")
                if {"list", "delete"} <= set(resource["verbs"]) and not is_last:
                    yield f"{root}/{resource['name']}", "deletecollection" in resource["verbs"]


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
