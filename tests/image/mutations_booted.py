"""Mutations for the checks that only a running machine can be asked: commands run as root on the machine.

They are applied together, in this order, to one throw-away VM; none of them may take away the login, or
what the checks are made with. Then every check named here has to fail.
"""

from __future__ import annotations

BOOTED: dict[str, tuple[int, str]] = {}


def record_booted(check: str, command: str, *, turn: int = 0) -> None:
    """Record the command (for ``sh -c``) that must turn a check of a running machine red.

    ``turn`` orders those that take away what other commands still need: 0 comes first.
    """
    if check in BOOTED:
        raise ValueError(f"{check} is recorded twice")
    BOOTED[check] = (turn, command)


def all_booted() -> dict[str, str]:
    """Return every recorded command by its check, in the order to run them."""
    import mutations  # noqa: F401 (it records those of the other topics)

    ordered = sorted(BOOTED.items(), key=lambda item: item[1][0])
    return {check: command for check, (_, command) in ordered}


ROOT_DEVICE = "$(findmnt --noheadings --output MAJ:MIN / | tr -d ' ')"

record_booted(
    "test_machine_has_an_id_of_its_own",
    "umount /etc/machine-id 2>/dev/null; echo uninitialized > /etc/machine-id",
)
record_booted("test_host_keys_are_of_this_machine", "touch --date=1990-01-01 /etc/ssh/ssh_host_*_key")
record_booted("test_machine_has_a_name", "hostname localhost")
record_booted(
    "test_root_is_this_builds_partition",
    f"sed -i 's/ID_PART_ENTRY_UUID=.*/ID_PART_ENTRY_UUID=0000/' /run/udev/data/b{ROOT_DEVICE}",
)
record_booted("test_system_is_running", "systemd-run --quiet --unit=mutation-one /bin/false")
record_booted("test_no_unit_failed", "systemd-run --quiet --unit=mutation-two /bin/false")
record_booted(
    "test_no_unit_was_restarted",
    "systemd-run --quiet --unit=mutation-three -p Restart=on-failure -p RestartSec=1 /bin/false; sleep 4",
)
record_booted("test_journal_has_no_trouble", "echo 'Kernel panic - not syncing: mutation' | systemd-cat")
record_booted("test_kernel_is_not_tainted", "echo 64 > /proc/sys/kernel/tainted")
record_booted(
    "test_kernel_got_its_arguments", "echo ro > /run/cmdline && mount --bind /run/cmdline /proc/cmdline"
)
record_booted(
    "test_root_fills_the_disk",
    "size=/sys/class/block/$(lsblk --noheadings --output PKNAME $(findmnt -no SOURCE /))/size; "
    "echo $(( $(cat $size) + 2097152 )) > /run/disk-size && mount --bind /run/disk-size $size",
)
record_booted(
    "test_root_is_sound",
    "echo mutation > /sys/fs/ext4/$(basename $(findmnt --noheadings --output SOURCE /))/trigger_fs_error",
    turn=3,
)
record_booted("test_esp_is_mounted", "umount /boot/efi")
record_booted(
    "test_cgroup_v2", "mkdir /run/cgroup1 && mount -t cgroup -o none,name=mutation none /run/cgroup1"
)
record_booted(
    "test_clock_is_right",
    "systemctl stop systemd-timesyncd.service chrony.service ntpsec.service 2>/dev/null; true",
)
record_booted(
    "test_only_known_ports_are_open",
    "systemd-run --quiet --unit=mutation-four python3 -m http.server 8099; sleep 3",
)
record_booted("test_network_is_up", "rm -f /etc/resolv.conf && touch /etc/resolv.conf")
record_booted(
    "test_no_swap_is_in_use",
    "dd if=/dev/zero of=/var/swap bs=1M count=8 status=none; chmod 600 /var/swap; "
    "mkswap -q /var/swap && swapon /var/swap",
)
record_booted(
    "test_no_zombies",
    "systemd-run --quiet --unit=mutation-five "
    "python3 -c 'import os,time; os.fork() or os._exit(0); time.sleep(9999)'",
)
record_booted(
    "test_docker_runs_with_overlay2",
    # A setting that a reload takes: a daemon that is started anew with another driver has no images any more, and
    # every check of those would be red for this.
    'python3 -c \'import json; p = "/etc/docker/daemon.json"; c = json.load(open(p)); '
    'c["live-restore"] = not c["live-restore"]; json.dump(c, open(p, "w"))\' '
    "&& systemctl reload docker.service && sleep 5",
    turn=2,
)
record_booted(
    "test_runtime_processes_have_the_limits",
    "prlimit --pid $(systemctl show -p MainPID --value containerd.service) --nofile=1024:1024",
    turn=2,
)
