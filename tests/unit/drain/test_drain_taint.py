"""The taint that keeps pods off an empty host, alongside other taints."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from image_builder.drain.taint import TAINT, bar, is_barred, lift
from image_builder.node.net.kube import KubeError
from tests.unit.drain.manifests import PATCH_FAILED

OTHER = {"key": "nvidia.com/gpu", "effect": "NoSchedule"}
OURS = {"key": TAINT, "value": "roll-7", "effect": "NoExecute"}


class Server:
    """A Node, changed by JSON patches as on an API server; ``meanwhile`` changes it before the first one."""

    def __init__(
        self, *taints: dict[str, str], meanwhile: dict[str, str] | None = None, loses: bool = False
    ) -> None:
        self.document: dict[str, Any] = {"metadata": {"uid": "1"}, "spec": {}}
        if taints:
            self.document["spec"]["taints"] = list(taints)
        self.meanwhile = meanwhile
        self.patches, self.reads = 0, 0
        # The first answer is lost, and the client sends the patch again.
        self.loses = loses

    def find(self, _path: str) -> dict[str, Any]:
        self.reads += 1
        return copy.deepcopy(self.document)

    def request(self, _method: str, _path: str, patch: list[dict[str, Any]], _kind: str) -> dict[str, Any]:
        self.patches += 1
        spec = self.document["spec"]
        if self.meanwhile:
            spec["taints"] = [*spec.get("taints", ()), self.meanwhile]
            self.meanwhile = None
        taints = copy.deepcopy(spec.get("taints"))
        for step in patch:
            match step["op"], step["path"].removeprefix("/spec/taints"):
                case "test", "/metadata/uid":
                    assert step["value"] == "1"
                case "test", "":
                    self._require(taints == step["value"])
                case "add", "":
                    taints = step["value"]
                case "test", place:
                    number = int(place.removeprefix("/"))
                    self._require(number < len(taints or ()) and taints[number] == step["value"])
                case "remove", place:
                    del taints[int(place.removeprefix("/"))]
                case other:
                    raise AssertionError(other)
        if len({(taint["key"], taint["effect"]) for taint in taints or ()}) < len(taints or ()):
            raise KubeError(
                "spec.taints[1]: Duplicate value: taints must be unique by key and effect pair", 422
            )
        # An empty list isn't kept.
        self.document["spec"] = {"taints": taints} if taints else {}
        if self.loses:
            self.loses = False
            return self.request(_method, _path, patch, _kind)
        return copy.deepcopy(self.document)

    @staticmethod
    def _require(holds: bool) -> None:
        if not holds:
            raise KubeError(PATCH_FAILED, status=422)


@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_a_patch_that_is_sent_twice_adds_it_once(others: tuple[dict[str, str], ...]) -> None:
    server = Server(*others, loses=True)
    assert bar(server, "gpu-17", "roll-7")  # type: ignore[arg-type]
    assert server.document["spec"]["taints"] == [*others, OURS]


@pytest.mark.parametrize("others", [(), (OTHER,)])
def test_it_comes_and_goes_and_others_stay(others: tuple[dict[str, str], ...]) -> None:
    server = Server(*others)
    assert bar(server, "gpu-17", "roll-7")  # type: ignore[arg-type]
    assert server.document["spec"]["taints"] == [*others, OURS]
    assert is_barred(server.document, "roll-7") and not is_barred(server.document, "roll-8")
    assert bar(server, "gpu-17", "roll-7") and server.patches == 1  # type: ignore[arg-type]
    assert lift(server, "gpu-17")  # type: ignore[arg-type]
    assert server.document["spec"] == ({"taints": list(others)} if others else {})


def test_a_taint_that_comes_meanwhile_is_not_lost() -> None:
    server = Server(meanwhile=OTHER)
    bar(server, "gpu-17", "roll-7")  # type: ignore[arg-type]
    assert server.document["spec"]["taints"] == [OTHER, OURS]
    assert server.patches == 2


def test_a_node_that_was_read_is_read_again_only_where_its_taints_have_moved() -> None:
    server = Server()
    barred = bar(server, "gpu-17", "roll-7", copy.deepcopy(server.document))  # type: ignore[arg-type]
    assert barred == server.document and server.reads == 0
    server.document["spec"]["taints"].append(OTHER)
    assert lift(server, "gpu-17", barred) == {"metadata": {"uid": "1"}, "spec": {"taints": [OTHER]}}  # type: ignore[arg-type]
    assert server.reads == 0
    barred = bar(server, "gpu-17", "roll-7")  # type: ignore[arg-type]
    server.document["spec"]["taints"].reverse()
    assert lift(server, "gpu-17", barred) == {"metadata": {"uid": "1"}, "spec": {"taints": [OTHER]}}  # type: ignore[arg-type]
    assert server.reads == 2


def test_another_runs_taint_is_replaced() -> None:
    server = Server(OTHER, {**OURS, "value": "roll-6"})
    assert bar(server, "gpu-17", "roll-7")  # type: ignore[arg-type]
    assert server.document["spec"]["taints"] == [OTHER, OURS]
