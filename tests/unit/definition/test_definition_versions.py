"""Versions that `validate` refuses, at the lines that set them: kubelets, API servers, engines and cgroups."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from image_builder.definition import Inventory, load_inventory
from image_builder.errors import Problem

pytestmark = pytest.mark.usefixtures("unread_layers")

INVENTORY = """
all:
  children:
    images:
      hosts:
        worker:
      vars:
        image_base: {suite: bookworm}
        image_layers: [container_runtime, kubernetes]
        container_runtime_engine: containerd
        kubelet_source: {type: none}
"""


def read(folder: Path, images: str, pools: str = "") -> tuple[Path, Inventory]:
    """Write an inventory with more variables for its image, and more groups, and read it."""
    path = folder / "hosts.yml"
    path.write_text(
        INVENTORY + indent(images.strip("\n"), " " * 8) + "\n" + indent(pools.strip("\n"), " " * 4) + "\n"
    )
    return path, load_inventory([path])


def check(folder: Path, images: str, pools: str = "") -> tuple[Path, list[Problem]]:
    """Return all problems of such an inventory."""
    path, inventory = read(folder, images, pools)
    return path, inventory.problems()


def line(path: Path, text: str) -> str:
    number = next(n for n, found in enumerate(path.read_text().splitlines(), 1) if text in found)
    return f"hosts.yml:{number}"


def images(kubelet: str, containerd: str = "2.2") -> str:
    return f'kubelet_version: "{kubelet}"\ncontainer_runtime_containerd_version: "{containerd}"'


def pool(servers: str) -> str:
    return f"""
pools:
  vars:
    cluster: "1.36.2"
    pool_api_server_versions: {servers}
  children:
    pool_a:
      vars:
        pool_image: worker
