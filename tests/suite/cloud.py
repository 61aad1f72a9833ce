"""Mutations for hardening, the cloud and network accounting."""

from __future__ import annotations

from typing import Any

from tests.suite.booted import await_restart, edited, record_booted
from tests.suite.offline import (
    Mutation,
    append,
    both,
    change,
    chmod,
    chown,
    given,
    link,
    mkdir,
    record,
    remove,
    write,
)

SSHD = "/etc/ssh/sshd_config.d/10-hardening.conf"
CLOUD = "/etc/cloud/cloud.cfg.d/95_image.cfg"
FIRST_BOOT = "/etc/systemd/system/first-boot"
GUARD = "/etc/systemd/system/azure-pod-guard.service"
GUARDED = "/etc/systemd/system/kubelet.service.d/15-pod-guard.conf"
ACCOUNTING = "/etc/systemd/system/network-accounting.service"


def cloud_config(text: str) -> Mutation:
    """Add a later file to cloud-init's configuration."""
    return write("/etc/cloud/cloud.cfg.d/99_mutation.cfg", text)


def without_driver(variables: dict[str, Any]) -> Mutation:
    """Replace the initramfs with one that has no drivers: an empty cpio archive."""
    trailer = "070701" + "0" * 88 + "0000000B" + "00000000" + "TRAILER!!!\0"

    def mutate(root: Any, _variables: dict[str, Any]) -> None:
        for image in (root / "boot").glob("initrd.img-*"):
            image.write_bytes(trailer.encode().ljust(512, b"\0"))

    return mutate


record(
    "test_sshd_settings",
    write("/etc/ssh/sshd_config.d/00-first.conf", "PermitRootLogin yes\n"),
    remove(SSHD),
    append(SSHD, "NoSuchSetting yes\n"),
)
record(
    "test_sshd_algorithms",
    change(SSHD, "^KexAlgorithms .*", "KexAlgorithms +diffie-hellman-group14-sha1"),
    write("/etc/ssh/sshd_config.d/00-first.conf", "MACs hmac-sha1\n"),
)
record(
    "test_hypervisor_has_no_door_of_its_own",
    remove("/etc/systemd/system-generators/systemd-ssh-generator"),
)
record("test_no_trust_by_host_name", write("/root/.shosts", "+\n"), write("/etc/hosts.equiv", "+\n"))
record(
    "test_modules_are_denied",
    given(
        lambda v: change(
            "/etc/modprobe.d/80-hardening.conf", f"^install {v['hardening_denied_modules'][0]} .*", ""
        )
    ),
    remove("/etc/modprobe.d/80-hardening.conf"),
)
record(
    "test_needed_modules_are_not_denied",
    write("/etc/modprobe.d/cis.conf", "install vfat /bin/true\n"),
    write("/etc/modprobe.d/cis.conf", "blacklist udf\n"),
)
record(
    "test_hardening_sysctls_are_configured",
    write("/etc/sysctl.d/zzz-later.conf", "kernel/kptr_restrict = 0\n"),
    remove("/etc/sysctl.d/zz-hardening.conf"),
)
record("test_declared_file_modes", chmod("/root", 0o755), chown("/etc/ssh/sshd_config", 1, 0))
record("test_account_files_are_protected", chmod("/etc/shadow", 0o644), chown("/etc/gshadow", 0, 0))
record(
    "test_root_is_the_only_root",
    append("/etc/passwd", "toor:x:0:0::/root:/bin/sh\n"),
    append("/etc/passwd", "twin:x:1:1::/:/usr/sbin/nologin\n"),
)
record("test_system_accounts_have_no_shell", change("/etc/passwd", "^(daemon:.*):[^:]*$", r"\1:/bin/bash"))
record(
    "test_system_files_are_roots_to_write",
    chmod("/etc/hosts", 0o646),
    both(chmod("/etc/systemd", 0o775), chown("/etc/systemd", 0, 5)),
    mkdir("/etc/open", 0o777),
)
record("test_programs_belong_to_root", chown("/usr/bin/env", 1, 0))
record("test_sudo_is_sound", write("/etc/sudoers.d/broken", "this is no rule\n", 0o440))
record(
    "test_nobody_is_sudoer_by_default", write("/etc/sudoers.d/build", "build ALL=(ALL) NOPASSWD:ALL\n", 0o440)
)

