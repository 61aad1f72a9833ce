"""Run work in a private mount, PID, IPC and UTS namespace that nothing outlives.

The outermost process only waits and forwards signals; so does its child, which makes the namespaces. Next comes
PID 1 of the new PID namespace: it mounts a /proc and a /dev of its own (no host device is in reach) and reaps
orphans. The kernel kills each of them when its parent ends, however that ends (``PR_SET_PDEATHSIG``). With PID 1
the kernel kills every process of the namespace, and with the last process the mount namespace and all its
mounts are gone. The last process does the work.

``unshare(1) --kill-child`` does the same but blocks SIGTERM in the outermost process until util-linux 2.40,
and Python's ``os.unshare`` came with 3.12; hence the four system calls here.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from image_builder.errors import EXIT_BUG, EXIT_INTERRUPTED, HostError
from image_builder.process import die_with_parent

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_RDONLY, _MS_REMOUNT = 4096, 16384, 1 << 18, 1, 32
_MNT_DETACH = 2

_DEV_NODES = {
    "null": (1, 3),
    "zero": (1, 5),
    "full": (1, 7),
    "random": (1, 8),
    "urandom": (1, 9),
    "tty": (5, 0),
}
_DEV_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode())
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {kind} {source}: {os.strerror(code)}", target)


def mount(kind: str, source: str, target: str, options: str = "") -> None:
    """Mount a filesystem of ``kind``; raises OSError with the target's name."""
    _mount(source, target, kind, _MS_NOSUID if kind in ("proc", "sysfs") else 0, options)


def bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind ``source`` (a directory or a file, not what is mounted below it) onto ``target``."""
    _mount(source, target, "", _MS_BIND)
    if read_only:
        _mount("", target, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def make_read_only(target: str) -> None:
    """Make an existing mount read-only."""
    _mount("", target, "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY)


def mount_dev(target: str) -> list[str]:
    """Mount a /dev of its own at ``target``: a tmpfs with the nodes that programs need, none of the host's.

    Returns what was mounted, in order.
    """
    mounted = [target, f"{target}/pts", f"{target}/shm"]
    mount("tmpfs", "tmpfs", target, "mode=755,size=4m")
    for name, (major, minor) in _DEV_NODES.items():
        os.mknod(f"{target}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(f"{target}/{name}", 0o666)
    for name, link in _DEV_LINKS.items():
        os.symlink(link, f"{target}/{name}")
    for path in mounted[1:]:
        os.mkdir(path)
    mount("devpts", "devpts", mounted[1], "newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", "tmpfs", mounted[2], "mode=1777")
    return mounted


def show_cgroups(target: str, *, read_only: bool = True) -> list[str]:
    """Bind the host's cgroup mounts onto ``target``, a directory of sysfs; return what was mounted.

    A host has one cgroup2 mount there, or a tmpfs with a mount for each controller of version 1.
    """
    source = "/sys/fs/cgroup"
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        places = [line.split(" ")[4] for line in stream]
    mounted = []
    for place in places:
        if place == source or place.startswith(f"{source}/"):
            where = target + place.removeprefix(source)
            bind(place, where, read_only=read_only)
            mounted.append(where)
    return mounted


def unmount(target: str) -> None:
    """Unmount ``target``; raises OSError (EBUSY when something still uses it)."""
    if _libc.umount2(target.encode(), 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"umount: {os.strerror(code)}", target)


def syncfs(path: str) -> None:
    """Write everything of the filesystem that holds ``path`` to its disk; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"syncfs: {os.strerror(code)}", path)
    finally:
        os.close(fd)


def run_isolated(work: Callable[[], int]) -> int:
    """Run ``work`` in fresh namespaces and return its exit status (128 + n when a signal n ended it).

    Needs root. Must be called before any thread was started, since it forks. The calling process itself stays
    in its namespaces, so it may call this again. Where the kernel refuses, that is told on standard error and
    the status is HostError's.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    alive = os.pipe()
    outer = os.fork()
    if outer == 0:
        _make_namespaces(work, alive)
    os.close(alive[0])
    try:
        return _wait_for(outer)
    finally:
        os.close(alive[1])


def _parent_is_gone(alive: tuple[int, int]) -> bool:
    """Tell whether the parent ended before it could be asked to take us along: its end of the pipe is closed.

    Closes this process' own copy of that end, which it got by fork.
    """
    os.close(alive[1])
    readable, _, _ = select.select([alive[0]], [], [], 0)
    return bool(readable)


def _make_namespaces(work: Callable[[], int], alive: tuple[int, int]) -> NoReturn:
    """Between the caller and PID 1: whoever unshares a PID namespace can't fork once that is gone."""
    die_with_parent()
    code = EXIT_BUG
    try:
        if _parent_is_gone(alive):
            os._exit(code)
        mine = os.pipe()
        if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS) != 0:
            reason = os.strerror(ctypes.get_errno())
            sys.stderr.write(f"error: can't make private namespaces: {reason}\nhint: run as root\n")
            code = HostError.exit_code
        else:
            first = os.fork()
            if first == 0:
                _become_init(work, mine)
            os.close(mine[0])
            code = _wait_for(first)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait_for(child: int) -> int:
    """Forward SIGINT, SIGTERM and SIGHUP to ``child`` and wait for its end.

    A Ctrl-C reaches the whole foreground group, so SIGINT is only forwarded when it was sent to this process
    alone; the worker sees at most two and treats them as one.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        os.kill(child, number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, forward) for number in signals}
    try:
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return _exit_status(status)


def _exit_status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _become_init(work: Callable[[], int], alive: tuple[int, int]) -> NoReturn:
    """PID 1: set up the mounts, start the worker, reap until it ends. Never returns."""
    die_with_parent()
    code = EXIT_BUG
    try:
        if _parent_is_gone(alive):
            os._exit(code)
        _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        mount_dev("/dev")
        worker = os.fork()
        if worker == 0:
            _run_worker(work)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, _f: os.kill(worker, n))
        while True:
            pid, status = os.wait()
            if pid == worker:
                code = _exit_status(status)
                break
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_worker(work: Callable[[], int]) -> NoReturn:
    code = EXIT_BUG
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
