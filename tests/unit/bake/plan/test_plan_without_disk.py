"""An image that can't boot, published only as a tar, has no disk: the tar is made of the sealed tree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from image_builder.bake import space
from image_builder.bake.build import _goals
from image_builder.bake.lock.model import Lock, LockedGroup, LockedPackage
from image_builder.bake.plan.resolve import requirements, resolve
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, ImageDisk, load_inventory
from image_builder.definition.model import Format
from image_builder.errors import SpaceError
from image_builder.settings import REPO_ROOT


@pytest.fixture(scope="module")
def tiny() -> ImageDefinition:
    return load_inventory([REPO_ROOT / "inventories/lab"]).define("tiny")


def _lock(definition: ImageDefinition, size: int = 0) -> Lock:
    package = LockedPackage(
        name="p", sha256="a" * 64, size=size, path="p", repository="debian", version="1", architecture="all"
    )
    needs = requirements(definition, extensions())
    groups = {n: LockedGroup(**g.question.model_dump(), packages=[package]) for n, g in needs.groups.items()}
    return Lock(image=definition.name, source_date_epoch=1, repositories={}, groups=groups)


def test_it_plans_no_disk_and_publishes_without_one(tiny: ImageDefinition) -> None:
    plan = resolve(tiny, _lock(tiny), REPO_ROOT, extensions())
    assert [stage.name for stage in plan.stages] == ["tools", "base", "system", "seal", "verify", "convert"]
    assert plan.stage("convert").inputs.keys() == {"tools"}
    assert plan.stage("convert").lowers[0] == plan.build_id
    assert _goals(plan, extensions(), None) == ["verify", "convert"]


@pytest.mark.parametrize("formats", [("raw",), ("raw", "tar"), ("qcow2",), ("vhd", "tar")])
def test_any_other_format_is_made_from_a_disk(tiny: ImageDefinition, formats: tuple[Format, ...]) -> None:
    plan = resolve(replace(tiny, formats=formats), _lock(tiny), REPO_ROOT, extensions())
    assert [stage.name for stage in plan.stages][-2:] == ["disk", "convert"]
    assert plan.stage("convert").inputs == {name: plan.stage(name).id for name in ("disk", "tools")}
    assert _goals(plan, extensions(), None) == ["verify", "disk", "convert"]


def test_a_tree_that_boots_has_a_disk_whatever_is_published() -> None:
    minimal = replace(
        load_inventory([REPO_ROOT / "inventories/lab"]).define("minimal"), formats=("tar",), secure_boot=False
    )
    plan = resolve(minimal, _lock(minimal), REPO_ROOT, extensions())
    assert plan.stage("convert").inputs["disk"] == plan.stage("disk").id


def test_what_fits_on_no_disk_needs_none(tiny: ImageDefinition) -> None:
    small = replace(tiny, disk=ImageDisk.model_validate({"root_size_mib": 1024}))
    lock = _lock(small, size=1 << 30)
    space.check_root(lock, small)
    with pytest.raises(SpaceError):
        space.check_root(lock, replace(small, formats=("raw",)))
