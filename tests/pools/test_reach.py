"""Connecting to real hosts, each of which may fail in its own way: every one ends in one class, the right one."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path

import pytest

from image_builder.pool.plan.model import Host
from image_builder.pool.reach.hostkeys import CertificateAuthority, FirstUse, HostKeys, openssh_options
from image_builder.pool.reach.reach import Answer, Reach
from image_builder.pool.reach.session import OUTPUT_LIMIT
from image_builder.pool.steps.openssh import arguments
from tests.pools.conftest import FAULTS, FILLED, SLOW, lent, with_fault
from tests.support.control_plane.gates import wait_until
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import CLASSES, GATEWAY, SLOW_SECONDS, USER, Fault, Fleet, fleet, new_key, sign

pytestmark = [pytest.mark.root, pytest.mark.hosts]

_LONG = 300.0  # for commands that end on their own
# sshd's log entry once a client has said which user it wants to be.
_ATTEMPT = "userauth-request"


# Hosts whose keys are changed here, and one whose key is first seen here.
PINNED, SIGNED, LEARNT = 3, 4, 5
NAMES: dict[int, str] = {**FAULTS, FILLED: "disk full", SLOW: "slow"}


@pytest.fixture(scope="module")
def pool(hosts: Fleet) -> Iterator[Fleet]:
    with lent(hosts):
        yield hosts
    for number in (0, PINNED, SIGNED, LEARNT):
        hosts.restore_key(number)


@pytest.fixture(scope="module")
def answers(pool: Fleet) -> dict[str, Answer]:
    """Return each host's answer to the same command as root, sent to all at the same time."""
    script = "id -u && echo 'a \"word\"' | cat > /var/tmp/asked && cat /var/tmp/asked"
    access = pool.access(connect_seconds=6, banner_seconds=6, sudo_seconds=6)
    with Reach(access) as reach:
        futures = [reach.submit(host, ["sh", "-c", script], root=True, seconds=_LONG) for host in pool.hosts]
    return {NAMES.get(n, f"sound {n}"): future.result() for n, future in enumerate(futures)}


def ask(pool: Fleet, host: int, script: str, host_keys: HostKeys | None = None) -> Answer:
    """Run a script on one host."""
    with Reach(pool.access(host_keys)) as reach:
        return reach.submit(pool.hosts[host], ["sh", "-c", script], seconds=_LONG).result()


def wait_for(pool: Fleet, host: int, file: str) -> None:
    """Wait until a command has written a file on its host."""
    deadline = time.monotonic() + _LONG
    while not pool.run(host, "sh", "-c", 'test ! -e "$0" || echo there', file):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def openssh(pool: Fleet, host: int, host_keys: HostKeys) -> bool:
    """Return whether OpenSSH logs in to a host with the same file of host keys."""
    argv = ["ssh", "-F", "none", "-o", "BatchMode=yes", "-o", "IdentitiesOnly=yes", "-i", os.fspath(pool.key)]
    argv += [
        *arguments(openssh_options(host_keys, pool.hosts[host])),
        f"{USER}@{pool.hosts[host].address}",
        "true",
    ]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert done.returncode in (0, 255), done.stderr
    assert done.returncode == 0 or "Host key verification failed" in done.stderr, done.stderr
    return done.returncode == 0


def test_every_host_ends_in_its_class(answers: dict[str, Answer]) -> None:
    signatures = {name: answer.outcome.signature for name, answer in answers.items()}
    classes = {str(fault): kind for fault, kind in CLASSES.items()}
    assert signatures == {name: classes.get(name, "ok") for name in answers}


def test_sound_hosts_ran_the_command_as_root(answers: dict[str, Answer]) -> None:
    assert answers["sound 0"].stdout == b'0\na "word"\n'
    assert [a.status for name, a in answers.items() if name.startswith("sound")] == [0] * 8


def test_command_that_fails_on_a_full_disk_ran(answers: dict[str, Answer]) -> None:
    full = answers["disk full"]
    assert full.status and b"No space left on device" in full.stderr


def test_slow_host_gets_its_time(answers: dict[str, Answer]) -> None:
    assert answers["slow"].stdout == b'0\na "word"\n' and answers["slow"].seconds >= SLOW_SECONDS


