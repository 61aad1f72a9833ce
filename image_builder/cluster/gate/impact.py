"""Reports of bad machines for Azure's Guest Health Reporting: impacts on VMs, with the physical host's name.

Azure may take the host out of service for one, so only hardware findings are reported unless a person names a category.
https://learn.microsoft.com/azure/azure-impact-reporting/guest-health-impact-report
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from image_builder.cluster.gate.breaker import code_of
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.errors import UsageError
from image_builder.node.finding import kubernetes_reason
from image_builder.node.net.kube import Client, path_of_node
from image_builder.text import stamp

API = "2025-01-01-preview"
SERVICE = "https://management.azure.com"
PREFIX = "Resource.Hpc."
_UNHEALTHY = f"{PREFIX}Unhealthy."
GENERIC = "HpcGenericFailure"
# Azure's categories (guest-health-impact-categories), and what belongs to each: codes of the preflight and the health
# checks, conditions of AKS and NVSentinel. This includes what a reboot may fix: Azure wants a report if it didn't help.
CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "HpcMissingGpu": ("gpu.lost", "gpu.count", "GPUMissing"),
    "UnhealthyGPUNvidiasmi": ("gpu.hung",),
    "DBEOverLimit": ("gpu.ecc", "gpu.sram", "ecc.uncorrected", "ecc.sram-threshold"),
    "HpcRowRemapFailure": (
        *("gpu.remap-failure", "gpu.remap-unrepairable"),
        *("remap.failure", "remap.unrepairable", "remap.retired"),
    ),
    "HpcInforomCorruption": ("gpu.inforom", "GpuInforomWatch"),
    "NvLink": ("gpu.nvlink", "nvlink.down", "nvlink.errors", "nvlink.crc", "NVLinkStatusInactive", "GpuNvlinkWatch"),
    "GpuXIDError": ("gpu.xid", "XIDErrors", "SysLogsXIDError"),
    "XID79FallenOffBus": ("SysLogsGPUFallenOff",),
    "HpcDcgmiThermalReport": ("temp.margin", "throttle.sustained"),
    "MissingIB": ("ib.count",),
    "IBPortDown": ("infiniband.down", "InfiniBandStateCheck"),
    "IBPerformance": ("infiniband.slow",),
    "IBPortFlapping": ("infiniband.flaps", "IBLinkFlapping"),
    GENERIC: (
        *("gpu.sxid", "answer.wrong", "bandwidth.low", "below.median", "compute.slow", "worker.crashed"),
        *("pcie.generation", "pcie.width", "nvme.count", "drive.state", "drive.nvme", "drive.io-errors"),
        "CperHardwareErrorFatal",
    ),
}  # fmt: skip
_XIDS = {
    48: "XID48DoubleBitECC",
    79: "XID79FallenOffBus",
    94: "XID94ContainedECCError",
    95: "XID95UncontainedECCError",
}
# A reason is a code without its punctuation.
_BY_REASON = {
    name if name[0].isupper() else kubernetes_reason(name): category
    for category, names in CATEGORIES.items()
    for name in names
}
# An XID as the kernel's log and NVSentinel write it.
_XID = re.compile(r"Xid \(PCI:[^)]*\): ([0-9]{1,9})\b|\bErrorCode:([0-9]{1,9})\b")
_PREFLIGHT_XID = re.compile(r"(s?)xid\.([0-9]{1,9})")


def category_of(condition: str, reason: str, detail: str = "") -> str:
    """Return the category of a finding, by its reason or code, or else its condition; empty if it isn't hardware."""
    if match := _PREFLIGHT_XID.fullmatch(reason):
        return _UNHEALTHY + (GENERIC if match[1] else _xid(match[2]))
    name = _BY_REASON.get(kubernetes_reason(reason) if "." in reason else reason) or _BY_REASON.get(condition)
    if name == "GpuXIDError" and (match := _XID.search(detail)):
        name = _xid(match[1] or match[2])
    return f"{_UNHEALTHY}{name}" if name else ""


def _xid(number: str) -> str:
    return _XIDS.get(int(number), "GpuXIDError")


