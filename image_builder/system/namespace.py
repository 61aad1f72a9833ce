"""Run work in a private mount, PID, IPC and UTS namespace that nothing outlives.

The outermost process only waits and forwards signals; so does its child, which creates the namespaces. Next comes
PID 1 of the new PID namespace: it mounts its own /proc and /dev (no host device is in reach) and reaps
orphans. The kernel kills each of them when its parent ends, however it ends (``PR_SET_PDEATHSIG``). When PID 1 ends,
the kernel kills every process in the namespace, and when the last process is gone, so are the mount namespace and all
its mounts. The innermost process does the work.

``unshare(1) --kill-child`` does the same but blocks SIGTERM in the outermost process until util-linux 2.40,
and Python's ``os.unshare`` only came with 3.12; hence the four system calls here.
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
from pathlib import Path
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
_SI_KERNEL = 0x80  # siginfo's code for a signal that no process sent: here, a key press at the terminal
# How long a worker may clean up after a signal; the kernel and the command clean up the rest. A build's programs
# end within five seconds, of which the kernel has needed two when there were more of them than processors.
_GRACE_SECONDS = 2.0
# A signal to the whole group arrives twice, directly and forwarded. One that arrives later than this is a second one.
_ECHO_SECONDS = 1.0
_ERROR, _HINT = "error: ", "\nhint: "
_Mask = set[signal.Signals | int]

_libc = ctypes.CDLL(None, use_errno=True)


def mount(kind: str, source: str, target: str, options: str = "") -> None:
    """Mount a filesystem of ``kind``. Raises OSError with the target's name."""
    mounts.mount(source, target, kind, mounts.NOSUID if kind in ("proc", "sysfs") else 0, options)


def bind(source: str, target: str, *, read_only: bool) -> None:
    """Bind ``source`` (a directory or a file, without the mounts below it) onto ``target``."""
    mounts.bind(source, target)
    if read_only:
        make_read_only(target)


def make_read_only(target: str) -> None:
    """Make an existing mount read-only."""
    mounts.mount("", target, "", mounts.BIND | _MS_REMOUNT | mounts.RDONLY)


def unmount(target: str) -> None:
    """Unmount ``target``. Raises OSError (EBUSY if something still uses it).

    While the work is being ended, anything that a killed program left mounted below it is unmounted too.
    """
    if _end.number is None:
        mounts.unmount(target)
    elif _libc.umount2(os.fsencode(target), _MNT_DETACH) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"umount: {os.strerror(code)}", target)


def show_cgroups(target: str, *, read_only: bool = True) -> list[str]:
    """Bind the host's cgroup mounts onto ``target``, a directory in sysfs, and return the mount points.

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
    """Run ``work`` in new namespaces and return its exit status (128 + n if signal n ended it).

    Needs root. Must be called before any thread is started, since it forks. The calling process itself stays
    in its namespaces, so it may call this again. If the kernel refuses, that is reported on standard error and
    the status is HostError's.

    Signals are blocked from before the first fork (in the worker, until it is ready for them), so that none arrives
    while no process would forward it (PID 1 of a namespace never sees a signal that it neither blocks nor handles).
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
    """Try ``run_isolated``. Raises HostError if it is refused, as in a container without the rights."""
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
    """Report that the kernel refuses the namespaces or their mounts; return the exit status for that."""
    sys.stderr.write(f"{_ERROR}private namespaces are refused: {reason}{_HINT}{host.RIGHTS}\n")
    sys.stderr.flush()
    return HostError.exit_code


def _parent_is_gone(alive: tuple[int, int]) -> bool:
    """Return whether the parent ended before ``die_with_parent`` took effect: its end of the pipe is then closed.

    Closes this process's own copy of that end, which it inherited through fork.
    """
    os.close(alive[1])
    readable, _, _ = select.select([alive[0]], [], [], 0)
    return bool(readable)


def _make_namespaces(work: Callable[[], int], alive: tuple[int, int], mask: _Mask) -> NoReturn:
    """Run between the caller and PID 1: a process that unshared a PID namespace can't fork once that is gone."""
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
    """Forward SIGINT, SIGTERM and SIGHUP to ``child`` and return its exit status; reap ``orphans`` meanwhile.

    The terminal sends a Ctrl-C to every process of the foreground group, including the worker, so it isn't forwarded.
    A child that took too long to end (``_end_work``) gets the status of the signal that it was sent.
    """
    last = signal.SIGALRM
    while True:
        # The timeout is for a caller that has threads after all: one of them may swallow the SIGCHLD.
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
    """Act as PID 1: set up the mounts, start the worker, reap until it ends. Never returns."""
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
        assert os.getpid() == 1  # the worker may kill every process that it sees
        worker = os.fork()
        if worker == 0:
            _run_worker(work, mask)
        # What Ansible takes for the service manager, unless it has a name that says nothing.
        Path("/proc/self/comm").write_text("init", encoding="utf-8")
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
    """End the work within ``_GRACE_SECONDS``: kill its programs, then unwind; a second signal ends it immediately.

    Threads and what they wait for don't notice a signal, so all processes in this PID namespace are killed (except
    PID 1 and this one), and the kernel's SIGALRM, which nothing here handles, ends whatever goes on nevertheless.
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
