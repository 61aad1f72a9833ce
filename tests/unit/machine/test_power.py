"""A machine in simulated time, without QEMU: how long is waited for what, and what ends a wait."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_builder.errors import BootError, HostError
from image_builder.machine import monitor, qemu, shell, ssh, vm
from image_builder.machine.vm import Vm
from image_builder.system import process


class Machine:
    """A machine whose console grows as told; a login fails until ``up_at``, QEMU ends at ``over_at``."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.up_at, self.over_at = 1000.0, 1e9, 1e9
        self.refusal = "no banner"
        self.events: dict[float, str] = {}
        self.logins: list[float] = []
        self.gave_up = False
        self.vm: Any = object.__new__(Vm)
        self.vm.__dict__.update(
            options=SimpleNamespace(name="worker"),
            directory=folder,
            console_log=folder / "console.log",
            accelerator="tcg",
            seconds_to_ssh=None,
            _console_named=folder / "kept.log",
            _qemu_log=folder / "qemu.log",
            _monitor=folder / "monitor",
            _power=ExitStack(),
            _process=self,
            _powered_on_at=self.now,
            _console_start=0,
            _target=self,
        )
        self.vm.console_log.touch()
        (folder / "qemu.log").write_text("qemu says")
        for module in (vm, shell, qemu):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(monitor, "gave_up", lambda _: self.gave_up)
        monkeypatch.setattr(monitor, "execute", lambda *_: None)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.events if at <= self.now]:
            with self.vm.console_log.open("a") as file:
                file.write(self.events.pop(at))

    def poll(self) -> int | None:
        return None if self.now < self.over_at else 0

    def kill(self) -> None:
        self.over_at = self.now

    def close(self) -> None: ...

    def connect(self, *, banner_seconds: float) -> None:
        self.sleep(banner_seconds)
        self.logins.append(self.now)
        if self.now < self.up_at:
            raise BootError(self.refusal)

    def save_known_hosts(self, path: Path) -> None:
        path.touch()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_login_is_waited_for_as_long_as_the_console_grows(machine: Machine) -> None:
    machine.up_at = machine.now + 500
    machine.events = {machine.now + n * 100: f"line {n}\n" for n in range(1, 6)}
    shown: list[str] = []
    assert machine.vm.wait_for_ssh(on_line=shown.append) is machine
    assert shown == ["", *(f"line {n}" for n in range(1, 5))]
    assert 500 <= machine.vm.seconds_to_ssh < 504 and (machine.vm.directory / "known_hosts").exists()


@pytest.mark.parametrize(
    ("grows", "seconds", "over"),
    [(False, 1e9, 180.0), (True, 1e9, 900.0), (True, 250.0, 250.0), (False, 100.0, 100.0)],
)
def test_a_wait_without_a_login_has_an_end(
    machine: Machine, grows: bool, seconds: float, over: float
) -> None:
    """A still console has three minutes, and any console a quarter of an hour; QEMU may end before."""
    began, machine.over_at = machine.now, machine.now + seconds
    if grows:
        machine.events = {machine.now + n * 50: f"line {n}\n" for n in range(1, 40)}
    with pytest.raises(BootError) as error:
        machine.vm.wait_for_ssh()
    assert over <= machine.now - began < over + 4
    assert ("qemu says" in str(error.value)) is not grows


def test_a_console_that_ends_and_a_kvm_that_gives_up_end_the_wait(machine: Machine) -> None:
    machine.vm.accelerator, machine.gave_up = "kvm", True
    began = machine.now
    with pytest.raises(BootError):
        machine.vm.wait_for_ssh()
    assert machine.now - began < 10
    machine.gave_up = False
    machine.events = {machine.now + 20: "Kernel panic - not syncing: x\n"}
    began = machine.now
    with pytest.raises(BootError):
        machine.vm.wait_for_ssh()
    assert machine.now - began < 30
    assert machine.vm.last_line() == "Kernel panic - not syncing: x" and machine.vm.problems()


def test_refused_logins_become_rare(machine: Machine) -> None:
    machine.refusal, machine.up_at = "Authentication failed", machine.now + 100
    machine.vm.wait_for_ssh()
    pauses = [b - a - 3 for a, b in zip(machine.logins, machine.logins[1:], strict=False)]
    assert pauses[:2] == pytest.approx([0.375, 0.5625]) and max(pauses) == pytest.approx(10)


