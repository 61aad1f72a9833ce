"""The Event that asks an owner to save its work."""

from __future__ import annotations

from image_builder.drain.ask import event
from image_builder.drain.pods import pod_from
from tests.unit.drain.manifests import pod_object


def test_it_is_on_the_owner_and_says_until_when() -> None:
    made = event(pod_from(pod_object(owner="Job")), "roll-7", by=3600.0, now=0.0)
    assert made["involvedObject"] == {
        "apiVersion": "apps/v1",
        "kind": "Job",
        "name": "x",
        "uid": "uid-Job",
        "namespace": "work",
    }
    assert "1970-01-01T01:00:00Z" in made["message"] and "gpu-1" in made["message"]


def test_without_an_owner_it_is_on_the_pod() -> None:
    made = event(pod_from(pod_object(owner="")), "roll-7", by=3600.0, now=0.0)
    assert (made["involvedObject"]["kind"], made["involvedObject"]["name"]) == ("Pod", "a")
