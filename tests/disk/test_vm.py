"""The machine's lifetime: it dies with the process that started it, and a machine that can't boot is reported early."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from image_builder.errors import BootError
from image_builder.events import Monitor
from image_builder.lab import pause
from image_builder.machine import monitor, qemu
from image_builder.machine.vm import ExtraDisk, Vm, VmOptions
from image_builder.settings import Settings
from image_builder.verify.boot import boot

pytestmark = pytest.mark.boot

REPO = Path(__file__).resolve().parents[2]
_HOLD = """
import sys, time
from pathlib import Path
from image_builder.machine.vm import Vm, VmOptions
with Vm(VmOptions("held", Path(sys.argv[1])), Path(sys.argv[2])) as vm:
    print("on", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    path = tmp_path / "blank.raw"
    path.write_bytes(bytes(1 << 20))
    return path


def _machines(directory: Path) -> list[int]:
    """Return the processes whose command line names ``directory``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if qemu.PROGRAM.encode() in command and os.fsencode(directory) in command:
                found.append(int(entry.name))
    return found


def test_emulation_works_here() -> None:
    assert qemu.works("tcg")


def test_a_firmware_that_does_not_get_through_is_no_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host where KVM runs only the first instructions: the processor starts, and there is no output."""
    _, variables = qemu.find_firmware()
    code = tmp_path / "code.fd"
    code.write_bytes(b"\xf4" * 3653632)  # hlt, everywhere
    monkeypatch.setattr(qemu, "find_firmware", lambda: (code, variables))
    assert not qemu.works("tcg", seconds=3)
    assert not _machines(Path(tempfile.gettempdir(), "image-builder-probe-"))


def test_a_monitor_is_there_when_it_is_listened_to(tmp_path: Path) -> None:
    path = tmp_path / "monitor"
    assert not monitor.listens(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        assert path.exists() and not monitor.listens(path)
        listener.listen()
        assert monitor.listens(path)


def test_a_guest_that_kvm_can_not_go_on_with_is_given_up(tmp_path: Path) -> None:
    """As QEMU 7.2 answers on a host whose KVM isn't a hypervisor's (kvm-pvm): it is stopped, and waits for nothing."""
    path = tmp_path / "monitor"

    def serve(listener: socket.socket) -> None:
        for said in ("internal-error", "running"):
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                stream.write(b'{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}}}}\n')
                stream.flush()
                for answer in ({}, {"status": said, "singlestep": False, "running": said == "running"}):
                    stream.readline()
                    stream.write(json.dumps({"return": answer}).encode() + b"\n")
                    stream.flush()

    assert not monitor.gave_up(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        assert [monitor.gave_up(path), monitor.gave_up(path)] == [True, False]
        thread.join()


def test_machine_without_a_bootable_disk_is_given_up_early(blank: Path, tmp_path: Path) -> None:
    before = blank.read_bytes()
    extra = (ExtraDisk("local0", 64 << 20), ExtraDisk("temp0", 64 << 20, bus="scsi", model="Virtual Disk"))
    with Vm(VmOptions("blank", blank, extra_disks=extra, disk_size=8 << 20), tmp_path) as vm:
        with pytest.raises(BootError, match="no boot device") as caught:
            vm.wait_for_ssh(total_seconds=300)
        assert "console.log" in (caught.value.hint or "")
        assert vm.problems()
    assert not _machines(tmp_path)
    assert blank.read_bytes() == before


def test_the_console_that_a_failed_boot_names_is_there_afterwards(blank: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/console.log").write_text("of an earlier boot")
    with pytest.raises(BootError, match="no boot device") as caught:
        boot(
            blank,
            verify=False,
            out_dir=tmp_path / "out",
            settings=Settings(store=tmp_path / "store"),
            monitor=Monitor(),
            pause_archive=pause.archive,
            extra_disks=(),
        )
    shown = Path((caught.value.hint or "").removeprefix("the whole console: "))
    assert shown == tmp_path / "out/console.log"
    assert "of an earlier boot" not in shown.read_text(errors="replace")
    assert not list((tmp_path / "store/staging").iterdir())


def test_power_is_cut_and_comes_back_with_the_same_disk(blank: Path, tmp_path: Path) -> None:
    with Vm(VmOptions("blank", blank), tmp_path) as vm:
        first = vm.target.address.port
        vm.reset()
        assert vm.running and vm.target.address.port == first
        vm.power_off()
        assert not vm.running and not _machines(tmp_path)
        with pytest.raises(BootError, match="not powered on"):
            _ = vm.target
        vm.power_on()
        assert vm.running
    assert not _machines(tmp_path)


def test_dead_machine_is_reported_with_its_own_words(blank: Path, tmp_path: Path) -> None:
    with Vm(VmOptions("blank", blank), tmp_path) as vm:
        (pid,) = _machines(tmp_path)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(BootError, match="QEMU ended"):
            vm.wait_for_ssh(total_seconds=60)


def test_machine_that_does_not_answer_is_not_left_running(
    blank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(self: Vm, *_: object) -> None:
        assert self.running
        raise BootError("QEMU didn't start")

    # Stands in for a QEMU that hangs before it has a monitor.
    monkeypatch.setattr(qemu, "command_line", lambda _machine: ["sleep", "600"])
    monkeypatch.setattr(Vm, "_await", silent)
    vm = Vm(VmOptions("blank", blank), tmp_path)
    with pytest.raises(BootError, match="didn't start"), vm:
        pass
    assert not vm.running


def test_machine_dies_with_a_killed_parent(blank: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _HOLD, str(blank), str(tmp_path)]
    with subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"on\n"
        assert len(_machines(tmp_path)) == 1
        parent.kill()
    deadline = time.monotonic() + 10
    while _machines(tmp_path):
        assert time.monotonic() < deadline, "the machine outlived its parent"
        time.sleep(0.05)