record(
    "test_cloud_init_looks_where_declared",
    cloud_config("datasource_list: [ Ec2 ]\n"),
    change(CLOUD, r"^datasource_list: \[.*\]", "datasource_list:\n  - NoCloud\n  - Azure\n  - None"),
)
record(
    "test_cloud_init_starts_at_boot",
    write("/etc/cloud/cloud-init.disabled", ""),
    link("/etc/systemd/system/cloud-init-local.service", "/dev/null"),
)
record(
    "test_first_boot_survives_a_power_failure",
    remove("/etc/systemd/system/cloud-init-local.service.wants/first-boot-again.service"),
    change(f"{FIRST_BOOT}-again.service", "^ConditionPathExists=!.*\n", ""),
    change(f"{FIRST_BOOT}-durable.service", "^ExecStart=/usr/bin/sync .*\n", ""),
    change(f"{FIRST_BOOT}-durable.service", "^Restart=.*$", ""),
)
record(
    "test_cloud_init_leaves_the_network_alone",
    cloud_config("network: {config: {}}\n"),
    change(CLOUD, "apply_network_config: false", "apply_network_config: true"),
)
record(
    "test_cloud_init_leaves_disks_alone",
    cloud_config("cloud_config_modules: [disk_setup]\n"),
    cloud_config("mounts: [[ephemeral0, /mnt]]\n"),
    change(CLOUD, r"^cloud_init_modules: \[", "cloud_init_modules: [mounts, "),
)
record(
    "test_cloud_init_leaves_packages_alone",
    cloud_config("cloud_final_modules: [package-update-upgrade-install]\n"),
)
record(
    "test_cloud_init_makes_the_declared_user",
    cloud_config("system_info: {default_user: {name: build}}\n"),
    cloud_config("ssh_pwauth: true\n"),
    cloud_config("disable_root: false\n"),
)
record(
    "test_cloud_init_makes_host_keys",
    cloud_config("ssh_deletekeys: false\n"),
    cloud_config("ssh_genkeytypes: [dsa]\n"),
)
record(
    "test_cloud_init_grows_the_root",
    cloud_config("growpart: {mode: 'off'}\n"),
    remove("/usr/bin/growpart"),
    cloud_config("resize_rootfs: false\n"),
)
record(
    "test_agent_leaves_the_local_disk_alone",
    change("/etc/waagent.conf", "ResourceDisk.Format=n", "ResourceDisk.Format=y"),
    change("/etc/waagent.conf", "AutoUpdate.Enabled=n\n", ""),
)
record("test_no_agent_is_installed", write("/usr/sbin/waagent", mode=0o755))
record(
    "test_azure_disks_have_names",
    remove("/usr/lib/udev/rules.d/80-azure-disk.rules"),
    write(
        "/usr/lib/udev/rules.d/80-azure-disk.rules",
        'ENV{ID_MODEL}=="Microsoft NVMe Direct Disk", SYMLINK+="disk/azure/", NO_SUCH_KEY==\n',
    ),
)
record("test_initramfs_has_the_clouds_drivers", given(without_driver))
record(
    "test_pods_are_kept_from_the_host_addresses",
    remove("/etc/systemd/system/multi-user.target.wants/azure-pod-guard.service"),
    change(GUARD, "--jump DROP", "--jump ACCEPT"),
    change(GUARD, r"--destination \S+", "--destination 192.0.2.1"),
)
record(
    "test_kubelet_waits_for_the_pod_guard",
    remove(GUARDED),
    change(GUARDED, "^ExecStartPre=.*$", "ExecStartPre=-/usr/bin/false"),
    change(GUARDED, "^After=.*$", ""),
    change(GUARD, "^ExecStartPost=.*$", ""),
    change(GUARD, "^ExecStartPost=", "ExecStartPre="),
    change(GUARD, "^Restart=.*$", ""),
)
record(
    "test_traffic_will_be_counted",
    remove("/etc/systemd/system/multi-user.target.wants/network-accounting.service"),
    change(ACCOUNTING, "^StandardInputText=.*traffic=internal-out.*\n", ""),
    change(ACCOUNTING, "^StandardInputText=--append OUTPUT .*\n", ""),
    change(ACCOUNTING, " ! --out-interface lo", ""),
    change(ACCOUNTING, "^Restart=.*\n", ""),
)

record_booted("test_hardening_sysctls_are_live", "sysctl --write net.ipv4.conf.all.send_redirects=1")
record_booted(
    "test_denied_modules_stay_out",
    "mv /etc/modprobe.d/80-hardening.conf /run/mutation-modules",
    mend="mv /run/mutation-modules /etc/modprobe.d/80-hardening.conf",
)
record_booted(
    "test_cloud_init_is_done",
    **edited("/run/cloud-init/status.json", r"s/\"errors\": \[\]/\"errors\": [\"mutation\"]/"),
)
record_booted("test_first_boot_is_on_the_disk", "rm /var/lib/cloud/instance/first-boot-is-on-disk")
record_booted(
    "test_fstab_is_the_images",
    "echo '/dev/disk/cloud/azure_resource-part1 /mnt auto defaults,nofail 0 2' >> /etc/fstab",
    mend="sed -i '$d' /etc/fstab",
)
record_booted(
    "test_pod_guard_is_in_force",
    "systemctl stop azure-pod-guard.service",
    mend="systemctl start azure-pod-guard.service",
)
record_booted(
    "test_traffic_is_counted",
    "systemctl stop network-accounting.service",
    mend="systemctl start network-accounting.service",
)
record_booted(
    "test_containerd_answers",
    "mv /run/containerd/containerd.sock /run/containerd/moved.sock",
    mend="mv /run/containerd/moved.sock /run/containerd/containerd.sock",
)
record_booted(
    "test_runtime_units_run",
    "systemctl kill --signal=KILL containerd.service; " + await_restart("containerd.service"),
    turn=4,
)
