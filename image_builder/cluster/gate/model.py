"""A node as the gate sees it: the few fields of a Node object that matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from image_builder.cluster.gate.health import Health, health_of
from image_builder.cluster.gate.policy import Policy
from image_builder.drain.fence import MALFORMED, unix_time
from image_builder.node.preflight.model import ANSWER, CONDITION, GRANTED, HELD, WISH, boot_of, retest_of
from image_builder.node.status import PREFLIGHT_LABEL

EFFECT = "NoSchedule"
ADMITTED = "image-builder/admitted"


@dataclass(frozen=True)
class Rules:
    """The gate's settings. ``label``: it handles only nodes that have this label. ``pool``: the label that names a
    node's pool; nodes without it form one pool. ``health``: what is done about nodes that go bad in service."""

    taint: str = PREFLIGHT_LABEL
    label: str = PREFLIGHT_LABEL
    condition: str = CONDITION
    pool: str = "pool"
    health: Policy = field(default_factory=Policy)


@dataclass(frozen=True)
class Wish:
    """A node's request to be tested again. ``tested`` is when it last was, ``until`` when it stops waiting for an
    answer (Unix times), ``text`` the annotation itself."""

    boot_id: str
    nonce: str
    tested: float
    until: float
    text: str


@dataclass(frozen=True)
class Answer:
    """The gate's answer to the wish with this nonce, and when it was given (Unix time)."""

    boot_id: str
    nonce: str
    state: str
    at: float


@dataclass(frozen=True)
class Node:
    """``boot_id`` is the boot that the kubelet reports, ``tested_boot`` the one that the condition is about, and
    ``admitted_boot`` the one that a person admitted, at ``admitted_at`` (Unix time); each is empty if there is none.
    ``admitted`` are the reasons of the findings that it had then and has had since, ``admission`` is the annotation
    itself. ``taints`` are the API's own objects, in their order.

    ``retested`` is the nonce of the re-test that the condition is about, empty for the boot's own test, and
    ``reported`` is when the condition was written (Unix time, 0: unknown).
    """

    name: str
    boot_id: str = ""
    status: str = ""
    tested_boot: str = ""
    message: str = ""
    admitted_boot: str = ""
    taints: tuple[Mapping[str, Any], ...] = ()
    retested: str = ""
    reported: float = 0.0
    wish: Wish | None = None
    answer: Answer | None = None
    pool: str = ""
    admitted_at: float = 0.0
    admitted: frozenset[str] = frozenset()
    admission: str = ""
    health: Health = field(default_factory=Health)

    @property
    def is_under_test(self) -> bool:
        """Return whether this boot is out for a re-test whose result hasn't been reported yet."""
        answer = self.answer
        is_open = answer is not None and answer.state in (HELD, GRANTED) and answer.boot_id == self.boot_id
        return is_open and answer is not None and answer.nonce != self.retested


def node_from(document: Mapping[str, Any], rules: Rules) -> Node:
    """Return the part of a Node object that matters. Whatever is malformed counts as missing."""
    meta, spec, status = (document.get(name) or {} for name in ("metadata", "spec", "status"))
    conditions = [c for c in status.get("conditions") or [] if c.get("type") == rules.condition]
    condition = conditions[0] if conditions else {}
    message = str(condition.get("message", ""))
    annotations = meta.get("annotations") or {}
    boot_id = str((status.get("nodeInfo") or {}).get("bootID", ""))
    pool = str((meta.get("labels") or {}).get(rules.pool, ""))
    admission = str(annotations.get(ADMITTED, ""))
    admitted_boot, admitted_at, admitted = _admission(admission)
    tested_boot, reported = boot_of(message), _time(str(condition.get("lastHeartbeatTime") or ""))
    return Node(
        name=meta["name"],
        boot_id=boot_id,
        status=str(condition.get("status", "")),
        tested_boot=tested_boot,
        message=message,
        admitted_boot=admitted_boot,
        taints=tuple(spec.get("taints") or ()),
        retested=retest_of(message),
        reported=reported,
        wish=_wish(str(annotations.get(WISH, ""))),
        answer=_answer(str(annotations.get(ANSWER, ""))),
        pool=pool,
        admitted_at=admitted_at,
        admitted=admitted,
        admission=admission,
        health=health_of(document, boot_id, pool, rules.health, reported if tested_boot == boot_id else 0.0),
    )


def _time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def _wish(text: str) -> Wish | None:
    try:
        fields = json.loads(text)
        boot_id, nonce = str(fields["boot_id"]), str(fields["nonce"])
        return Wish(boot_id, nonce, unix_time(fields["tested"]), unix_time(fields["until"]), text)
    except MALFORMED:
        return None


def _answer(text: str) -> Answer | None:
    try:
        fields = json.loads(text)
        return Answer(
            str(fields["boot_id"]), str(fields["nonce"]), str(fields["state"]), unix_time(fields["at"])
        )
    except MALFORMED:
        return None


def _admission(annotation: str) -> tuple[str, float, frozenset[str]]:
    """Return the boot that a person admitted, when, and the reasons of its findings then."""
    try:
        fields = dict(json.loads(annotation))
        findings = frozenset(map(str, fields.get("findings") or ()))
        return str(fields.get("boot_id", "")), _time(str(fields.get("at", ""))), findings
    except MALFORMED:
        return "", 0.0, frozenset()
