"""A rehearsal of the first contact with a GPU: the whole command, on our own stand-in for the driver's libraries.

There is no GPU here, and speeds mean nothing. The point is that the command's ten minutes aren't lost to its own
faults: it performs every step, notices every drill, continues after anything that hangs, dies or answers wrongly, and
leaves its results so far whenever it is stopped.
"""

from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.node.decode import decode
from image_builder.node.gpu.model import Gpu
from image_builder.system.namespace import run_isolated
from image_builder.system.sandbox import open_root
from tests.bench.first_contact import nvml_answers
from tests.bench.first_contact.assumptions import Contact, rows
from tests.bench.first_contact.context import lines, read_json
from tests.bench.first_contact.propose import NAMING, names_of
from tests.bench.first_contact.steps import STEPS
from tests.bench.first_contact.worker import runs
from tests.support.gpu_stand_in import machines
from tests.support.gpu_stand_in.machines import StandIn
from tests.support.images.builds import REPO, Workplace

pytestmark = pytest.mark.root

PROGRAM = [sys.executable, os.fspath(REPO / "tests/bench/gpu.py")]
# So much less is measured; the deadlines are those of a real run.
PACE = "0.02"
RUNS = runs(float(PACE))
# Checks that make no sense on a stand-in: how fast it is.
SPEEDS = ("hbm_ratio", "h2d_ratio", "d2h_ratio", "mma_ratio", "at the same time", "boot-quick", "compiler")


@dataclass(frozen=True)
class Learned:
    """A run's machine and directory, its exit status, and its output."""

    machine: StandIn
    out: Path
    status: int
    output: str

    def result(self, step: str) -> dict[str, Any]:
        return read_json(self.out / "steps" / step / "result.json")

    @property
    def states(self) -> dict[str, str]:
        return {step["step"]: step["state"] for step in read_json(self.out / "summary.json")["steps"]}


