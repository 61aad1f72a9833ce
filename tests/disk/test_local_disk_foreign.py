"""Disks that the agent must leave alone, and those of them that it may wipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from image_builder.node import mounts
from image_builder.node.disk import layout
from tests.support.disks.foreign import FOREIGN, azure, gpt, luks, luks2, lvm
from tests.support.disks.loop_devices import LARGE, Desk, is_zero, mounted, run, run_scenario, write
from tests.support.images.builds import Workplace

pytestmark = pytest.mark.root


def foreign(desk: Desk) -> Any:
    desk.settings()
    found = {}
    for number, (name, (make, size, _)) in enumerate(FOREIGN.items()):
        disk = desk.disk(size, f"disk{number}")
        make(disk, desk.base / "mnt")
        before = desk.digest(disk)
        told = desk.run(disk)
        found[name] = {"told": told, "same": desk.digest(disk) == before}
        (desk.base / f"disk{number}").unlink()
    return found


@pytest.fixture(scope="module")
def foreigners(worker: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_scenario(foreign, worker, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_data_is_left_as_it_is_and_named(foreigners: Any, name: str) -> None:
    found = foreigners[name]
    told = found["told"]
    assert found["same"]
    assert (told["exit"], told["state"], told["code"]) == (0, "degraded", "disk.foreign")
    assert told["reason"].endswith(FOREIGN[name][2])
    assert told["members"] == [] and told["action"] == "none"


def erasure(desk: Desk) -> Any:
    """Simulate a crash after each write of one of our erasures."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root))
    disk = desk.disk(LARGE)
    found = []
    for count in range(1, len(layout.erasure(disk.bytes)) + 1):
        run("mkfs.ext4", "-q", "-F", "-L", "theirs", disk.path)
        gpt(3)(disk, desk.base)
        for offset, data in layout.erasure(disk.bytes)[:count]:
            write(disk, offset, data)
        found.append(desk.run(disk))
        mounts.unmount(root)
    return found


def test_an_erasure_that_was_cut_short_is_finished(worker: Workplace, tmp_path: Path) -> None:
    for told in run_scenario(erasure, worker, tmp_path):
        assert (told["exit"], told["state"], told["action"]) == (0, "ok", "format")


