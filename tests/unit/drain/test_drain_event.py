"""Events on nodes: one for each step, however often it is repeated."""

from __future__ import annotations

from image_builder.drain.event import event


def test_the_same_step_has_the_same_name() -> None:
    first = event("gpu-1", "uid", "NodeFreed", "freed", 1.0, step="a")
    again = event("gpu-1", "uid", "NodeFreed", "freed", 2.0, step="a")
    others = [
        event("gpu-1", "uid-2", "NodeFreed", "freed", 1.0, step="a"),
        event("gpu-1", "uid", "NodeFreed", "freed", 1.0, step="b"),
        event("gpu-1", "uid", "Other", "freed", 1.0, step="a"),
    ]
    assert first["metadata"] == again["metadata"]
    assert len({other["metadata"]["name"] for other in (first, *others)}) == 4


def test_its_shape() -> None:
    document = event("gpu-1", "uid", "NodeQuarantined", "m" * 2000, 0.0, kind="Warning")
    assert document["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "gpu-1", "uid": "uid"}
    assert document["metadata"]["namespace"] == "default"
    assert (len(document["message"]), document["type"]) == (1024, "Warning")
    assert document["count"] == 1
    assert document["firstTimestamp"] == "1970-01-01T00:00:00Z"