def test_end_says_why(answers: dict[str, Answer]) -> None:
    assert "password is required" in answers["sudo asks"].outcome.detail
    assert "SHA256:" in answers["other key"].outcome.detail
    assert "refused" in answers["refused"].outcome.detail
    assert all(a.outcome.detail for a in answers.values() if not a.outcome.ok)


@pytest.mark.parametrize("fault", ["sudo asks", "sudo refuses", "sudo hangs"])
def test_where_root_is_not_asked_for_sudo_does_not_matter(pool: Fleet, fault: Fault) -> None:
    answer = ask(pool, with_fault(fault), "id -un; exit 7")
    assert (answer.outcome.kind, answer.status, answer.stdout) == ("ok", 7, f"{USER}\n".encode())


def test_status_of_one_is_not_taken_for_sudo(pool: Fleet) -> None:
    with Reach(pool.access()) as reach:
        answer = reach.submit(pool.hosts[0], ["sh", "-c", "exit 1"], root=True, seconds=_LONG).result()
    assert (answer.outcome.kind, answer.status) == ("ok", 1)


@pytest.mark.parametrize("kind", ["pinned", "authority"])
def test_changed_key_stops_a_host_before_it_knows_who_we_are(pool: Fleet, kind: str) -> None:
    host = {"pinned": PINNED, "authority": SIGNED}[kind]
    keys: HostKeys = pool.pinned if kind == "pinned" else pool.authority
    assert ask(pool, host, "true", keys).outcome.ok
    assert _ATTEMPT in pool.log(host)
    pool.change_key(host)
    before = pool.log(host)
    assert ask(pool, host, "true", keys).outcome.kind == "host key"
    logged = pool.log(host).removeprefix(before)
    assert "Connection from" in logged and _ATTEMPT not in logged


def test_first_key_is_learnt_once_and_kept(pool: Fleet, tmp_path: Path) -> None:
    keys = FirstUse(tmp_path / "learnt" / "known_hosts")
    with Reach(pool.access(keys)) as reach:
        futures = [reach.submit(pool.hosts[n], ["true"], seconds=_LONG) for n in (0, 2, 0, LEARNT)]
        assert [a.result().outcome.kind for a in futures] == ["ok"] * 4
    learnt = keys.path.read_text()
    pinned = pool.pinned.path.read_text().splitlines()
    assert sorted(learnt.splitlines()) == [pinned[n].rsplit(" ", 1)[0] for n in (0, 2, LEARNT)]
    assert openssh(pool, LEARNT, keys)
    pool.change_key(LEARNT)
    before = pool.log(LEARNT)
    assert ask(pool, LEARNT, "true", keys).outcome.kind == "host key"
    assert _ATTEMPT not in pool.log(LEARNT).removeprefix(before)
    assert keys.path.read_text() == learnt
    assert not openssh(pool, LEARNT, keys)


# A host's certificate as options of ssh-keygen, and whether it must be trusted. `NAME` is the host's, `OTHER` the
# next host's.
_CERTIFICATES = {
    "its own": (["-n", "NAME"], True),
    "for it and others": (["-n", "OTHER,NAME"], True),
    "for another host": (["-n", "OTHER"], False),
    "not valid any more": (["-n", "NAME", "-V", "-2d:-1d"], False),
    "not valid yet": (["-n", "NAME", "-V", "+1d:+2d"], False),
}


@pytest.mark.parametrize("case", _CERTIFICATES)
def test_certificate_is_judged_as_openssh_judges_it(pool: Fleet, tmp_path: Path, case: str) -> None:
    options, good = _CERTIFICATES[case]
    assert judged(pool, tmp_path, pool.folder / "authority", options) == (good, good)


def test_certificate_of_another_authority_is_refused(pool: Fleet, tmp_path: Path) -> None:
    new_key(tmp_path / "other")
    assert judged(pool, tmp_path, tmp_path / "other", ["-n", "NAME"]) == (False, False)


