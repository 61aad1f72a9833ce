"""The SSH target against a server that speaks the real protocol (paramiko's own) and runs real commands."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from image_builder.errors import BootError, CommandError
from image_builder.machine.ssh import SshAddress, SshTarget
from image_builder.machine.vm import write_key
from tests.support.ssh_server import Server

pytestmark = pytest.mark.root


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "home").mkdir()
    made = Server(write_key(tmp_path / "key", "test"), tmp_path / "home")
    yield made
    made.close()


@pytest.fixture
def target(server: Server, tmp_path: Path) -> Iterator[SshTarget]:
    with SshTarget(SshAddress("root", "127.0.0.1", server.port, tmp_path / "key")) as made:
        yield made


def test_command_gives_its_output_status_and_takes_input(target: SshTarget) -> None:
    done = target.run(["sh", "-c", "cat; echo 'a b' >&2; exit 3"], input="x\ny", ok=(3,))
    assert (done.returncode, done.stdout, done.stderr) == (3, "x\ny", "a b\n")
    with pytest.raises(CommandError, match="exit status 3") as caught:
        target.run(["sh", "-c", "echo why; exit 3"])
    assert caught.value.tail == "why"


def test_a_file_is_put_into_place_and_nothing_else_stays(
    target: SshTarget, server: Server, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    target.put(b"content", f"{folder}/file", mode=0o600)
    assert (folder / "file").read_bytes() == b"content" and (folder / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CommandError, match="exit status"):  # can't be installed
        target.put(b"content", f"{folder}/file/below")
    with pytest.raises(CommandError, match="exit status"):  # can't be renamed
        target.put(b"content", f"{folder}/.")
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert [*server.home.iterdir()] == []


def test_large_output_comes_whole(target: SshTarget) -> None:
    assert len(target.run(["head", "-c", "3000000", "/dev/zero"]).stdout) == 3_000_000


def test_command_that_hangs_is_given_up(target: SshTarget) -> None:
    with pytest.raises(CommandError, match="timed out after 0.5 s"):
        target.run(["sleep", "3600"], timeout=0.5)


def test_lost_connection_is_made_again(target: SshTarget, server: Server) -> None:
    target.connect()
    server.drop()
    with pytest.raises(CommandError, match=r"lost 127\.0\.0\.1"):
        target.run(["true"])
    assert target.run(["echo", "back"]).stdout == "back\n"


def test_changed_host_key_is_refused_even_before_it_was_saved(target: SshTarget, server: Server) -> None:
    target.connect()
    server.key = paramiko.ECDSAKey.generate()
    with pytest.raises(BootError):
        target.connect()


def test_host_key_of_another_type_is_refused(target: SshTarget, server: Server) -> None:
    target.connect()
    server.key = paramiko.RSAKey.generate(2048)
    with pytest.raises(BootError):
        target.connect()


def test_saved_host_key_is_what_others_must_meet(target: SshTarget, server: Server, tmp_path: Path) -> None:
    target.save_known_hosts(tmp_path / "known_hosts")
    (line,) = (tmp_path / "known_hosts").read_text().splitlines()
    assert line.split()[0] == f"[127.0.0.1]:{server.port}"
    assert f"known_hosts={tmp_path}/known_hosts" in target.url
    with SshTarget(target.address) as other:
        assert other.run(["true"]).returncode == 0
        server.key = paramiko.ECDSAKey.generate()
        with pytest.raises(BootError):
            other.connect()
    target.close()
    (tmp_path / "known_hosts").write_text("")
    with pytest.raises(BootError, match="known_hosts"):
        target.connect()


def test_strange_key_is_not_let_in(server: Server, tmp_path: Path) -> None:
    write_key(tmp_path / "other", "stranger")
    with (
        SshTarget(SshAddress("root", "127.0.0.1", server.port, tmp_path / "other")) as stranger,
        pytest.raises(BootError, match="uthentication"),
    ):
        stranger.connect()


def test_port_without_a_server_is_told_apart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_key(tmp_path / "key", "test")
        address = SshAddress("root", "127.0.0.1", silent.getsockname()[1], tmp_path / "key")
        with SshTarget(address) as target, pytest.raises(BootError, match="timed out"):
            target.connect(banner_seconds=0.3)
    with SshTarget(address) as target, pytest.raises(BootError, match="refused"):
        target.connect()
