"""Mutations for the kernel, its settings and the system's services."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.suite.booted import record_booted
from tests.suite.offline import append, change, chmod, given, link, outside, record, remove, uninstall, write

HOOK = "/etc/kernel/postinst.d/zz-image-esp"


def _half_an_initramfs(root: Path, _variables: dict[str, Any]) -> None:
    """Cut the initramfs off in the middle."""
    image = next((root / "boot").glob("initrd.img-*"))
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])


def _other_code(root: Path, _variables: dict[str, Any]) -> None:
    """Change a byte in the middle of GRUB, so that its signature no longer matches."""
    grub = outside(root, "/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed")
    content = bytearray(grub.read_bytes())
    content[len(content) // 2] ^= 0x55
    grub.write_bytes(content)


def _first_sysctl(variables: dict[str, Any]) -> str:
    return str(next(iter(variables["__system_sysctl"])))


record(
    "test_sysctls_are_configured",
    given(lambda v: write("/etc/sysctl.d/99-later.conf", f"{_first_sysctl(v)} = 4\n")),
    given(lambda v: change("/etc/sysctl.d/90-image.conf", rf"^{_first_sysctl(v)} .*\n", "")),
    remove("/etc/sysctl.d/90-image.conf"),
)
record("test_kubelets_sysctls_are_configured", write("/etc/sysctl.d/99-later.conf", "kernel.panic=0\n"))
record(
    "test_kernel_is_the_declared_one",
    write("/boot/vmlinuz-1.2.3-amd64"),
    given(lambda v: uninstall(v["__system_kernel"].strip())),
)
record(
    "test_kernel_is_held",
    change("/var/lib/dpkg/status", "^Status: hold ok installed", "Status: install ok installed"),
)
record("test_kernel_is_complete", remove("/usr/lib/modules/*/modules.dep.bin"), remove("/boot/initrd.img-*"))
record("test_initramfs_finds_the_root", _half_an_initramfs)
record(
    "test_initramfs_waits_for_no_swap",
    write("/etc/initramfs-tools/conf.d/resume", "RESUME=UUID=0\n"),
    remove("/etc/initramfs-tools/conf.d/image.conf"),
)
record(
    "test_boot_loader_is_signed",
    remove("/usr/lib/shim/shimx64.efi.signed"),
    write("/usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed"),
    write("/usr/lib/shim/shimx64.efi.signed", "\0" * 200_000),
    _other_code,
)
record(
    "test_esp_follows_the_kernel",
    chmod(HOOK, 0o644),
    remove("/etc/initramfs/post-update.d/zz-image-esp"),
    append(HOOK, "if\n"),
)
record(
    "test_modules_are_loaded_at_boot",
    given(lambda v: change("/etc/modules-load.d/90-image.conf", rf"^{v['system_modules'][0]}\n", "")),
)
record(
    "test_modules_exist",
    write("/etc/modprobe.d/x.conf", "install overlay /bin/false\n"),
    remove("/usr/lib/modules/*/modules.dep.bin"),
)

record("test_units_are_masked", given(lambda v: remove(f"/etc/systemd/system/{v['__system_masked'][0]}")))
record("test_units_are_enabled", remove("/etc/systemd/system/multi-user.target.wants/ssh.service"))
record(
    "test_units_are_valid",
    write("/etc/systemd/system/broken.service", "[Service]\nExecStart=/no/such/program\n"),
    append("/etc/systemd/system/ssh-host-keys.service", "[Service]\nExecStart=relative/path\n"),
)
record(
    "test_no_swap_is_configured",
    append("/etc/fstab", "/swapfile none swap sw 0 0\n"),
    remove("/etc/systemd/system/swap.target"),
)
record(
    "test_limits_are_configured",
    write("/etc/security/limits.d/99-later.conf", "* - memlock 64\n"),
    remove("/etc/security/limits.d/90-image.conf"),
)
record(
    "test_journal_is_bounded",
    write("/etc/systemd/journald.conf.d/99-later.conf", "[Journal]\nSystemMaxUse=100G\n"),
    remove("/etc/systemd/journald.conf.d/90-image.conf"),
)
record(
    "test_clock_is_kept",
    given(
        lambda v: (
            remove("/etc/systemd/system/multi-user.target.wants/chrony.service")
            if v["system_time_sync"] == "chrony"
            else remove("/etc/systemd/system/sysinit.target.wants/systemd-timesyncd.service")
        )
    ),
)
record(
    "test_chrony_accepts_its_configuration",
    append("/etc/chrony/chrony.conf", "maxslewrate fast\n"),
    change("/etc/chrony/chrony.conf", "^cmdport 0", "cmdport 323"),
)
record(
    "test_interfaces_use_dhcp",
    change("/etc/systemd/network/90-dhcp.network", "^Kind=.*\n", ""),
    remove("/etc/systemd/network/90-dhcp.network"),
)
record(
    "test_foreign_routes_are_left_alone",
    write("/etc/systemd/networkd.conf.d/99-later.conf", "[Network]\nManageForeignRoutes=yes\n"),
)
record(
    "test_pods_inherit_real_name_servers",
    link("/etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
    remove("/etc/systemd/resolved.conf.d/90-image.conf"),
)
record(
    "test_host_keys_come_at_first_boot",
    remove("/etc/systemd/system/ssh-host-keys.service"),
    change("/etc/systemd/system/ssh-host-keys.service", "^Before=ssh.service.*", "Before=multi-user.target"),
    change("/etc/systemd/system/ssh-host-keys.service", "^Restart=.*$", ""),
    change("/etc/systemd/system/ssh-host-keys.service", "^ExecStartPost=.*$", ""),
)

record_booted("test_sysctls_are_live", "sysctl --write net.ipv4.neigh.default.gc_thresh1=128")
# A kubelet that starts later exits if a kernel setting isn't the one it relies on.
record_booted(
    "test_kubelets_sysctls_are_live",
    "sysctl --write vm.panic_on_oom=1",
    mend="sysctl --write vm.panic_on_oom=0",
)
record_booted(
    "test_modules_are_loaded",
    # No module has to be unloaded: the check reads another table instead.
    "grep -v '^br_netfilter ' /proc/modules > /run/modules; mount --bind /run/modules /proc/modules",
    mend="umount /proc/modules",
)
record_booted(
    "test_running_kernel_is_the_images",
    "mv /boot/vmlinuz-* /boot/vmlinuz-1.2.3-mutation",
    mend="mv /boot/vmlinuz-1.2.3-mutation /boot/vmlinuz-$(uname -r)",
)
record_booted("test_esp_has_the_images_kernel", "truncate --size=-1 /boot/efi/EFI/image/vmlinuz")
record_booted(
    "test_sessions_have_the_limits",
    "echo '* - memlock 64' > /etc/security/limits.d/99-mutation.conf",
    mend="rm /etc/security/limits.d/99-mutation.conf",
)
record_booted("test_journal_is_persistent", "journalctl --relinquish-var", mend="journalctl --flush")
