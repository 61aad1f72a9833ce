"""Each pin of the example for Azure is checked against its source: a line of ../shared/facts, or another fact of ours.

A pin is a version, an address, a checksum, a VM size, a suite, a package of the kernel or one of its options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from image_builder.settings import REPO_ROOT
from tests.support.facts import SHARED, needs_facts
from tests.unit.definition.test_azure_example import EXAMPLE, MISSING_BRANCHES, OPTIONS, REPOSITORIES

_PIN = re.compile(
    r"\d+\.\d+|://|^Standard_|^[0-9a-f]{64}$|^linux-image|^(INFINIBAND|MLX5|PCI|DMABUF)_|^(trixie|bookworm)$"
)
# Addresses and names in the example's own network.
_OWN = re.compile(
    r"ansible_host$|pool_subnet$|:kubelet_cluster_dns|:join_|cidrs\.0$|:container_runtime_registry_mirrors|"
    r":image_preload|:cluster_registry$"
)


class Source(NamedTuple):
    """A file below ../shared and a pattern of a line in it, in which ``part`` of the pin replaces ``PIN``."""

    file: str
    line: str
    part: str = r".+"


_ND = Source(
    "facts/gpu.md", r"^\| PIN \| 8.H100-80 SXM \| 96/1900 \|.* 8, 28 TiB total \| 8.400G \|", r"ND\w+"
)
SOURCES = {
    "all:cluster_kubernetes": Source("facts/kubelet-fields.json", r'^\s*"PIN": \{'),
    "all:container_runtime_containerd_version": Source("facts/builders.md", r"containerd only \(PIN\.\d"),
    "all:container_runtime_pause_image": Source(
        "facts/runtime.md", r"registry\.k8s\.io/PIN\"", r"pause:\d+\.\d+"
    ),
    "all:network_accounting_internal_cidrs.1": Source("facts/pools.md", r"wireserver \(PIN ", r"[\d.]+(?=/)"),
    "all:network_accounting_internal_cidrs.2": Source(
        "review/node.md", r"A pod asks PIN for", r"[\d.]+(?=/)"
    ),
    "gpu:nvidia_driver_version": Source("facts/gpu.md", r"`aks-gpu-cuda-lts` PIN \(default managed\)"),
    "gpu:nvidia_container_toolkit_version": Source("facts/gpu.md", r"^### .*Container toolkit & CDI \(PIN\)"),
    "h100:nvidia_vm_sizes.0": _ND,
    "hosts:all.children.vmss_h100_a.vars.pool_vm_size": _ND,
    "hosts:all.children.vmss_cpu.vars.pool_vm_size": Source(
        "review/features.md", r"^\| `PIN` \| CPU pool.*handled"
    ),
    "main:pool_api_server_versions.0": Source("programs/README.md", r"`kubernetes-PIN/kubelet\.xz`"),
}


def _has_same_series(value: str, pins_by_path: Mapping[str, str]) -> bool:
    return (
        f"/download/v{pins_by_path['all:cluster_kubernetes']}.0/azure-acr-credential-provider-linux-amd64"
        in value
    )


def _is_docker_repository_of_lab(value: str, _: Mapping[str, str]) -> bool:
    lab = yaml.safe_load((REPO_ROOT / "inventories/lab/group_vars/current.yml").read_text("utf-8"))
    return bool(lab["current_programs"]["makers"]["repository"]["uris"] == [value])


def _is_nvidia_repository_of_suite(value: str, pins_by_path: Mapping[str, str]) -> bool:
    return value.endswith(f"/cuda/repos/{REPOSITORIES[pins_by_path['gpu:image_base.suite']]}/x86_64/")


def _has_branch(suite: str, pins_by_path: Mapping[str, str]) -> bool:
    return pins_by_path["gpu:nvidia_driver_version"].split(".")[0] not in MISSING_BRANCHES.get(suite, set())


def _has_options(kernel: str, pins_by_path: Mapping[str, str]) -> bool:
    wanted = {value for path, value in pins_by_path.items() if ":nvidia_rdma_kernel_options." in path}
    return wanted <= OPTIONS[kernel]


# Pins without a line in ../shared/facts, and the check of each: against another pin, or the vendor's instructions.
CHECKS: dict[str, Callable[[str, Mapping[str, str]], bool]] = {
    "all:image_base.suite": lambda value, _: value in REPOSITORIES,
    "gpu:image_base.suite": _has_branch,
    "all:container_runtime_repository.uris.0": _is_docker_repository_of_lab,
    "all:kubelet_repository.uris.0": lambda value, _: (
        value == "https://pkgs.k8s.io/core:/stable:/v{{ cluster_kubernetes }}/deb/"
    ),
    "all:kubelet_image_credential_providers.0.url": _has_same_series,
    # A placeholder, which `validate` refuses.
    "all:kubelet_image_credential_providers.0.sha256": lambda value, _: value == "0" * 64,
    "gpu:nvidia_repository.uris.0": _is_nvidia_repository_of_suite,
    "gpu:nvidia_container_toolkit_repository.uris.0": lambda value, _: (
        value == "https://nvidia.github.io/libnvidia-container/stable/deb/amd64/"
    ),
    "h100:system_kernel_package": _has_options,
    **{
        f"h100:nvidia_rdma_kernel_options.{n}": lambda value, found: (
            value in OPTIONS[found["h100:system_kernel_package"]]
        )
        for n in range(3)
    },
}


class _Loader(yaml.SafeLoader):
    """A loader that reads vaulted values as nothing."""


_Loader.add_constructor("!vault", lambda _loader, _node: "")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each scalar with its path."""
    if isinstance(value, dict | list):
        for name, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(below, f"{path}.{name}" if path else str(name))
    else:
        yield path, str(value)


