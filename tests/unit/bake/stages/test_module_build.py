"""The judgment on built modules: by their files, not by the program that made them."""

from __future__ import annotations

import dataclasses

import pytest

from image_builder.bake.stages.module_build.run import LICENSES, Module, compiler_of, parse_modinfo, problems

KERNEL = "6.1.0-50-cloud-amd64"
DRIVER = "535.261.03"
VERMAGIC = f"{KERNEL} SMP preempt mod_unload modversions "


def module(name: str, **changed: str) -> Module:
    known = Module(name, DRIVER, VERMAGIC, "Dual MIT/GPL", "", "00" * 32)
    return dataclasses.replace(known, **changed)


GOOD = [module(name) for name in ("nvidia", "nvidia_drm", "nvidia_modeset", "nvidia_uvm")]
PEERMEM = module("nvidia_peermem", version="535.1", license="Linux-OpenIB")


def test_what_was_asked_for_is_accepted() -> None:
    assert problems([*GOOD, PEERMEM], KERNEL, DRIVER, "open") == []


def test_nothing_built_is_told_of_each_module() -> None:
    """A package's script that finds no headers says so, builds nothing and exits with 0."""
    names = ("nvidia", "nvidia_uvm", "nvidia_modeset")
    assert problems([], KERNEL, DRIVER, "open") == [f"no module {name} was built" for name in names]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"vermagic": "6.1.0-49-cloud-amd64 SMP"}, f"nvidia is for 6.1.0-49-cloud-amd64, not {KERNEL}"),
        # The release is compared as a whole: a kernel whose name only begins the same is a different one.
        ({"vermagic": f"{KERNEL}x SMP"}, f"nvidia is for {KERNEL}x, not {KERNEL}"),
        ({"vermagic": ""}, f"nvidia is for no kernel, not {KERNEL}"),
        ({"version": "535.247.01"}, f"nvidia is version 535.247.01, not {DRIVER}"),
        ({"license": "NVIDIA"}, "nvidia has the license 'NVIDIA', so it is not open"),
        ({"signer": "DKMS module signing key"}, "nvidia is signed"),
    ],
)
def test_another_module_is_refused(changed: dict[str, str], told: str) -> None:
    assert problems([module("nvidia", **changed), *GOOD[1:]], KERNEL, DRIVER, "open") == [told]


def test_unsigned_modules_are_refused_where_signed_ones_are_wanted() -> None:
    signed = [dataclasses.replace(m, signer="ours") for m in GOOD]
    assert problems(signed, KERNEL, DRIVER, "open", signed=True) == []
    assert problems([*signed[1:], GOOD[0]], KERNEL, DRIVER, "open", signed=True) == ["nvidia is not signed"]


def test_flavours_differ_by_their_licenses() -> None:
    closed = [dataclasses.replace(m, license="NVIDIA") for m in GOOD]
    assert problems(closed, KERNEL, DRIVER, "proprietary") == []
    assert len(problems(GOOD, KERNEL, DRIVER, "proprietary")) == 3
    assert not set(LICENSES["open"]) & set(LICENSES["proprietary"])


def test_first_of_fields_that_stand_often() -> None:
    # As kmod 30 writes them with --null: only the file name is in human-readable form.
    text = "filename:       /x/nvidia.ko\0firmware=nvidia/1/a.bin\0firmware=nvidia/1/b.bin\0parm=a:b=c\0"
    found = parse_modinfo(text)
    assert (found["firmware"], found["parm"]) == ("nvidia/1/a.bin", "a:b=c")


@pytest.mark.parametrize(
    ("configuration", "version"),
    [
        (
            'CONFIG_CC_VERSION_TEXT="gcc-12 (Debian 12.2.0-14+deb12u1) 12.2.0"\nCONFIG_GCC_VERSION=120200\n',
            "12.2.0",
        ),
        ("CONFIG_GCC_VERSION=140213\n", "14.2.13"),
        ("CONFIG_GCC_VERSION=0\nCONFIG_CLANG_VERSION=180103\n", ""),
        ("", ""),
    ],
)
def test_compiler_of_a_kernel(configuration: str, version: str) -> None:
    assert compiler_of(configuration) == version
