"""The console checks: each kind of trouble is seen, and a clean boot shows none."""

from __future__ import annotations

import pytest

from image_builder.machine.console import FATAL, PATTERNS, fatal, plain, problems

# Lines as real consoles show them, each with the name of the pattern that must catch it.
TROUBLE = [
    ("emergency shell", "You are in emergency mode. After logging in, type \"journalctl -xb\" to view"),
    ("emergency shell", "Cannot open access to console, the root account is locked."),
    ("emergency shell", "Press Enter for emergency shell or wait 5 minutes 0 seconds for reboot."),
    ("initramfs shell", "(initramfs) "),
    ("initramfs shell", "ALERT!  PARTUUID=2111 does not exist.  Dropping to a shell!"),
    ("initramfs shell", "dracut: Refusing to continue"),
    ("boot loader", "grub> "),
    ("boot loader", "grub rescue> "),
    ("boot loader", "error: file `/vmlinuz' not found."),
    ("boot loader", "alloc magic is broken at 0x7d2a5a40: 7d2a4a20"),
    ("secure boot refused", "ERROR: Verification failed: (0x1A) Security Violation"),
    ("secure boot refused", "error: bad shim signature."),
    ("no boot device", "BdsDxe: No bootable option or device was found."),
    ("kernel panic", "[   34.028905] Kernel panic - not syncing: Fatal exception in interrupt"),
    ("kernel oops", "[   34.020224] Oops: double fault: 0000 [#1] PREEMPT SMP NOPTI"),
    ("kernel oops", "[    1.0] BUG: unable to handle page fault for address: ffffa"),
    ("kernel warning", "[    3.2] WARNING: CPU: 1 PID: 77 at kernel/workqueue.c:1 foo+0x1/0x2"),
    ("lockup", "[   60.1] watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [apt:123]"),
    ("lockup", "[   60.1] rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:"),
    ("hung task", "[  242.9] INFO: task kworker/0:1:12 blocked for more than 120 seconds."),
    ("out of memory", "[   90.0] Out of memory: Killed process 411 (dockerd) total-vm:1kB"),
    ("out of memory", "[   90.0] kubelet invoked oom-killer: gfp_mask=0x140cca"),
    ("page allocation failure", "[   90.0] swapper/0: page allocation failure: order:5"),
    ("disk error", "[   12.0] blk_update_request: I/O error, dev vda, sector 0"),
    ("disk error", "[   12.0] sd 0:0:0:0: rejecting I/O to offline device"),
    ("disk error", "[   12.0] nvme nvme0: I/O 12 QID 1 timeout, aborting"),
    ("filesystem error", "[   12.0] EXT4-fs error (device vda2): ext4_lookup:1: inode #2"),
    ("filesystem error", "[   12.0] EXT4-fs (vda2): Remounting filesystem read-only"),
    ("filesystem error", "[   12.0] XFS (nvme0n1): Metadata corruption detected at xfs_agf_read_verify"),
    ("verity error", "[   12.0] device-mapper: verity: 7:0: data block 1 is corrupted"),
    ("systemd ordering cycle", "[    5.0] systemd[1]: a.service: Found ordering cycle on b.service/start"),
    ("systemd generator", "(sd-exec-[249]: /usr/lib/systemd/system-generators/x-generator failed with exit status 1."),
    ("late console", "[ TIME ] Timed out waiting for device dev-ttyS0.device - /dev/ttyS0."),
    ("late console", "[DEPEND] Dependency failed for serial-getty…S0.service - Serial Getty on ttyS0."),
    ("failed unit", "[\x1b[0;1;31mFAILED\x1b[0m] Failed to start \x1b[0;1;39mkubelet.service\x1b[0m."),
    ("failed unit", "[DEPEND] Dependency failed for local-fs.target."),
    ("unit time-out", "[ \x1b[0;1;31mTIME\x1b[0m ] Timed out waiting for device dev-sdb1.device."),
    ("crash", "[   20.0] dockerd[411]: segfault at 0 ip 0000 sp 0000 error 4 in libc.so.6"),
    ("crash", "systemd[1]: a.service: Main process exited, code=dumped, status=6/ABRT"),
    ("crash", "Aborted (core dumped)"),
    ("go panic", "panic: runtime error: invalid memory address or nil pointer dereference"),
    ("go panic", "kubelet[731]: panic: assignment to entry in nil map"),
    ("go panic", "goroutine 1 [running]:"),
    ("python traceback", "Traceback (most recent call last):"),
    ("missing module", "modprobe: FATAL: Module br_netfilter not found in directory /lib/modules/6.12"),
    ("cloud-init", "cloud-init[462]: 2026-11-21 09:46:48 - util.py[WARNING]: Failed to run module"),
]  # fmt: skip

