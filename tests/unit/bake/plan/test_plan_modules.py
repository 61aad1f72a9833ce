"""Kernel modules are built for the locked kernel, and the build depends on nothing else in the image."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from image_builder.bake.lock.model import Lock, LockedGroup, LockedPackage
from image_builder.bake.plan.model import Plan
from image_builder.bake.plan.resolve import requirements, resolve
from image_builder.bake.stages.module_build import MODULE_BUILD, MODULE_ROOT, modules_from_source
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition
from image_builder.errors import LockError
from tests.support.shipped import shipped

REPO = Path(__file__).resolve().parents[4]
KERNEL = "6.1.0-50-cloud-amd64"


def definition(image: str = "worker_gpu") -> ImageDefinition:
    return shipped("lab").define(image)


def package(name: str, version: str = "1") -> LockedPackage:
    return LockedPackage(
        name=name,
        sha256=hashlib.sha256(f"{name} {version}".encode()).hexdigest(),
        size=1,
        path=f"{name}.deb",
        repository="debian",
        version=version,
        architecture="amd64",
    )


def lock(**packages: list[LockedPackage]) -> Lock:
    """Return a lock of the image: one package per group, plus ``packages`` by group name."""
    groups = {
        name: LockedGroup(
            suite=group.suite,
            components=list(group.components),
            requested=list(group.names),
            packages=[package(f"p-{name}"), *packages.get(name, [])],
        )
        for name, group in requirements(definition(), extensions()).groups.items()
    }
    return Lock(image="worker_gpu", source_date_epoch=1, repositories={"debian": None}, groups=groups)


IMAGE = package(f"linux-image-{KERNEL}", "6.1.176-1")
HEADERS = package(f"linux-headers-{KERNEL}", "6.1.176-1")


def plan(**packages: list[LockedPackage]) -> Plan:
    return resolve(
        definition(), lock(**{"system": [IMAGE], MODULE_ROOT: [HEADERS], **packages}), REPO, extensions()
    )


def test_modules_are_built_for_the_locked_kernel() -> None:
    found = plan()
    build = found.stage(MODULE_BUILD)
    assert build.options["kernel"] == KERNEL and build.options["driver"] == "535.261.03"
    assert f"linux-headers-{KERNEL}" in found.stage(MODULE_ROOT).options["include"]
    assert build.inputs == {MODULE_ROOT: found.stage(MODULE_ROOT).id} and not build.lowers
    assert found.stage("gpu").inputs == {MODULE_BUILD: build.id}


@pytest.mark.parametrize("group", ["base", "system", "gpu"])
def test_no_other_package_of_the_image_compiles_anything(group: str) -> None:
    more = {group: [package("another"), *([IMAGE] if group == "system" else [])]}
    before, after = plan(), plan(**more)
    assert before.stage(MODULE_BUILD).id == after.stage(MODULE_BUILD).id
    assert before.stage("gpu").id != after.stage("gpu").id


@pytest.mark.parametrize("group", [MODULE_ROOT, MODULE_BUILD])
def test_another_compiler_or_source_does(group: str) -> None:
    more = {group: [package("another"), *([HEADERS] if group == MODULE_ROOT else [])]}
    assert plan().stage(MODULE_BUILD).id != plan(**more).stage(MODULE_BUILD).id


@pytest.mark.parametrize(
    "headers",
    [[], [package(f"linux-headers-{KERNEL}", "6.1.170-1")], [package("linux-headers-6.1.0-51", "6.1.176-1")]],
)
def test_headers_of_another_kernel_are_refused(headers: list[LockedPackage]) -> None:
    with pytest.raises(LockError, match=rf"has the kernel {KERNEL} 6.1.176-1, and its headers are"):
        plan(**{MODULE_ROOT: headers})


def test_kernels_that_are_not_one_are_refused() -> None:
    for kernels in ([], [IMAGE, package("linux-image-6.1.0-51-cloud-amd64")]):
        with pytest.raises(LockError, match="modules are built for one kernel, worker_gpu has"):
            plan(system=kernels)


def test_images_without_a_gpu_build_no_modules() -> None:
    assert modules_from_source(definition("minimal")) is None
    assert MODULE_BUILD not in requirements(definition("minimal"), extensions()).groups


def test_only_the_source_is_fetched_and_not_what_it_depends_on() -> None:
    group = requirements(definition(), extensions()).groups[MODULE_BUILD]
    assert group.alone and group.names == ("nvidia-open-kernel-dkms=535.261.03-*",)
    assert not any(
        g.alone for name, g in requirements(definition(), extensions()).groups.items() if name != MODULE_BUILD
    )
