"""The physical host's name in the Hyper-V daemon's file."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.node.health import physical_host, report
from tests.support.nodes.health_looks import kvp_record

OTHERS = (
    kvp_record("HostName", "HOST"),
    kvp_record("VirtualMachineName", "gpu_17"),
    kvp_record("PhysicalHostNameX", "no"),
)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"".join((*OTHERS, kvp_record("PhysicalHostName", "GGBB90904476"))), "GGBB90904476"),
        (
            kvp_record("PhysicalHostName", "OLD1") + kvp_record("PhysicalHostName", "GGBB90904476"),
            "GGBB90904476",
        ),
        (b"".join(OTHERS), ""),
        (kvp_record("PhysicalHostName", ""), ""),
        (kvp_record("PhysicalHostName", "a b"), ""),
        (kvp_record("PhysicalHostName", "x" * 64), ""),
        # The daemon is still writing.
        (kvp_record("PhysicalHostName", "GGBB90904476")[:-1], ""),
        (b"", ""),
    ],
)
def test_name(tmp_path: Path, data: bytes, name: str) -> None:
    (tmp_path / "pool").write_bytes(data)
    assert physical_host.name(tmp_path / "pool") == name


def test_a_machine_that_is_not_on_hyper_v_has_none(tmp_path: Path) -> None:
    assert physical_host.name(tmp_path / "none") == "" and physical_host.name(tmp_path) == ""


def test_a_name_that_comes_after_the_condition_is_reported_too() -> None:
    current = report.Condition("True", "NodeIsHealthy", "")
    reported = report.after_success(current, "", "", "", 0.0)
    assert not report.due(reported, current, "", "", 0.0)
    assert report.due(reported, current, "GGBB90904476", "", 0.0)
    assert not report.due(report.after_success(current, "H", "", "", 0.0), current, "H", "", 0.0)