@dataclass(frozen=True)
class Finding:
    """What is wrong with a node's hardware, since when (Unix time), and on which host; empty: its present one."""

    category: str
    description: str
    since: float
    host: str = ""


def finding_of(node: Node) -> Finding | None:
    """Return the hardware finding that a node has now, was taken out for, or failed its preflight with, if any."""
    causes = [(a.condition, a.reason, a.detail, a.since, "") for a in node.health.ailments]
    if record := node.health.record:
        causes.append((record.condition, record.reason, record.detail, record.since, record.host))
    if code := code_of(node):
        causes.append(("", code, node.message, node.reported, ""))
    for condition, reason, detail, since, host in causes:
        if category := category_of(condition, reason, detail):
            return Finding(category, f"{condition} {reason}: {detail}".strip(), since, host)
    return None


@dataclass(frozen=True)
class Impact:
    """One report, on a machine (its id in Azure) and its physical host."""

    node: str
    machine: str
    host: str
    finding: Finding

    @property
    def name(self) -> str:
        """Return the impact's name. Azure accepts each name once, so a finding that is sent twice is reported once."""
        parts = (self.machine.lower(), self.host, self.finding.category, stamp(self.finding.since))
        return f"image-builder-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"

    @property
    def subscription(self) -> str:
        return self.machine.split("/")[2]

    @property
    def path(self) -> str:
        return f"/subscriptions/{self.subscription}/providers/Microsoft.Impact/workloadImpacts/{self.name}"

    @property
    def url(self) -> str:
        return f"{SERVICE}{self.path}?api-version={API}"

    @property
    def body(self) -> dict[str, Any]:
        return {
            "properties": {
                "startDateTime": stamp(self.finding.since),
                "impactCategory": self.finding.category,
                "impactDescription": self.finding.description,
                "impactedResourceId": self.machine,
                "additionalProperties": {"PhysicalHostName": self.host},
            }
        }


def impact_of(node: Node, category: str = "", now: float = 0.0) -> Impact | str | None:
    """Return the report on a node, the reason why there can be none, or None if nothing is wrong with its hardware.

    ``category``: a person says that something is wrong, since ``now`` unless a finding says since when.
    """
    finding = finding_of(node)
    if category:
        known = finding or Finding("", "reported by an operator", now)
        finding = replace(known, category=category)
    if finding is None:
        return None
    if not node.health.machine:
        return "its providerID names no machine in Azure"
    host = finding.host or node.health.host
    if not host:
        return "its physical host is unknown (docs/reference/node-health.md)"
    return Impact(node.name, node.health.machine, host, finding)


def impacts(
    client: Client, rules: Rules, names: Sequence[str], category: str, now: float
) -> tuple[list[Impact], dict[str, str]]:
    """Return reports on nodes, by default on all bad ones, and the reasons why others have none.

    Raises KubeError, UsageError.
    """
    if category and not (names and category.startswith(PREFIX)):
        raise UsageError(f"--category needs a category {PREFIX}… and the nodes to report under it")
    reports, refusals = [], {}
    for node in _nodes(client, rules, names):
        impact = impact_of(node, category, now)
        if isinstance(impact, Impact):
            reports.append(impact)
        elif impact or names:
            refusals[node.name] = impact or "no finding of its hardware: --category names one"
    return reports, refusals


def _nodes(client: Client, rules: Rules, names: Sequence[str]) -> Iterator[Node]:
    if names:
        for name in names:
            yield node_from(client.request("GET", path_of_node(name)), rules)
        return
    query = urllib.parse.urlencode({"labelSelector": rules.label, "resourceVersion": "0"})
    nodes: list[Node] = []
    client.each(f"/api/v1/nodes?{query}", lambda document: nodes.append(node_from(document, rules)))
    yield from nodes


class Manager(Protocol):
    """Resource Manager, as ``system.resource_manager`` reaches it."""

    def send(
        self, method: str, path: str, api: str, body: Mapping[str, Any] | None = None
    ) -> tuple[Any, str]: ...


def send(manager: Manager, impact: Impact) -> str:
    """Send a report once; return Azure's description of what is wrong with it, empty if it was accepted."""
    answer, problem = manager.send("PUT", impact.path, API, impact.body)
    return "" if answer is not None and answer.status_code < 300 else problem