@pytest.fixture(scope="session")
def libraries(worker_gpu: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile both libraries with the compiler that builds the kernel modules."""
    folder = tmp_path_factory.mktemp("gpu-stand-in")
    machines.sources(folder / "src")
    binds = {"/run/stand-in": folder / "src"}

    def isolated() -> int:
        with open_root(worker_gpu.trees("module_root"), folder / "root", writable_binds=binds) as root:
            machines.compile_in(Path("/run/stand-in"), root.run)
        return 0

    assert run_isolated(isolated) == 0
    return folder / "src"


def start(machine: StandIn, out: Path, *more: str, program: Sequence[str] = PROGRAM) -> subprocess.Popen[str]:
    verb = "--first-contact" if program is PROGRAM else "first-contact"
    argv = [*program, verb, os.fspath(out), "--root", os.fspath(machine.root), "--pace", PACE, *more]
    return subprocess.Popen(
        argv, env=machine.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/"
    )


def run(machine: StandIn, out: Path, *more: str, program: Sequence[str] = PROGRAM) -> Learned:
    with start(machine, out, *more, program=program) as child:
        output = child.communicate()[0]
    assert left_behind(out) == []
    return Learned(machine, out, child.returncode, output)


def only(*names: str) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def left_behind(out: Path) -> list[str]:
    """Return the command lines of processes started by a run in this directory that are still running."""
    end = time.monotonic() + 10
    while True:
        pids = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                arguments = path.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(word.startswith(os.fspath(out)) for word in arguments):
                pids.append(" ".join(arguments))
        if not pids or time.monotonic() >= end:
            return pids
        time.sleep(0.1)


@pytest.fixture(scope="module")
def learned(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    """Return a complete run on two healthy GPUs."""
    folder = tmp_path_factory.mktemp("contact")
    return run(machines.machine(folder / "machine", libraries), folder / "out")


def test_every_step_is_done(learned: Learned) -> None:
    assert learned.status == 0, learned.output
    assert set(learned.states.values()) == {"done"} and list(learned.states) == [step.name for step in STEPS]
    assert learned.result("smoke-quick")["exit_status"] == learned.result("smoke-full")["exit_status"] == 0
    assert {device["uuid"] for device in learned.result("cuda")["gpus"]} == set(learned.machine.gpus)


def test_every_drill_is_noticed(learned: Learned) -> None:
    drills = {step.name: learned.result(step.name) for step in STEPS if step.name.startswith("drill-")}
    assert len(drills) == 10
    assert {name for name, drill in drills.items() if not drill["caught"]} == set()


def test_assumptions_hold_on_a_healthy_machine(learned: Learned) -> None:
    slow_rows = [row for row in rows(Contact(learned.out)) if not any(word in row.subject for word in SPEEDS)]
    assert len(slow_rows) > 20
    assert [row for row in slow_rows if row.holds is not True] == []


def test_answers_are_recorded_to_the_byte(learned: Learned) -> None:
    """The recording has exactly what the libraries were told to answer, for each call."""
    table = {}
    for line in (learned.machine.libraries / "nvml.txt").read_text().splitlines():
        fields = line.split()
        numbers = tuple(map(int, fields[4 : 4 + int(fields[3])]))
        gpu, peer = (None if word == "-1" else int(word) for word in fields[1:3])
        code, outputs = int(fields[4 + len(numbers)]), fields[6 + len(numbers) :]
        table[fields[0], gpu, peer, numbers] = code, outputs[1::2]
    answers = [answer for answer in lines(learned.out / "steps/nvml/answers.jsonl") if "code" in answer]
    live = ("nvmlDeviceGetComputeRunningProcesses_v3",)  # depends on the processes that are running
    recorded = {nvml_answers.key(answer): answer for answer in answers if answer["call"] not in live}
    assert len(recorded) > 3000 and set(recorded) == {
        question for question in table if question[0] not in live
    }
    for question, answer in recorded.items():
        code, outputs = table[question]
        assert answer["code"] == code, question
        if question[0] != "nvmlDeviceGetFieldValues" and code == 0:
            assert [out["bytes"] or "-" for out in answer["out"].values()] == outputs, question


def test_a_proposal_names_no_machine_and_can_be_replayed(
    learned: Learned, libraries: Path, tmp_path: Path
) -> None:
    done = subprocess.run([*PROGRAM, "--propose", learned.out], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    into = learned.out / "proposal"
    recording = json.loads(next(into.glob("h100*.json")).read_bytes())
    assert [decode(Gpu, gpu).index for gpu in recording["gpus"]] == [0, 1]
    assert b"GPU-00000000-" in json.dumps(recording).encode()
    page = (into / "gpu-results.md").read_text()
    assert "| a wrong bit in memory | detected | done | holds |" in page
    # The size is unknown and the run was short: no calibration, and the reasons why.
    calibration = read_json(into / "calibration.json")
    assert calibration["calibrations"] == [] and len(calibration["why_not"]) >= 2
    raw = lzma.decompress(next(into.glob("*.xz")).read_bytes())
    answers = [json.loads(line) for line in raw.splitlines()]
    everything = b"".join(path.read_bytes() for path in into.glob("*.json")) + json.dumps(answers).encode()
    secrets = list(names_of(Contact(learned.out)))
    assert secrets and not [secret for secret in secrets if secret in everything]
    # A machine that gives these answers reports the same about itself, except for its name.
    again = machines.machine(tmp_path / "machine", libraries, count=1)
    again.answer(answers)
    first = run(again, tmp_path / "out", *only("facts", "nvml"))
    recorded = lines(first.out / "steps/nvml/answers.jsonl")
    assert len(answers) > 1500 and told(recorded) == told(answers)


def told(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers about the machine and its first GPU, without their timings and without any names."""
    return [
        {key: value for key, value in answer.items() if key != "us"}
        for answer in answers
        if "code" in answer and answer["gpu"] in (None, 0) and answer["call"] not in NAMING
    ]


def test_what_is_wrong_is_noticed_and_costs_no_other_step(libraries: Path, tmp_path: Path) -> None:
    machine = machines.machine(tmp_path / "machine", libraries)
    machine.script("wrong 0 kat_ffma", "blind 1 2", "refuse 0 cuMemcpyPeerAsync 801")
    learned = run(
        machine, tmp_path / "out", *only("facts", "readings", "cuda", "coverage", "spread", "references")
    )
    assert learned.status == 0, learned.output
    contact = Contact(learned.out)
    assert "wrong answers: kat.ffma" in list(contact.doubts())
    bad = {row.subject for row in rows(contact) if row.holds is False}
    assert {"kat.ffma: the host's answers", "every SM gets a block"} <= bad
    spread = {(row["gpu"], row["id"]): row for row in learned.result("spread")["spread"]}
    first, second = machine.gpus
    assert spread[first, "kat.ffma"]["done"] == 0 and spread[first, "kat.int"]["done"] == RUNS
    assert spread[second, "kat.int"]["done"] == 0 and "SM" in spread[second, "kat.int"]["not_done"][0]
    assert "CUDA_ERROR_NOT_SUPPORTED" in spread[first, "bw.p2p"]["not_done"][0]
    assert spread[second, "bw.p2p"]["done"] == RUNS


def test_a_call_that_hangs_and_one_that_crashes_cost_one_answer_each(libraries: Path, tmp_path: Path) -> None:
    machine = machines.machine(tmp_path / "machine", libraries)
    path = machine.libraries / "nvml.txt"
    hung, ended = "nvmlDeviceGetVbiosVersion 1 -1 0 ", "nvmlDeviceGetBoardPartNumber 0 -1 0 "
    before = path.read_text().splitlines()
    changed = [
        f"{hung}-1 0" if line.startswith(hung) else f"{ended}-2 0" if line.startswith(ended) else line
        for line in before
    ]
    assert sum(old != other for old, other in zip(before, changed, strict=True)) == 2
    path.write_text("\n".join(changed) + "\n")
    contact = run(machine, tmp_path / "out", *only("nvml"))
    assert contact.status == 0, contact.output
    assert contact.result("nvml")["hung"] == 1
    answers = [answer for answer in lines(contact.out / "steps/nvml/answers.jsonl") if "code" in answer]
    codes = {(answer["call"], answer["gpu"]): answer["code"] for answer in answers}
    assert codes["nvmlDeviceGetVbiosVersion", 1] == "hung"
    assert codes["nvmlDeviceGetBoardPartNumber", 0] == f"status {-signal.SIGABRT}"
    assert codes["nvmlDeviceGetVbiosVersion", 0] == codes["nvmlDeviceGetName", 1] == 0
    assert len(answers) == len(before)


@pytest.mark.parametrize(
    ("steps", "most_seconds"),
    [
        (("facts", "readings", "nvml", "cuda", "smoke-quick", "drill-result", "after"), 120),
        pytest.param((), 150, marks=pytest.mark.nightly),  # all steps: there is no time for the last ones
    ],
)
def test_a_driver_that_never_answers_ends_in_time(
    libraries: Path, tmp_path: Path, steps: tuple[str, ...], most_seconds: float
) -> None:
    machine = machines.machine(tmp_path / "machine", libraries)
    machine.script("hang 0 cuInit", "hang 1 cuInit")
    began = time.monotonic()
    contact = run(machine, tmp_path / "out", "--seconds", "120", *only(*steps))
    assert time.monotonic() - began < most_seconds
    assert contact.status == 1
    assert (contact.states["facts"], contact.states["readings"], contact.states["nvml"]) == (
        "done",
        "done",
        "done",
    )
    assert contact.states["cuda"] == "late"
    # The smoke test gave up on its workers itself, and has a document that says so.
    assert contact.result("smoke-quick")["document"]["verdict"]["status"] == "inconclusive"
    assert set(contact.states.values()) <= {"done", "late", "failed", "skipped"}


@pytest.mark.parametrize("moment", ["at once", "copies", "spread", "drill-hang"])
def test_killed_at_any_moment_it_leaves_what_it_has(libraries: Path, tmp_path: Path, moment: str) -> None:
    machine = machines.machine(tmp_path / "machine", libraries)
    out = tmp_path / "out"
    # Steps that take a long time before that moment would add nothing here.
    steps = [] if moment == "at once" else ["facts", "readings", "nvml", "cuda", moment, "jit", "after"]
    with start(machine, out, *only(*steps)) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if moment == "at once" or line.startswith(f"{moment}:"):
                break
        time.sleep(0.3)
        child.kill()
    assert left_behind(out) == []
    contact = Learned(machine, out, child.returncode, "")
    states = list(contact.states.items())
    reached = next(at for at, (_, state) in enumerate(states) if state != "done")
    assert {state for _, state in states[reached + 1 :]} <= {"planned"}
    assert moment == "at once" or states[reached][0] == moment
    for name, _ in states[:reached]:
        assert contact.result(name), name
    # And a proposal can be made from it.
    done = subprocess.run([*PROGRAM, "--propose", out], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert "not observed" in (out / "proposal/gpu-results.md").read_text()


def test_interrupted_it_ends_at_once(libraries: Path, tmp_path: Path) -> None:
    machine = machines.machine(tmp_path / "machine", libraries)
    steps = only("facts", "readings", "cuda", "spread", "jit", "after")
    with start(machine, tmp_path / "out", *steps) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("spread:"):
                break
        child.send_signal(signal.SIGINT)
        began = time.monotonic()
        child.communicate()
        assert time.monotonic() - began < 15
    assert child.returncode == 128 + signal.SIGINT
    assert left_behind(tmp_path / "out") == []
    contact = Learned(machine, tmp_path / "out", child.returncode, "")
    assert contact.states["spread"] == "interrupted" and contact.states["after"] == "skipped"


def test_one_file_is_all_that_it_needs(libraries: Path, tmp_path: Path) -> None:
    packed = tmp_path / "first-contact"
    done = subprocess.run([*PROGRAM, "--pack", packed], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    machine = machines.machine(tmp_path / "machine", libraries)
    steps = ("facts", "readings", "nvml", "cuda", "smoke-quick", "references", "drill-crash")
    program = [sys.executable, "-I", os.fspath(packed)]
    contact = run(machine, tmp_path / "out", *only(*steps), program=program)
    assert contact.status == 0, contact.output
    assert contact.result("smoke-quick")["exit_status"] == 0 and contact.result("drill-crash")["caught"]


def test_without_a_gpu_it_says_so(libraries: Path, tmp_path: Path) -> None:
    machine = machines.machine(tmp_path / "machine", libraries, count=0)
    for path in (machine.libraries).iterdir():
        path.unlink()
    contact = run(
        machine, tmp_path / "out", *only("facts", "readings", "nvml", "cuda", "spread", "drill-hang")
    )
    assert contact.status == 1
    assert contact.states["facts"] == "done"
    assert {state for name, state in contact.states.items() if name != "facts"} == {"failed"}
    reasons = {step["step"]: step["why"] for step in read_json(contact.out / "summary.json")["steps"]}
    assert "libnvidia-ml.so.1" in reasons["readings"] and "libcuda.so.1" in reasons["cuda"]


def test_what_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text("{}")
    done = subprocess.run([*PROGRAM, "--first-contact", tmp_path], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and "is not empty" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json"]