def making(desk: Desk) -> Any:
    """Simulate a crash while mkfs.ext4 runs: some of its blocks are in the first MiB; it writes its superblock last."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root), filesystem="ext4")
    disk = desk.disk(LARGE)
    write(disk, *layout.making(disk.bytes))
    write(disk, 8192, b"\2\200\0\0" * 1024)
    found = [desk.run(disk), desk.run(disk)]
    mounts.unmount(root)
    return found


def test_a_filesystem_whose_making_was_cut_short_is_made_anew(worker: Workplace, tmp_path: Path) -> None:
    assert [told["action"] for told in run_scenario(making, worker, tmp_path)] == ["format", "mount"]


def refusals(desk: Desk) -> Any:
    """Run the agent on disks that must not be touched, even though they are blank or next to others."""
    desk.settings(mount_point=os.fspath(desk.base / "local"), expected_disks=1)
    one, other = desk.disk(LARGE, "one"), desk.disk(LARGE, "other")
    system = desk.disk(LARGE, "system", system=True)
    found: dict[str, Any] = {"two": desk.run(one, other), "system": desk.run(system), "none": desk.run()}
    desk.settings(mount_point=os.fspath(desk.base / "local"))
    luks(other, desk.base)
    found["blank and foreign"] = desk.run(one, other)
    found["untouched"] = [is_zero(desk.base / name) for name in ("one", "system")]
    run("mkfs.ext4", "-q", "-L", "mine", one.path)
    with mounted(one, "ext4", desk.base / "mnt") as inside:
        (inside / "kept").write_bytes(b"x" * 100_000)
        os.sync()
        before = desk.digest(one)
        found["mounted"] = desk.run(one)
        found["mounted, same"] = desk.digest(one) == before
    short = desk.disk(LARGE, "short")
    os.truncate(desk.base / "short", LARGE - 4096)  # its end can no longer be read
    found["unreadable"] = desk.run(short)
    found["unreadable, same"] = is_zero(desk.base / "short")
    desk.settings(mount_point=os.fspath(desk.base / "local"), policy="require")
    found["required"] = desk.run()
    found["environment"] = (desk.places.run / "kubelet.env").read_text()
    found["place"] = oct((desk.base / "local").stat().st_mode & 0o7777)
    found["state"] = (desk.base / "local/.node").is_dir()
    return found


def test_wrong_and_ambiguous_disks_are_left_alone(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(refusals, worker, tmp_path)
    codes = {
        "two": "disk.ambiguous",
        "system": "disk.system",
        "none": "disk.none",
        "blank and foreign": "disk.foreign",
        "mounted": "disk.busy",
        "unreadable": "disk.error",
        "required": "disk.none",
    }
    assert {name: found[name]["code"] for name in codes} == codes
    assert {found[name]["exit"] for name in codes} == {0}
    assert found["untouched"] == [True, True] and found["unreadable, same"] and found["mounted, same"]
    assert "serial-one" in found["two"]["reason"] and "serial-other" in found["two"]["reason"]
    assert "Input/output error" in found["unreadable"]["reason"]
    assert found["required"]["state"] == "failed" and found["two"]["state"] == "degraded"
    assert "image-builder/local-disk=disk.none:NoSchedule" in found["environment"]
    assert (found["place"], found["state"]) == ("0o755", True)


def wiped(desk: Desk) -> Any:
    """Apply the wipe policy: only what it names, only on disks that the platform calls local."""
    desk.settings(mount_point=os.fspath(desk.base / "local"), wipe=["crypto_LUKS"])
    found = {}
    for name, make, local in (
        ("named", luks, True),
        ("with a second header", luks2, True),
        ("other", lvm, True),
        ("not local", luks, False),
    ):
        disk = desk.disk(LARGE, name, local=local)
        make(disk, desk.base)
        before = desk.digest(disk)
        found[name] = {**desk.run(disk), "same": desk.digest(disk) == before}
        if found[name]["action"] != "none":
            mounts.unmount(desk.base / "local")
    return found


def test_policy_to_wipe(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(wiped, worker, tmp_path)
    assert {name: (told["action"], told["same"]) for name, told in found.items()} == {
        "named": ("format", False),
        "with a second header": ("format", False),
        "other": ("none", True),
        "not local": ("none", True),
    }


def platform(desk: Desk) -> Any:
    """Present Azure's resource disk in both of its forms, with only its readme, and with a person's file next to it."""
    root = desk.base / "local"
    desk.settings(mount_point=os.fspath(root))
    found = {}
    for name in ("readme", "files"):
        for is_large in (False, True):
            disk = desk.disk(LARGE, f"{name}{is_large}", local=True)
            azure(name, is_large=is_large)(disk, desk.base)
            before = desk.digest(disk)
            found[f"{name}, {is_large}"] = {**desk.run(disk), "same": desk.digest(disk) == before}
            if name == "readme":
                mounts.unmount(root)
    disk = desk.disk(LARGE, "data")
    azure("readme")(disk, desk.base)
    found["not local"] = desk.run(disk)
    return found


def test_resource_disk_of_azure(worker: Workplace, tmp_path: Path) -> None:
    found = run_scenario(platform, worker, tmp_path)
    for is_large in (False, True):
        told = found[f"readme, {is_large}"]
        assert (told["action"], told["state"], told["same"]) == ("format", "ok", False), told["reason"]
        kept = found[f"files, {is_large}"]
        assert (kept["action"], kept["code"], kept["same"]) == ("none", "disk.foreign", True)
        assert "more or less than the platform's readme" in kept["reason"]
    assert found["not local"]["code"] == "disk.foreign"
