"""The lab's images of packages: how they are layered, and which of them are made for which definition."""

from __future__ import annotations

from pathlib import Path

import pytest

from image_builder.bake.lock.model import Lock, LockedGroup, LockedPackage
from image_builder.bake.plan.resolve import requirements, supplier_plan
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.lab import software
from image_builder.settings import REPO_ROOT
from tests.support.shipped import shipped

pytestmark = pytest.mark.usefixtures("unread_layers")

LAB = REPO_ROOT / "inventories/lab"


@pytest.mark.parametrize("layers", software.IMAGES.values(), ids=software.IMAGES)
def test_packages_of_an_image_are_named_once(layers: software.Layers) -> None:
    names = [name for layer in layers for name in layer]
    assert len(names) == len(set(names))
    assert {"base-files", "dash", "coreutils", "libc6"} <= set(layers[0])
    assert len(layers) == 6
    assert all(list(layer) == sorted(layer) for layer in layers)


def _plan(definition: ImageDefinition) -> tuple[set[str], object, str]:
    """Return the packages locked for the lab's images, the images that are made, and the stage's id."""
    packages = [
        LockedPackage(
            name="p", sha256="a" * 64, size=1, path="p", repository="debian", version="1", architecture="all"
        )
    ]
    groups = requirements(definition, extensions()).groups
    locked = {
        name: LockedGroup(**group.question.model_dump(), packages=packages) for name, group in groups.items()
    }
    lock = Lock(image=definition.name, source_date_epoch=1, repositories={}, groups=locked)
    stage = supplier_plan(definition, lock, REPO_ROOT, extensions()).stages[-1]
    return set(groups["lab_images"].names), stage.options["images"], stage.id


def test_the_large_image_is_made_only_for_who_preloads_it(tmp_path: Path) -> None:
    few, made, without = _plan(shipped("lab").define("worker"))
    assert made == [software.REFERENCE]
    assert few == {name for layer in software.IMAGES[software.REFERENCE] for name in layer}
    many, made, with_large = _plan(load_inventory([LAB, REPO_ROOT / "tests/e2e/large.yml"]).define("worker"))
    assert made == [software.REFERENCE, software.LARGE_REFERENCE] and with_large != without
    assert many - few >= {"libllvm19", "golang-1.24-go"}


def test_what_is_not_a_lab_image_of_packages_makes_no_other(tmp_path: Path) -> None:
    file = tmp_path / "more.yml"
    text = "images: {hosts: {worker: {image_preload: [{ref: 'registry.lab.internal/none:1'}]}}}"
    file.write_text(text, encoding="utf-8")
    assert _plan(load_inventory([LAB, file]).define("worker"))[1] == [software.REFERENCE]