CLEAN = """\
BdsDxe: loading Boot0001 "UEFI QEMU NVMe Ctrl" from PciRoot(0x0)/Pci(0x3,0x0)\r
\x1b[2J\x1b[01;01H\x1b[=3h\x1b[0m\x1b[37m\x1b[40m[    0.000000] Linux version 6.12.107+deb13-cloud-amd64\r
[    0.000000] tsc: Fast TSC calibration failed\r
[    0.618104] x86/fpu: Enabled xstate features 0x21f, context size is 2696 bytes\r
[    1.200000] ata5: SATA link down (SStatus 0 SControl 300)\r
[    2.103345] EXT4-fs (vda2): mounted filesystem 2111 ro with ordered data mode. Quota mode: none.\r
[    3.500000] systemd[1]: Listening on systemd-coredump.socket - Process Core Dump Socket.\r
[\x1b[0;32m  OK  \x1b[0m] Listening on \x1b[0;1;39msystemd-coredump.socket\x1b[0m - Process Core Dump Socket.\r
[\x1b[0;32m  OK  \x1b[0m] Started \x1b[0;1;39mssh.service\x1b[0m - OpenBSD Secure Shell server.\r
         Starting \x1b[0;1;39mcloud-config.service\x1b[0m - Cloud-init: Config Stage...\r
[   33.036021] containerd[411]: aufs is not supported (modprobe: FATAL: Module aufs not found in directory /lib)\r
[   34.036021] cloud-init[462]: Cloud-init v. 25.1.4 running 'modules:config' at Sat, 21 Nov 2026\r
\r
Debian GNU/Linux 13 worker ttyS0\r
\r
worker login: """


@pytest.mark.parametrize(("name", "line"), TROUBLE)
def test_trouble_is_seen_under_its_name(name: str, line: str) -> None:
    assert [p.partition(": ")[0] for p in problems(line)] == [name]


@pytest.mark.parametrize(("name", "line"), TROUBLE)
def test_trouble_is_seen_in_the_middle_of_a_clean_boot(name: str, line: str) -> None:
    lines = CLEAN.splitlines(keepends=True)
    found = problems("".join([*lines[:6], f"{line}\r\n", *lines[6:]]))
    assert found == [f"{name}: {plain(line).strip()}"]


def test_every_pattern_has_a_sample() -> None:
    assert {p.name for p in PATTERNS} == {name for name, _ in TROUBLE}


def test_clean_boot_has_no_problem() -> None:
    assert problems(CLEAN) == []


def test_repeated_line_is_told_once() -> None:
    assert len(problems("(initramfs) \n" * 5)) == 1


def test_what_a_busy_host_causes_does_not_count_when_emulated() -> None:
    names = {pattern.name for pattern in PATTERNS if pattern.real_time}
    text = "\n".join(line for name, line in TROUBLE if name in names)
    assert len(problems(text)) == 5 and not problems(text, emulated=True)
    assert problems(f"{text}\n(initramfs) \n", emulated=True) == ["initramfs shell: (initramfs)"]


def test_only_the_end_of_a_boot_is_fatal() -> None:
    assert fatal("[FAILED] Failed to start a.service.\n") is None
    assert (
        fatal("[FAILED] x\n[ 1.0] Kernel panic - not syncing: y\n")
        == "kernel panic: [ 1.0] Kernel panic - not syncing: y"
    )
    assert {p.name for p in PATTERNS} >= FATAL


def test_plain_text_has_no_terminal_control() -> None:
    assert plain("\x1b[2J\x1b]0;title\x07a\x1b[0;1;31mb\x1b[0m\r\nc\rd\0\x1b=e") == "ab\nc\nde"
