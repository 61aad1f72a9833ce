"""The state that the role leaves behind."""

from __future__ import annotations

from testinfra.host import Host


def test_machine_id_is_there_and_empty(host: Host) -> None:
    file = host.file("/etc/machine-id")
    assert (file.size, file.mode) == (0, 0o444)


def test_nothing_of_a_machine_is_left(host: Host) -> None:
    left = host.check_output(
        "find /etc/ssh -name 'ssh_host_*'; find /var/log /var/lib/apt/lists /var/cache/apt -type f; "
        "find /var/lib/cloud -mindepth 1 2>/dev/null; ls -d /etc/passwd- /etc/hostname 2>/dev/null; true"
    )
    assert left == ""


def test_directories_of_logs_are_kept(host: Host) -> None:
    assert host.file("/var/log/apt").is_directory


def test_packages_are_intact(host: Host) -> None:
    assert host.check_output("dpkg --audit") == ""