@pytest.mark.parametrize(("over", "is_off"), [(5.0, True), (120.05, True), (1e9, False)])
def test_a_machine_that_is_shut_down_has_two_minutes(machine: Machine, over: float, is_off: bool) -> None:
    began, machine.over_at = machine.now, machine.now + over
    if is_off:
        machine.vm.shutdown()
        assert not machine.vm.running and machine.vm._process is None
        return
    with pytest.raises(BootError):
        machine.vm.shutdown()
    assert 120 < machine.now - began < 121 and machine.vm.running


@pytest.mark.parametrize(
    ("done_at", "over", "fails"), [(29.9, 1e9, False), (31.0, 1e9, True), (9.0, 5.0, True)]
)
def test_a_start_is_awaited_while_qemu_runs(
    machine: Machine, done_at: float, over: float, fails: bool
) -> None:
    began, machine.over_at = machine.now, machine.now + over
    if fails:
        with pytest.raises(BootError):
            machine.vm._await(lambda: machine.now >= began + done_at, 30, "QEMU didn't start")
        assert machine.now - began == pytest.approx(min(over, 30.0), abs=0.05)
    else:
        machine.vm._await(lambda: machine.now >= began + done_at, 30, "QEMU didn't start")


def test_a_machine_that_does_not_start_is_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Vm) -> None:
        raise BootError("QEMU didn't start")

    monkeypatch.setattr(Vm, "power_on", fail)
    with pytest.raises(BootError):
        machine.vm.__enter__()
    assert machine.over_at == machine.now and not machine.vm.running


def test_a_reset_forgets_what_the_console_showed(machine: Machine) -> None:
    machine.vm.console_log.write_text("before\n")
    machine.vm.seconds_to_ssh, machine.now = 9.0, machine.now + 50
    machine.vm.reset()
    assert (machine.vm.console(), machine.vm.seconds, machine.vm.seconds_to_ssh) == ("", 0.0, None)
    machine.vm.console_log.unlink()
    assert machine.vm.console() == "" and machine.vm.last_line() == ""


# -- the monitor -----------------------------------------------------------------------------------------------


class Stream(io.BytesIO):
    """QEMU's side: the lines that it sends."""

    def __init__(self, *lines: dict[str, Any]) -> None:
        super().__init__(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        self.asked: list[dict[str, Any]] = []

    def write(self, data: Any) -> int:
        self.asked.append(json.loads(data))
        return len(data)


def test_an_answer_comes_after_events() -> None:
    stream = Stream({"event": "RESET"}, {"return": {"status": "running"}}, {"return": {}})
    assert monitor._ask(stream, "query-status", {"a": 1}) == {"status": "running"}
    assert stream.asked == [{"execute": "query-status", "arguments": {"a": 1}}]
    for lines in ([{"error": {"desc": "no"}}], [{"event": "RESET"}], []):
        with pytest.raises(BootError):
            monitor._ask(Stream(*lines), "query-status", {})


@pytest.mark.parametrize(
    ("error", "listens"), [(None, True), (FileNotFoundError(), False), (ConnectionRefusedError(), False)]
)
def test_qemu_listens_once_a_connection_works(
    monkeypatch: pytest.MonkeyPatch, error: OSError | None, listens: bool
) -> None:
    class Socket:
        def __enter__(self) -> Socket:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, path: str) -> None:
            assert path == "/monitor"
            if error:
                raise error

    monkeypatch.setattr(socket, "socket", lambda _: Socket())
    assert monitor.listens(Path("/monitor")) is listens


@pytest.mark.parametrize(("answer", "gave_up"), [("internal-error", True), ("running", False), (None, False)])
def test_kvm_gave_up_only_where_qemu_says_so(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, gave_up: bool
) -> None:
    def execute(*_: object, **__: object) -> dict[str, str]:
        if answer is None:
            raise BootError("no answer")
        return {"status": answer}

    monkeypatch.setattr(monitor, "execute", execute)
    assert monitor.gave_up(Path("/monitor")) is gave_up


def test_a_socket_has_107_bytes() -> None:
    assert len(str(monitor.socket_path(Path("/" + "é" * 53)))) == 54
    with pytest.raises(BootError):
        monitor.socket_path(Path("/" + "é" * 53 + "x"))


# -- programs --------------------------------------------------------------------------------------------------


def test_firmware_is_a_pair_of_files(tmp_path: Path) -> None:
    for secure, names in qemu._FIRMWARE_FILES.items():
        for name in names:
            with pytest.raises(HostError):
                qemu.find_firmware(secure, tmp_path)
            (tmp_path / name).touch()
        assert qemu.find_firmware(secure, tmp_path) == tuple(tmp_path / name for name in names)