def test_certificate_of_an_authority_by_rsa(pool: Fleet, tmp_path: Path) -> None:
    rsa = tmp_path / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", rsa], check=True)
    keys = CertificateAuthority(tmp_path / "authorities")
    keys.path.write_text(f"@cert-authority * {rsa.with_suffix('.pub').read_text()}")
    assert judged(pool, tmp_path, rsa, ["-n", "NAME"], keys) == (True, True)
    # SHA-1, which a library would still verify.
    assert judged(pool, tmp_path, rsa, ["-t", "ssh-rsa", "-n", "NAME"], keys) == (False, False)


def test_revoked_key_is_refused_for_all_its_certificate(pool: Fleet, tmp_path: Path) -> None:
    keys = CertificateAuthority(tmp_path / "authorities")
    public = (pool.folder / "host-0.pub").read_text()
    keys.path.write_text(pool.authority.path.read_text() + f"@revoked * {public}")
    assert judged(pool, tmp_path, pool.folder / "authority", ["-n", "NAME"], keys) == (False, False)


def test_certificate_for_no_host_in_particular_is_refused(pool: Fleet, tmp_path: Path) -> None:
    ours, _ = judged(pool, tmp_path, pool.folder / "authority", [])
    assert not ours


def judged(
    pool: Fleet, folder: Path, authority: Path, options: list[str], keys: CertificateAuthority | None = None
) -> tuple[bool, bool]:
    """Give host 0 a certificate; return whether we and OpenSSH log in to it."""
    keys = keys or pool.authority
    names = {"NAME": pool.hosts[0].vm_id, "OTHER": pool.hosts[1].vm_id}
    arguments = [w.replace("NAME", names["NAME"]).replace("OTHER", names["OTHER"]) for w in options]
    public = folder / "host.pub"
    public.write_text((pool.folder / "host-0.pub").read_text())
    pool.show(0, sign(authority, public, *arguments).read_text())
    answer = ask(pool, 0, "true", keys)
    assert answer.outcome.kind in ("ok", "host key"), answer
    return answer.outcome.ok, openssh(pool, 0, keys)


def test_partition_in_mid_task_ends_as_dropped(pool: Fleet) -> None:
    with Reach(pool.access(keepalive_seconds=1)) as reach:
        future = reach.submit(pool.hosts[0], ["sh", "-c", "touch /tmp/begun; sleep 600"], seconds=_LONG)
        wait_for(pool, 0, "/tmp/begun")
        pool.cut(0)
        try:
            assert future.result().outcome.kind == "dropped", future.result()
        finally:
            pool.mend(0)
    assert ask(pool, 0, "true").outcome.ok


def test_command_beyond_its_time_ends_as_timeout(pool: Fleet) -> None:
    with Reach(pool.access()) as reach:
        answer = reach.submit(pool.hosts[0], ["sleep", "600"], seconds=1).result()
    assert answer.outcome.kind == "timeout" and answer.status is None


def test_end_by_a_signal_is_told_from_a_broken_connection(pool: Fleet) -> None:
    killed = ask(pool, 0, "echo so far; kill -KILL $$")
    assert (killed.outcome.kind, killed.status, killed.stdout) == ("ok", 128 + 9, b"so far\n")
    # The shell of all commands, which the command's parent is a copy of; and the sshd process of this connection.
    shell = '$(sed -n "s/^PPid:[^0-9]*//p" /proc/$PPID/status)'
    for script in (f"kill -KILL {shell}", f"kill -KILL $(pgrep -u {USER} -f '^sshd-session: '); sleep 600"):
        gone = ask(pool, 0, script)
        assert (gone.outcome.kind, gone.status) == ("dropped", None), gone


def test_of_much_output_a_mebibyte_is_kept_and_the_status_comes(pool: Fleet) -> None:
    much = "head -c 5000000 /dev/zero | tee /dev/stderr; exit 4"
    answer = ask(pool, 0, much)
    assert (len(answer.stdout), len(answer.stderr), answer.status) == (OUTPUT_LIMIT, OUTPUT_LIMIT, 4)


