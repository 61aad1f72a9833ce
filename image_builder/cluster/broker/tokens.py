"""Bootstrap tokens as Kubernetes stores them: secrets in kube-system, each bound to one machine and one node.

https://kubernetes.io/docs/reference/access-authn-authz/bootstrap-tokens/. They are created and never read: a
token's id is derived from the node, machine and nonce of the attested document that it is issued for, so if two brokers
see documents with the same nonce, the API server refuses the second.
"""

from __future__ import annotations

import hashlib
import secrets
import string
from dataclasses import dataclass
from typing import Any

from image_builder.cluster.broker import attestation
from image_builder.cluster.broker.refusal import RefusedError
from image_builder.node.join import binding
from image_builder.node.net.kube import CONFLICT, Client, KubeError
from image_builder.text import stamp

TYPE = "bootstrap.kubernetes.io/token"
LABELS = {"app.kubernetes.io/managed-by": "image-builder-broker"}
_ALPHABET = string.digits + string.ascii_lowercase
_ID, _SECRET = 6, 16
_NODE, _VM, _POOL = (f"image-builder/{name}" for name in ("node", "vm-id", "pool"))


@dataclass(frozen=True)
class Grant:
    """A token to issue to a node: the node and its machine, the nonce, and the groups. ``seconds`` is its lifetime."""

    node: str
    vm_id: str
    nonce: str
    pool: str
    groups: tuple[str, ...]
    seconds: int
    namespace: str = "kube-system"

    @property
    def id(self) -> str:
        """Return the part of the token that is not secret."""
        text = f"{self.node}\n{self.vm_id}\n{self.nonce}".encode()
        value = int.from_bytes(hashlib.sha256(text).digest()[:8])
        digits = []
        for _ in range(_ID):
            value, digit = divmod(value, len(_ALPHABET))
            digits.append(_ALPHABET[digit])
        return "".join(digits)


@dataclass(frozen=True, repr=False)
class Issued:
    """A token, and when it expires (Unix time). No ``repr`` shows its text."""

    text: str
    expires: float

    @property
    def id(self) -> str:
        """Return the part of the token that is not secret."""
        return self.text.partition(".")[0]


def issue(client: Client, grant: Grant, now: float) -> Issued:
    """Create a node's token. Raises RefusedError (409: this document was already used), KubeError."""
    text = "".join(secrets.choice(_ALPHABET) for _ in range(_SECRET))
    # Kubernetes uses whole seconds.
    expires = float(int(now) + grant.seconds)
    try:
        client.request("POST", f"/api/v1/namespaces/{grant.namespace}/secrets", secret(grant, text, expires))
    except KubeError as error:
        if error.status != CONFLICT:
            raise
        raise RefusedError(
            409, "document.used", "a token was given for this document already", attestation.until_next(now)
        ) from error
    return Issued(f"{grant.id}.{text}", expires)


def secret(grant: Grant, text: str, expires: float) -> dict[str, Any]:
    """Return the secret of a token; ``expires`` is Unix time."""
    # The order matters: the admission policy checks the beginning of the list.
    groups = (binding.of_machine(grant.vm_id), binding.of_node(grant.node), *grant.groups)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": TYPE,
        "metadata": {
            "name": f"bootstrap-token-{grant.id}",
            "namespace": grant.namespace,
            "labels": dict(LABELS),
            "annotations": {_NODE: grant.node, _VM: grant.vm_id, _POOL: grant.pool},
        },
        "stringData": {
            "description": f"image-builder's token broker, for {grant.node}",
            "token-id": grant.id,
            "token-secret": text,
            "expiration": stamp(expires),
            "usage-bootstrap-authentication": "true",
            "usage-bootstrap-signing": "false",
            "auth-extra-groups": ",".join(groups),
        },
    }
