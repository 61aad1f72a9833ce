"""Waits that must end: a program that can't be killed or leaves others behind, a peer that trickles, a held lock."""

from __future__ import annotations

import http.client
import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from image_builder.node import child, files
from image_builder.node.errors import ProgramError
from image_builder.node.health import apart, storage
from image_builder.node.health.model import Look, Places
from image_builder.node.health.settings import Settings
from image_builder.node.net import fetch, kube
from image_builder.node.net.kubeconfig import Access, Pem

pytestmark = pytest.mark.root


@contextmanager
def trickling(head: bytes) -> Iterator[int]:
    """Serve a port that sends ``head`` and then a byte at a time until the block ends; yield its number.

    So it's never the peer that ends what a client waits for.
    """
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):
            connection.sendall(head)
            while not over.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            thread.join()


HEADERS = b"HTTP/1.1 200 OK\r\nX: "
HEADS = [
    pytest.param(HEADERS, id="in a header"),
    pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", id="in the body"),
    pytest.param(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", id="in a body without an end"),
]


@pytest.mark.parametrize("head", HEADS)
def test_a_peer_that_trickles_does_not_keep_a_question(head: bytes) -> None:
    with trickling(head) as port, pytest.raises(TimeoutError, match="no whole answer within 0.5 s"):
        fetch.ask(f"http://127.0.0.1:{port}/", headers={}, seconds=0.5)


@pytest.mark.parametrize("head", HEADS)
def test_an_api_server_that_trickles_does_not_keep_a_request(
    head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over plain HTTP: this is about the request's own deadline, which TLS has no part in."""
    with trickling(head) as port:
        plain = http.client.HTTPConnection("127.0.0.1", port)
        monkeypatch.setattr(kube.Client, "_connect", lambda _self: plain)
        access = Access(f"https://127.0.0.1:{port}", Pem(text=""))
        with kube.Client(access, timeout=0.5) as client, pytest.raises(kube.KubeError):
            client.request("GET", "/version")


def test_a_deadline_that_passes_before_there_is_a_connection_ends_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(_client: kube.Client) -> http.client.HTTPConnection:
        time.sleep(0.7)
        return plain

    with trickling(HEADERS) as port:
        plain = http.client.HTTPConnection("127.0.0.1", port)
        monkeypatch.setattr(kube.Client, "_connect", connect)
        access = Access(f"https://127.0.0.1:{port}", Pem(text=""))
        with (
            kube.Client(access, timeout=0.5) as client,
            pytest.raises(kube.KubeError, match="no answer in time"),
        ):
            client.request("GET", "/version")


def test_a_deadline_ends_a_request_on_an_open_connection_without_another_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with trickling(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" + HEADERS) as port:
        connections = []

        def connect(_client: kube.Client) -> http.client.HTTPConnection:
            connections.append(http.client.HTTPConnection("127.0.0.1", port))
            return connections[-1]

        monkeypatch.setattr(kube.Client, "_connect", connect)
        with kube.Client(Access(f"https://127.0.0.1:{port}", Pem(text="")), timeout=30) as client:
            assert client.request("GET", "/version") == {}
            client._timeout = 0.5
            with pytest.raises(kube.KubeError):
                client.request("GET", "/version")
        assert len(connections) == 1


def test_what_a_program_started_does_not_keep_its_caller(tmp_path: Path) -> None:
    """It holds the output open, and still runs when the caller has its answer."""
    noted, seconds = tmp_path / "pid", 0.25
    noted.touch()
    while not noted.read_text():  # on a busy machine, it is killed before it gets that far
        seconds *= 2
        with pytest.raises(ProgramError, match=f"did not end within {seconds:g} s$") as caught:
            child.run(["sh", "-c", f"sleep 3600 & echo $! > {noted}; wait"], timeout=seconds)
        assert caught.value.status == 124
    os.kill(int(noted.read_text()), signal.SIGKILL)


def test_a_program_that_can_not_be_killed_is_left_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test can have a process in the kernel's D state: one that is never killed stands for it."""
    monkeypatch.setattr(child, "END_SECONDS", 0.3)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda _self: None)
    with pytest.raises(ProgramError, match=r"process \d+ hangs in the kernel"):
        child.run(["sleep", "3600"], timeout=0.3)
    process = child._abandoned.pop()
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_what_leads_a_group_takes_it_along(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    script = ["sh", "-c", f"sleep 3600 & echo $! > {noted}.new; mv {noted}.new {noted}; wait"]
    with child.Child(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE, own_group=True) as program:
        while not noted.exists():
            assert program.wait(0.05) is None and not program.has_ended()
        assert program.end() and program.status == -signal.SIGKILL
    while _is_alive(int(noted.read_text())):
        time.sleep(0.01)


def test_what_has_ended_is_known_before_it_is_reaped() -> None:
    with child.Child(["true"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as program:
        while not program.has_ended():
            time.sleep(0.01)
        assert program.status is None and program.wait(10) == 0 == program.status


def test_a_block_that_raises_leaves_no_program(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        child.Child(["sleep", "3600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program,
    ):
        raise ZeroDivisionError
    assert program.status == -signal.SIGKILL and program.stdout is not None and program.stdout.closed


def test_a_watched_program_reports_its_progress_and_its_failure(tmp_path: Path) -> None:
    steps, reports, seen = itertools.count(), list[str](), tmp_path / "seen"

    def progress(_pid: int) -> tuple[object, str]:
        seen.touch()
        return next(steps), "under way"

    script = ["sh", "-c", f"while [ ! -e {seen} ]; do sleep 0.02; done; echo broken >&2; exit 3"]
    with pytest.raises(ProgramError, match="broken") as caught:
        child.watch(script, progress, reports.append, 0.1, 0.2)
    assert caught.value.status == 3 and reports[0].startswith("under way, ")
    with pytest.raises(ProgramError, match=r"got no further for 0\.2 s, stuck") as late:
        child.watch(["sleep", "3600"], lambda _pid: (0, "stuck"), reports.append, 0.05, 0.2)
    assert late.value.status == child.LATE


def test_input_and_output_are_the_programs_own() -> None:
    done = child.run(["sh", "-c", "cat; echo no >&2; exit 3"], input="yes", ok=(3,))
    assert (done.status, done.stdout, done.stderr) == (3, "yes", "no\n")
    with pytest.raises(ProgramError, match="ended with 3"):
        child.run(["sh", "-c", "exit 3"])
    with pytest.raises(ProgramError) as caught:
        child.run(["/nonexistent"])
    assert caught.value.status == 127


def test_a_lock_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(["flock", "--no-fork", path, "sleep", "3600"])
    try:
        while _is_free(path):
            time.sleep(0.02)
        with pytest.raises(TimeoutError, match=r"for more than 0\.3 s"), files.lock(path, 0.3):
            pass
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.wait()
    with files.lock(path, 5):
        assert not _is_free(path)
    assert _is_free(path)


def _is_free(path: Path) -> bool:
    return subprocess.run(["flock", "--nonblock", path, "true"], check=False).returncode == 0


def test_a_child_that_hangs_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A forked process has its parent's locks. One that can't be killed would block all later checks."""
    path = tmp_path / "lock"
    with files.lock(path):
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert _is_free(path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_drive_that_does_not_answer_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = tmp_path / "class/nvme/nvme0"
    controller.mkdir(parents=True)
    (controller / "state").write_text("live\n")
    look = Look(Settings(), Places(sys=tmp_path, dev=tmp_path), 0.0)
    assert storage.check_drives(look).findings == ()

    def hang(_device: Path) -> None:
        signal.pause()

    monkeypatch.setattr(storage, "_SECONDS", 0.3)
    monkeypatch.setattr(storage, "read_page", hang)
    outcome = storage.check_drives(look)
    assert [(one.code, one.action) for one in outcome.findings] == [("drive.hung", "reboot")]
    asked = tmp_path / "asked"
    monkeypatch.setattr(storage, "read_page", lambda _device: asked.touch())
    with subprocess.Popen(["sleep", "3600"]) as stuck:
        memory = {"hung": [stuck.pid, apart.started(stuck.pid)]}
        again = storage.check_drives(Look(Settings(), look.places, 0.0, memory))
        assert again.memory == memory and not asked.exists(), "asked beside one that hangs"
        stuck.kill()


@pytest.mark.parametrize(("status", "is_up"), [(b"200 OK", True), (b"503 no", False)])
def test_only_a_kubelet_that_says_so_is_up(status: bytes, is_up: bool) -> None:
    with trickling(b"HTTP/1.1 " + status + b"\r\nContent-Length: 3\r\n\r\n") as port:
        assert fetch.is_up(f"http://127.0.0.1:{port}/healthz", 60) is is_up