"""


@pytest.mark.parametrize(
    ("kubelet", "servers", "told"),
    [
        ("1.35", '["1.35.6"]', ""),
        ("1.35.3", '["1.35.0"]', ""),
        ("1.35", '["1.36.2", "1.35.6"]', ""),
        ("1.34", '"1.37.0"', ""),
        ("1.35", '"{{ [cluster] }}"', ""),
        (
            "1.36.1",
            '["1.36.2", "1.35.6"]',
            "the kubelet 1.36.1 of `worker` is newer than the API server 1.35.6: upgrade every API server first, or "
            "set kubelet_version to 1.35 or older",
        ),
        (
            "1.33",
            '["1.36.2", "1.37.0"]',
            "the kubelet 1.33 of `worker` is more than 3 minor versions older than the API server 1.37.0: set "
            "kubelet_version to 1.34 or later",
        ),
        ("1.35", "[1.36]", "must be a list of Kubernetes versions in quotes"),
        ("1.35", "[]", "must be a list of Kubernetes versions in quotes"),
        ("1.35", '["1.36.2", "latest"]', "must be a list of Kubernetes versions in quotes"),
        ("1.35", '"{{ nowhere }}"', "must be a list of Kubernetes versions in quotes"),
    ],
)
def test_a_kubelet_and_the_api_servers_of_its_pools(
    tmp_path: Path, kubelet: str, servers: str, told: str
) -> None:
    path, problems = check(tmp_path, images(kubelet), pool(servers))
    if not told:
        assert problems == []
        return
    (problem,) = problems
    assert problem.path == "pool_api_server_versions"
    assert problem.where.endswith(line(path, "pool_api_server_versions"))
    assert problem.reason.startswith(told)


def test_the_line_is_that_of_the_group_that_overrides(tmp_path: Path) -> None:
    own = pool('["1.35.6"]') + '        pool_api_server_versions: ["1.34.8"]\n'
    path, (problem,) = check(tmp_path, images("1.35"), own)
    assert problem.where.endswith(line(path, '["1.34.8"]'))


@pytest.mark.parametrize(
    ("kubelet", "server", "oldest"),
    [
        ("1.20", "1.22.17", ""),
        ("1.20", "1.23.17", "1.21"),
        ("1.20", "1.28.1", "1.25"),
        ("1.20", "1.29.1", "1.26"),
    ],
)
def test_a_kubelet_before_1_25_may_be_two_minor_versions_older(
    tmp_path: Path, kubelet: str, server: str, oldest: str
) -> None:
    _, problems = check(tmp_path, images(kubelet, "1.7"), pool(f'["{server}"]'))
    told = (
        f"the kubelet {kubelet} of `worker` is more than 2 minor versions older than the API server {server}: set "
        f"kubelet_version to {oldest} or later"
    )
    assert [p.reason for p in problems] == ([told] if oldest else [])


def test_both_sides_of_a_wide_upgrade_are_reported_and_other_images_pools_are_not(tmp_path: Path) -> None:
    _, problems = check(tmp_path, images("1.34"), pool('["1.33.1", "1.38.0"]'))
    assert len(problems) == 2 and {p.path for p in problems} == {"pool_api_server_versions"}
    _, problems = check(tmp_path, images("1.34"), pool('["1.33.1"]').replace("worker", "another"))
    assert problems == []
    _, problems = check(tmp_path, images("1.34"), "pools:\n  vars: {pool_image: worker}")
    assert problems == []


@pytest.mark.parametrize(
    ("image", "pools", "lines"),
    [
        ("", pool('["1.35.6"]'), []),
        ("", pool("none").replace("pool_api_server_versions", "site"), ["pool_image: worker"]),
        ("kubelet_mode: standalone", "pools:\n  vars: {pool_image: worker}", []),
        ("image_layers: [system]", "pools:\n  vars: {pool_image: worker}", []),
        ("", "pools:\n  vars: {pool_image: another}", []),
        # Once per place, however many groups inherit it.
        ("", "pools:\n  vars: {pool_image: worker}\n  children: {a: , b: }", ["pool_image: worker"]),
    ],
)
def test_a_pool_that_says_no_api_servers_is_warned_of(
    tmp_path: Path, image: str, pools: str, lines: list[str]
) -> None:
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars/worker.yml").write_text(image)
    path, inventory = read(tmp_path, images("1.35"), pools)
    assert inventory.problems() == []
    warnings = inventory.warnings(["worker"])
    assert [w.where.rpartition("/")[2] for w in warnings] == [line(path, text) for text in lines]
    for warning in warnings:
        assert warning.path == "pool_api_server_versions"
        assert "the kubelet 1.35 of `worker` works with the pool's API servers" in warning.reason


@pytest.mark.parametrize(
    ("kubelet", "argument", "config", "is_refused"),
    [
        ("1.35", "systemd.unified_cgroup_hierarchy=0", "{}", True),
        ("1.37", "systemd.unified_cgroup_hierarchy=no", "{failCgroupV1: true}", True),
        ("1.36", "systemd.unified_cgroup_hierarchy=0", "{failCgroupV1: false}", False),
        ("1.34", "systemd.unified_cgroup_hierarchy=0", "{}", False),
        ("1.35", "systemd.unified_cgroup_hierarchy=1", "{}", False),
    ],
)
def test_cgroup_v1_with_a_kubelet_that_does_not_start_there(
    tmp_path: Path, kubelet: str, argument: str, config: str, is_refused: bool
) -> None:
    more = f"image_kernel_args:\n  - quiet\n  - {argument}\nkubelet_config: {config}"
    path, problems = check(tmp_path, f"{images(kubelet)}\n{more}")
    assert [p.path for p in problems] == (["image_kernel_args[1]"] if is_refused else [])
    if is_refused:
        assert problems[0].where.endswith(line(path, argument))
        assert problems[0].reason.endswith("remove it, or set kubelet_config: {failCgroupV1: false}")


def test_all_of_it_is_reported_at_once(tmp_path: Path) -> None:
    more = """
image_kernel_args: [systemd.unified_cgroup_hierarchy=0]
kubelet_crictl: {url: "https://REPLACE.example/crictl.tgz", sha256: "%s"}
site_registry: REPLACE
""" % ("0" * 64)
    path, problems = check(tmp_path, images("1.36") + more, pool('["1.35.6"]'))
    assert [(p.path, p.where.partition("hosts.yml")[2]) for p in problems] == [
        ("image_kernel_args[0]", line(path, "image_kernel_args").removeprefix("hosts.yml")),
        ("kubelet_crictl", line(path, "kubelet_crictl").removeprefix("hosts.yml")),
        ("site_registry", line(path, "site_registry").removeprefix("hosts.yml")),
        ("pool_api_server_versions", line(path, "pool_api_server").removeprefix("hosts.yml")),
    ]
    path, problems = check(tmp_path, images("1.36", "1.7.28") + more)
    refused = next(p for p in problems if p.path == "kubelet_container_runtime_version")
    assert "Kubernetes 1.36 does not work with containerd 1.7.28; it needs 2.0 or later" in refused.reason
    assert refused.where
    assert {p.path for p in problems} >= {"kubelet_crictl", "site_registry"}
