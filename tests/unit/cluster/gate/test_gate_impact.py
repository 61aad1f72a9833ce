"""The report to Azure's Guest Health Reporting about a bad node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from image_builder.cluster.gate.health import Ailment, Health
from image_builder.cluster.gate.impact import (
    CATEGORIES,
    PREFIX,
    Finding,
    Impact,
    category_of,
    impact_of,
    impacts,
)
from image_builder.cluster.gate.model import Node, Rules, node_from
from image_builder.cluster.gate.policy import Policy
from image_builder.cluster.gate.triage import step_of
from image_builder.drain import quarantine
from image_builder.drain.quarantine import Record
from image_builder.errors import UsageError
from image_builder.node.finding import kubernetes_reason
from image_builder.node.health import kernel_log
from image_builder.node.net.kube import Client
from image_builder.node.preflight import model
from image_builder.node.preflight.model import FAILED, Verdict
from image_builder.node.status import PHYSICAL_HOST

BOOT = "11111111-2222-3333-4444-555555555555"
MACHINE = (
    "/subscriptions/00000000-1111-2222-3333-444444444444/resourceGroups/pools/providers/Microsoft.Compute"
    "/virtualMachineScaleSets/Gpu-0/virtualMachines/7"
)
SINCE = 1_767_225_600.0  # 2026-01-01
LOST = Ailment("NodeHealthy", "GpuLost", SINCE, f"gpu.lost: GPU 3 doesn't answer (boot {BOOT})")
OUT = Record("NodeHealthy", "GpuInforom", "gpu.inforom: GPU 1", "hand-over", SINCE + 300, BOOT, 0.0)


def node(*ailments: Ailment, record: Record | None = None, **more: Any) -> Node:
    health = Health(ailments=ailments, record=record, machine=MACHINE, host="GGBB90904476")
    return Node("gpu-7", boot_id=BOOT, health=health, **more)


def test_a_report_is_the_documented_request() -> None:
    """Case counts in every name: `properties` in camelCase, `additionalProperties` in PascalCase."""
    impact = impact_of(node(LOST))
    assert isinstance(impact, Impact)
    assert impact.body == {
        "properties": {
            "startDateTime": "2026-01-01T00:00:00Z",
            "impactCategory": "Resource.Hpc.Unhealthy.HpcMissingGpu",
            "impactDescription": f"NodeHealthy GpuLost: {LOST.detail}",
            "impactedResourceId": MACHINE,
            "additionalProperties": {"PhysicalHostName": "GGBB90904476"},
        }
    }
    assert impact.url == (
        "https://management.azure.com/subscriptions/00000000-1111-2222-3333-444444444444/providers/Microsoft.Impact"
        f"/workloadImpacts/{impact.name}?api-version=2025-01-01-preview"
    )


def test_a_finding_has_one_name_and_each_finding_another() -> None:
    """Azure accepts a name once: a report sent twice is one, the next finding on the same machine is another."""
    first = Impact("gpu-7", MACHINE, "A", Finding("C", "words", SINCE))
    assert (
        first.name
        == replace(first, machine=MACHINE.upper(), finding=Finding("C", "others", SINCE + 0.4)).name
    )
    others = [
        replace(first, host="B"),
        replace(first, machine=MACHINE + "1"),
        replace(first, finding=Finding("D", "words", SINCE)),
        replace(first, finding=Finding("C", "words", SINCE + 1)),
    ]
    assert len({first.name, *(other.name for other in others)}) == 5


@pytest.mark.parametrize(
    ("condition", "reason", "detail", "category"),
    [
        ("NodeHealthy", "GpuRemapFailure", "", "HpcRowRemapFailure"),
        ("NodeHealthy", "InfinibandFlaps", "", "IBPortFlapping"),
        (
            "NodeHealthy",
            "GpuXid",
            "gpu.xid: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen",
            "XID79FallenOffBus",
        ),
        ("NodeHealthy", "GpuXid", "gpu.xid: NVRM: Xid (PCI:0000:3b:00): 119, pid=0, Timeout", "GpuXIDError"),
        ("NodeHealthy", "GpuXid", "gpu.xid: ...", "GpuXIDError"),
        ("GPUMissing", "Observed", "Expected 8", "HpcMissingGpu"),
        (
            "SysLogsXIDError",
            "SysLogsXIDErrorIsNotHealthy",
            "ErrorCode:95 PCI:0002",
            "XID95UncontainedECCError",
        ),
        ("", "xid.48", "", "XID48DoubleBitECC"),
        ("", "xid.13", "", "GpuXIDError"),
        ("", "sxid.20034", "", "HpcGenericFailure"),
        ("XIDErrors", f"xid.{'9' * 5000}", "", "GpuXIDError"),
        ("XIDErrors", "", f"Xid (PCI:0): {'9' * 5000}", "GpuXIDError"),
        ("XIDErrors", "", f"ErrorCode:{'9' * 5000}", "GpuXIDError"),
        ("", "temp.margin", "", "HpcDcgmiThermalReport"),
        # Not a fault of the hardware, or not certainly.
        ("NodeHealthy", "ClockOff", "", ""),
        ("NodeHealthy", "MaintenanceScheduled", "", ""),
        ("NodeHealthy", "GpuDriver", "", ""),
        ("", "driver.mismatch", "", ""),
        ("KernelDeadlock", "DockerHung", "", ""),
    ],
)
def test_category(condition: str, reason: str, detail: str, category: str) -> None:
    expected = f"Resource.Hpc.Unhealthy.{category}" if category else ""
    assert category_of(condition, reason, detail) == expected


def test_an_xid_is_read_as_our_agent_writes_it() -> None:
    line = "NVRM: Xid (PCI:0000:3b:00): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1)"
    trouble = kernel_log.Trouble("gpu.xid", "94 0000:3b:00", 1, SINCE, line)
    (finding,) = kernel_log.rule([trouble], SINCE, frozenset(), lambda _: ("fail", "replace"))
    reason = kubernetes_reason(finding.code)
    assert category_of("NodeHealthy", reason, f"{finding.code}: {finding.detail}").endswith(
        "XID94ContainedECCError"
    )


def test_categories_are_azures() -> None:
    """As its page lists them (guest-health-impact-categories, September 2025)."""
    known = (
        "HpcMissingGpu MissingIB IBPerformance IBPortDown IBPortFlapping HpcGpuDcgmDiagFailure HpcRowRemapFailure"
        " HpcInforomCorruption HpcGenericFailure ManualInvestigation XID95UncontainedECCError XID94ContainedECCError"
        " XID79FallenOffBus XID48DoubleBitECC UnhealthyGPUNvidiasmi NvLink HpcDcgmiThermalReport"
        " ECCPageRetirementTableFull DBEOverLimit GpuXIDError AmdGpuResetFailed EROTFailure GPUMemoryBWFailure"
        " CPUPerformance"
    )
    assert set(CATEGORIES) <= set(known.split())
    names = [name for names in CATEGORIES.values() for name in names]
    assert len(names) == len(set(names))


def test_what_took_a_node_out_is_reported_after_a_reboot_too() -> None:
    impact = impact_of(node(record=OUT))
    assert isinstance(impact, Impact)
    assert impact.finding == Finding(
        "Resource.Hpc.Unhealthy.HpcInforomCorruption",
        "NodeHealthy GpuInforom: gpu.inforom: GPU 1",
        SINCE + 300,
    )


def test_what_took_a_node_out_is_reported_of_the_host_that_it_was_on() -> None:
    """Azure has moved the machine meanwhile; a record of an earlier version names no host."""
    need = step_of(node(LOST), {}, Policy(), Rules(), SINCE + 300)
    assert need and need[1]
    moved = node(record=need[1])
    moved = replace(moved, boot_id="other", health=replace(moved.health, host="GGBB90904999"))
    for subject, host in ((need[1], "GGBB90904476"), (OUT, "GGBB90904999")):
        impact = impact_of(replace(moved, health=replace(moved.health, record=subject)))
        assert isinstance(impact, Impact) and impact.host == host
    new = impact_of(replace(moved, health=replace(moved.health, ailments=(LOST,))))
    assert isinstance(new, Impact) and new.host == "GGBB90904999"


def test_a_boot_that_failed_its_preflight_is_reported() -> None:
    verdict = Verdict(FAILED, "nvlink.down", "GPU 2: 17 of 18", "replace")
    document = model.document(verdict, [], boot_id=BOOT, image_build="b", started="now", seconds=9.0)
    condition = {
        "type": model.CONDITION,
        "status": "False",
        "message": model.message(document),
        "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    }
    sick = node_from(
        {
            "metadata": {"name": "gpu-7", "annotations": {PHYSICAL_HOST: "GGBB90904476"}},
            "spec": {"providerID": f"azure://{MACHINE}"},
            "status": {"nodeInfo": {"bootID": BOOT}, "conditions": [condition]},
        },
        Rules(),
    )
    impact = impact_of(sick)
    assert isinstance(impact, Impact)
    assert (impact.machine, impact.host) == (MACHINE, "GGBB90904476")
    assert (impact.finding.category, impact.finding.since) == ("Resource.Hpc.Unhealthy.NvLink", SINCE)


def test_what_is_not_the_hardwares_takes_a_person() -> None:
    clock = node(Ailment("NodeHealthy", "ClockOff", SINCE))
    assert impact_of(clock) is None and impact_of(node()) is None
    named = impact_of(node(), "Resource.Hpc.Unhealthy.ManualInvestigation", SINCE)
    assert isinstance(named, Impact) and named.finding.since == SINCE
    known = impact_of(node(LOST), "Resource.Hpc.Reboot", SINCE + 9)
    assert isinstance(known, Impact)
    assert (known.finding.category, known.finding.since) == ("Resource.Hpc.Reboot", SINCE)


def test_a_node_that_azure_could_not_find() -> None:
    sick = node(LOST)
    for health, reason in (
        (replace(sick.health, machine=""), "providerID"),
        (replace(sick.health, host=""), "physical host"),
    ):
        refused = impact_of(replace(sick, health=health))
        assert isinstance(refused, str) and reason in refused


class Nodes:
    """An API server with a node without a finding, and one whose host is unknown."""

    def request(self, _method: str, path: str) -> dict[str, Any]:
        name = path.rpartition("/")[2]
        annotation = {quarantine.MARK: OUT.text()} if name == "homeless" else {}
        return {"metadata": {"name": name, "annotations": annotation}, "spec": {}, "status": {}}

    def each(self, _path: str, take: Callable[[dict[str, Any]], None]) -> None:
        for name in ("well", "homeless"):
            take(self.request("GET", name))


@pytest.mark.parametrize(
    ("names", "category", "refused"),
    [
        ([], "", {"homeless"}),
        (["well"], "", {"well"}),
        (["well", "homeless"], "", {"well", "homeless"}),
        (["well"], f"{PREFIX}Unhealthy", {"well"}),
    ],
)
def test_who_was_named_and_has_no_report_gets_a_reason(
    names: list[str], category: str, refused: set[str]
) -> None:
    reports, refusals = impacts(cast(Client, Nodes()), Rules(), names, category, SINCE)
    assert not reports and set(refusals) == refused and all(refusals.values())


@pytest.mark.parametrize(("names", "category"), [([], f"{PREFIX}Unhealthy"), (["well"], "Resource.Other")])
def test_a_category_needs_nodes_and_its_prefix(names: list[str], category: str) -> None:
    with pytest.raises(UsageError):
        impacts(cast(Client, Nodes()), Rules(), names, category, SINCE)
