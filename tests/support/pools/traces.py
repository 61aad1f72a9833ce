"""What a rollout has left behind, on this end and on its hosts: the kernel is asked, not the programs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.support.pools.fleet import Fleet
from tests.support.pools.rollouts import wait

_NETWORK = Path("/proc/thread-self/net")
_ESTABLISHED, _SSH = "01", 22


def here(pool: Fleet) -> list[str]:
    """Return what is left on this end: processes in the hosts' network, sockets with a name, connections to hosts.

    All that a driver starts is in that network: slices, Ansible's workers, OpenSSH's masters, the suite.
    """
    return [*_processes(pool), *_named_sockets(), *_connections()]


def wait_until_hosts_are_bare(pool: Fleet) -> None:
    """Wait until nothing runs on any host but its sshd; what a broken connection has left takes its time to notice."""
    wait(lambda: not pool.processes())


def _processes(pool: Fleet) -> list[str]:
    traces = []
    for pid in pool.around() - pool.bystanders:
        with suppress(OSError):  # it has ended
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            traces.append(f"process {pid}: {line}")
    return traces


def _named_sockets() -> list[str]:
    # Num RefCount Protocol Flags Type St Inode, and a path where it was bound to one.
    rows = (line.split(maxsplit=7) for line in (_NETWORK / "unix").read_text().splitlines()[1:])
    return [f"socket {row[7]}" for row in rows if len(row) == 8]


def _connections() -> list[str]:
    rows = (line.split() for line in (_NETWORK / "tcp").read_text().splitlines()[1:])
    return [
        f"connection to {row[2]}"
        for row in rows
        if row[3] == _ESTABLISHED and int(row[2].rpartition(":")[2], 16) == _SSH
    ]
