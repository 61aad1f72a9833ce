"""A pool whose machines the image's GPU driver was not chosen for is found where it is declared."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from image_builder.canonical import JSON
from image_builder.definition import load_inventory
from image_builder.definition.pools import address_problem, fits, is_closed

INVENTORY = """
all:
  children:
    images:
      hosts:
        gpu_image:
        other_image:
          image_layers: [system]
      vars:
        image_base: {{suite: bookworm, components: [main, contrib, non-free, non-free-firmware]}}
        image_layers: [system, gpu]
        nvidia_driver_version: "535.261.03"
        nvidia_vm_sizes: [Standard_NC24ads_A100_v4]
    pool_a:
      vars:
        pool_image: {image}
        pool_vm_size: {size}
      hosts:
        node-1:
"""


@pytest.mark.parametrize(
    ("image", "size", "told"),
    [
        ("gpu_image", "Standard_NC24ads_A100_v4", ""),
        ("gpu_image", "standard_nc24ads_a100_v4", ""),
        (
            "gpu_image",
            "Standard_NC6s_v3",
            "Standard_NC6s_v3 runs `gpu_image`, whose nvidia_vm_sizes don't list it",
        ),
        ("other_image", "Standard_NC6s_v3", ""),
        ("gpu_image", "'{{ somewhere_else }}'", ""),
    ],
)
def test_pool_of_another_size(tmp_path: Path, image: str, size: str, told: str) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY.format(image=image, size=size))
    found = load_inventory([path]).problems()
    assert [p.reason for p in found] == ([told] if told else [])
    if told:
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "pool_vm_size" in text)
        assert found[0].where.endswith(f"hosts.yml:{line}")


def test_a_size_that_a_group_above_sets(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    text = INVENTORY.format(image="gpu_image", size="Standard_NC24ads_A100_v4")
    path.write_text(
        text.replace(
            "    pool_a:", "    pool_a:\n      children: {pool_b: {vars: {pool_vm_size: Standard_NC6s_v3}}}"
        )
    )
    (problem,) = load_inventory([path]).problems()
    assert problem.path == "pool_vm_size" and problem.reason.startswith("Standard_NC6s_v3 runs `gpu_image`")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-J ops@gate", ()),
        ("'-J {{ gate_of_a_host }}'", ()),
        ("-o StrictHostKeyChecking=no", ("`-o StrictHostKeyChecking=no` is not supported",)),
    ],
)
def test_arguments_for_openssh_that_do_not_count(
    tmp_path: Path, arguments: str, expected: tuple[str, ...]
) -> None:
    path = tmp_path / "hosts.yml"
    image = f"other_image\n        ansible_ssh_common_args: {arguments}"
    path.write_text(INVENTORY.format(image=image, size="Standard_NC6s_v3"))
    problems = load_inventory([path]).problems()
    assert [(p.path, p.reason.partition(",")[0]) for p in problems] == [
        ("ansible_ssh_common_args", reason) for reason in expected
    ]
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "ssh_common_args" in text)
    assert all(p.where.endswith(f"hosts.yml:{line}") for p in problems)


def test_sizes_are_compared_as_azure_writes_them_and_as_people_do() -> None:
    assert fits("Standard_ND96isr_H100_v5", ["nd96isr_h100_v5"])
    assert not fits("Standard_ND96is_H100_v5", ["nd96isr_h100_v5"])
    assert not fits("anything", None)


JOINING = """
all:
  children:
    images:
      hosts:
        joining:
          image_layers: [system, container_runtime, node, kubernetes, join]
        standalone:
      vars:
        image_base: {{suite: bookworm}}
        image_layers: [system]
        kubelet_mode: cluster
        kubelet_source: {{type: none}}
        container_runtime_engine: containerd
{more}
    pools:
      vars:
        join_credentials: {{kind: {kind}, url: "https://broker/token", resource: "api://broker"}}
      hosts:
        node-1:
"""
_OPEN = "        azure_guest_blocked_for_pods: [{address: 168.63.129.16, ports: [80, 32526]}]"


@pytest.mark.parametrize(
    ("more", "kind", "is_refused"),
    [("", "broker", False), (_OPEN, "broker", True), (_OPEN, "custom-data", False)],
)
def test_nodes_whose_pods_reach_the_metadata_service_join_by_no_broker(
    tmp_path: Path, more: str, kind: str, is_refused: bool
) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(JOINING.format(more=more, kind=kind))
    found = [one for one in load_inventory([path]).problems() if one.path == "join_credentials"]
    assert len(found) == is_refused
    if found:
        line = next(
            n for n, text in enumerate(path.read_text().splitlines(), 1) if "join_credentials" in text
        )
        assert found[0].where.endswith(f"hosts.yml:{line}") and "`joining`" in found[0].reason


_PROVIDER = """
        kubelet_image_credential_providers:
          - {{name: acr-credential-provider, match_images: ["*.azurecr.io"], args: [{path}]}}
