"""Triage of nodes in bad health: which are taken out, what is done about them, and when they are back. Pure.

All state is in the Node objects: a controller that takes over continues where the previous one stopped.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

from image_builder.cluster.gate.decide import is_tainted
from image_builder.cluster.gate.health import Ailment
from image_builder.cluster.gate.model import Node, Rules
from image_builder.cluster.gate.policy import HOST_CONDITION, OURS, Policy
from image_builder.cluster.gate.retest import cap
from image_builder.drain.quarantine import ASKING, RUN, Record, Remedy
from image_builder.node.preflight.hold import OPEN, Hold

_RANKS: Mapping[str, int] = {remedy: rank for rank, remedy in enumerate(get_args(Remedy))}


class Step(enum.Enum):
    TAKE_OUT = "taken out"
    DRAIN = "emptied"
    ASK = "asked for"
    GIVE_BACK = "given back"


def record_for(node: Node, holds: Mapping[str, Hold], policy: Policy, now: float) -> Record | None:
    """Return the record with which a node belongs in quarantine for a lasting ailment, the gravest; None if none.

    Ailments that the breaker holds don't count, nor those that a person admitted with this boot: earlier ones, and
    those of our agent that were never gone since, as its condition's time is that of its newest finding.
    """
    is_by_hand = node.admitted_boot == node.boot_id
    records = []
    for ailment in node.health.ailments:
        rule = policy.rule(ailment.condition, ailment.reason)
        lasts = policy.lasts(rule)
        # The time is of the node's clock; one far ahead of ours would keep the node in until ours gets there.
        is_lasting = abs(now - ailment.since) >= lasts
        is_held = _is_held(node.pool, ailment.reason, holds)
        is_known = ailment.condition in OURS and ailment.reason in node.admitted
        is_admitted = is_by_hand and (ailment.since <= node.admitted_at or is_known)
        if rule.remedy != "ignore" and is_lasting and not is_held and not is_admitted:
            records.append(_record(node, ailment, rule.remedy, now))
    return max(records, key=lambda record: _RANKS[record.remedy], default=None)


def _record(node: Node, ailment: Ailment, remedy: Remedy, now: float) -> Record:
    return Record(
        condition=ailment.condition,
        reason=ailment.reason,
        detail=ailment.detail,
        remedy=remedy,
        since=now,
        boot_id=node.boot_id,
        tested=node.reported,
        host=node.health.host,
    )


def is_back(node: Node, record: Record, policy: Policy) -> bool:
    """Return whether a node may work again: it is well and passed its preflight since, or a person admitted it."""
    if node.admitted_boot == node.boot_id and node.admitted_at >= record.since:
        return True
    has_passed = node.status == "True" and node.tested_boot == node.boot_id and not node.is_under_test
    is_new = (node.boot_id, node.reported) != (record.boot_id, record.tested)
    # A condition that the policy no longer names, or that nobody maintains, is never reported as well.
    is_named = policy.bad_status(record.condition) is not None and record.condition not in node.health.stale
    is_known = record.condition == HOST_CONDITION or is_named
    is_well = not node.health.ailments and (record.condition in node.health.well or not is_known)
    return bool(node.boot_id) and has_passed and is_new and is_well


def step_of(
    node: Node, holds: Mapping[str, Hold], policy: Policy, rules: Rules, now: float
) -> tuple[Step, Record | None] | None:
    """Return what a node needs next, regardless of other nodes; None if nothing."""
    health, record = node.health, node.health.record
    due = record_for(node, holds, policy, now)
    if record is None:
        if health.is_tainted or health.cordon == RUN:
            return Step.GIVE_BACK, None  # somebody removed our annotation
        if due is None or not node.boot_id or health.is_left:
            return None
        # A node that is out for its preflight takes no work anyway; but on a bad host, passing it isn't enough.
        is_due = due.condition == HOST_CONDITION or not is_tainted(node, rules)
        return (Step.TAKE_OUT, due) if is_due else None
    if is_back(node, record, policy):
        return Step.GIVE_BACK, record
    if health.is_left:
        return None
    if due and _RANKS[due.remedy] > _RANKS[record.remedy]:
        return Step.TAKE_OUT, due
    if not health.is_tainted:
        return Step.TAKE_OUT, record
    if record.is_drained and record.stage == "out":
        return Step.DRAIN, record
    if record.remedy in ASKING and record.stage == "empty":
        return Step.ASK, record
    return None


def plan(
    nodes: Sequence[Node],
    holds: Mapping[str, Hold],
    held_sets: Collection[str],
    policy: Policy,
    rules: Rules,
    now: float,
) -> list[tuple[Node, Step, Record | None]]:
    """Return what to do now, in this order: nodes that may come back first, newly bad ones last, longest bad first.

    ``held_sets`` are scale sets that a rollout drives: their nodes get the taint, and the rest is left to it. Nothing
    is started on a host that has the cordon of another run of ours, nor for a reason that the breaker holds because
    many nodes of a pool have it.
    """
    steps: list[tuple[Node, Step, Record | None]] = []
    fresh: list[tuple[Node, Step, Record | None]] = []
    for node in nodes:
        if (need := step_of(node, holds, policy, rules, now)) is None:
            continue
        step, record = need
        is_held = record is not None and _is_held(node.pool, record.reason, holds)
        is_driven = step is not Step.TAKE_OUT and node.health.scale_set in held_sets
        is_in_work = node.health.cordon not in ("", RUN)
        if step is not Step.GIVE_BACK and (is_held or is_driven or is_in_work):
            continue
        (fresh if node.health.record is None and step is Step.TAKE_OUT else steps).append(
            (node, step, record)
        )
    steps.sort(key=lambda item: (item[1] is not Step.GIVE_BACK, item[0].name))
    fresh.sort(key=_urgency)
    out = sum(node.health.record is not None for node in nodes)
    # A host that a roll has only cordoned may be at work for days.
    away = sum(node.health.record is not None or bool(node.health.barred_by) for node in nodes)
    room = min(
        cap(len(nodes), policy.share) - out, cap(len(nodes), max(policy.unavailable, policy.share)) - away
    )
    return steps + fresh[: max(0, room)]


def _urgency(item: tuple[Node, Step, Record | None]) -> tuple[bool, float, str]:
    """Return the sort key of a node that is to be taken out: nodes that only have a bad host come last."""
    node, _, record = item
    is_hosts = record is not None and record.condition == HOST_CONDITION
    return is_hosts, min(ailment.since for ailment in node.health.ailments), node.name


def _is_held(pool: str, reason: str, holds: Mapping[str, Hold]) -> bool:
    hold = next((h for h in holds.values() if (h.code, h.pool) == (reason, pool)), None)
    return hold is not None and hold.state == OPEN
