"""Our cordon and its record: the patches, and what is read back."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from image_builder.drain import fence, taint
from image_builder.drain.fence import (
    CORDON,
    SCALE_DOWN,
    Record,
    cordon,
    free,
    is_denied,
    pointer,
    record_of,
    recordon,
    uncordon,
)
from image_builder.node.net.kube import Client, KubeError
from image_builder.node.net.kubeconfig import Access, Pem
from tests.unit.drain.manifests import PATCH_FAILED, node_object

OURS = Record("roll-7", 1000.0)


def test_a_record_is_read_as_it_was_written() -> None:
    record = Record("roll-7", 1000.5, was_unschedulable=True, scale_down="false")
    assert record_of(node_object({CORDON: record.text()})) == record


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "1", "[" * 100_000),
        *(
            f'{{"run": "a", "since": {since}, "scale_down": null, "was_unschedulable": true}}'
            for since in ('"NaN"', "1e300", "-1", "1" + "0" * 400, "9" * 5000)
        ),
    ],
    ids=range(10),
)
def test_what_is_no_record(text: str) -> None:
    assert record_of(node_object({CORDON: text})) is None


def test_a_cordon_is_tested_by_what_it_was_decided_from() -> None:
    record, patch = cordon(node_object({SCALE_DOWN: "false"}), "roll-7", 1000.0)
    assert record == Record("roll-7", 1000.0, was_unschedulable=False, scale_down="false")
    tests = {step["path"]: step["value"] for step in patch if step["op"] == "test"}
    assert tests == {
        "/metadata/uid": "uid-1",
        "/spec/unschedulable": None,
        "/metadata/annotations/image-builder~1cordon": None,
    }
    assert patch[-1] == {"op": "add", "path": "/spec/unschedulable", "value": True}


def test_a_node_without_annotations() -> None:
    patch = recordon(node_object(), OURS)
    assert {"op": "test", "path": "/metadata/annotations", "value": None} in patch
    added = {"op": "add", "path": "/metadata/annotations", "value": {CORDON: OURS.text(), SCALE_DOWN: "true"}}
    assert added in patch


def test_what_is_ours_is_taken_away() -> None:
    patch = uncordon(node_object({CORDON: OURS.text(), SCALE_DOWN: "true"}, cordoned=True))
    assert patch[0] == {
        "op": "test",
        "path": "/metadata/annotations/image-builder~1cordon",
        "value": OURS.text(),
    }
    removed = {step["path"] for step in patch if step["op"] == "remove"}
    assert len(removed) == 3 and "/spec/unschedulable" in removed


def test_a_cordon_from_before_stays() -> None:
    record = Record("roll-7", 1000.0, was_unschedulable=True, scale_down="true")
    patch = uncordon(node_object({CORDON: record.text(), SCALE_DOWN: "true"}, cordoned=True))
    assert [step["op"] for step in patch] == ["test", "remove", "add"]
    assert not any(step["path"] == "/spec/unschedulable" for step in patch)


def test_the_autoscalers_mark_from_before_is_put_back() -> None:
    record = Record("roll-7", 1000.0, scale_down="false")
    patch = uncordon(node_object({CORDON: record.text(), SCALE_DOWN: "true"}, cordoned=True))
    assert {"op": "add", "path": pointer(SCALE_DOWN), "value": "false"} in patch


def test_nothing_of_others_is_touched() -> None:
    assert uncordon(node_object({SCALE_DOWN: "true"}, cordoned=True)) == []


class Server(Client):
    """A Node with our cordon, whose patches are refused in turn."""

    def __init__(self, *refusals: KubeError) -> None:
        super().__init__(Access("https://lab", Pem(text="")))
        self.refusals = list(refusals)

    def request(self, method: str, *_: Any) -> dict[str, Any]:
        if method == "PATCH" and self.refusals:
            raise self.refusals.pop(0)
        return node_object({CORDON: OURS.text()}, cordoned=True)


def test_a_node_that_changes_meanwhile_is_read_again() -> None:
    server = Server(KubeError(PATCH_FAILED, 422), KubeError("the object has been modified", 409))
    assert free(server, "gpu-1", "roll-7") == "uid-1"
    assert not server.refusals


@pytest.mark.parametrize(
    "message",
    [
        "nodes \"gpu-1\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no",
        'admission webhook "nodes.example.com" denied the request: no',
        'Node "gpu-1" is invalid: spec.taints[0].effect: Required value',
    ],
)
def test_a_denial_is_no_change(message: str) -> None:
    with pytest.raises(KubeError, match=message.partition(":")[0]):
        free(Server(KubeError(f"PATCH /api/v1/nodes/gpu-1: 422 {message}", 422)), "gpu-1", "roll-7")


def test_a_proxys_refusal_is_no_denial() -> None:
    """It has no Status object, so the status line is all that is known."""
    assert not is_denied(KubeError("PATCH /api/v1/nodes/gpu-1: 403 Forbidden", 403))


@pytest.mark.parametrize(
    ("value", "is_time"),
    [
        (0, True),
        (1.5, True),
        (fence._LATEST, True),
        (-1, False),
        (fence._LATEST * 2, False),
        (float("nan"), False),
    ],
)
def test_a_time_can_be_written_as_a_date(value: float, is_time: bool) -> None:
    if is_time:
        assert fence.unix_time(value) == value
        return
    with pytest.raises(fence.MALFORMED):
        fence.unix_time(value)


@pytest.mark.parametrize("change", ["free", "bar", "lift"])
@pytest.mark.parametrize("refused", [3, 10**6])
def test_a_patch_that_never_applies_is_repeated_with_pauses_and_ends(
    monkeypatch: pytest.MonkeyPatch, change: str, refused: int
) -> None:
    """A webhook that changes the annotation back, or anything else that is faster than we are."""
    pauses: list[float] = []
    monkeypatch.setattr(fence, "_sleep", pauses.append)

    class Contested(Client):
        def __init__(self) -> None:
            super().__init__(Access("https://lab", Pem(text="")))
            self.patches = 0
            self.document = node_object({CORDON: Record("roll", 1.0).text()}, cordoned=True)
            if change == "lift":
                self.document["spec"]["taints"] = [
                    {"key": taint.TAINT, "value": "roll", "effect": "NoExecute"}
                ]

        def request(self, method: str, _path: str, _body: Any = None, _type: str = "") -> dict[str, Any]:
            if method == "PATCH":
                self.patches += 1
                if self.patches <= refused:
                    raise KubeError(PATCH_FAILED, 422)
            return self.document

    client = Contested()
    with nullcontext() if refused == 3 else pytest.raises(KubeError):
        match change:
            case "free":
                fence.free(client, "gpu-1", "roll")
            case "bar":
                taint.bar(client, "gpu-1", "roll")
            case _:
                taint.lift(client, "gpu-1")
    assert client.patches == (4 if refused == 3 else 12) and len(pauses) == client.patches - 2
    assert all(pause <= 10 for pause in pauses)
