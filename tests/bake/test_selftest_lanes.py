"""`image-builder test` runs lanes that share a queue of files: real pytest runs, on a project with a few tests."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.selftest import durations, lanes
from tests.selftest.proofs import Proofs
from tests.support.images.builds import REPO

pytestmark = [pytest.mark.root, pytest.mark.process]

CONFTEST = f"""
import json, pathlib, sys
sys.path.insert(0, {os.fspath(REPO)!r})
pytest_plugins = ["tests.selftest.lane_plugin"]
def pytest_addoption(parser):
    parser.addoption("--parts")
def pytest_sessionfinish(session):
    path = session.config.getoption("--parts")
    pathlib.Path(path).write_text(json.dumps({{session.config.getoption("-m"): 1.0}}))
"""
MARKS = ["root", "boot", "gpu", "nightly", "process", "alone", "hosts", "image"]
# Files that run at the same time: each waits until all have started.
MEET = """
import os, pathlib, tempfile, time, pytest
HERE = pathlib.Path(__file__).parent
pytestmark = [{marks}]
def test_it():
    (HERE / {mine!r}).write_text(f"{{os.getpid()}} {{tempfile.gettempdir()}}")
    deadline = time.monotonic() + 60
    while not all((HERE / name).exists() for name in ("one", "two", "three")):
        assert time.monotonic() < deadline, "it ran alone"
        time.sleep(0.05)
    assert {verdict}
"""
# A test that notes when it runs, and that no other of its kind runs at the same time.
NOTE = """
import os, pathlib, time, pytest
HERE = pathlib.Path(__file__).parent
pytestmark = [{marks}]
@pytest.mark.parametrize("number", range(2))
def test_it(number):
    with open(HERE / {kind!r}, "a") as notes:
        notes.write(f"{name} {{os.getpid()}}\\n")
        notes.flush()
        busy = HERE / "busy-{kind}"
        busy.mkdir()
        time.sleep(0.2)
        busy.rmdir()
"""
# One lane has had a failure and is in its next test, which has a child process, when the run is interrupted.
SLEEPS = """
import pathlib, subprocess, pytest
HERE = pathlib.Path(__file__).parent
pytestmark = [pytest.mark.boot]
def test_boot_failed():
    assert False
def test_boot():
    child = subprocess.Popen(["sleep", "60"])
    (HERE / "sleeper.new").write_text(str(child.pid))
    (HERE / "sleeper.new").rename(HERE / "sleeper")
    child.wait()
