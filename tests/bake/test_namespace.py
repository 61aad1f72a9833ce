"""Nothing outlives the outermost process: no process, no mount, whatever signal ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from image_builder.system import namespace

pytestmark = pytest.mark.root

REPO = Path(__file__).resolve().parents[2]
_WORK = """
import os, subprocess, sys, time
from image_builder.system import namespace
def work():
    namespace.mount("tmpfs", "tmpfs", sys.argv[1])
    open(sys.argv[1] + "/inside", "w").close()
    subprocess.Popen(["setsid", "sleep", sys.argv[2]], start_new_session=True)
    print("ready", flush=True)
    time.sleep(60)
    return 0
sys.exit(namespace.run_isolated(work))
"""


def _processes_with(word: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue
    return found


def _wait_until_gone(word: str) -> list[int]:
    deadline = time.monotonic() + 120
    while (left := _processes_with(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _start(tmp_path: Path, word: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _WORK, str(tmp_path), word], cwd=REPO, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    assert _processes_with(word)
    return child


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)],
)
def test_no_process_and_no_mount_is_left(tmp_path: Path, number: int, status: int) -> None:
    word = f"{60 + os.getpid()}.{number}1234"
    mounts = Path("/proc/self/mounts").read_text()
    child = _start(tmp_path, word)
    assert Path("/proc/self/mounts").read_text() == mounts
    assert not (tmp_path / "inside").exists()
    child.send_signal(number)
    with child:
        code = child.wait(10)
    assert code == status
    assert _wait_until_gone(word) == []
    assert Path("/proc/self/mounts").read_text() == mounts


def test_the_status_of_the_work_is_passed_on() -> None:
    code = (
        "import sys; from image_builder.system import namespace; sys.exit(namespace.run_isolated(lambda: 12))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 12


def test_the_hosts_devices_are_out_of_reach() -> None:
    code = (
        "import os, sys; from image_builder.system import namespace\n"
        "def work():\n"
        "    print(sorted(os.listdir('/dev')))\n"
        "    os.unlink('/dev/null')\n"
        "    return 0\n"
        "sys.exit(namespace.run_isolated(work))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, check=True, stdout=subprocess.PIPE, text=True
    )
    assert "'vda'" not in done.stdout
    assert "'null'" in done.stdout
    assert Path("/dev/null").is_char_device()


_SIGNALLED_AT_ONCE = """
import os, signal, sys, time
from image_builder.system import namespace
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
def work():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(5)
    return 0
print(*[namespace.run_isolated(work) for _ in range(20)])
"""


def test_a_signal_is_passed_on_from_the_first_moment() -> None:
    """With one processor, the work nearly always runs before PID 1 gets to its next line."""
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALLED_AT_ONCE], cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["143"] * 20, done.stderr


_INTERRUPTED = """
import sys, time
from image_builder.system import namespace
namespace._ECHO_SECONDS = namespace._GRACE_SECONDS = 60
def work():
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        time.sleep(1)
        open(sys.argv[1], "w").close()
    return 0
sys.exit(namespace.run_isolated(work))
"""


def test_a_second_interrupt_does_not_stop_the_clearing_away(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", _INTERRUPTED, str(tmp_path / "cleared")],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        for _ in range(5):
            os.killpg(child.pid, signal.SIGINT)
            time.sleep(0.1)
        assert child.wait() == 130
    assert (tmp_path / "cleared").exists()


_BESIDE = """
import hashlib, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from image_builder.system import namespace, process
from image_builder.errors import CommandError
folder = Path(sys.argv[1])
namespace._GRACE_SECONDS = float(sys.argv[3])
def waits():
    process.run(["sh", "-c", "setsid sleep 300 & wait"])
def computes():
    while True:
        hashlib.sha256(bytes(1 << 20))
def mounts():
    namespace.mount("tmpfs", "tmpfs", str(folder))
    process.run(["sh", "-c", f"mkdir {folder}/inner; mount -t tmpfs x {folder}/inner; sleep 300"])
def work():
    try:
        go_on()
    finally:
        print("ended by itself", flush=True)
def go_on():
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(globals()[sys.argv[2]])
        time.sleep(0.5)
        while sys.argv[2] == "mounts" and not (beside.done() or os.path.ismount(folder / "inner")):
            time.sleep(0.05)
        try:
            print("ready", flush=True)
            beside.result()
        finally:
            if sys.argv[2] == "mounts":
                namespace.unmount(str(folder))
            try:
                process.run(["true"])
            except CommandError as error:
                print(error.message, flush=True)
sys.exit(namespace.run_isolated(work))
"""


def _beside(
    tmp_path: Path, what: str, number: int, *, grace: float = 600, again: bool = False
) -> tuple[int, float, str]:
    """Send a signal to work that has a thread; return status, seconds, output.

    With ``again``, send one more after the work has noticed the first, so late that it can't be an echo.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _BESIDE, str(tmp_path), what, str(grace)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        started = time.monotonic()
        child.send_signal(number)
        try:
            if again:
                assert child.stdout.readline() == "not started, the work is ending: true\n"
                time.sleep(namespace._ECHO_SECONDS + 0.1)
                child.send_signal(number)
            status = child.wait()
        finally:
            child.kill()  # if it hasn't ended: leaving this block waits for that
        return status, time.monotonic() - started, child.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_a_thread_waits_for(tmp_path: Path, number: int) -> None:
    """So does what that started, in whatever session; nothing new is started after that."""
    status, _, said = _beside(tmp_path, "waits", number)
    assert status == 128 + number
    assert said.splitlines() == ["not started, the work is ending: true", "ended by itself"]


def test_a_signal_ends_a_thread_that_hears_of_nothing(tmp_path: Path) -> None:
    status, seconds, said = _beside(tmp_path, "computes", signal.SIGTERM, grace=1)
    assert status == 128 + signal.SIGTERM
    assert seconds >= 1 and "ended by itself" not in said, "the kernel ended it when its time was over"


def test_a_second_signal_ends_the_work_at_once(tmp_path: Path) -> None:
    status, _, said = _beside(tmp_path, "computes", signal.SIGINT, again=True)
    assert status == 130
    assert "ended by itself" not in said


def test_what_a_killed_program_left_mounted_goes_with_the_mount_below_it(tmp_path: Path) -> None:
    status, _, said = _beside(tmp_path, "mounts", signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "not started" in said, "unmounting did not fail"


@pytest.mark.parametrize(
    ("prefix", "refusal"),
    [
        ((), ""),
        (
            ("unshare", "--user", "--map-root-user"),
            "private namespaces are refused: a device in /dev: Operation not permitted | run it as root",
        ),
    ],
)
def test_what_the_kernel_refuses_is_known_before_any_work(prefix: tuple[str, ...], refusal: str) -> None:
    """Root of a user namespace has all capabilities in it, and may mount, but can't make device nodes."""
    code = (
        "from image_builder.errors import HostError\n"
        "from image_builder.system import namespace\n"
        "try:\n    namespace.check()\n"
        "except HostError as error:\n    print(error.message, '|', error.hint)\n"
    )
    argv = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.startswith(refusal)
    assert bool(done.stdout) == bool(refusal)
