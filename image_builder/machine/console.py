"""Trouble on a serial console: patterns as data, and a pure function that looks for them.

The list combines the console checks of CoreOS's kola with the kernel log checks of AKS node images. A pattern
matches within one line; ``unless`` exempts lines that are known to be harmless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Terminal control: CSI sequences, OSC strings, two-byte escapes.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[@-Z\\^_a-z0-9=>]")


@dataclass(frozen=True)
class Pattern:
    """One kind of trouble: its name, what shows it, and what exempts a line.

    ``real_time`` marks trouble that an emulated machine may show merely because its host is busy.
    """

    name: str
    shows: str
    unless: str | None = None
    real_time: bool = False


PATTERNS = (
    Pattern("emergency shell", r"Press Enter for emergency shell|You are in (emergency|rescue) mode"),
    Pattern("emergency shell", r"Give root password for maintenance|Cannot open access to console, the root"),
    Pattern("initramfs shell", r"^\s*\(initramfs\)|ALERT!.*does not exist|dracut: Refusing to continue"),
    Pattern("boot loader", r"^grub( rescue)?>|error: .*(file|disk|no such device).*not found"),
    Pattern("boot loader", r"alloc magic (is )?broken|free magic (is )?broken|Minimal BASH-like line editing"),
    Pattern("secure boot refused", r"Security Violation|bad shim signature|Verification failed: \(0x"),
    Pattern("no boot device", r"BdsDxe: No bootable option|UEFI Interactive Shell"),
    Pattern("kernel panic", r"Kernel panic - not syncing|Attempted to kill init"),
    Pattern("kernel oops", r"\bOops:|BUG: (unable to handle|kernel |scheduling|Bad page)|general protection fault"),
    Pattern("kernel warning", r"WARNING: (CPU: \d+ PID: \d+|possible circular locking)"),
    Pattern("lockup", r"soft lockup|hard LOCKUP|rcu.*(detected stall|kthread starved)", real_time=True),
    Pattern("hung task", r"task \S+ blocked for more than \d+ seconds", real_time=True),
    Pattern("out of memory", r"Out of memory: Kill|invoked oom-killer|oom-kill:|Memory cgroup out of memory"),
    Pattern("page allocation failure", r"page allocation (failure|stalls)"),
    Pattern("disk error", r"I/O error|rejecting I/O to offline device|Medium Error|critical \w+ error, dev"),
    Pattern("disk error", r"nvme.*(timeout|reset controller|controller is down|Abort status)"),
    Pattern("filesystem error", r"EXT4-fs error|EXT4-fs.*(delayed block allocation failed|failed to)"),
    Pattern("filesystem error", r"XFS.*[Cc]orruption"),
    Pattern("filesystem error", r"erofs.*(failed|corrupt)|[Rr]emounting filesystem read-only|[Rr]ead-only file system"),
    Pattern("verity error", r"device-mapper: verity.*(corrupted|mismatch)"),
    Pattern("systemd ordering cycle", r"[Ff]ound ordering cycle|to break ordering cycle|breaking (dependency )?cycle"),
    Pattern("systemd generator", r"generators?/\S+ (failed|terminated)|Failed to start .*generator"),
    # udev gets to the port after systemd's timeout of 90 seconds.
    Pattern("late console", r"\[\s*(TIME|DEPEND)\s*\].*[- ]ttyS\d", real_time=True),
    Pattern("failed unit", r"\[\s*FAILED\s*\]|\[\s*DEPEND\s*\]"),
    Pattern("unit time-out", r"\[\s*TIME\s*\]"),
    Pattern("crash", r"segfault at|SIGSEGV|segmentation violation|traps: \S+ (general protection|trap)"),
    Pattern("crash", r"core ?dump(ed)?\b|dumped core|code=dumped", unless=r"systemd-coredump"),
    Pattern("go panic", r"^(.*\]: )?panic: |fatal error: (all goroutines|concurrent map|runtime)"),
    Pattern("go panic", r"goroutine \d+ \[running\]"),
    Pattern("python traceback", r"Traceback \(most recent call last\)"),
    # containerd tries to load aufs before it skips that plugin; Debian's kernel never had the module.
    Pattern("missing module", r"modprobe: FATAL|Failed to find module", unless="Module aufs not found"),
    Pattern("cloud-init", r"cloud-init.*(WARNING|CRITICAL|failed)", unless=r"WARNING\]: (Unhandled|No template)"),
)  # fmt: skip

# With one of these on the console the machine will never come up, so there is no point in waiting any longer.
FATAL = frozenset(
    {
        "emergency shell",
        "initramfs shell",
        "boot loader",
        "secure boot refused",
        "no boot device",
        "kernel panic",
    }
)

_COMPILED = tuple((p, re.compile(p.shows), re.compile(p.unless) if p.unless else None) for p in PATTERNS)


def plain(text: str) -> str:
    """Return ``text`` without terminal control sequences and NULs, with newlines for all line ends."""
    return _CONTROL.sub("", text).replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")


def problems(text: str, *, emulated: bool = False) -> list[str]:
    """Return the problems on the console as ``name: line``, in order, each line once.

    With ``emulated``, ``real_time`` patterns don't count: without KVM, the host causes them.
    """
    lines: dict[str, None] = {}
    for line in plain(text).splitlines():
        for pattern, shows, unless in _COMPILED:
            if shows.search(line) and not (unless and unless.search(line)):
                if not (emulated and pattern.real_time):
                    lines[f"{pattern.name}: {line.strip()}"] = None
                break
    return list(lines)


def fatal(text: str) -> str | None:
    """Return the first problem after which a machine can no longer come up, or None."""
    return next((p for p in problems(text) if p.partition(":")[0] in FATAL), None)
