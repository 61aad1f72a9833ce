"""Settings that the node agent would refuse at boot are problems of the definition, at the lines that set them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.definition import load_inventory
from image_builder.errors import Problem
from image_builder.node import check
from image_builder.settings import REPO_ROOT

pytestmark = pytest.mark.usefixtures("unread_layers")

BASE: dict[str, Any] = {
    "image_base": {"suite": "trixie"},
    "image_layers": ["container_runtime", "node", "kubernetes", "gate", "join"],
    "container_runtime_engine": "containerd",
    "kubelet_version": "1.34",
    "kubelet_source": {"type": "none"},
}
WRONG: tuple[tuple[str, Any, str, str], ...] = (
    ("local_disk_wait_seconds", 600, "local_disk_wait_seconds", "0 to 300"),
    ("local_disk_cache_path", "/cache", "local_disk_cache_path", "below the mount point"),
    ("local_disk_binds", [{"source": "/pods", "target": "/var/p"}], "local_disk_binds[0].source", "below"),
    ("local_disk_directories", [{"path": "a", "mode": 755}], "local_disk_directories[0].mode", "octal"),
    ("local_disk_wipe", ["busy"], "local_disk_wipe", "never wiped"),
    ("local_disk_label", "a-label-that-is-too-long", "local_disk_label", "1 to 12"),
    ("local_disk_selector", {"kind": "configured"}, "local_disk_selector.kind", "needs a model"),
    ("local_disk_mount_point", "/", "local_disk_mount_point", "absolute path"),
    ("local_disk_expected_disks", -1, "local_disk_expected_disks", "at least 0"),
    ("image_preload_promote_reserve_percent", 100, "image_preload_promote_reserve_percent", "below 100"),
    ("image_preload_promote_bytes_per_second", -1, "image_preload_promote_bytes_per_second", "at least 0"),
    ("gpu_preflight_jitter_seconds", 900, "gpu_preflight_jitter_seconds", "0 to 600"),
    ("gpu_preflight_wait_seconds", 1200, "gpu_preflight_wait_seconds", "1 to 900"),
    ("gpu_preflight_taint", "foo", "gpu_preflight_taint", "PREFIX/NAME"),
    ("gpu_preflight_tcp", ["registry"], "gpu_preflight_tcp[0]", "HOST:PORT"),
    ("gpu_preflight_retest_days", -1, "gpu_preflight_retest_days", "at least 0"),
    ("gpu_preflight_gpu", {"count": 99}, "gpu_preflight_gpu.count", "1 to 16"),
    ("gpu_preflight_gpu", {"cuont": 8}, "gpu_preflight_gpu.cuont", "known key"),
    ("gpu_preflight_gpu", {"waived": {"none.such": "r"}}, "gpu_preflight_gpu.waived", "none.such"),
    ("node_health_flaps", 0, "node_health_flaps", "at least 1"),
    ("node_health_raise_looks", 0, "node_health_raise_looks", "at least 1"),
    ("node_health_full_warn_percent", 99, "node_health_full_warn_percent", "full_fail_percent"),
    ("node_health_paths", ["/", "mnt"], "node_health_paths[1]", "absolute path"),
    ("node_health_registries", ["registry.test"], "node_health_registries[0]", "HOST:PORT"),
    ("node_health_severities", {"network.dns": "bad"}, "node_health_severities.network.dns", "warn"),
    ("node_health_intervals", {"disk": 60}, "node_health_intervals.disk", "one of the checks"),
    ("node_health_endpoint_phases", 0, "node_health_endpoint_phases", "at least 1"),
    ("node_health_endpoint_lease_seconds", 0, "node_health_endpoint_lease_seconds", "at least 1"),
    ("node_health_endpoint_idle_gpu_users", -1, "node_health_endpoint_idle_gpu_users", "at least 0"),
    ("node_join_clock_seconds", 0, "node_join_clock_seconds", "1 to 3600"),
    ("node_join_imds", "https://imds", "node_join_imds", "http address"),
)


def found(folder: Path, variables: dict[str, Any]) -> tuple[str, list[Problem]]:
    inventory = {"all": {"children": {"images": {"hosts": {"worker": None}, "vars": {**BASE, **variables}}}}}
    path = folder / "hosts.yml"
    path.write_text(yaml.safe_dump(inventory, sort_keys=False))
    return path.read_text(), load_inventory([path]).problems()


def test_without_a_wrong_setting_there_is_no_problem(tmp_path: Path) -> None:
    assert found(tmp_path, {"gpu_preflight_gpu": {"count": 8}})[1] == []


@pytest.mark.parametrize("number", [0, 1, 2])
def test_each_wrong_setting_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """All at once; a variable that is wrong in several ways has one of them in each round."""
    monkeypatch.chdir(tmp_path)
    each = {name: [row for row in WRONG if row[0] == name] for name, *_ in WRONG}
    rows = {name: ways[number] for name, ways in each.items() if number < len(ways)}
    text, problems = found(tmp_path, {variable: row[1] for variable, row in rows.items()})
    lines = text.splitlines()
    assert sorted(problem.path for problem in problems) == sorted(row[2] for row in rows.values())
    for problem in problems:
        variable, _, _, words = next(row for row in rows.values() if row[2] == problem.path)
        assert words in problem.reason, problem
        first = next(n for n, line in enumerate(lines, 1) if f"{variable}:" in line)
        assert first <= int(problem.where.removeprefix("hosts.yml:")) <= first + 2, problem


def test_a_value_that_is_made_from_another_is_named_where_the_play_makes_it(tmp_path: Path) -> None:
    _, problems = found(tmp_path, {"container_runtime_containerd_root": "containerd"})
    assert {problem.path for problem in problems} >= {"image_preload_data_root"}
    assert any("playbooks/layers/node.yml" in problem.where for problem in problems)


def test_each_document_that_a_role_writes_is_read_by_a_command() -> None:
    written = set()
    for file in REPO_ROOT.glob("roles/*/vars/main.yml"):
        written |= set(re.findall(r"/etc/node-agent/([a-z-]+)\.json", file.read_text()))
    # Taints, and the driver's record, which a command reads key by key; what a node gets when it joins.
    assert written - {"kubelet", "gpu-driver"} == set(check._MODULES)


def test_the_command_reports_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "disk.json").write_text('{"wait_seconds": 600, "wipe": ["busy"]}')
    (tmp_path / "join.json").write_text("[]")
    (tmp_path / "health.json").write_text("{}")
    (tmp_path / "node-config.json").write_text("anything")
    assert check.run(directory=tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["disk.json:", "disk.json:", "join.json:"]
    assert check.run("health", tmp_path / "health.json") == 0
    assert check.run("preflight", tmp_path / "disk.json") == 1
