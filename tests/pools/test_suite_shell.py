"""The suite's one shell on a machine: real sshd and sudo, and commands of every kind, one after the other."""

from __future__ import annotations

import base64
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
from testinfra.host import Host

from image_builder.machine.ssh import SshAddress
from image_builder.pool.reach.reach import Reach
from image_builder.pool.steps.suite_process import serve
from image_builder.verify.runner import SUITE
from tests.builds import Workplace
from tests.pools.fleet import USER, Fleet, fleet

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def targets() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.fspath(SUITE))
        yield importlib.import_module("targets")


@pytest.fixture(scope="module")
def machine(minimal: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet(minimal, tmp_path_factory.mktemp("machine"), 1) as made:
        yield made


@pytest.fixture
def ssh(machine: Fleet, targets: ModuleType, tmp_path: Path) -> BaseBackend:
    """The suite's own connection."""
    host = machine.hosts[0]
    known = tmp_path / "known_hosts"
    known.write_text(f"{host.address} {(machine.folder / 'host-0.pub').read_text()}")
    url = SshAddress(USER, host.address, host.port, machine.key, known).url
    return targets.open_target(targets.parse_target(url)).backend


@pytest.fixture
def asked(machine: Fleet, targets: ModuleType) -> Iterator[BaseBackend]:
    """A pool's, which the driver has."""
    with Reach(machine.access()) as reach, reach.session(machine.hosts[0], root=True, seconds=300) as session:
        ours, theirs = socket.socketpair()
        with Connection(ours.detach()) as questions, ThreadPoolExecutor(1) as threads:
            served = threads.submit(serve, questions, session)
            backend = targets.open_target(targets.Target("asked", asked=theirs)).backend
            yield backend
            backend.close()
            served.result()


@pytest.fixture(params=["ssh", "asked"])
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
    with pytest.raises(OSError, match="no end after 1 s: echo begun"):
        backend.run("echo begun; sleep 20")
    monkeypatch.undo()
    assert backend.run("id -u").stdout == "0\n"


@pytest.fixture
def alike(targets: ModuleType) -> Iterator[ModuleType]:
    """What knows what machines have in common, and nothing yet; the suite is found because of its targets."""
    assert targets
    module = importlib.import_module("alike")
    yield module
    module._answers.clear()


def test_what_machines_print_alike_is_sent_once(asked: BaseBackend, alike: ModuleType) -> None:
    """What stands in a file is what one machine prints and another one doesn't; what is parsed was sent."""
    sent = list[bytes]()

    def parse(printed: bytes) -> bytes:
        sent.append(printed)
        return printed

    def ask() -> bytes:
        found: bytes = alike.alike(Host(asked), "cat /tmp/alike", parse)
        return found

    odd = b"\0\xff\n no newline"
    for content, wanted in ((odd, [odd]), (odd, [odd]), (b"", [odd, b""]), (odd, [odd, b""])):
        asked.run("printf %s | base64 -d >/tmp/alike", base64.b64encode(content).decode())
        assert ask() == content
        assert sent == wanted
    # Only so many are kept.
    for number in range(4):
        asked.run(f"echo {number} >/tmp/alike")
        assert ask() == b"%d\n" % number
    assert len(sent) == 6
    asked.run("printf %s | base64 -d >/tmp/alike", base64.b64encode(odd).decode())
    assert ask() == odd
    assert len(sent) == 7


def test_a_command_that_fails_is_no_answer_though_it_prints_what_it_printed_elsewhere(
    asked: BaseBackend, alike: ModuleType
) -> None:
    command = "echo same; test ! -e /tmp/broken"
    for _ in range(2):
        assert alike.alike(Host(asked), command, bytes) == b"same\n"
    asked.run("touch /tmp/broken")
    with pytest.raises(AssertionError, match="echo ended with 1"):
        alike.alike(Host(asked), command, bytes)


def test_what_comes_of_the_same_files_is_worked_out_once(asked: BaseBackend, alike: ModuleType) -> None:
    reads, command = "cat /tmp/read /tmp/not-there 2>/dev/null", "echo ran >>/tmp/ran; cat /tmp/read"

    def ask() -> tuple[bytes, int]:
        """As on another machine; return what it is told, and how often it ran."""
        asked.run("rm -f /tmp/ran")
        return alike.alike(Host(asked), command, bytes, reads), asked.run("cat /tmp/ran").stdout.count("ran")

    asked.run("echo one >/tmp/read")
    assert [ask(), ask()] == [(b"one\n", 1), (b"one\n", 0)]
    asked.run("echo two >/tmp/read")
    assert [ask(), ask()] == [(b"two\n", 1), (b"two\n", 0)]