def pins(folder: Path) -> dict[str, str]:
    """Return the pins of an inventory's files by ``FILE:path.of.the.value``."""
    return {
        f"{file.stem}:{path}": value
        for file in sorted(folder.rglob("*.yml"))
        for path, value in leaves(yaml.load(file.read_text("utf-8"), _Loader))
        if _PIN.search(value) and "\n" not in value and not _OWN.search(f"{file.stem}:{path}")
    }


PINS = pins(EXAMPLE)


def test_every_pin_has_a_source() -> None:
    assert sorted(PINS) == sorted([*SOURCES, *CHECKS])


def is_in_source(path: str, value: str) -> bool:
    """Return whether a pin is in its source."""
    source = SOURCES[path]
    part = re.search(source.part, value)
    pattern = source.line.replace("PIN", re.escape(part[0]) if part else "nothing")
    return re.search(pattern, (SHARED / source.file).read_text("utf-8"), re.MULTILINE) is not None


def _other(value: str) -> str:
    """Return another pin of the same form: with each digit, suite, package or option replaced by the next one."""
    other = {"trixie": "sid", "bookworm": "trixie", "linux-image-amd64": "linux-image-cloud-amd64"}.get(value)
    return other or re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), value)


@needs_facts
@pytest.mark.parametrize("path", sorted(SOURCES))
def test_a_pin_is_what_its_source_says(path: str) -> None:
    assert is_in_source(path, PINS[path])
    assert not is_in_source(path, _other(PINS[path]))


@pytest.mark.parametrize("path", sorted(CHECKS))
def test_a_pin_is_what_another_fact_says(path: str) -> None:
    value = PINS[path]
    other = f"{value}_OF_NONE" if "kernel_options" in path else _other(value).replace("/debian", "/ubuntu")
    other = other if other != value else value.replace("https:", "http:")
    assert CHECKS[path](value, PINS)
    assert not CHECKS[path](other, PINS)


@needs_facts
def test_what_kernel_and_repositories_lack_is_what_the_facts_say() -> None:
    rows = (SHARED / "review/features.md").read_text("utf-8").splitlines()
    (kernel,) = (row for row in rows if row.startswith("| kernel | suite's cloud kernel |"))
    has, _, rest = kernel.partition(" yes; ")
    lacks = set(re.findall(r"`(\w+)`", rest.partition(" not set")[0]))
    assert "`mlx5_ib`" in has and "INFINIBAND_IPOIB" in lacks
    assert not lacks & OPTIONS["linux-image-cloud-amd64"]
    assert lacks & OPTIONS["linux-image-amd64"] == {"INFINIBAND_IPOIB"}
    (driver,) = (row for row in rows if row.startswith("| driver | "))
    (branch,) = MISSING_BRANCHES["trixie"]
    assert f"R{branch} is LTS" in driver and "the Debian 12 one has it" in driver
    assert "Not in that repository per open issue 38" in driver
