"""A token as a secret: what is written is what is read, and what is damaged is no token."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest

from image_builder.broker.tokens import TYPE, Wanted, read, secret, token_id
from tests.joins import VM_ID

ENDS = 1_800_000_000.0
WANTED = Wanted(
    "vmss-h100-a000017", VM_ID, "h100", ("system:bootstrappers:h100", "system:bootstrappers:gpu"), 1800
)


def stored(**data: str) -> dict[str, Any]:
    """Return a secret as the API server gives it back; ``data`` replaces some of it, an empty text takes away."""
    made = secret(WANTED, "k3y1dx", "s3cr3ts3cr3ts3cr", ENDS)
    values = {**made.pop("stringData"), **{name.replace("_", "-"): text for name, text in data.items()}}
    return {
        **made,
        "data": {name: base64.b64encode(text.encode()).decode() for name, text in values.items() if text},
    }


def test_what_is_written_is_what_is_read() -> None:
    found = read(stored())
    assert found and (found.text, found.expires) == ("k3y1dx.s3cr3ts3cr3ts3cr", ENDS)
    assert found.id == "k3y1dx" and found.is_known and "s3cr3t" not in repr(found)


def test_a_secret_is_what_kubernetes_takes_for_a_token() -> None:
    made = secret(WANTED, "k3y1dx", "s3cr3ts3cr3ts3cr", ENDS)
    assert (made["type"], made["metadata"]["name"]) == (TYPE, "bootstrap-token-k3y1dx")
    assert made["metadata"]["namespace"] == "kube-system"
    data = made["stringData"]
    assert data["auth-extra-groups"] == "system:bootstrappers:h100,system:bootstrappers:gpu"
    assert data["expiration"] == "2027-01-15T08:00:00Z"
    # No annotation, label or description has the secret part.
    assert [name for name, text in data.items() if "s3cr3t" in text] == ["token-secret"]
    assert "s3cr3t" not in repr(made["metadata"])


DAMAGED: dict[str, dict[str, Any]] = {
    "no end": stored(expiration=""),
    "an end that is no time": stored(expiration="tomorrow"),
    "an end without a zone": stored(expiration="2027-01-15T08:00:00"),
    "no secret part": stored(token_secret=""),
    "a short secret part": stored(token_secret="abc"),
    "another type": {**stored(), "type": "Opaque"},
    "no data": {**stored(), "data": None},
    "data that are no base64": {**stored(), "data": {"token-id": "%"}},
}


@pytest.mark.parametrize("found", DAMAGED.values(), ids=DAMAGED)
def test_what_is_damaged_is_no_token(found: dict[str, Any]) -> None:
    assert read(found) is None


def test_a_nodes_id_is_always_the_same_and_hardly_another_nodes() -> None:
    names = [f"vmss-h100-a{number:06x}" for number in range(600)]
    ids = {token_id(name, 0) for name in names}
    assert len(ids) == len(names) and all(re.fullmatch("[a-z0-9]{6}", one) for one in ids)
    assert token_id(names[0], 0) in ids and token_id(names[0], 1) not in ids
