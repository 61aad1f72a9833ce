"""The traces of a rollout, on this end and on its hosts, according to the kernel, not the programs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.support.pools.fleet import Fleet
from tests.support.pools.rollouts import wait

_NETWORK = Path("/proc/thread-self/net")
_ESTABLISHED, _SSH = "01", 22


def here(pool: Fleet) -> list[str]:
    """Return what is left on this end: processes in the hosts' network, named sockets, connections to hosts.

    Everything that a driver starts is in that network: slices, Ansible's workers, OpenSSH's masters, the suite.
    """
    return [*_processes(pool), *_named_sockets(), *_connections()]


def wait_until_hosts_are_bare(pool: Fleet) -> None:
    """Wait until only sshd runs on each host; what a broken connection has left takes a while to notice."""
    wait(lambda: not pool.processes())


def _processes(pool: Fleet) -> list[str]:
    traces = []
    for pid in pool.around() - pool.bystanders:
        with suppress(OSError):  # it has ended
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            traces.append(f"process {pid}: {line}")
    return traces


def _named_sockets() -> list[str]:
    # Num RefCount Protocol Flags Type St Inode, and a path if the socket is bound to one.
    rows = (line.split(maxsplit=7) for line in (_NETWORK / "unix").read_text().splitlines()[1:])
    return [f"socket {row[7]}" for row in rows if len(row) == 8]


def _connections() -> list[str]:
    rows = (line.split() for line in (_NETWORK / "tcp").read_text().splitlines()[1:])
    return [
        f"connection to {row[2]}"
        for row in rows
        if row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == _SSH
    ]
