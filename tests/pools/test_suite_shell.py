"""The suite's one shell on a machine: real sshd and sudo, and commands of every kind, one after another."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import pytest
from testinfra.backend.base import BaseBackend

from image_builder.machine.ssh import SshAddress
from image_builder.pool.reach.reach import Reach
from image_builder.pool.steps.suite import serve
from image_builder.settings import SUITE
from tests.support.pools.fleet import USER, Fleet

pytestmark = [pytest.mark.root, pytest.mark.hosts]


@pytest.fixture(scope="module")
def targets() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.fspath(SUITE))
        yield importlib.import_module("targets")


@pytest.fixture
def ssh(pool: Fleet, targets: ModuleType, tmp_path: Path) -> BaseBackend:
    """Open the suite's own connection."""
    host = pool.hosts[0]
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(f"{host.address} {(pool.folder / 'host-0.pub').read_text()}")
    url = SshAddress(USER, host.address, host.port, pool.key, known_hosts).url
    return targets.open_target(targets.parse_target(url)).backend


@pytest.fixture
def relayed(pool: Fleet, targets: ModuleType) -> Iterator[BaseBackend]:
    """Relay a pool's connection, which the driver holds."""
    with Reach(pool.access()) as reach, reach.session(pool.hosts[0], root=True, seconds=300) as session:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as requests, ThreadPoolExecutor(1) as threads:
            served = threads.submit(serve, requests, session)
            backend = targets.Relayed(theirs)
            yield backend
            backend.close()
            served.result()


@pytest.fixture(params=["ssh", "relayed"])
def backend(request: pytest.FixtureRequest) -> BaseBackend:
    return request.getfixturevalue(request.param)


def test_each_command_is_alone(backend: BaseBackend) -> None:
    assert backend.run("id -u").stdout == "0\n"
    assert backend.run("cd /tmp; umask 0; x=1; exit 7").rc == 7
    after = backend.run("pwd; umask; echo \"[$x]\"; cat; printf '%s' no-newline")
    assert (after.rc, after.stderr) == (0, "")
    assert after.stdout.splitlines()[1:] == ["0022", "[]", "no-newline"]
    assert after.stdout.splitlines()[0] != "/tmp"
    assert backend.run("sh -c 'kill -TERM $$'").rc == 128 + 15
    assert backend.run("echo %s", "a 'quoted' $HOME ü\nword").stdout == "a 'quoted' $HOME ü\nword\n"
    assert backend.run("if").rc == 2


def test_streams_are_told_apart_whatever_is_in_them(backend: BaseBackend) -> None:
    loud = backend.run(
        "head -c 6000000 /dev/zero; head -c 5000000 /dev/zero >&2; printf '\\n\\377' >&2; exit 3"
    )
    assert loud.rc == 3
    assert loud.stdout_bytes == bytes(6_000_000)
    assert loud.stderr_bytes == bytes(5_000_000) + b"\n\xff"
    quiet = backend.run("true")
    assert (quiet.rc, quiet.stdout_bytes, quiet.stderr_bytes) == (0, b"", b"")


def test_a_shell_that_is_gone_is_an_error_and_the_next_command_has_another(backend: BaseBackend) -> None:
    with pytest.raises(OSError, match="the shell has ended: kill"):
        backend.run("kill -9 $$; sleep 1")
    assert backend.run("id -u").stdout == "0\n"


def test_a_connection_that_is_gone_is_an_error_and_the_next_command_has_another(ssh: BaseBackend) -> None:
    assert ssh.run("id -u").stdout == "0\n"
    ssh.client.close()
    with pytest.raises(OSError, match="id -u"):
        ssh.run("id -u")
    assert ssh.run("id -u").stdout == "0\n"


def test_a_command_without_an_end_is_an_error(
    backend: BaseBackend, targets: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_COMMAND_SECONDS", 1.0)
    with pytest.raises(OSError, match="timed out after 1 s: echo begun"):
        backend.run("echo begun; sleep 20")
    monkeypatch.undo()
    assert backend.run("id -u").stdout == "0\n"