"""


@pytest.mark.parametrize(
    ("path", "pool", "is_refused"),
    [
        ("/etc/kubernetes/azure.json", "", True),
        ("/etc/kubernetes/azure.json", "        join_azure: {tenant_id: a}\n", False),
        ("/etc/other.json", "", False),
    ],
)
def test_a_credential_provider_has_a_file_to_read(
    tmp_path: Path, path: str, pool: str, is_refused: bool
) -> None:
    inventory = tmp_path / "hosts.yml"
    text = JOINING.format(more=_PROVIDER.format(path=path), kind="custom-data")
    inventory.write_text(
        text.replace("      hosts:\n        node-1:", f"{pool}      hosts:\n        node-1:")
    )
    found = load_inventory([inventory]).problems()
    assert [one.path for one in found] == ["join_azure"] * is_refused, found
    if found:
        assert "acr-credential-provider of `joining` reads /etc/kubernetes/azure.json" in found[0].reason


@pytest.mark.parametrize(
    ("above", "pool", "told"),
    [
        ("", "pool_capacity: 600, pool_subnet: 10.40.0.0/16", "65531 addresses for 66600: 600 machines"),
        ("pool_subnet: 10.40.0.0/16", "pool_capacity: 600", "65531 addresses for 66600: 600 machines"),
        ("pool_subnet: 10.40.0.0/24", "pool_capacity: 600, pool_subnet: 10.40.0.0/15", ""),
        ("pool_subnet: 10.40.0.0/16, pool_capacity: 600, join_max_pods: 30", "", ""),
        (
            "join_max_pods: 30",
            "pool_capacity: 600, join_max_pods: 110, pool_subnet: 10.40.0.0/16",
            "for 66600",
        ),
        (
            "racks: 60",
            "pool_capacity: '{{ racks * 10 }}', pool_subnet: 10.40.0.0/16",
            "for 66600: 600 machines",
        ),
        ("", "pool_capacity: '{{ nowhere }}', pool_subnet: 10.40.0.0/16", "needs pool_capacity"),
        ("pool_capacity: 2, pool_subnet: 10.40.0.0/30", "pool_image: joining", "0 addresses for 222"),
        (
            "join_max_pods: '{{ kubelet_max_pods }}'",
            "pool_capacity: 600, pool_subnet: 10.40.0.0/16",
            "for 66600: 600 machines",
        ),
    ],
)
@pytest.mark.parametrize("hosts", ["", "      hosts:\n        node-1:\n        node-2:\n"])
def test_a_pools_subnet_holds_its_pods(tmp_path: Path, above: str, pool: str, told: str, hosts: str) -> None:
    path = tmp_path / "hosts.yml"
    groups = f"""    network:
      vars: {{pool_image: joining, {above}}}
      children:
        pool_a:
          vars: {{{pool}}}
{indent(hosts, "    ")}        pool_b:
          vars: {{pool_image: another, pool_capacity: 9000, pool_subnet: 10.40.0.0/28}}
"""
    path.write_text(JOINING.format(more="", kind="custom-data") + groups)
    problems = load_inventory([path]).problems()
    assert [problem.path for problem in problems] == ["pool_subnet"] * bool(told), problems
    if told:
        assert told in problems[0].reason
        line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "pool_subnet" in text)
        assert problems[0].where.endswith(f"hosts.yml:{line}")


def test_a_file_of_a_group_above_counts_more_than_what_stands_beside_the_hosts(tmp_path: Path) -> None:
    """As Ansible has it: the machines' groups' files come after all that the inventory says in one place."""
    path = tmp_path / "hosts.yml"
    groups = """    network:
      children:
        pool_a:
          vars: {pool_image: joining, pool_capacity: 600, pool_subnet: 10.0.0.0/30}
"""
    path.write_text(JOINING.format(more="", kind="custom-data") + groups)
    assert [problem.path for problem in load_inventory([path]).problems()] == ["pool_subnet"]
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/network.yml").write_text("pool_subnet: 10.0.0.0/8\n")
    assert load_inventory([path]).problems() == []


def test_addresses_are_counted_to_the_last() -> None:
    assert address_problem("10.0.0.0/24", 25, 9) == ""  # 250 of 251
    assert "for 252" in address_problem("10.0.0.0/24", 36, 6)
    assert "200000 machines" in address_problem("10.0.0.0/8", 200_000, 110)
    for count in (None, True, 0, -5, "9"):
        assert "pool_capacity" in address_problem("10.0.0.0/24", count, 9)
    assert "must be a subnet" in address_problem("10.0.0.1/24", 1, 9)


def test_what_closes_the_metadata_service() -> None:
    assert is_closed([{"address": "169.254.169.254", "ports": [443, 80]}])
    wrong: list[JSON] = [None, [], ["x"], [{"address": "169.254.169.254", "ports": [443]}], [{"ports": [80]}]]
    assert not any(is_closed(blocked) for blocked in wrong)
