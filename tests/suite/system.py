"""Mutations for identity, packages and the boot configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.suite.offline import append, both, change, given, link, record, remove, uninstall, write

record(
    "test_image_names_its_build",
    change("/etc/image-release", "^IMAGE_BUILD_ID=.*", 'IMAGE_BUILD_ID="0"'),
    remove("/etc/image-release"),
)
record("test_image_names_its_layers", change("/etc/image-release", "^IMAGE_LAYERS=.*", 'IMAGE_LAYERS="gpu"'))
record("test_distribution", change("/usr/lib/os-release", "^VERSION_CODENAME=.*", "VERSION_CODENAME=buzz"))
record("test_architecture", write("/var/lib/dpkg/arch", "amd64\ni386\n"))
record(
    "test_root_and_esp_are_found_by_partition",
    change("/etc/fstab", r"^PARTUUID=\S+ / ", "/dev/sda2 / "),
    change("/etc/fstab", r"^PARTUUID=\S+ /boot/efi .*\n", ""),
)
record("test_root_will_grow", change("/etc/fstab", ",x-systemd.growfs", ""))
record(
    "test_a_missing_esp_does_not_stop_the_boot",
    change("/etc/fstab", "nofail,", ""),
    append("/etc/fstab", "/dev/sdc1 /data xfs defaults 0 2\n"),
)
record("test_machine_has_no_name", write("/etc/hostname", "builder\n"))
record(
    "test_localhost_resolves",
    write("/etc/hosts", "127.0.1.1 builder\n"),
    append("/etc/hosts", "192.0.2.1 localhost\n"),
)
record("test_clock_is_in_utc", link("/etc/localtime", "/usr/share/zoneinfo/Asia/Tokyo"))
record(
    "test_boots_to_the_full_system",
    link("/etc/systemd/system/default.target", "/usr/lib/systemd/system/rescue.target"),
    link("/etc/systemd/system/default.target", "/nowhere/multi-user.target"),
    link("/etc/systemd/system/multi-user.target", "/dev/null"),
)


def _change_package(root: Path, field: str, text: str) -> None:
    """Change a field of the first package in dpkg's status file."""
    status = root / "var/lib/dpkg/status"
    lines = status.read_text(encoding="utf-8").splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if line.startswith(f"{field}: "))
    lines[number] = f"{field}: {text}\n"
    status.write_text("".join(lines), encoding="utf-8")


def _half_installed(root: Path, _variables: dict[str, Any]) -> None:
    _change_package(root, "Status", "install ok half-configured")


def _other_version(root: Path, _variables: dict[str, Any]) -> None:
    _change_package(root, "Version", "0.0.1-1")


def _damaged_program(root: Path, _variables: dict[str, Any]) -> None:
    """Flip one byte in the middle of a program."""
    program = root / "usr/bin/env"
    content = bytearray(program.read_bytes())
    content[len(content) // 2] ^= 1
    program.write_bytes(bytes(content))


PACKAGE = """
Package: {name}
Status: install ok installed
Maintainer: x
Architecture: amd64
Version: 1
Description: x
"""

record("test_packages_are_installed_whole", _half_installed)
record("test_dependencies_are_met", uninstall("libc6"))
record(
    "test_dpkg_has_no_unfinished_work",
    _half_installed,
    write(
        "/var/lib/dpkg/updates/0001",
        PACKAGE.format(name="x").lstrip(),
    ),
)
record("test_roles_packages_are_installed", given(lambda v: uninstall(_first_package(v))))
record(
    "test_packages_are_the_listed_ones",
    _other_version,
    append("/var/lib/dpkg/status", PACKAGE.format(name="stowaway")),
)
record(
    "test_packages_files_are_unchanged",
    _damaged_program,
    remove("/usr/bin/env"),
    # With this dpkg compares nothing and prints nothing.
    write("/var/lib/dpkg/status", "Package\n"),
)
record(
    "test_sources_are_signed",
    write("/etc/apt/sources.list.d/x.sources", "Types: deb\nURIs: file:/x\nSuites: ./\n"),
    write("/etc/apt/sources.list", "deb [trusted=yes] file:/x ./\n"),
)
record(
    "test_no_key_is_trusted_for_everything",
    write("/etc/apt/trusted.gpg.d/vendor.asc", "-----BEGIN PGP PUBLIC KEY BLOCK-----\n"),
)
record(
    "test_apt_uses_no_builders_settings",
    write("/etc/apt/apt.conf.d/99proxy", 'Acquire::http::Proxy "http://builder:3142";\n'),
    write("/etc/apt/apt.conf.d/99trust", 'APT::Get::AllowUnauthenticated "true";\n'),
)
record(
    "test_nothing_upgrades_by_itself",
    both(
        link("/etc/systemd/system/apt-daily.timer", "/usr/lib/systemd/system/apt-daily.timer"),
        link(
            "/etc/systemd/system/timers.target.wants/apt-daily.timer",
            "/usr/lib/systemd/system/apt-daily.timer",
        ),
    ),
)
record("test_no_compiler", write("/usr/local/bin/gcc", "#!/bin/sh\n", 0o755))
record("test_no_build_packages", append("/var/lib/dpkg/status", PACKAGE.format(name="linux-headers-amd64")))


def _first_package(variables: dict[str, Any]) -> str:
    """Return a package that a role of the image names."""
    lists = (v for n, v in sorted(variables.items()) if n.startswith("__") and n.endswith("_packages") and v)
    return str(next(iter(lists))[0]).partition("=")[0]
