"""The operator's policy for nodes that go bad."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.cluster.gate.policy import Policy
from image_builder.errors import DefinitionError
from image_builder.strict_yaml import load

FILE = """\
share: 0.05
rules:
  - {reason: "Gpu*", remedy: reboot, lasting_seconds: 60}
  - {condition: ReadonlyFilesystem, remedy: ignore}
conditions: {"example.com/*": "True"}
drain: {mode: evict}
"""


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "health.yml").write_text(FILE)
    policy = load(tmp_path / "health.yml", Policy, "health")
    gpu = policy.rule("NodeHealthy", "GpuLost")
    assert (gpu.remedy, policy.lasts(gpu)) == ("reboot", 60.0)
    assert policy.rule("ReadonlyFilesystem", "FilesystemIsReadOnly").remedy == "ignore"
    plain = policy.rule("NodeHealthy", "FilesystemReadOnly")
    assert (plain.remedy, policy.lasts(plain)) == ("taint", 300.0)
    assert policy.drain.mode == "evict"


@pytest.mark.parametrize(
    ("condition", "status"),
    [
        ("NodeHealthy", "False"),
        ("image-builder/NodeHealthy", "False"),
        ("example.org/NodeHealthy", None),
        ("KernelDeadlock", "True"),
        ("GpuNvlinkWatch", "True"),
        ("SysLogsXIDError", "True"),
        ("InfiniBandStateCheck", "True"),
        ("KubeletUnhealthy", "True"),
        ("XIDErrors", "True"),
        ("NTPProblem", None),
        ("example.com/Disk", "True"),
        ("Ready", None),
        ("NodePreflightPassed", None),
    ],
)
def test_which_status_is_bad(condition: str, status: str | None) -> None:
    policy = Policy(conditions={"example.com/*": "True"})
    assert policy.bad_status(condition) == status


def test_notice_of_maintenance_is_acted_on_at_once() -> None:
    policy = Policy()
    assert policy.lasts(policy.rule("NodeHealthy", "MaintenanceScheduled")) == 0


@pytest.mark.parametrize(
    "text",
    [
        "share: 2",
        "lasting_seconds: -1",
        "lasting_seconds: .inf",
        # This would empty healthy nodes, beyond the allowed share.
        "drain: {whole_gangs: true}",
        # Each node has a drain of its own, so this would limit nothing.
        "drain: {max_fenced: 1}",
    ],
)
def test_what_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "health.yml").write_text(text)
    with pytest.raises(DefinitionError):
        load(tmp_path / "health.yml", Policy, "health")
