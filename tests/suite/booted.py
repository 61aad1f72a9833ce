"""Mutations for the checks that need a running machine: commands that run as root on that machine.

A run with ``broken:`` (image_builder/suite/broken_fixtures.py) runs each of these checks twice: first it must pass;
then the command runs under ``sh -euc`` on the same throw-away VM, and the check must fail. A mutation that would turn
later checks red as well is undone, or comes last. No command may break the login or the tools that the checks use.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict


class Broken(NamedTuple):
    """A command that breaks a machine and one that undoes it; ``turn`` orders those that nothing undoes, 0 first."""

    command: str
    mend: str
    turn: int


BOOTED: dict[str, Broken] = {}


def record_booted(check: str, command: str, *, mend: str = "", turn: int = 0) -> None:
    """Record the command (for ``sh -euc``) that must turn a check of a running machine red."""
    if check in BOOTED:
        raise ValueError(f"{check} is recorded twice")
    BOOTED[check] = Broken(command, mend, turn)


def ordered() -> dict[str, Broken]:
    """Return the checks' mutations in the order in which the machine is broken."""
    from tests.suite import offline  # noqa: F401 (it records those of the other topics)

    return dict(sorted(BOOTED.items(), key=lambda item: item[1].turn))


class Edit(TypedDict):
    """The commands that edit a file and restore it."""

    command: str
    mend: str


def edited(path: str, expression: str) -> Edit:
    """Return the command that edits a file with a sed expression, which must change something, and its undo command."""
    kept = "/run/mutation-kept"
    return {
        "command": f"cp -p {path} {kept}; sed -i -E '{expression}' {path}; if cmp -s {path} {kept}; then exit 1; fi",
        "mend": f"cp -p {kept} {path}",
    }


def awaited(condition: str) -> str:
    """Return the command that waits for minutes until another one succeeds."""
    return f"for second in $(seq 200); do if {condition}; then break; fi; sleep 1; done; {condition}"


def await_port(port: int | str) -> str:
    """Return the command that waits until something listens on a TCP port."""
    # The whole port: containerd streams on a random one, which may be 44312 while 443 is awaited.
    return awaited(f"ss -Hltn sport = :{port} | grep -q .")


def await_restart(unit: str) -> str:
    """Return the command that waits until systemd has restarted a service."""
    return awaited(f"systemctl show --property=NRestarts {unit} | grep -qv =0")


ROOT_DEVICE = "$(findmnt --noheadings --output MAJ:MIN / | tr -d ' ')"
DISK_SIZE = "/sys/class/block/$(lsblk --noheadings --output PKNAME $(findmnt -no SOURCE /))/size"
LIVE_RESTORE = "docker info --format {{.LiveRestoreEnabled}}"
TOGGLE_LIVE_RESTORE = (
    f"before=$({LIVE_RESTORE}); "
    'python3 -c \'import json; p = "/etc/docker/daemon.json"; c = json.load(open(p)); '
    'c["live-restore"] = not c["live-restore"]; json.dump(c, open(p, "w"))\'; '
    "systemctl reload docker.service; " + awaited(f"test $({LIVE_RESTORE}) != $before")
)

