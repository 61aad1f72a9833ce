"""A token as a secret: bound to a machine and a node, and good for one document."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest

from image_builder.cluster.broker.refusal import RefusedError
from image_builder.cluster.broker.tokens import TYPE, Grant, issue, secret
from image_builder.node.join import binding
from image_builder.node.net.kube import Client, KubeError
from tests.support.nodes.joins import VM_ID

NONCE = "0123456789"
ENDS = 1_800_000_000.0
GRANT = Grant("vmss-h100-a000017", VM_ID, NONCE, "h100", ("system:bootstrappers:h100",), 1800)
# Kubernetes' own rule.
GROUP = re.compile(r"\Asystem:bootstrappers:[a-z0-9:-]{0,255}[a-z0-9]\Z")


class Api:
    """An API server that keeps secrets by name, as the real one does (tests/gpu)."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def request(self, _method: str, _path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        if name in self.names:
            raise KubeError("it is there", 409)
        self.names.add(name)
        return body


def test_a_secret_is_what_kubernetes_takes_for_a_token() -> None:
    document = secret(GRANT, "s3cr3ts3cr3ts3cr", ENDS)
    assert (document["type"], document["metadata"]["name"]) == (TYPE, f"bootstrap-token-{GRANT.id}")
    assert document["metadata"]["namespace"] == "kube-system" and re.fullmatch("[a-z0-9]{6}", GRANT.id)
    data = document["stringData"]
    assert data["expiration"] == "2027-01-15T08:00:00Z"
    # No annotation, label or description contains the secret part.
    assert [name for name, text in data.items() if "s3cr3t" in text] == ["token-secret"]
    assert "s3cr3t" not in repr(document["metadata"])


def test_a_token_is_bound_to_its_machine_and_its_node() -> None:
    groups = secret(GRANT, "s3cr3ts3cr3ts3cr", ENDS)["stringData"]["auth-extra-groups"].split(",")
    assert groups == [
        binding.of_machine(VM_ID),
        binding.of_node("vmss-h100-a000017"),
        "system:bootstrappers:h100",
    ]
    assert all(GROUP.match(group) for group in groups)
    assert binding.of_machine(VM_ID.upper()) == binding.of_machine(VM_ID)
    assert binding.of_node("a") != binding.of_node("b") != binding.of_machine("b")


def test_a_document_is_worth_one_token() -> None:
    api = cast(Client, Api())
    first = issue(api, GRANT, 1_799_998_200.0)
    assert first.expires == ENDS
    assert first.text.partition(".")[2] not in repr(first) and first.id == GRANT.id
    with pytest.raises(RefusedError) as caught:
        issue(api, GRANT, 1_799_998_205.0)
    assert (caught.value.status, caught.value.code) == (409, "document.used")
    # For as long as the same nonce is issued: the next one will be accepted.
    assert caught.value.retry_after == 55.0
    others = [
        Grant("vmss-h100-a000018", VM_ID, NONCE, "h100", (), 1800),
        Grant(GRANT.node, "11111111-2222-4333-8444-555555555555", NONCE, "h100", (), 1800),
        Grant(GRANT.node, VM_ID, "0123456780", "h100", (), 1800),
    ]
    assert len({issue(api, grant, ENDS).id for grant in others} | {first.id}) == 4


def test_a_cluster_that_fails_is_no_used_document() -> None:
    class Failing(Api):
        def request(self, *_: Any) -> dict[str, Any]:
            raise KubeError("no", 500)

    with pytest.raises(KubeError):
        issue(cast(Client, Failing()), GRANT, ENDS)
