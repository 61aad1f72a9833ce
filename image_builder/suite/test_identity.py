"""The image says what it is; the machine that boots it gets an identity of its own."""

from __future__ import annotations

import re
from typing import Any

from answers import output_once
from questions import mounted
from suite import Facts, assignments, booted, differences, nothing, offline, output, read, statements
from testinfra.host import Host
from tree import Tree

V = dict[str, Any]


@offline
@booted
def test_image_names_its_build(host: Host, facts: Facts) -> None:
    """/etc/image-release has the image's name and the build's id."""
    actual = assignments(read(host, "/etc/image-release"))
    nothing(differences({"IMAGE_NAME": facts.image, "IMAGE_BUILD_ID": facts.build_id}, actual))


# Only for the image: a machine may have been given more layers since.
@offline
def test_image_names_its_layers(host: Host, v: V) -> None:
    """/etc/image-release lists the layers that the image was baked from."""
    actual = assignments(read(host, "/etc/image-release"))
    nothing(differences({"IMAGE_LAYERS": " ".join(v["image_layers"])}, actual))


@offline
@booted
def test_distribution(host: Host, v: V) -> None:
    """The system is the declared distribution and suite."""
    actual = assignments(read(host, "/etc/os-release"))
    expected = {"ID": v["image_base"]["distribution"], "VERSION_CODENAME": v["image_base"]["suite"]}
    nothing(differences(expected, actual))


@offline
@booted
def test_architecture(host: Host, v: V) -> None:
    """dpkg installs packages of the declared architecture, and of no other."""
    printed = output(host, "dpkg --print-architecture && dpkg --print-foreign-architectures")
    architectures = printed.split()
    assert architectures == [v["image_base"]["architecture"]], f"{architectures}"


@offline
@booted
def test_root_and_esp_are_found_by_partition(host: Host, facts: Facts) -> None:
    """fstab names this build's own partitions, so that no other disk can be taken for them."""
    mounts = {fields[1]: fields[0] for fields in map(str.split, statements(read(host, "/etc/fstab")))}
    partitions = facts.partitions
    expected = {"/": f"PARTUUID={partitions['root']}", "/boot/efi": f"PARTUUID={partitions['esp']}"}
    nothing(differences(expected, mounts))


@offline
@booted
def test_root_will_grow(host: Host) -> None:
    """fstab tells systemd to grow the root filesystem to fill its partition."""
    roots = [fields for fields in map(str.split, statements(read(host, "/etc/fstab"))) if fields[1] == "/"]
    assert len(roots) == 1 and "x-systemd.growfs" in roots[0][3].split(","), f"{roots}"


@offline
@booted
def test_a_missing_esp_does_not_stop_the_boot(host: Host) -> None:
    """Every filesystem in fstab except the root may be missing at boot."""
    rest = [fields for fields in map(str.split, statements(read(host, "/etc/fstab"))) if fields[1] != "/"]
    nothing(fields[1] for fields in rest if "nofail" not in fields[3].split(","))


@offline
def test_machine_has_no_name(tree: Tree) -> None:
    """The image has no host name, which comes from the platform at first boot."""
    nothing(tree.matching("/etc/hostname|/etc/machine-info"))


@offline
@booted
def test_localhost_resolves(host: Host) -> None:
    """localhost is a loopback address, and needs no name server."""
    pairs = [
        (fields[0], name)
        for fields in map(str.split, statements(read(host, "/etc/hosts")))
        for name in fields[1:]
    ]
    assert ("127.0.0.1", "localhost") in pairs, "127.0.0.1 is not localhost"
    nothing(
        f"{name} is {address}"
        for address, name in pairs
        if name == "localhost" and address not in ("127.0.0.1", "::1")
    )


@offline
@booted
def test_clock_is_in_utc(host: Host) -> None:
    """The clock is in UTC, so the logs of all machines use the same time."""
    assert output_once(host, "env --unset=TZ date -d @0 +%H%z") == "00+0000"


@booted
def test_machine_has_an_id_of_its_own(host: Host) -> None:
    """The machine has a valid id of its own, made by systemd."""
    actual = read(host, "/etc/machine-id").strip()
    assert re.fullmatch("[0-9a-f]{32}", actual) and actual != "0" * 32, actual


@booted
def test_host_keys_are_of_this_machine(host: Host, tree: Tree) -> None:
    """The host keys are newer than the image and private to root, and one of them is ed25519."""
    keys = tree.matching(r"/etc/ssh/ssh_host_\w+_key")
    assert "/etc/ssh/ssh_host_ed25519_key" in keys, f"{keys}"
    nothing(f"{key} {tree[key].mode:o}" for key in keys if tree[key].mode & 0o077 or tree[key].uid)
    born = assignments(read(host, "/etc/image-release"))["IMAGE_SOURCE_DATE_EPOCH"]
    times = output_once(host, f"stat --format=%Y {' '.join(keys)}").split()
    nothing(key for key, seconds in zip(keys, times, strict=True) if int(seconds) <= int(born))


@booted
def test_machine_has_a_name(host: Host) -> None:
    """The machine has the name that the platform gave it."""
    assert read(host, "/proc/sys/kernel/hostname").strip() not in ("", "localhost", "(none)")


@booted
def test_root_is_this_builds_partition(host: Host, facts: Facts) -> None:
    """The root filesystem is on the partition that the build made."""
    device = mounted(host, "/")["partuuid"]
    assert device == facts.partitions["root"], device
