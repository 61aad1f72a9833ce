"""A VHD that was baked, booted and verified becomes a version: in the end, Azurite has the file, byte for byte."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from image_builder.errors import PublishError
from image_builder.gallery import pages
from image_builder.settings import DEFAULT_STORE
from tests.support.arm import kills
from tests.support.arm.model import Request
from tests.support.arm.place import SETTINGS, Place
from tests.support.arm.publisher import Publisher
from tests.support.images.builds import REPO, Workplace

pytestmark = [pytest.mark.root, pytest.mark.slow]

IMAGE = "minimal"


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """Make the lab's inventory, whose smallest image is made as a VHD and published."""
    folder = tmp_path / "inventory"
    folder.mkdir()
    for name in ("hosts.yml", "group_vars"):
        (folder / name).symlink_to(REPO / "inventories/lab" / name)
    (folder / "host_vars").mkdir()
    values = {"image_formats": ["vhd"], "image_gallery": SETTINGS | {"definition": IMAGE, "create": True}}
    (folder / f"host_vars/{IMAGE}.yml").write_text(yaml.safe_dump(values))
    return folder


def test_a_baked_vhd_is_published_byte_for_byte(azure: Place, inventory: Path, tmp_path: Path) -> None:
    azure.store.sizes.clear()
    place = Workplace(Path(os.environ.get("IMAGE_BUILDER_STORE", DEFAULT_STORE)), tmp_path / "output", IMAGE)
    done = place.build(inventory=inventory)
    assert done.status == 0, done.stderr
    disk = next(place.artefact.glob("*.vhd"))
    copies = []

    def compare(request: Request) -> None:
        if request.method == "PUT" and "/versions/" in request.path:
            copies.append(kills.is_copy(azure, disk))

    azure.arm.faults.append(compare)
    publish = Publisher(azure, inventory, place.output, IMAGE)
    publish("run", status=PublishError.exit_code)
    assert f"boot {IMAGE} --verify" in publish.output and azure.changes() == []
    arguments = ["boot", IMAGE, "--verify", "--output", str(place.output), "--store", str(place.store)]
    boot = subprocess.run([REPO / "image-builder", *arguments], check=False, capture_output=True, text=True)
    assert boot.returncode == 0, boot.stderr
    result = publish("run")
    assert copies == [True]
    # Holes in the file weren't sent.
    data = sum(end - start for start, end in pages.data_ranges(disk))
    assert result["bytes_sent"] == azure.host.received == data + 512 < disk.stat().st_size // 2
    tags = azure.arm.resources[result["version"].lower()].content["tags"]
    manifest = json.loads((place.artefact / "manifest.json").read_bytes())
    assert tags["image-builder-build"] == manifest["build_id"][:12]
    assert re.fullmatch(r"offline (\d+)/\1, booted (\d+)/\2", tags["image-builder-suite"])
