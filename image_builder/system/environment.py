"""The environment of every program in a bake: variables, umask, /dev. All of it is part of the stages' ids."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from image_builder.node import mounts

# The caller's own, such as 077 on hardened hosts, would make trees inaccessible to the services that run in them.
UMASK = 0o022
# The caller's variables that are passed on: which authorities to trust, where temporary files go.
_PASSED_ON = ("SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR")
# Passed on too. Programs differ in which of the two spellings they read; all of them read lower case.
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
# The variables of every program, on the host and in a root.
BASE: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
    "TZ": "UTC",
}
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


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a child's environment: a fixed base, the proxy and certificate settings, and ``extra``."""
    env = {**BASE}
    env.update({name: os.environ[name] for name in _PASSED_ON if name in os.environ})
    for name in PROXIES:
        if value := os.environ.get(name) or os.environ.get(name.upper()):
            env[name] = value
    env.update(extra or {})
    return env


def mount_dev(target: str) -> list[str]:
    """Mount a private /dev at ``target``: a tmpfs with the nodes that programs need, none of the host's.

    Returns the mount points, in order.
    """
    mounted = [target, f"{target}/pts", f"{target}/shm"]
    mounts.mount("tmpfs", target, "tmpfs", options="mode=755,size=4m")
    for name, (major, minor) in _DEV_NODES.items():
        os.mknod(f"{target}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.chmod(f"{target}/{name}", 0o666)  # noqa: S103  # as in any /dev
    for name, link in _DEV_LINKS.items():
        os.symlink(link, f"{target}/{name}")
    for path in mounted[1:]:
        os.mkdir(path)
    mounts.mount("devpts", mounted[1], "devpts", options="newinstance,ptmxmode=0666,mode=620,gid=5")
    mounts.mount("tmpfs", mounted[2], "tmpfs", options="mode=1777")
    return mounted
