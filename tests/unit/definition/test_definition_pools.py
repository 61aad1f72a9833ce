"""A pool whose machines the image's GPU driver was not chosen for is found where it is declared."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.definition import load_inventory
from image_builder.definition.pools import fits

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
            "Standard_NC6s_v3 runs `gpu_image`, whose nvidia_vm_sizes don't have it",
        ),
        ("other_image", "Standard_NC6s_v3", ""),
        ("gpu_image", "'{{ somewhere_else }}'", ""),
    ],
)
def test_pool_of_another_size(tmp_path: Path, image: str, size: str, told: str) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(INVENTORY.format(image=image, size=size))
    found = load_inventory([path]).problems()
    assert [p.what for p in found] == ([told] if told else [])
    if told:
        line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if "pool_vm_size" in text)
        assert found[0].where.endswith(f"hosts.yml:{line}")


def test_sizes_are_compared_as_azure_writes_them_and_as_people_do() -> None:
    assert fits("Standard_ND96isr_H100_v5", ["nd96isr_h100_v5"])
    assert not fits("Standard_ND96is_H100_v5", ["nd96isr_h100_v5"])
    assert not fits("anything", None)
