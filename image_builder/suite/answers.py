"""A target's answers, each fetched once for all checks, and the files that checks read, fetched together.

Starting a program, and requesting it over SSH, costs a machine more than the work that most of these programs do. An
answer is cached if it doesn't change while the checks run. A mutant has a host of its own for each check, so nothing is
cached for the next check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from testinfra.backend.base import CommandResult
from testinfra.host import Host

T = TypeVar("T")

# What checks read: files, folders with everything in them, and what the kernel reports about the current boot.
FILES = (
    "/etc/apt/sources.list",
    "/etc/apt/sources.list.d",
    "/etc/chrony/chrony.conf",
    "/etc/cloud/cloud.cfg",
    "/etc/cloud/cloud.cfg.d",
    "/etc/fstab",
    "/etc/group",
    "/etc/hosts",
    "/etc/image-release",
    "/etc/initramfs-tools/conf.d",
    "/etc/initramfs-tools/initramfs.conf",
    "/etc/machine-id",
    "/etc/modules-load.d",
    "/etc/os-release",
    "/etc/passwd",
    "/etc/security/limits.conf",
    "/etc/security/limits.d",
    "/etc/shadow",
    "/etc/systemd/system/first-boot-again.service",
    "/etc/systemd/system/first-boot-durable.service",
    "/etc/waagent.conf",
    "/proc/cmdline",
    "/proc/modules",
    "/proc/mounts",
    "/proc/swaps",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/kernel/tainted",
    "/usr/lib/udev/rules.d/80-azure-disk.rules",
    "/var/lib/dpkg/diversions",
)


def once(host: Host, key: object, ask: Callable[[], T]) -> T:
    """Return the result of ``ask``, calling it only the first time for a key and a target.

    A failed assertion in it is cached as well, for machines where much is broken; other exceptions aren't.
    """
    answers: dict[object, tuple[Any, str | None]] = vars(host).setdefault("answers", {})
    if key not in answers:
        try:
            answers[key] = (ask(), None)
        except AssertionError as error:
            answers[key] = (None, str(error))
            raise
    answer, failed = answers[key]
    if failed is not None:
        raise AssertionError(failed)
    value: T = answer
    return value


def succeeded(command: str, done: CommandResult) -> CommandResult:
    """Return a command's result; fail the check with the command's message if the command failed."""
    assert done.rc == 0, (
        f"{command.split(maxsplit=1)[0]} ended with {done.rc}: {(done.stderr or done.stdout).strip()[-500:]}"
    )
    return done


def output_once(host: Host, command: str) -> str:
    """Return the output of a command whose answer can't change while the checks run."""
    return once(host, (output_once, command), lambda: _output(host, command))


def _output(host: Host, command: str) -> str:
    return str(succeeded(command, host.run(command)).stdout).rstrip("\n")


def files(host: Host) -> dict[str, str]:
    """Return the text of each existing file in ``FILES``, and of each file below its folders that isn't empty."""
    return once(host, files, lambda: _read(host))


def _read(host: Host) -> dict[str, str]:
    # Each line of each file, after the file's name and a NUL; then the names of empty files, which have no lines.
    names = " ".join(FILES)
    lines = f"LC_ALL=C grep -aRs --devices=skip --null '' {names}"
    done = host.run(
        rf"{lines}; printf '\0\0\n'; for f in {names}; do [ -f $f ] && [ ! -s $f ] && echo $f; done; true"
    )
    listed, _, empty = done.stdout_bytes.decode("utf-8", "surrogateescape").rpartition("\0\0\n")
    texts: dict[str, list[str]] = {path: [] for path in empty.splitlines()}
    for line in listed.split("\n")[:-1]:
        path, _, text = line.partition("\0")
        texts.setdefault(path, []).append(text)
    assert texts, f"no file can be read: {done.rc} {done.stderr}"
    return {path: "".join(f"{text}\n" for text in lines) for path, lines in texts.items()}


def in_folder(host: Host, folder: str, suffix: str) -> dict[str, str]:
    """Return the text of the files directly in a folder of ``FILES`` that have the suffix, by path, in order."""
    assert folder in FILES
    texts = {path: text for path, text in files(host).items() if path.endswith(suffix)}
    return {path: texts[path] for path in sorted(texts) if path.rpartition("/")[0] == folder}
