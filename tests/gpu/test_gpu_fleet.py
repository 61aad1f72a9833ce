"""Workers that are real processes and go wrong in every way: each is stopped in time, and named by its GPU.

No GPU is needed: the workers are small programs. One of them is the program's own worker on interpreted kernels
(tests/support/gpu_stand_in/libcuda.py), so that the parent reads what a worker really prints.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from image_builder.node import child, zipapp
from image_builder.node.gpu.model import Tier, Worker
from image_builder.node.gpu.smoke import fleet
from image_builder.settings import REPO_ROOT
from tests.support.control_plane.gates import wait_until
from tests.support.processes import is_over

pytestmark = pytest.mark.root

FREEZER = Path("/sys/fs/cgroup/freezer")
GPUS = [f"GPU-12345678-9abc-def0-1234-56789abcde{n:02x}" for n in range(8)]
SAY = """
import json, os, signal, sys, time
uuid, peers = sys.argv[1], sys.argv[2:]
def say(value):
    print(json.dumps(value), flush=True)
def measured(id="kat.int"):
    say({"id": id, "gpu": uuid, "status": "done", "measured": 0.0, "unit": "mismatches"})
def summary():
    say({"gpu": uuid, "ended": "done", "sms": 4, "sms_seen": 4, "memory_bytes": 10, "memory_tested_bytes": 9})
def note(folder):
    open(os.path.join(place, folder, str(os.getpid())), "w").close()
def hang(stop=signal.pause):
    note("hung")
    stop()