def test_kept_connection_serves_the_hosts_next_command(pool: Fleet) -> None:
    """It serves neither another host nor a different user; if it broke in the meantime, a new one is made."""
    logins = "Accepted publickey for"
    before = [pool.log(n).count(logins) for n in (0, 2)]

    def as_whom(number: int, *, root: bool, keep: bool) -> str:
        answer = reach.submit(pool.hosts[number], ["id", "-un"], root=root, seconds=_LONG, keep=keep).result()
        return answer.stdout.decode().strip() or answer.outcome.kind

    with Reach(pool.access(), at_once=1) as reach:
        assert [as_whom(0, root=True, keep=True) for _ in range(3)] == ["root"] * 3
        assert as_whom(2, root=True, keep=True) == "root"  # there is no room for it
        assert as_whom(2, root=True, keep=False) == "root"
        with reach.session(pool.hosts[0], root=True, seconds=_LONG) as session:
            assert session.run("id -un", _LONG, OUTPUT_LIMIT) == (0, b"root\n", b"")
        assert [pool.log(n).count(logins) for n in (0, 2)] == [before[0] + 1, before[1] + 2]
        assert [as_whom(0, root=root, keep=True) for root in (True, False, False)] == ["root", USER, USER]
        assert pool.log(0).count(logins) == before[0] + 3
        connected = set(connections(pool, 0))
        for pid in connected:
            pool.run(0, "kill", "-KILL", pid, ok=False)  # one may have ended together with the other
        while set(connections(pool, 0)) & connected:
            time.sleep(0.05)
        assert as_whom(0, root=False, keep=True) == USER
        reach.release(pool.hosts[0])
        wait_until_none(pool, 0)


def connections(pool: Fleet, host: int) -> list[str]:
    """Return the PIDs, on the host, of its sshd processes that serve a connection."""
    return pool.run(host, "pgrep", "-f", "^sshd-session: ", ok=False).split()


def wait_until_none(pool: Fleet, host: int) -> None:
    deadline = time.monotonic() + _LONG
    while connections(pool, host):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_leaving_by_an_error_ends_what_runs(pool: Fleet) -> None:
    def interrupted() -> None:
        with Reach(pool.access(), at_once=1) as reach:
            futures.append(
                reach.submit(pool.hosts[0], ["sh", "-c", "touch /tmp/runs; sleep 600"], seconds=_LONG)
            )
            futures.append(reach.submit(pool.hosts[0], ["true"], seconds=_LONG))
            wait_for(pool, 0, "/tmp/runs")
            raise KeyboardInterrupt

    futures: list[Future[Answer]] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    runs, waits = futures
    assert runs.result().outcome.kind == "dropped"
    with pytest.raises(CancelledError):
        waits.result()


def _hang_up(connection: socket.socket) -> None:
    connection.close()


def _speak_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def _speak_nonsense(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + base64.b64decode("AAAADAoU") + bytes(range(100)))


@pytest.mark.parametrize(
    ("behave", "kind"), [(_hang_up, "refused"), (_speak_http, "refused"), (_speak_nonsense, "dropped")]
)
def test_what_is_no_ssh_server(pool: Fleet, behave: Callable[[socket.socket], None], kind: str) -> None:
    """Run on the hosts' side of the bridge, but in this process: a server that behaves like no real one."""
    with socket.create_server((GATEWAY, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                behave(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        host = pool.hosts[0].model_copy(update={"address": GATEWAY, "port": server.getsockname()[1]})
        assert isinstance(host, Host)
        with Reach(pool.access()) as reach:
            assert reach.submit(host, ["true"], seconds=_LONG).result().outcome.kind == kind
        thread.join()


def test_of_hosts_that_are_done_with_nothing_is_left(minimal: Workplace, tmp_path: Path) -> None:
    def theirs() -> set[str]:
        """Return the processes that have a host's root among their mounts."""
        processes = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                processes |= {process.name} if "/run/fleet/" in (process / "mountinfo").read_text() else set()
        return processes

    before, network = theirs(), os.readlink("/proc/thread-self/ns/net")
    started: set[str] = set()

    def interrupted() -> None:
        with fleet(minimal, tmp_path, 2):
            started.update(theirs() - before)
            assert started
            assert os.readlink("/proc/thread-self/ns/net") != network
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    # Sessions on the pool's own hosts come and go; and what was killed needs a moment to end.
    assert wait_until(lambda: not started & theirs())
    assert os.readlink("/proc/thread-self/ns/net") == network
