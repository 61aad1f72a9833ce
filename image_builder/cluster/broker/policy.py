"""The broker's rule: which identity gets a token for which node. Pure; anything that no rule allows is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from image_builder.cluster.broker.config import Pool
from image_builder.cluster.broker.identity import Caller
from image_builder.cluster.broker.refusal import RefusedError, forbidden
from image_builder.node.join import schema

# An attested document takes up some 4.5 KB of it.
MOST_BYTES = 16384
# To Kubernetes, a node's name is a DNS subdomain; host names are shorter.
_NODE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")
_LONGEST_NODE = 253
_GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Request:
    """A node's request, as it claims. ``document`` proves the machine; None requests a nonce."""

    node: str
    vm_id: str
    boot_id: str
    document: str | None = None


def parse(body: bytes) -> Request:
    """Return the request. Raises RefusedError (400). Unknown keys, as from a newer agent, are ignored."""
    try:
        fields = schema.load(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "body", "the body is not JSON") from error
    if not isinstance(fields, dict):
        raise RefusedError(400, "body", "the body is not an object")
    node, vm_id, boot_id = (fields.get(name) for name in ("node", "vm_id", "boot_id"))
    if not isinstance(node, str) or len(node) > _LONGEST_NODE or not _NODE.fullmatch(node):
        raise RefusedError(400, "body", "`node` is not the name of a node")
    if not isinstance(vm_id, str) or not _GUID.fullmatch(vm_id):
        raise RefusedError(400, "body", "`vm_id` is not the id of a machine")
    if not isinstance(boot_id, str) or not _GUID.fullmatch(boot_id):
        raise RefusedError(400, "body", "`boot_id` is not the id of a boot")
    document = fields.get("document")
    if document is not None and not isinstance(document, str):
        raise RefusedError(400, "body", "`document` is not a text")
    return Request(node, vm_id, boot_id, document)


def decide(pools: Sequence[Pool], caller: Caller, request: Request) -> Pool:
    """Return the pool that a machine belongs to. Raises RefusedError (403)."""
    allowed = [pool for pool in pools if _is_of(pool, caller)]
    if not allowed:
        raise forbidden("identity", "this identity belongs to no pool")
    matches = [pool for pool in allowed if re.fullmatch(pool.nodes, request.node)]
    if not matches:
        names = ", ".join(pool.name for pool in allowed)
        raise forbidden("node", f"no node of {names} is called {request.node}")
    if len(matches) > 1:
        names = ", ".join(pool.name for pool in matches)
        raise forbidden("ambiguous", f"{request.node} matches {names}: their patterns must not overlap")
    return matches[0]


def _is_of(pool: Pool, caller: Caller) -> bool:
    # A claim that the token lacks is empty, which no pool has in its lists.
    resources = {resource.lower() for resource in pool.resources}
    return caller.resource in resources or caller.object_id in pool.objects