note("born")
"""
WELL = "measured(); summary()"
# None of these exits on its own.
LATE = {
    "hangs": "measured(); hang()",
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); measured(); hang()",
    "is stopped": "measured(); hang(lambda: os.kill(os.getpid(), signal.SIGSTOP))",
    "hangs after its summary": "measured(); summary(); hang()",
}
BAD = {
    "segfaults": ("measured(); os.kill(os.getpid(), signal.SIGSEGV)", "crashed: signal 11"),
    "is killed": ("measured(); summary(); os.kill(os.getpid(), signal.SIGKILL)", "crashed: signal 9"),
    "aborts": ("measured(); os.abort()", "crashed: signal 6"),
    "fails": ("measured(); sys.exit('FAILED: gpu.cuda')", "error: exit status 1: FAILED: gpu.cuda"),
    "fails after its summary": (
        "measured(); summary(); sys.exit(1)",
        "error: exit status 1: (no output)",
    ),
    "prints rubbish": (
        "print('Segmentation fault'); measured(); summary()",
        "error: line 1 is not a worker's",
    ),
    "speaks of another": ("uuid = 'GPU-other'; measured(); summary()", "error: line 1 is not a worker's"),
    "says nothing": ("pass", "error: it ended without a summary"),
    "forgets its summary": ("measured()", "error: it ended without a summary"),
    "floods": ("measured()\nwhile True: print('x' * 65536)", "error: more than"),
}
# Odd, but not a fault.
LOUD = "for _ in range(99): print('x' * 65536, file=sys.stderr)\nmeasured(); summary()"
# The second half is for the links.
DEADLINE = 60


class Clock:
    """The fleet's clock: it stands still while any worker has something to do. Once all that are left hang, it is the
    end of their round: of the workers by themselves, or of the links.
    """

    def __init__(self, place: Path) -> None:
        self.place, self.now, self.started = place, 0.0, 0
        self.over: set[str] = set()
        self.end = 0.0
        for name in ("born", "hung"):
            (place / name).mkdir()

    def argv(self, uuid: str, program: str, peers: Sequence[str]) -> list[str]:
        """Return the command line of a worker that this clock knows."""
        self.started += 1
        self.end = DEADLINE if peers else DEADLINE / 2
        text = f"place = {os.fspath(self.place)!r}\n{SAY}{program}"
        return [sys.executable, "-c", text, uuid, *peers]

    def monotonic(self) -> float:
        born, hung = (set(os.listdir(self.place / name)) for name in ("born", "hung"))
        self.over |= {pid for pid in born - self.over if is_over(int(pid))}
        if len(born) == self.started and born <= hung | self.over and hung - self.over:
            self.now = self.end
        return self.now


@pytest.fixture(autouse=True)
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(tmp_path)
    monkeypatch.setattr(fleet, "time", made)
    return made


def _argv(clock: Clock, programs: dict[str, str]) -> fleet.Argv:
    def argv(uuid: str, tier: Tier, seed: int, peers: Sequence[str]) -> list[str]:
        return clock.argv(uuid, programs.get(uuid, WELL), peers)

    return argv


def _run(
    clock: Clock,
    programs: dict[str, str],
    *,
    gpus: Sequence[str] = GPUS[:3],
    reap: float = 1e9,
    on_tick: Callable[[], None] = lambda: None,
) -> dict[str, Worker]:
    outcomes = fleet.run(
        gpus,
        "boot-quick",
        1,
        DEADLINE,
        on_tick,
        argv=_argv(clock, programs),
        reap_seconds=reap,
        tick_seconds=0.05,
        links_seconds=DEADLINE / 2,
    )
    assert [outcome.gpu for outcome in outcomes] == list(gpus)
    return {outcome.gpu: outcome for outcome in outcomes}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = _children()
    yield
    abandoned = list(child._abandoned)
    child._abandoned.clear()
    for process in abandoned:
        process.kill()
        process.wait(10)
    # A child of an earlier test may have exited in the meantime; this test leaves none.
    assert abandoned == [] and _children() <= before


def _children() -> set[int]:
    pids = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            pids |= set(map(int, (task / "children").read_text().split()))
    return pids


@pytest.mark.parametrize("name", BAD)
def test_a_worker_that_goes_wrong_is_named_and_the_others_are_done(clock: Clock, name: str) -> None:
    program, ended = BAD[name]
    outcomes = _run(clock, {GPUS[1]: program, GPUS[2]: LOUD})
    assert outcomes[GPUS[1]].ended.startswith(ended)
    assert [outcomes[gpu].ended for gpu in (GPUS[0], GPUS[2])] == ["done", "done"]
    if program.startswith("measured()"):
        assert outcomes[GPUS[1]].measurements[0].id == "kat.int"
    if "summary()" not in program:
        assert outcomes[GPUS[1]].sms_seen == 0


def test_workers_that_hang_end_together_at_their_deadline_and_are_named(clock: Clock) -> None:
    late = dict(zip(GPUS, LATE.values(), strict=False))
    outcomes = _run(clock, late, gpus=GPUS[:6])
    assert clock.now == DEADLINE / 2
    assert [outcomes[gpu].ended for gpu in late] == ["killed: deadline"] * len(late)
    assert all(outcomes[gpu].measurements[0].id == "kat.int" for gpu in late)
    # The other GPUs' links were still tried.
    assert [outcomes[gpu].ended for gpu in GPUS[4:6]] == ["done", "done"]
    assert [len(outcomes[gpu].measurements) for gpu in GPUS[4:6]] == [2, 2]


def test_a_worker_that_can_not_be_started_is_named(clock: Clock) -> None:
    def argv(uuid: str, tier: Tier, seed: int, peers: Sequence[str]) -> list[str]:
        return ["/nonexistent"] if uuid == GPUS[0] else _argv(clock, {})(uuid, tier, seed, peers)

    outcomes = fleet.run(GPUS[:2], "boot-quick", 1, 60, argv=argv)
    assert outcomes[0].ended.startswith("error: could not be started: ")
    assert outcomes[1].ended == "done"


def test_what_a_worker_leaves_behind_ends_with_it_and_holds_up_nothing(clock: Clock, tmp_path: Path) -> None:
    """The worker's child holds the pipe whose closing would signal its exit, and never ends by itself."""
    pid_file = tmp_path / "pid"
    program = f"""
child = os.fork()
if child == 0:
    signal.pause()
open({os.fspath(pid_file)!r}, "w").write(str(child))
measured(); summary()
"""
    assert _run(clock, {GPUS[0]: program}, gpus=GPUS[:1])[GPUS[0]].ended == "done"
    assert wait_until(lambda: is_over(int(pid_file.read_text())))