record_booted(
    "test_machine_has_an_id_of_its_own",
    "if mountpoint -q /etc/machine-id; then umount /etc/machine-id; fi; "
    "cp /etc/machine-id /run/mutation-id; echo uninitialized > /etc/machine-id",
    mend="cp /run/mutation-id /etc/machine-id",
)
record_booted("test_host_keys_are_of_this_machine", "touch --date=1990-01-01 /etc/ssh/ssh_host_*_key")
record_booted("test_machine_has_a_name", "hostname localhost", mend="hostname $(cat /etc/hostname)")
record_booted(
    "test_root_is_this_builds_partition",
    f"sed -i 's/ID_PART_ENTRY_UUID=.*/ID_PART_ENTRY_UUID=0000/' /run/udev/data/b{ROOT_DEVICE}",
)
record_booted(
    "test_system_is_running",
    "! systemd-run --quiet --wait --unit=mutation-one /bin/false",
    mend="systemctl reset-failed",
)
record_booted(
    "test_no_unit_failed",
    "! systemd-run --quiet --wait --unit=mutation-two /bin/false",
    mend="systemctl reset-failed",
)
record_booted(
    "test_no_unit_was_restarted",
    "systemd-run --quiet --unit=mutation-three -p Restart=on-failure -p RestartSec=1 /bin/false; "
    + await_restart("mutation-three.service"),
    mend="systemctl stop mutation-three.service; systemctl reset-failed",
)
# A journal entry stays: run this one before other mutations break things that may log errors.
record_booted("test_journal_has_no_trouble", "echo 'Kernel panic - not syncing: mutation' | systemd-cat")
record_booted("test_kernel_is_not_tainted", "echo 64 > /proc/sys/kernel/tainted")
record_booted(
    "test_kernel_got_its_arguments",
    "echo ro > /run/cmdline && mount --bind /run/cmdline /proc/cmdline",
    mend="umount /proc/cmdline",
)
record_booted(
    "test_root_fills_the_disk",
    f"echo $(( $(cat {DISK_SIZE}) + 2097152 )) > /run/disk-size && mount --bind /run/disk-size {DISK_SIZE}",
    mend=f"umount {DISK_SIZE}",
)
# A filesystem error is permanent.
record_booted(
    "test_root_is_sound",
    "echo mutation > /sys/fs/ext4/$(basename $(findmnt --noheadings --output SOURCE /))/trigger_fs_error",
    turn=5,
)
record_booted("test_esp_is_mounted", "umount /boot/efi", mend="mount /boot/efi")
record_booted(
    "test_cgroup_v2",
    "mkdir /run/cgroup1 && mount -t cgroup -o none,name=mutation none /run/cgroup1",
    mend="umount /run/cgroup1 && rmdir /run/cgroup1",
)
record_booted(
    "test_clock_is_right",
    "for unit in systemd-timesyncd chrony ntpsec; do if systemctl is-active --quiet $unit; "
    "then systemctl stop $unit; echo $unit > /run/mutation-clock; fi; done; test -s /run/mutation-clock",
    mend="systemctl start $(cat /run/mutation-clock)",
)
record_booted(
    "test_only_known_ports_are_open",
    "systemd-run --quiet --unit=mutation-four python3 -m http.server 8099; " + await_port(8099),
    mend="systemctl stop mutation-four.service",
)
record_booted(
    "test_network_is_up",
    "mv /etc/resolv.conf /etc/resolv.conf.kept && touch /etc/resolv.conf",
    mend="mv /etc/resolv.conf.kept /etc/resolv.conf",
)
record_booted(
    "test_no_swap_is_in_use",
    "dd if=/dev/zero of=/var/swap bs=1M count=8 status=none; chmod 600 /var/swap; "
    "mkswap -q /var/swap && swapon /var/swap",
    mend="swapoff /var/swap && rm /var/swap",
)
record_booted(
    "test_no_zombies",
    "systemd-run --quiet --unit=mutation-five "
    "python3 -c 'import os,time; os.fork() or os._exit(0); time.sleep(9999)'; "
    + awaited("ps -e -o stat= | grep -q ^Z"),
    mend="systemctl stop mutation-five.service",
)
record_booted(
    "test_docker_runs_with_overlay2",
    # Use a setting that a reload applies: a daemon restarted with another driver no longer has any images, which would
    # turn every check of the images red.
    TOGGLE_LIVE_RESTORE,
    mend=TOGGLE_LIVE_RESTORE,
)
record_booted(
    "test_runtime_processes_have_the_limits",
    "prlimit --pid $(systemctl show -p MainPID --value containerd.service) --nofile=1024:1024",
    turn=2,
)
