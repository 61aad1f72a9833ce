"""The broker's policy: who may have a token for which node, and what a request looks like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from image_builder.cluster.broker import policy
from image_builder.cluster.broker.config import Pool
from image_builder.cluster.broker.identity import Caller
from image_builder.cluster.broker.policy import Request
from image_builder.cluster.broker.refusal import RefusedError
from tests.support.azure.identities import OBJECT, SCALE_SET
from tests.support.nodes.joins import VM_ID

OTHER = "11111111-2222-4333-8444-555555555555"
H100 = Pool(name="h100", nodes="vmss-h100-a[0-9a-z]{6}", resources=(SCALE_SET,))
T4 = Pool(name="t4", nodes="vmss-t4-[0-9a-z]{6}", objects=(OBJECT,))
BY_SCALE_SET, BY_OBJECT = Caller("", SCALE_SET.lower()), Caller(OBJECT, "")
NODE = "vmss-h100-a000017"


def asked(node: str = NODE) -> Request:
    return Request(node, VM_ID, VM_ID)


def test_an_identity_is_of_its_pool() -> None:
    assert policy.decide([T4, H100], BY_SCALE_SET, asked()) is H100
    assert policy.decide([T4, H100], BY_OBJECT, asked("vmss-t4-00000a")) is T4
    # Two pools share an identity; the node names tell them apart.
    both = Caller(OBJECT, SCALE_SET.lower())
    assert policy.decide([T4, H100], both, asked()) is H100
    assert policy.decide([T4, H100], both, asked("vmss-t4-00000a")) is T4


FORBIDDEN: dict[str, tuple[list[Pool], Caller, str, str]] = {
    "an identity of no pool": ([H100, T4], Caller(OTHER, "/subscriptions/x"), NODE, "identity"),
    "an identity that says nothing": ([H100, T4], Caller("", ""), NODE, "identity"),
    "a scale set with a longer name": ([H100], Caller("", SCALE_SET.lower() + "2"), NODE, "identity"),
    "a machine of the scale set": (
        [H100],
        Caller("", SCALE_SET.lower() + "/virtualmachines/1"),
        NODE,
        "identity",
    ),
    "another pool's node": ([H100, T4], BY_SCALE_SET, "vmss-t4-00000a", "node"),
    "a node that begins right": ([H100], BY_SCALE_SET, NODE + "9", "node"),
    "a control plane's name": ([H100], BY_SCALE_SET, "control-plane-1", "node"),
    "patterns that overlap": (
        [H100, H100.model_copy(update={"name": "h100-b"})],
        BY_SCALE_SET,
        NODE,
        "ambiguous",
    ),
}


@pytest.mark.parametrize(("pools", "who", "node", "code"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_all_else_is_forbidden(pools: list[Pool], who: Caller, node: str, code: str) -> None:
    with pytest.raises(RefusedError) as caught:
        policy.decide(pools, who, asked(node))
    assert (caught.value.status, caught.value.code) == (403, code)


GOOD = {"node": NODE, "vm_id": VM_ID, "boot_id": VM_ID}
BAD: dict[str, Any] = {
    "no object": [],
    "no node": {**GOOD, "node": None},
    "a path": {**GOOD, "node": "../secrets"},
    "capitals": {**GOOD, "node": "VMSS-1"},
    "too long a name": {**GOOD, "node": "a" * 64},
    "a line's end": {**GOOD, "node": f"{NODE}\n"},
    "too many labels": {**GOOD, "node": ".".join(["a" * 60] * 5)},
    "no machine": {**GOOD, "vm_id": "17"},
    "no boot": {**GOOD, "boot_id": 17},
    "a document that is no text": {**GOOD, "document": {}},
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD)
def test_a_request_that_is_none(value: Any) -> None:
    with pytest.raises(RefusedError) as caught:
        policy.parse(json.dumps(value).encode())
    assert (caught.value.status, caught.value.code) == (400, "body")


def test_a_request() -> None:
    assert policy.parse(json.dumps({**GOOD, "of a later agent": 1}).encode()) == asked()
    assert policy.parse(json.dumps({**GOOD, "document": "MII="}).encode()).document == "MII="
    for data in (b"", b"\xff", b'{"node": "a", "node": "b"}', b"[" * policy.MOST_BYTES):
        with pytest.raises(RefusedError, match="not JSON"):
            policy.parse(data)
