"""The role's defaults, seen in the sandbox they were applied to; and the hook for the ESP, run for real."""

from __future__ import annotations

from testinfra.host import Host

HOOK = "/etc/kernel/postinst.d/zz-image-esp"
TARGET = "/boot/efi/EFI/image"


def test_kernel_is_held_and_has_an_initramfs(host: Host) -> None:
    held = host.check_output("apt-mark showhold").split()
    assert "linux-image-cloud-amd64" in held and len(held) == 2
    version = host.check_output("linux-version list")
    assert host.file(f"/boot/initrd.img-{version}").size > 1_000_000


def test_time_and_network_accept_their_configuration(host: Host) -> None:
    assert "pool 2.debian.pool.ntp.org iburst" in host.check_output("chronyd -p")
    assert host.check_output("readlink /etc/resolv.conf") == "../run/systemd/resolve/resolv.conf"
    for unit in ("systemd-networkd", "systemd-resolved", "chrony", "ssh", "ssh-host-keys"):
        assert host.service(unit).is_enabled, unit


def test_ssh_generator_is_masked(host: Host) -> None:
    assert host.file("/etc/systemd/system-generators/systemd-ssh-generator").linked_to == "/dev/null"


def test_host_keys_are_made_once_and_empty_ones_anew(host: Host) -> None:
    make = "sed -n s/^ExecStart=//p /etc/systemd/system/ssh-host-keys.service | sh -e"
    key = "/etc/ssh/ssh_host_ed25519_key"
    host.check_output("rm -f /etc/ssh/ssh_host_*; touch /etc/ssh/ssh_host_ecdsa_key")
    host.check_output(make)
    first = host.file(key).content
    assert first and host.file("/etc/ssh/ssh_host_ecdsa_key").size and host.file(key).mode == 0o600
    host.check_output(make)
    assert host.file(key).content == first


def in_esp(host: Host, size: str, script: str) -> str:
    """Run a script with a tmpfs as ESP, which is gone afterwards together with what was changed in /boot."""
    mounts = (
        "mount -t tmpfs tmpfs /tmp && mkdir -p /boot/efi /tmp/boot && cp -a /boot/. /tmp/boot && "
        "mount --bind /tmp/boot /boot && "
        f"mount -t tmpfs -o size={size} tmpfs /boot/efi && mkdir -p {TARGET} && v=$(linux-version list) && "
    )
    return host.check_output(
        "unshare --mount --propagation private sh -ec %s", f"{mounts}cd {TARGET}; {script}"
    )


def test_esp_gets_the_kernel(host: Host) -> None:
    in_esp(
        host,
        "1g",
        f"{HOOK}; cmp vmlinuz /boot/vmlinuz-$v; cmp initrd.img /boot/initrd.img-$v; ! test -e vmlinuz.old",
    )


def test_esp_keeps_the_earlier_pair(host: Host) -> None:
    script = (
        f"{HOOK}; cp initrd.img /tmp/first; echo x >> /boot/initrd.img-$v; "
        "run-parts --arg=$v --arg=/boot/initrd.img-$v /etc/initramfs/post-update.d; "
        "cmp initrd.img /boot/initrd.img-$v; cmp initrd.img.old /tmp/first; cmp vmlinuz.old /boot/vmlinuz-$v; "
        f"cp -a . /tmp/before; {HOOK}; diff -r . /tmp/before; ls"
    )
    assert in_esp(host, "1g", script).split() == ["initrd.img", "initrd.img.old", "vmlinuz", "vmlinuz.old"]


def test_esp_takes_the_newest_kernel_that_has_an_initramfs(host: Host) -> None:
    script = (
        f"{HOOK}; n=6.99.0-cloud-amd64; cp /boot/vmlinuz-$v /boot/vmlinuz-$n; echo x >> /boot/vmlinuz-$n; "
        f"{HOOK}; cmp vmlinuz /boot/vmlinuz-$v; cp /boot/initrd.img-$v /boot/initrd.img-$n; "
        f"{HOOK}; cmp vmlinuz /boot/vmlinuz-$n; cmp vmlinuz.old /boot/vmlinuz-$v"
    )
    in_esp(host, "1g", script)


def test_full_esp_stays_as_it_was(host: Host) -> None:
    script = (
        f"{HOOK}; cp -a . /tmp/before; echo x >> /boot/initrd.img-$v; "
        f"if {HOOK}; then exit 9; fi; diff -r . /tmp/before"
    )
    in_esp(host, "40m", script)


def test_hook_does_nothing_where_no_esp_is_mounted(host: Host) -> None:
    assert host.check_output(HOOK) == ""
    assert not host.file(TARGET).exists
