"""Who may have a token for which node. Pure; what no rule allows is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from image_builder.cluster.broker.config import Pool
from image_builder.cluster.broker.jwt import Proven
from image_builder.cluster.broker.refusal import RefusedError, forbidden
from image_builder.node.join import schema

# An attested document is some 4.5 KB of it.
MOST_BYTES = 16384
# A node's name is a DNS subdomain for Kubernetes, and a host's name is shorter.
_NODE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*")
_LONGEST_NODE = 253
_GUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Asked:
    """What a node asks for: itself, by its own word. ``document`` proves the machine; None asks for a nonce."""

    node: str
    vm_id: str
    boot_id: str
    document: str | None = None


def parse(body: bytes) -> Asked:
    """Return what is asked for. Raises RefusedError (400). Keys of a later agent are left alone."""
    try:
        found = schema.load(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, "body", "the body is no JSON") from error
    if not isinstance(found, dict):
        raise RefusedError(400, "body", "the body is no object")
    node, vm_id, boot_id = (found.get(name) for name in ("node", "vm_id", "boot_id"))
    if not isinstance(node, str) or len(node) > _LONGEST_NODE or not _NODE.fullmatch(node):
        raise RefusedError(400, "body", "`node` is no node's name")
    if not isinstance(vm_id, str) or not _GUID.fullmatch(vm_id):
        raise RefusedError(400, "body", "`vm_id` is no id of a machine")
    if not isinstance(boot_id, str) or not _GUID.fullmatch(boot_id):
        raise RefusedError(400, "body", "`boot_id` is no id of a boot")
    document = found.get("document")
    if document is not None and not isinstance(document, str):
        raise RefusedError(400, "body", "`document` is no text")
    return Asked(node, vm_id, boot_id, document)


def decide(pools: Sequence[Pool], proven: Proven, asked: Asked) -> Pool:
    """Return the pool that a machine belongs to. Raises RefusedError (403)."""
    theirs = [pool for pool in pools if _is_of(pool, proven)]
    if not theirs:
        raise forbidden("identity", "this identity is of no pool")
    fitting = [pool for pool in theirs if re.fullmatch(pool.nodes, asked.node)]
    if not fitting:
        names = ", ".join(pool.name for pool in theirs)
        raise forbidden("node", f"no node of {names} is called {asked.node}")
    if len(fitting) > 1:
        names = ", ".join(pool.name for pool in fitting)
        raise forbidden("ambiguous", f"{asked.node} could be of {names}: their patterns must not overlap")
    return fitting[0]


def _is_of(pool: Pool, proven: Proven) -> bool:
    # Empty is what the token does not say, and no pool has that in its lists.
    resources = {resource.lower() for resource in pool.resources}
    return proven.resource in resources or proven.object_id in pool.objects
