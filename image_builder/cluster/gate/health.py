"""A node's health according to its Node object: conditions of our agent, node-problem-detector and NVSentinel."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from image_builder.cluster.gate.policy import Policy
from image_builder.drain import fence, hosts, quarantine, taint
from image_builder.drain.pods import moment
from image_builder.node.finding import kubernetes_reason

# The annotation that NVSentinel leaves on a node that it has taken out, and the labels of which one is "false" on nodes
# that it must leave alone.
# https://docs.nvidia.com/nvsentinel/components/cancelling-breakfix
_NVSENTINEL_AT_WORK = "quarantineHealthEvent"
_NVSENTINEL_MANAGES = ("nvsentinel.dgxc.nvidia.com/managed", "k8saas.nvidia.com/ManagedByNVSentinel")
# Our agent's messages end with the boot that they are about (node/health/report.py).
_BOOT = re.compile(r"\(boot ([0-9a-f-]{36})[,)]")
# The condition has the first one's reason, if there are several.
_FINDINGS = re.compile(r"([0-9]{1,4}) findings: ")
_FINDING = re.compile(r"(?:^|; )([a-z0-9-]+(?:\.[a-z0-9-]+)+): ")
_MACHINE = re.compile(r"(?i)azure://(/subscriptions/[^/]+/.+/virtualMachines/[^/]+)")
_SCALE_SET = re.compile(r"(?i)(.+/virtualMachineScaleSets/[^/]+)/virtualMachines/[^/]+")
_DETAIL = 300


@dataclass(frozen=True)
class Ailment:
    """A finding of a bad condition, since when that is bad (Unix time), and its message."""

    condition: str
    reason: str
    since: float
    detail: str = ""


@dataclass(frozen=True)
class Health:
    """The part of a Node that matters for its health.

    ``well`` are the conditions that say that all is well with this boot, and those whose finding the policy ignores.
    ``stale`` are those that nobody maintains any more: they say nothing. ``machine`` is its id in Azure, ``scale_set``
    that of its scale set in lower case, ``host`` the physical machine's name; each is empty if the Node doesn't name
    it. ``cordon``: which of our runs cordoned it. ``is_left``: NVSentinel is working on it, or its pool is left to
    NVSentinel. ``is_cut``: a message has no room for all of its findings. ``barred_by``: the roll that has emptied it,
    and keeps all pods off.
    """

    ailments: tuple[Ailment, ...] = ()
    well: frozenset[str] = frozenset()
    record: quarantine.Record | None = None
    is_tainted: bool = False
    cordon: str = ""
    machine: str = ""
    scale_set: str = ""
    host: str = ""
    is_left: bool = False
    is_cut: bool = False
    stale: frozenset[str] = frozenset()
    barred_by: str = ""


def health_of(
    document: Mapping[str, Any], boot_id: str, pool: str, policy: Policy, tested: float = 0.0
) -> Health:
    """Return what a Node object says about its health. Whatever is malformed counts as missing.

    ``tested`` is when the preflight of this boot was last reported (Unix time, 0: never).
    """
    meta, spec, status = (document.get(name) or {} for name in ("metadata", "spec", "status"))
    ailments: list[Ailment] = []
    well = set()
    stale = set()
    is_cut = False
    conditions = list(status.get("conditions") or ())
    newest = max([0.0, *map(_beat, conditions)])
    for condition in conditions:
        kind, state = str(condition.get("type", "")), condition.get("status")
        message = str(condition.get("message", ""))
        bad = policy.bad_status(kind)
        boot = _BOOT.search(message)
        if bad is None or state not in ("True", "False") or (boot and boot[1] != boot_id):
            continue
        if state == bad and policy.is_stale(kind, _beat(condition), newest, tested):
            stale.add(kind)
            continue
        reasons = _reasons(kind, str(condition.get("reason") or kind), message)
        is_cut |= state == bad and kind in reasons and len(reasons) > 1
        bad_reasons = [reason for reason in reasons if policy.rule(kind, reason).remedy != "ignore"]
        if state != bad or not bad_reasons:
            well.add(kind)
            continue
        since = moment(condition.get("lastTransitionTime")) or 0.0
        ailments += [Ailment(kind, reason, since, message[:_DETAIL]) for reason in dict.fromkeys(bad_reasons)]
    cordon = fence.record_of(document)
    machine = _MACHINE.fullmatch(str(spec.get("providerID") or ""))
    set_id = _SCALE_SET.fullmatch(machine[1]) if machine else None
    is_at_work = _NVSENTINEL_AT_WORK in (meta.get("annotations") or {})
    labels = meta.get("labels") or {}
    is_managed = all(labels.get(name) != "false" for name in _NVSENTINEL_MANAGES)
    return Health(
        ailments=tuple(sorted(ailments, key=lambda ailment: (ailment.since, ailment.condition))),
        well=frozenset(well),
        record=quarantine.record_of(document),
        is_tainted=quarantine.is_tainted(document),
        cordon=cordon.run if cordon else "",
        machine=machine[1] if machine else "",
        scale_set=set_id[1].lower() if set_id else "",
        host=hosts.host_of(document),
        is_left=is_at_work or (pool in policy.nvsentinel and is_managed),
        is_cut=is_cut,
        stale=frozenset(stale),
        barred_by=next(
            (str(t.get("value") or "roll-") for t in spec.get("taints") or () if t.get("key") == taint.TAINT),
            "",
        ),
    )


def _beat(condition: Mapping[str, Any]) -> float:
    return moment(condition.get("lastHeartbeatTime")) or 0.0


def _reasons(kind: str, reason: str, message: str) -> list[str]:
    """Return the reasons of all findings of a condition; its type stands for those that its message has no room for."""
    if not (several := _FINDINGS.match(message)):
        return [reason]
    codes = _FINDING.findall(message[several.end() :])
    return [*map(kubernetes_reason, codes), *([kind] if len(codes) < int(several[1]) else [])]
