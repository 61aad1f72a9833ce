"""A root in which commands run: an overlay of stage trees with its own /proc, /dev, /run and /tmp.

Callers are already in a private mount namespace (``namespace.run_isolated``), so whatever happens, the
kernel removes every mount. Nothing of the host's /dev is bound: the few nodes that programs need are
created on a tmpfs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from image_builder.errors import StoreError
from image_builder.system import environment, namespace, process
from image_builder.system.process import Arg, Completed

# Stage trees are moved, hashed and mounted on other hosts: use no feature that ties a layer to its neighbors.
# `volatile` drops every fsync below the mount; the store's commit does one syncfs instead.
_OVERLAY = "index=off,metacopy=off,redirect_dir=off,xino=off,volatile"
# Mount points that a root must have; created in the upper layer if a tree lacks them.
_MOUNT_POINTS = ("proc", "sys", "dev", "run", "tmp")

# A role that sets sysctls live would set the build host's.
_READ_ONLY_PROC = ("sys", "sysrq-trigger")

# A killed program that waits for a disk ends when the disk answers.
_KILL_SECONDS = 30.0
# Drops what no bake needs: the host's modules, memory and ports, clock, power. Root in a bake is still root.
BOUNDED = ("setpriv", "--bounding-set", "-sys_module,-sys_rawio,-sys_time,-sys_boot", "--")

ENVIRONMENT = {
    **environment.BASE,
    "DEBIAN_FRONTEND": "noninteractive",
    "PYTHONDONTWRITEBYTECODE": "1",
}


@dataclass(frozen=True)
class Root:
    """A mounted root. ``path`` is where the caller sees it."""

    path: Path
    environment: Mapping[str, str]
    network: bool = False

    def argv(
        self, argv: Sequence[Arg], env: Mapping[str, str] | None = None, *, proxies: bool = False
    ) -> list[str]:
        """Return the command that runs ``argv`` in this root: a clean environment, no network by default.

        ``env`` goes into the argument list, which every user of the host can read. With ``proxies``, the program keeps
        the proxies' addresses, which may contain a password, from the environment that ``process`` gives it.
        """
        variables = {**self.environment, **(env or {})}
        passed = {*environment.PROXIES, *variables}
        dropped = sorted(environment.environment().keys() - passed) if proxies else []
        return [
            *BOUNDED,
            *(() if self.network else ("unshare", "--net", "--")),
            *("chroot", os.fspath(self.path), "/usr/bin/env"),
            *([f"--unset={name}" for name in dropped] if proxies else ["-i"]),
            *(f"{name}={value}" for name, value in variables.items()),
            *(os.fspath(a) for a in argv),
        ]

    def run(
        self,
        argv: Sequence[Arg],
        *,
        env: Mapping[str, str] | None = None,
        ok: Sequence[int] = (0,),
        input: str | None = None,
        timeout: float | None = None,
        log: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """Run ``argv`` in this root; parameters and errors are as in ``process.run``."""
        return process.run(
            self.argv(argv, env), ok=ok, input=input, timeout=timeout, log=log, on_line=on_line
        )


@contextmanager
def open_root(
    lowers: Sequence[Path],
    work: Path,
    *,
    upper: Path | None = None,
    binds: Mapping[str, Path] | None = None,
    writable_binds: Mapping[str, Path] | None = None,
    env: Mapping[str, str] | None = None,
    network: bool = False,
    writable_cgroups: bool = False,
) -> Iterator[Root]:
    """Mount a root and unmount it at the end, killing whatever still runs in it.

    ``lowers`` are stage trees, topmost first. Changes go to ``upper``, or to a directory in ``work`` that the
    caller deletes. ``work`` must be on the same filesystem as ``upper``. ``binds`` and ``writable_binds`` map paths
    in the root to directories or files outside; those below /run and /tmp leave no trace in the upper layer.
    With ``network``, its programs have the host's network and see the host's cgroups, as container engines
    require, but can't change the cgroups unless ``writable_cgroups``: a caller that starts containers removes their
    groups again (``cgroups.reap``). Raises StoreError if the overlay can't be mounted.
    """
    with ExitStack() as mounts:
        merged = mounts.enter_context(open_overlay(lowers, work, upper=upper))
        for name in _MOUNT_POINTS:
            (merged / name).mkdir(mode=0o1777 if name == "tmp" else 0o755, exist_ok=True)
        _mount(mounts, "proc", merged / "proc")
        for path in (merged / "proc" / name for name in _READ_ONLY_PROC):
            # A container engine sets the sysctls of its containers' networks; and not every kernel has a SysRq key.
            if not network and path.exists():
                mounts.enter_context(bound(path, path, read_only=True))
        _mount(mounts, "sysfs", merged / "sys")
        namespace.make_read_only(os.fspath(merged / "sys"))
        if network:
            for mounted in namespace.show_cgroups(
                os.fspath(merged / "sys/fs/cgroup"), read_only=not writable_cgroups
            ):
                mounts.callback(namespace.unmount, mounted)
        for mounted in environment.mount_dev(os.fspath(merged / "dev")):
            mounts.callback(namespace.unmount, mounted)
        _mount(mounts, "tmpfs", merged / "run", "mode=755")
        _mount(mounts, "tmpfs", merged / "tmp", "mode=1777")
        for where, source in (binds or {}).items():
            mounts.enter_context(bound(source, merged / where.lstrip("/"), read_only=True))
        for where, source in (writable_binds or {}).items():
            mounts.enter_context(bound(source, merged / where.lstrip("/"), read_only=False))
        mounts.callback(_kill_inhabitants, merged)
        yield Root(merged, {**ENVIRONMENT, **(env or {})}, network)


@contextmanager
def open_overlay(lowers: Sequence[Path], work: Path, *, upper: Path | None = None) -> Iterator[Path]:
    """Mount just the stage trees ``lowers`` (topmost first), for programs that read or fill a tree.

    Parameters and errors are as in ``open_root``; without any ``lowers``, the tree is empty, to be filled.
    """
    work.mkdir(parents=True, exist_ok=True)
    merged = _fresh(work, "root")
    with ExitStack() as mounts:
        _mount_overlay(
            mounts,
            lowers or [_fresh(work, "empty")],
            upper or _fresh(work, "upper"),
            _fresh(work, "overlay"),
            merged,
        )
        yield merged


def _fresh(work: Path, name: str) -> Path:
    """Create a new empty directory in ``work``; several roots may be opened in one work directory."""
    for number in range(1000):
        path = work / (name if number == 0 else f"{name}.{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise StoreError(f"{work} holds too many roots")


def _mount(mounts: ExitStack, kind: str, target: Path, options: str = "") -> None:
    namespace.mount(kind, kind, os.fspath(target), options)
    mounts.callback(namespace.unmount, os.fspath(target))


def _mount_overlay(
    mounts: ExitStack, lowers: Sequence[Path], upper: Path, overlay_work: Path, merged: Path
) -> None:
    for path in (*lowers, upper):
        if any(c in os.fspath(path) for c in ":,\\"):
            raise StoreError(f"{path}: an overlay can't be mounted from a path with ':', ',' or '\\'")
    lower = ":".join(os.fspath(p) for p in lowers)
    options = f"lowerdir={lower},upperdir={upper},workdir={overlay_work},{_OVERLAY}"
    try:
        _mount(mounts, "overlay", merged, options)
    except OSError as error:
        raise StoreError(
            f"can't mount the overlay of {len(lowers)} trees on {upper}: {error.strerror}",
            hint="the store needs a filesystem that can hold an overlay's upper layer: ext4 or xfs, no overlay",
        ) from error


@contextmanager
def bound(source: Path, target: Path, *, read_only: bool) -> Iterator[None]:
    """Bind a directory or a file onto a path, creating the path if needed; unmount it at the end."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    namespace.bind(os.fspath(source), os.fspath(target), read_only=read_only)
    try:
        yield
    finally:
        namespace.unmount(os.fspath(target))


def _kill_inhabitants(root: Path) -> None:
    """Kill every process whose root is ``root``: a package's postinst may have left a daemon.

    Returns once their last threads are gone, or after ``_KILL_SECONDS``: until then their files are open, and the
    root can't be unmounted. Only this PID namespace is visible here, so no process of the host can be killed.
    """
    where = os.stat(root)
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        inhabitants, ending = _inhabitants(where)
        if not inhabitants and not ending:
            return
        for pid in inhabitants:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _inhabitants(root: os.stat_result) -> tuple[set[int], bool]:
    """Return the processes with a thread in ``root``, and whether a thread that may have been in it is ending.

    The first thread of a process may be gone while others run, and an ending thread leaves its root before it
    closes its files (the kernel's do_exit).
    """
    inhabitants: set[int] = set()
    ending = False
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()):
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            try:
                place = os.stat(thread / "root/.")
            except OSError:
                ending = ending or not _is_gone(thread)
                continue
            if (place.st_dev, place.st_ino) == (root.st_dev, root.st_ino):
                inhabitants.add(pid)
    return inhabitants, ending


def _is_gone(thread: Path) -> bool:
    """Return whether a thread (its directory in /proc) has ended, whether or not it has been waited for."""
    try:
        return (thread / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
