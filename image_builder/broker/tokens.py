"""Bootstrap tokens as Kubernetes keeps them: secrets of kube-system, one for a node, the same while it lives.

https://kubernetes.io/docs/reference/access-authn-authz/bootstrap-tokens/. A token's id follows from the node's name, so
that several brokers, and one that was started again, find what there is by a single GET: nothing is listed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from image_builder.broker.refusal import RefusedError
from image_builder.node.join.credentials import TOKEN
from image_builder.node.kube import Client, KubeError

TYPE = "bootstrap.kubernetes.io/token"
_ALPHABET = string.digits + string.ascii_lowercase
_ID, _SECRET = 6, 16
# A node's second and third id, where the first is another node's: about one of 10^9 pairs of names.
_IDS = 3
# Another broker may make, replace or delete the same secret meanwhile.
_ROUNDS = 4
_NODE, _VM, _POOL = (f"image-builder/{name}" for name in ("node", "vm-id", "pool"))


@dataclass(frozen=True)
class Wanted:
    """A token for a node: who asks, and what it is to give. ``seconds`` is its whole life."""

    node: str
    vm_id: str
    pool: str
    groups: tuple[str, ...]
    seconds: int
    namespace: str = "kube-system"


@dataclass(frozen=True, repr=False)
class Issued:
    """A token, until when (Unix time), and whether it was there already. Its text is in no ``repr``."""

    text: str
    expires: float
    is_known: bool

    @property
    def id(self) -> str:
        """Return the part that is no secret."""
        return self.text.partition(".")[0]


def token_id(node: str, number: int) -> str:
    """Return the id of a node's token; ``number`` is 0 but where that is another node's."""
    value = int.from_bytes(hashlib.sha256(f"{node}\n{number}".encode()).digest()[:8], "big")
    digits = []
    for _ in range(_ID):
        value, digit = divmod(value, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return "".join(digits)


def issue(client: Client, wanted: Wanted, now: float) -> Issued:
    """Return a node's token, made where there is none. Raises RefusedError (409), KubeError."""
    for number in range(_IDS):
        name = token_id(wanted.node, number)
        for _ in range(_ROUNDS):
            found = _get(client, wanted.namespace, name)
            if found is None:
                if made := _create(client, wanted, name, now):
                    return made
                continue
            if _annotation(found, _NODE) != wanted.node:
                break  # another node's, or somebody else's altogether: neither is touched
            known = read(found)
            if known and _annotation(found, _VM) != wanted.vm_id and known.expires > now:
                left = known.expires - now
                what = f"another machine has a token as {wanted.node} for {left:.0f} s more"
                raise RefusedError(409, "held", what)
            if known and known.expires - now >= wanted.seconds / 2 and _gives(found, wanted):
                return known
            _delete(client, wanted.namespace, found)
        else:
            raise RefusedError(503, "busy", "the token changed while it was looked at", 1)
    raise RefusedError(503, "ids", f"each id of {wanted.node} is somebody else's", 60)


def secret(wanted: Wanted, name: str, text: str, expires: float) -> dict[str, Any]:
    """Return the secret of a token; ``expires`` is Unix time."""
    data = {
        "description": f"image-builder's token broker, for {wanted.node}",
        "token-id": name,
        "token-secret": text,
        "expiration": datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "usage-bootstrap-authentication": "true",
        "usage-bootstrap-signing": "false",
    }
    if wanted.groups:
        data["auth-extra-groups"] = ",".join(wanted.groups)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": TYPE,
        "metadata": {
            "name": f"bootstrap-token-{name}",
            "namespace": wanted.namespace,
            "labels": {"app.kubernetes.io/managed-by": "image-builder-broker"},
            "annotations": {_NODE: wanted.node, _VM: wanted.vm_id, _POOL: wanted.pool},
        },
        "stringData": data,
    }


def read(found: Mapping[str, Any]) -> Issued | None:
    """Return the token that a secret holds; None where it holds none that is of use."""
    data = _data(found)
    text = f"{data.get('token-id', '')}.{data.get('token-secret', '')}"
    try:
        expires = datetime.fromisoformat(data.get("expiration", ""))
    except ValueError:
        return None
    if found.get("type") != TYPE or not TOKEN.fullmatch(text) or expires.tzinfo is None:
        return None
    return Issued(text, expires.timestamp(), is_known=True)


def _gives(found: Mapping[str, Any], wanted: Wanted) -> bool:
    """Tell whether a token gives what its pool has now."""
    data = _data(found)
    groups = tuple(group for group in data.get("auth-extra-groups", "").split(",") if group)
    may_authenticate = data.get("usage-bootstrap-authentication") == "true"
    return may_authenticate and groups == wanted.groups and _annotation(found, _POOL) == wanted.pool


def _data(found: Mapping[str, Any]) -> dict[str, str]:
    values: Mapping[str, str] = found.get("data") or {}
    try:
        return {name: base64.b64decode(text).decode() for name, text in values.items()}
    except (binascii.Error, UnicodeDecodeError):
        return {}


def _annotation(found: Mapping[str, Any], name: str) -> str:
    return str((found["metadata"].get("annotations") or {}).get(name, ""))


def _path(namespace: str, name: str = "") -> str:
    return f"/api/v1/namespaces/{namespace}/secrets" + (f"/bootstrap-token-{name}" if name else "")


def _get(client: Client, namespace: str, name: str) -> dict[str, Any] | None:
    try:
        return client.request("GET", _path(namespace, name))
    except KubeError as error:
        if error.status == 404:
            return None
        raise


def _create(client: Client, wanted: Wanted, name: str, now: float) -> Issued | None:
    """Make a token; None where somebody else was quicker."""
    text = "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET))
    # Kubernetes has whole seconds.
    expires = float(int(now) + wanted.seconds)
    try:
        client.request("POST", _path(wanted.namespace), secret(wanted, name, text, expires))
    except KubeError as error:
        if error.status == 409:
            return None
        raise
    return Issued(f"{name}.{text}", expires, is_known=False)


def _delete(client: Client, namespace: str, found: Mapping[str, Any]) -> None:
    """Delete this very secret: one that took its name meanwhile is another broker's new one."""
    name = str(found["metadata"]["name"]).removeprefix("bootstrap-token-")
    body = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "preconditions": {"uid": found["metadata"]["uid"]},
    }
    try:
        client.request("DELETE", _path(namespace, name), body)
    except KubeError as error:
        if error.status not in (404, 409):
            raise