@pytest.mark.parametrize(("size", "last"), [(0, "/new"), (1 << 30, str(1 << 30))])
def test_an_overlay_may_be_larger(monkeypatch: pytest.MonkeyPatch, size: int, last: str) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(process, "run", ran.append)
    qemu.overlay(Path("/old"), "raw", Path("/new"), size)
    assert ran[0][-1] == last and ran[0][ran[0].index("-b") + 1] == "/old"


@pytest.mark.parametrize(
    ("written_at", "over_at", "gave_up", "works", "seconds"),
    [
        (3.0, 1e9, False, True, 3.0),
        (1e9, 2.0, False, False, 2.0),
        (1e9, 1e9, True, False, 0.0),
        (1e9, 1e9, False, False, 30.0),
    ],
)
def test_a_machine_works_once_its_firmware_writes(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    written_at: float,
    over_at: float,
    gave_up: bool,
    works: bool,
    seconds: float,
) -> None:
    began, machine.over_at, machine.gave_up = machine.now, machine.now + over_at, gave_up
    consoles: list[Path] = []

    class Child(ExitStack):
        def poll(self) -> int | None:
            if machine.now >= began + written_at:
                consoles[0].write_text("firmware")
            return machine.poll()

    def line(made: qemu.Machine) -> list[str]:
        consoles.append(made.console)
        return []

    (tmp_path / "vars").touch()
    monkeypatch.setattr(qemu, "find_firmware", lambda: (tmp_path / "code", tmp_path / "vars"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/qemu")
    monkeypatch.setattr(qemu, "command_line", line)
    monkeypatch.setattr(process, "background", lambda *_, **__: Child())
    assert qemu.works("kvm", 30.0) is works
    assert machine.now - began == pytest.approx(seconds, abs=1.0)


# -- connections -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("byte", "error"), [(b"S", None), (b"", ConnectionRefusedError), (None, TimeoutError)]
)
def test_a_server_is_there_once_it_says_something(
    monkeypatch: pytest.MonkeyPatch, byte: bytes | None, error: type[OSError] | None
) -> None:
    class Socket:
        closed = False
        timeout = 0.0

        def settimeout(self, seconds: float) -> None:
            self.timeout = seconds

        def recv(self, count: int, flags: int) -> bytes:
            assert (count, flags) == (1, socket.MSG_PEEK)
            if byte is None:
                raise TimeoutError
            return byte

        def close(self) -> None:
            self.closed = True

    made = Socket()
    monkeypatch.setattr(socket, "create_connection", lambda *_: made)
    if error:
        with pytest.raises(error):
            ssh.dial("host", 22, 1.0, 3.0)
    else:
        assert ssh.dial("host", 22, 1.0, 3.0) is made  # type: ignore[comparison-overlap]
    assert (made.closed, made.timeout) == (error is not None, 3.0)


@pytest.mark.parametrize("limit", [None, 10])
def test_a_stream_keeps_its_beginning_and_finds_its_end(limit: int | None) -> None:
    end = re.compile(rb"\nword (\d+)\n\Z")
    stream = shell._Stream(limit)
    for part in _parts(b"0123456789" * 30 + b"\nword 17\n"):
        assert stream.take_end(end) is None
        stream.add(part)
    assert stream.take_end(end) == 17
    assert stream.head == (b"0123456789" * 30)[:limit]
    assert stream.take_end(end) is None


def _parts(data: bytes) -> Iterator[bytes]:
    for at in range(0, len(data), 7):
        yield data[at : at + 7]


@pytest.mark.parametrize(
    ("text", "line"), [(b"", ""), (b"one\ntwo\n\n", "two"), (b" \n", ""), (b"\xff", "\ufffd")]
)
def test_the_last_line_that_says_something(text: bytes, line: str) -> None:
    assert shell._last_line(text) == line


def test_no_output_is_waited_for_after_the_deadline(machine: Machine) -> None:
    timeouts: list[float] = []
    made: Any = object.__new__(shell.Shell)
    made._channel = SimpleNamespace(settimeout=timeouts.append)
    stream = shell._Stream(None)

    def receive(data: bytes) -> Callable[[int], bytes]:
        return lambda _: data

    made._read(stream, receive(b"x"), machine.now + 9)
    made._read(stream, receive(b"y"), machine.now + 0.25)
    assert (stream.head, timeouts) == (b"xy", [0.5, 0.25])
    for late in (0.0, -1.0):
        with pytest.raises(TimeoutError):
            made._read(stream, receive(b"z"), machine.now + late)
    with pytest.raises(EOFError):
        made._read(stream, receive(b""), machine.now + 1)