"""
FAILS = """
import pathlib, time, pytest
HERE = pathlib.Path(__file__).parent
pytestmark = [pytest.mark.root, pytest.mark.alone]
def test_root():
    while not (HERE / "sleeper").exists():
        time.sleep(0.05)
    raise AssertionError("INTERRUPT")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nmarkers = {MARKS}\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(lanes, "REPO_ROOT", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


def _surroundings(project: Path) -> tuple[lanes.Surroundings, list[str]]:
    lines: list[str] = []
    reports = project / "reports"
    reports.mkdir(exist_ok=True)
    return lanes.Surroundings(project / "store", project / "cache", reports, lines.append), lines


def _write(project: Path, text: str, name: str, *marks: str, **values: str) -> None:
    words = ", ".join(f"pytest.mark.{mark}" for mark in marks)
    (project / f"test_{name}.py").write_text(text.format(marks=words, name=name, **values))


def _rest(
    project: Path, *, nightly: bool = False, proofs: Proofs | None = None
) -> tuple[list[lanes.Outcome], list[str]]:
    surroundings, lines = _surroundings(project)
    outcomes = lanes.rest(surroundings, nightly=nightly, proofs=proofs)
    # pytest's own directory isn't ours to remove.
    assert {p.name.partition("-")[0] for p in (project / "tmp").iterdir()} <= {"pytest"}
    return outcomes, lines


def _meet(project: Path, verdict: str) -> tuple[list[lanes.Outcome], list[str]]:
    _write(project, MEET, "one", "root", mine="one", verdict="True")
    _write(project, MEET, "two", "boot", mine="two", verdict=verdict)
    _write(project, MEET, "three", "root", "process", mine="three", verdict="True")
    return _rest(project)


def test_all_lanes_run_at_once_and_each_tells_its_parts(project: Path) -> None:
    outcomes, lines = _meet(project, "True")
    assert [outcome.status for outcome in outcomes] == [0, 0, 0], lines
    assert [dict(outcome.parts) for outcome in outcomes] == [{lanes.REST + lanes.NOT_NIGHTLY: 1.0}] * 3
    assert " 3 passed in " in lanes.closing_line(outcomes, 2)
    assert set(durations.files(project / "reports")) == {
        f"test_{name}.py" for name in ("one", "two", "three")
    }
    # The check for leftovers looks in the first lane's temporary directory.
    pids, folders = zip(
        *((project / name).read_text().split() for name in ("one", "two", "three")), strict=True
    )
    assert len(set(pids)) == 3
    others = [Path(folder) for folder in folders if Path(folder) != project / "tmp"]
    assert len(others) == 2 and {folder.parent.parent.parent for folder in others} == {project / "tmp"}


def test_a_failure_in_any_lane_fails_the_run_and_is_shown(project: Path) -> None:
    outcomes, lines = _meet(project, "False")
    assert sorted(outcome.status for outcome in outcomes) == [0, 0, 1]
    assert any("test_two" in line and "FAILED" in line for line in lines)
    assert " 1 failed, 2 passed in " in lanes.closing_line(outcomes, 2)


def test_each_file_runs_once_and_those_of_one_turn_after_each_other(project: Path) -> None:
    for number in range(3):
        _write(project, NOTE, f"hosts_{number}", "root", "hosts", kind="pools")
        _write(project, NOTE, f"boot_{number}", "boot", kind="machines")
    outcomes, lines = _rest(project)
    assert " 12 passed in " in lanes.closing_line(outcomes, 2), lines
    for kind in ("pools", "machines"):
        notes = [note.split()[0] for note in (project / kind).read_text().splitlines()]
        assert len(notes) == 6 and notes[::2] == notes[1::2], notes


def test_what_looks_at_the_whole_machine_runs_first_and_in_the_first_lane(project: Path) -> None:
    for number in range(2):
        _write(project, NOTE, f"alone_{number}", "root", "alone", kind="all")
        _write(project, NOTE, f"ordinary_{number}", "root", kind=f"all{number}")
        _write(project, NOTE, f"light_{number}", "root", "process", kind=f"light{number}")
    outcomes, lines = _rest(project)
    assert " 12 passed in " in lanes.closing_line(outcomes, 2), lines
    notes = [note.split() for note in (project / "all").read_text().splitlines()]
    assert len({pid for _, pid in notes}) == 1
    others = [path.stat().st_mtime for path in project.glob("*[01]") if path.is_file()]
    assert len(others) == 4 and min(others) >= (project / "all").stat().st_mtime


def test_fixtures_of_the_session_last_from_file_to_file(project: Path) -> None:
    """This includes a file taken while others run: a lane bakes an image once."""
    (project / "conftest.py").write_text(
        f"{CONFTEST}\nimport os, pytest\n"
        "@pytest.fixture(scope='session')\ndef worker(tmp_path_factory):\n"
        f"    with open({os.fspath(project / 'baked')!r}, 'a') as notes: notes.write(f'{{os.getpid()}}\\n')\n"
    )
    for number in range(6):
        (project / f"test_{number}.py").write_text(
            "import pytest\npytestmark = pytest.mark.root\ndef test_a(worker): pass\ndef test_b(worker): pass\n"
        )
    outcomes, lines = _rest(project)
    assert " 12 passed in " in lanes.closing_line(outcomes, 2), lines
    baked = (project / "baked").read_text().split()
    assert len(baked) == len(set(baked)) <= len(lanes.REST_LANES)


def test_a_lane_that_dies_keeps_nobody_waiting(project: Path) -> None:
    dies = (
        "import os, pytest\npytestmark = [pytest.mark.root, pytest.mark.alone]\ndef test_a(): os._exit(7)\n"
    )
    (project / "test_dies.py").write_text(dies)
    _write(project, NOTE, "looks", "root", "alone", kind="all")
    _write(project, NOTE, "not_begun", "root", kind="ordinary")
    outcomes, lines = _rest(project)
    assert [outcome.status for outcome in outcomes] == [7, 0, 0], lines
    # What it had already taken as its next is lost; the others run what it hadn't.
    assert lanes.closing_line(outcomes, 1).startswith(
        "pytest ended without a closing line, status 7; besides "
    )


def test_what_is_proven_runs_again_when_something_it_depends_on_changes(project: Path) -> None:
    """Files that pass are proven; a file that fails, has changed or imports a changed one isn't."""
    subprocess.run(["git", "init", "-q", project], check=True)
    (project / ".gitignore").write_text("/cache\n/tmp\n/reports\n__pycache__\n.pytest_cache\n")
    folder = project / "tests" / "part"
    folder.mkdir(parents=True)
    text = "import pytest\npytestmark = pytest.mark.root\ndef test_it(): assert {}\n"
    for name, verdict in {"sound": "True", "alike": "True", "failing": "False"}.items():
        (folder / f"test_{name}.py").write_text(text.format(verdict))

    def run() -> tuple[list[str], str]:
        proofs = Proofs.look_up(project / "cache/proofs", "root", project)
        outcomes, _ = _rest(project, proofs=proofs)
        return sorted(Path(name).stem for name in proofs.days), lanes.closing_line(outcomes, 1)

    days, closing = run()
    assert days == [] and " 1 failed, 2 passed in " in closing
    days, closing = run()
    assert days == ["test_alike", "test_sound"] and " 1 failed in " in closing
    (folder / "test_alike.py").write_text(text.format("1 == 1"))
    (folder / "test_failing.py").write_text(text.format("True"))
    days, closing = run()
    assert days == ["test_sound"] and " 2 passed in " in closing
    # A comment changes nothing; a file that any test may read does.
    (folder / "test_sound.py").write_text(f"# a comment\n{text.format('True')}")
    assert len(Proofs.look_up(project / "cache/proofs", "root", project).days) == 3
    (project / "any.yml").touch()
    assert not Proofs.look_up(project / "cache/proofs", "root", project).days


def test_what_is_for_the_night_runs_when_it_is_asked_for(project: Path) -> None:
    for name, marks in {"root": ("root",), "boot": ("boot",), "long": ("root", "nightly")}.items():
        _write(project, NOTE, name, *marks, kind=name)
    assert " 4 passed" in lanes.closing_line(_rest(project)[0], 1)
    assert " 6 passed" in lanes.closing_line(_rest(project, nightly=True)[0], 1)


def test_an_interrupted_run_tells_what_the_other_lanes_have_said_and_leaves_nothing(project: Path) -> None:
    (project / "test_alone.py").write_text(FAILS)
    (project / "test_boots.py").write_text(SLEEPS)
    surroundings, lines = _surroundings(project)

    def write(line: str) -> None:
        lines.append(line)
        if "INTERRUPT" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanes.rest(replace(surroundings, write=write))
    assert any("test_boot_failed" in line for line in lines), lines
    sleeper = int((project / "sleeper").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{sleeper}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{sleeper}").exists()


def test_every_unit_test_is_run_by_one_lane(project: Path) -> None:
    for folder in ("tests/unit", "tests/unit/node", "tests/unit/pool", "tests/unit/system"):
        (project / folder).mkdir(parents=True, exist_ok=True)
        (project / folder / f"test_{Path(folder).name}_.py").write_text("def test_one(): pass\n")
    surroundings, lines = _surroundings(project)
    outcomes = lanes.unit(surroundings)
    assert [outcome.status for outcome in outcomes] == [0, 0], lines
    assert " 4 passed in " in lanes.closing_line(outcomes, 1), lines


def test_arguments_are_one_run(project: Path) -> None:
    for name in ("one", "two", "three"):
        _write(project, NOTE, name, "root", kind=name)
    surroundings, lines = _surroundings(project)
    outcome = lanes.chosen(["-k", "two"], surroundings, fast=False)
    assert outcome.status == 0, lines
    assert "2 passed, 4 deselected" in outcome.closing
