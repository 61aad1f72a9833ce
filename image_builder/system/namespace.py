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
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from image_builder.errors import EXIT_BUG, EXIT_INTERRUPTED, HostError
from image_builder.node import mounts
from image_builder.system import environment, host
from image_builder.system.process import die_with_parent, refuse_new

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_MS_REC, _MS_PRIVATE, _MS_REMOUNT = 16384, 1 << 18, 32
_MNT_DETACH = 2

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SI_KERNEL = 0x80  # siginfo's code of a signal that no process sent: here, a key at the terminal
# The time that a worker has to clean up after a signal; the kernel and the command clean up the rest. A build's
# programs end within five seconds, and with more of them than processors the kernel has taken two for its part.
_GRACE_SECONDS = 2.0
# A signal to the whole group comes twice, by itself and passed on. One that comes later than this is a second one.
_ECHO_SECONDS = 1.0
_ERROR, _HINT = "error: ", "\nhint: "
_Mask = set[signal.Signals | int]

_libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, source: str, target: str, options: str = "") -> None:
    """Mount a filesystem of ``kind``; raises OSError with the target's name."""
    mounts.mount(source, target, kind, mounts.NOSUID if kind in ("proc", "sysfs") else 0, options)


def bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind ``source`` (a directory or a file, not what is mounted below it) onto ``target``."""
    mounts.bind(source, target)
    if read_only:
        make_read_only(target)


def make_read_only(target: str) -> None:
    """Make an existing mount read-only."""
    mounts.mount("", target, "", mounts.BIND | _MS_REMOUNT | mounts.RDONLY)


def unmount(target: str) -> None:
    """Unmount; raises OSError (EBUSY when something still uses it).

    While the work is being ended, what a killed program left mounted below is unmounted too.
    """
    if _end.number is None:
        mounts.unmount(target)
    elif _libc.umount2(os.fsencode(target), _MNT_DETACH) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"umount: {os.strerror(code)}", target)


def show_cgroups(target: str, *, read_only: bool = True) -> list[str]:
    """Bind the host's cgroup mounts onto ``target``, a directory of sysfs; return what was mounted.

    A host has one cgroup2 mount there, or a tmpfs with a mount for each controller of version 1.
    """
    source = "/sys/fs/cgroup"
    mounted = []
    for place in [mount.target for mount in mounts.listed()]:
        if place == source or place.startswith(f"{source}/"):
            where = target + place.removeprefix(source)
            bind(place, where, read_only=read_only)
            mounted.append(where)
    return mounted


def run_isolated(work: Callable[[], int]) -> int:
    """Run ``work`` in fresh namespaces and return its exit status (128 + n when a signal n ended it).

    Needs root. Must be called before any thread was started, since it forks. The calling process itself stays
    in its namespaces, so it may call this again. Where the kernel refuses, that is reported on standard error and
    the status is HostError's.

    The signals are blocked from before the first fork on, in the worker until it is ready for them: none comes
    while no process would pass it on (PID 1 of a namespace never sees a signal that it neither blocks nor handles).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    alive = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    try:
        outer = os.fork()
        if outer == 0:
            _make_namespaces(work, alive, mask)
        os.close(alive[0])
        try:
            return _wait_for(outer)
        finally:
            os.close(alive[1])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def check() -> None:
    """Raise HostError where ``run_isolated`` is refused, as in a container without the rights; tries it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 2)
            os._exit(run_isolated(lambda: 0))
        _, status = os.waitpid(child, 0)
        if status:
            output.seek(0)
            message, _, hint = output.read().strip().removeprefix(_ERROR).partition(_HINT)
            raise HostError(message, hint=hint)


def _refused(reason: str) -> int:
    """Say that the kernel refuses the namespaces or what they hold; return the status for it."""
    sys.stderr.write(f"{_ERROR}private namespaces are refused: {reason}{_HINT}{host.RIGHTS}\n")
    sys.stderr.flush()
    return HostError.exit_code


def _parent_is_gone(alive: tuple[int, int]) -> bool:
    """Tell whether the parent ended before it could be asked to take us along: its end of the pipe is closed.

    Closes this process' own copy of that end, which it got by fork.
    """
    os.close(alive[1])
    readable, _, _ = select.select([alive[0]], [], [], 0)
    return bool(readable)


def _make_namespaces(work: Callable[[], int], alive: tuple[int, int], mask: _Mask) -> NoReturn:
    """Between the caller and PID 1: a process that unshared a PID namespace can't fork once that namespace is gone."""
    die_with_parent()
    code = EXIT_BUG
    try:
        if _parent_is_gone(alive):
            os._exit(code)
        pipe = os.pipe()
        if _libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | _CLONE_NEWUTS) != 0:
            code = _refused(os.strerror(ctypes.get_errno()))
        else:
            first = os.fork()
            if first == 0:
                _become_init(work, pipe, mask)
            os.close(pipe[0])
            code = _wait_for(first)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait_for(child: int, *, orphans: bool = False) -> int:
    """Pass SIGINT, SIGTERM and SIGHUP on to ``child`` and return its exit status; reap ``orphans`` on the way.

    A Ctrl-C comes from the terminal to every process of the foreground group, the worker among them, and is not
    passed on. A child that took too long to end (``_end_work``) has the status of the signal that it was sent.
    """
    last = signal.SIGALRM
    while True:
        # The time limit is for a caller with threads after all: one of them may swallow the SIGCHLD.
        caught = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, 1)
        if caught and caught.si_signo != signal.SIGCHLD:
            last = signal.Signals(caught.si_signo)
            if not (caught.si_signo == signal.SIGINT and caught.si_code == _SI_KERNEL):
                os.kill(child, caught.si_signo)
            continue
        pid = -1
        while pid:
            pid, status = os.waitpid(-1 if orphans else child, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 + (last if code == -signal.SIGALRM else -code)


def _become_init(work: Callable[[], int], alive: tuple[int, int], mask: _Mask) -> NoReturn:
    """PID 1: set up the mounts, start the worker, reap until it ends. Never returns."""
    die_with_parent()
    code = EXIT_BUG
    try:
        if _parent_is_gone(alive):
            os._exit(code)
        try:
            mounts.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
            mounts.mount("proc", "/proc", "proc", mounts.NOSUID | mounts.NODEV | mounts.NOEXEC)
            environment.mount_dev("/dev")
        except OSError as error:
            os._exit(_refused(f"{error.filename or 'a device in /dev'}: {error.strerror}"))
        assert os.getpid() == 1  # the worker may kill all that it sees
        worker = os.fork()
        if worker == 0:
            _run_worker(work, mask)
        code = _wait_for(worker, orphans=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class _End:
    """The signal that ends the worker, and when it came (monotonic)."""

    number: int | None = None
    when: float = 0.0


_end = _End()


def _end_work(number: int, _frame: FrameType | None) -> None:
    """End the work within ``_GRACE_SECONDS``: its programs at once, itself by unwinding; at once when asked again.

    Threads and what they wait for don't hear of a signal, so all processes of this PID namespace are killed (all but
    its PID 1 and this one), and the kernel's SIGALRM, which nothing here handles, ends what goes on nevertheless.
    """
    if _end.number is not None:
        if time.monotonic() - _end.when > _ECHO_SECONDS:
            os._exit(128 + number)
        return
    _end.number, _end.when = number, time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, _GRACE_SECONDS)
    refuse_new()
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _run_worker(work: Callable[[], int], mask: _Mask) -> NoReturn:
    code = EXIT_BUG
    try:
        for number in _FORWARDED:
            signal.signal(number, _end_work)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.umask(environment.UMASK)
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
        # Whatever failed on the way out, it was the signal that ended the work.
        os._exit(code if _end.number is None else 128 + _end.number)
