"""The example for Azure: kernel, driver and network of its images come from sources that have them all."""

from __future__ import annotations

import re

import pytest

from image_builder.definition import resolved_variables
from image_builder.definition.pools import CAPACITY, IMAGE, SUBNET
from image_builder.definition.subnets import address_problem
from image_builder.settings import REPO_ROOT
from tests.support.shipped import shipped

EXAMPLE = REPO_ROOT / "inventories/azure_vmss"
# NVIDIA's repositories by suite, and the branches that they lack (NVIDIA/cuda-repo-management, issue 38).
REPOSITORIES = {"bookworm": "debian12", "trixie": "debian13"}
MISSING_BRANCHES = {"trixie": {"580"}}
# RDMA's options in Debian's kernels (packages linux-config-6.1 6.1.192-2 and linux-config-6.12 6.12.117-1).
OPTIONS = {
    "linux-image-amd64": {"INFINIBAND_IPOIB", "INFINIBAND_USER_ACCESS", "MLX5_INFINIBAND"},
    "linux-image-cloud-amd64": {"INFINIBAND_USER_ACCESS", "MLX5_INFINIBAND"},
}


def problems(suite: str, branch: str, repository: str, kernel: str, options: set[str]) -> list[str]:
    """Return what doesn't exist in this combination."""
    found = [f"kernel option {name}" for name in sorted(options - OPTIONS[kernel])]
    if branch in MISSING_BRANCHES.get(suite, set()):
        found.append(f"driver branch {branch}")
    if f"/repos/{REPOSITORIES[suite]}/" not in repository:
        found.append(f"repository of {suite}")
    return found


def test_kernel_and_driver_exist_together() -> None:
    definition = shipped("azure_vmss").define("worker_h100")
    v = resolved_variables(definition)
    repository, options = v["nvidia_repository"], v["nvidia_rdma_kernel_options"]
    assert isinstance(repository, dict) and isinstance(options, list)
    facts = (
        definition.base.suite,
        str(v["nvidia_driver_version"]).split(".")[0],
        str(repository["uris"]),
        str(v["system_kernel_package"]),
        {str(name) for name in options},
    )
    assert problems(*facts) == []
    assert v["kubelet_cni"] == "delegated" and v["node_join_pod_network"] == "/etc/cni/net.d"


def test_subnets_hold_what_their_comments_say() -> None:
    pods = resolved_variables(shipped("azure_vmss").define("worker_cpu"))["kubelet_max_pods"]
    text = (EXAMPLE / "hosts.yml").read_text("utf-8")
    told = re.findall(rf"{SUBNET}: (\S+)  # ([\d,]+) addresses: (\d+) ", text)
    assert len(told) == text.count(f"{IMAGE}: ") == text.count(f"{CAPACITY}: ") == 2
    for subnet, addresses, machines in told:
        assert address_problem(subnet, int(machines), pods) == ""
        number = addresses.replace(",", "")
        assert f"{subnet} has {number} addresses" in address_problem(subnet, int(machines) + 1, pods)


@pytest.mark.parametrize(
    ("suite", "repository", "kernel", "option", "problem"),
    [
        ("trixie", "/repos/debian13/", "linux-image-amd64", "INFINIBAND_IPOIB", "driver branch 580"),
        ("bookworm", "/repos/debian13/", "linux-image-amd64", "INFINIBAND_IPOIB", "repository of bookworm"),
        (
            *("bookworm", "/repos/debian12/", "linux-image-cloud-amd64", "INFINIBAND_IPOIB"),
            "kernel option INFINIBAND_IPOIB",
        ),
        ("bookworm", "/repos/debian12/", "linux-image-amd64", "PCI_P2PDMA", "kernel option PCI_P2PDMA"),
    ],
)
def test_what_does_not_exist_together_is_seen(
    suite: str, repository: str, kernel: str, option: str, problem: str
) -> None:
    assert problems(suite, "580", repository, kernel, {option}) == [problem]
