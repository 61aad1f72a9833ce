"""A pool with machines for which the image's GPU driver wasn't chosen is reported where it is declared."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.canonical import JSON
from image_builder.definition import load_inventory
from image_builder.definition.pools import fits, is_closed

pytestmark = pytest.mark.usefixtures("unread_layers")

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


def test_what_closes_the_metadata_service() -> None:
    assert is_closed([{"address": "169.254.169.254", "ports": [443, 80]}])
    wrong: list[JSON] = [None, [], ["x"], [{"address": "169.254.169.254", "ports": [443]}], [{"ports": [80]}]]
    assert not any(is_closed(blocked) for blocked in wrong)