def test_a_hung_worker_takes_its_child_along(clock: Clock, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
child = os.fork()
if child == 0:
    signal.pause()
open({os.fspath(pid_file)!r}, "w").write(str(child))
hang()
"""
    assert _run(clock, {GPUS[0]: program}, gpus=GPUS[:2])[GPUS[0]].ended == "killed: deadline"
    assert wait_until(lambda: is_over(int(pid_file.read_text())))


@contextmanager
def _frozen(name: str) -> Iterator[Path]:
    """Make a control group whose processes no signal can end while it is frozen: the nearest thing to a hung driver.

    With the prefix of builds, a build next to this would remove it while it is empty.
    """
    group = FREEZER / name
    group.mkdir()
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


# Only a frozen process is sure to survive SIGKILL; many hosts only have version 2, which does kill frozen processes.
@pytest.mark.skipif(not (FREEZER / "cgroup.procs").exists(), reason="no version 1 freezer on this host")
def test_a_worker_that_nothing_ends_is_given_up_and_named(clock: Clock) -> None:
    with _frozen(f"frozen-test-{os.getpid()}") as group:
        program = f"""
measured()
note("hung")
open("{group}/cgroup.procs", "w").write(str(os.getpid()))
open("{group}/freezer.state", "w").write("FROZEN")
signal.pause()
"""
        outcomes = _run(clock, {GPUS[1]: program}, reap=0)
        assert outcomes[GPUS[1]].ended == "hung: unkillable"
        assert outcomes[GPUS[1]].measurements[0].id == "kat.int"
        assert [outcomes[gpu].ended for gpu in (GPUS[0], GPUS[2])] == ["done", "done"]
    assert len(child._abandoned) == 1
    process = child._abandoned.pop()
    assert process.wait() == -signal.SIGKILL


# -- links -----------------------------------------------------------------------------------------------------

LINKS = """
measured("bw.p2p" if peers else "kat.int")
if peers:
    say({"id": "bw.d2h", "gpu": uuid, "status": "done", "measured": 1.0, "unit": "GB/s", "detail": ",".join(peers)})
summary()
"""


def test_links_are_tried_among_the_gpus_that_are_well_each_with_its_next(clock: Clock) -> None:
    outcomes = _run(clock, {**dict.fromkeys(GPUS[:4], LINKS), GPUS[1]: "os.abort()"}, gpus=GPUS[:4])
    assert [len(outcomes[gpu].measurements) for gpu in GPUS[:4]] == [3, 0, 3, 3]
    order = {gpu: outcomes[gpu].measurements[2].detail.split(",") for gpu in (GPUS[0], GPUS[2], GPUS[3])}
    assert order == {
        GPUS[0]: [GPUS[2], GPUS[3]],
        GPUS[2]: [GPUS[3], GPUS[0]],
        GPUS[3]: [GPUS[0], GPUS[2]],
    }


def test_a_link_that_hangs_is_within_the_same_deadline(clock: Clock) -> None:
    outcomes = _run(clock, {GPUS[0]: f"hang() if peers else None\n{WELL}"})
    assert outcomes[GPUS[0]].ended == "killed: deadline"
    assert [(result.id, result.status) for result in outcomes[GPUS[0]].measurements] == [
        ("kat.int", "done"),
        ("bw.p2p", "error"),
    ]
    assert outcomes[GPUS[1]].ended == "done"


# -- ticks -----------------------------------------------------------------------------------------------------


def _is_ticking() -> bool:
    return "gpu-ticks" in [thread.name for thread in threading.enumerate()]


def test_ticks_come_while_workers_run(clock: Clock, tmp_path: Path) -> None:
    ticks: list[int] = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 10:
            (tmp_path / "enough").touch()

    waits = f"while not os.path.exists({os.fspath(tmp_path / 'enough')!r}): time.sleep(0.01)"
    _run(clock, {GPUS[0]: f"{waits}\n{WELL}"}, gpus=GPUS[:1], on_tick=tick)
    assert len(ticks) >= 10
    assert wait_until(lambda: not _is_ticking())  # and none afterwards


def test_a_tick_that_hangs_holds_up_nothing(clock: Clock) -> None:
    over = threading.Event()

    def hang() -> None:
        over.wait()

    try:
        outcomes = _run(clock, {}, on_tick=hang)
        assert _is_ticking()
    finally:
        over.set()
    assert {outcome.ended for outcome in outcomes.values()} == {"done"}


def test_a_tick_that_fails_is_told_after_the_workers_ended(clock: Clock) -> None:
    def fail() -> None:
        raise RuntimeError("NVML is lost")

    with pytest.raises(RuntimeError, match="NVML is lost"):
        _run(clock, {}, on_tick=fail)


def test_an_interrupt_ends_the_workers() -> None:
    def start() -> None:
        with fleet.Fleet() as running:
            running.start(
                GPUS[0], [sys.executable, "-c", "import time; time.sleep(600)"], {}, time.monotonic() + 60
            )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start()


# -- the program's own worker ----------------------------------------------------------------------------------

INTERPRETED = """
import sys
from dataclasses import replace
from image_builder.node.gpu.smoke import bandwidth, memory, reference, worker
from tests.support.gpu_stand_in import libcuda
uuid, drill = sys.argv[1], sys.argv[2]
worker.SEEDS = memory._BLOCKS_PER_SM = bandwidth._BLOCKS_PER_SM = 1
worker.PLANS["boot-quick"] = worker.Plan(
    0, 0, 0.25, 0, 1, warm_seconds=0, chunk=8192, unit=1024, hbm_bytes=4096, link_bytes=4096, tile=128,
    cases=tuple(replace(case, steps=1, rounds=1) for case in reference.CASES), tensor_cases=lambda _: (),
)
gpu = libcuda.Gpu(uuid, sms=1, bytes=80 * 1024)
sys.exit(worker.run(uuid, "boot-quick", 5, drill=drill, driver=libcuda.Driver(gpu)))
"""


def _interpreted(clock: Clock, drills: dict[str, str]) -> fleet.Argv:
    def argv(uuid: str, tier: Tier, seed: int, peers: Sequence[str]) -> list[str]:
        if peers:
            return _argv(clock, {})(uuid, tier, seed, peers)
        return [sys.executable, "-c", INTERPRETED, uuid, drills.get(uuid, "")]

    return argv


def test_the_programs_own_worker_is_read_and_its_drills_are_caught(clock: Clock) -> None:
    drills = {GPUS[1]: "result", GPUS[2]: "crash", GPUS[3]: "hang"}
    outcomes = fleet.run(GPUS[:4], "boot-quick", 5, 90, argv=_interpreted(clock, drills))
    well, wrong, crashed, hung = outcomes
    assert [outcome.ended for outcome in (well, wrong)] == ["done", "done"]
    answers = ["kat.int", "kat.ffma", "kat.dfma", "det.fp32"]
    assert {result.status for result in well.measurements if result.id in answers} == {"done"}
    assert [result.id for result in wrong.measurements if result.status == "failed"] == answers
    assert crashed.ended == "crashed: signal 11"
    # The interpreter gives up on a kernel that doesn't end, as a GPU with a watchdog would.
    assert hung.ended.startswith("error: exit status 1: ") and "ILLEGAL_ADDRESS" in hung.ended


def test_a_node_without_a_driver_is_an_error_and_no_pass() -> None:
    """Start the real worker as on a node; on a host with a driver, its GPU would be missing."""
    outcomes = fleet.run(GPUS[:1], "boot-quick", 5, 60)
    assert outcomes[0].ended.startswith("error: exit status 1: node-agent: FAILED: gpu.")
    assert outcomes[0].measurements == ()


def test_the_agents_archive_starts_its_workers_from_itself(tmp_path: Path) -> None:
    agent = tmp_path / "node-agent"
    agent.write_bytes(zipapp.compiled(zipapp.archive()))
    code = (
        f"import os, sys; file = os.open({os.fspath(agent)!r}, os.O_RDONLY | os.O_CLOEXEC)\n"
        "sys.path.insert(0, f'/proc/{os.getpid()}/fd/{file}')\n"  # as the archive itself does
        "from image_builder.node.gpu.smoke import cuda, fleet, program\n"
        "print(os.path.realpath(program.worker_argv('GPU-a', 'boot-quick', 1, ())[2]))\n"
        "print(cuda.text_of('base').startswith(b'// Arithmetic'))\n"
        f"print(fleet.run(['{GPUS[0]}'], 'boot-quick', 5, 60)[0].ended)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    path, text, ended = done.stdout.splitlines()
    assert path == os.fspath(agent) and text == "True"
    assert ended.startswith("error: exit status 1: node-agent: FAILED: gpu.")


def test_a_worker_whose_reader_died_before_it_could_ask_the_kernel_ends() -> None:
    """The interpreter takes longer to start than it takes for an agent to be killed."""
    late = "import sys; sys.stdin.readline(); from image_builder.node.gpu.smoke import worker; "
    worker = [sys.executable, "-c", late + "worker.end_with_the_parent(); import time; time.sleep(600)"]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPO_ROOT) as started:
        assert started.stdin is not None and started.stdout is not None
        started.stdout.close()
        started.stdin.write(b"go on\n")
        started.stdin.flush()
        assert started.wait() == -signal.SIGKILL


def test_a_worker_ends_with_the_one_that_waits_for_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    worker = (
        "import os, time\nfrom image_builder.node.gpu.smoke import worker\nworker.end_with_the_parent()\n"
        f"open({os.fspath(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {worker!r}]).wait()"
    started = subprocess.Popen([sys.executable, "-c", parent], cwd=REPO_ROOT)
    assert wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()))
    started.kill()
    started.wait()
    assert wait_until(lambda: is_over(int(pid_file.read_text())))
