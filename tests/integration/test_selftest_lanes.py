"""`image-builder test` runs what boots machines beside the rest: real runs of pytest, on a project of three tests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.selftest import lanes

CONFTEST = """
import json, os, pathlib, time
def pytest_addoption(parser):
    parser.addoption("--parts")
def pytest_sessionfinish(session):
    path = session.config.getoption("--parts")
    pathlib.Path(path).write_text(json.dumps({session.config.getoption("-m"): 1.0}))
"""
MARKS = '[tool.pytest.ini_options]\nmarkers = ["root", "boot", "gpu", "nightly"]\n'
# What runs beside the other waits until that one has begun, and the other until it has seen it.
MEET = """
import pathlib, time, pytest
HERE = pathlib.Path(__file__).parent
def _meet(mine, other):
    (HERE / mine).touch()
    deadline = time.monotonic() + 60
    while not (HERE / other).exists():
        assert time.monotonic() < deadline, f"{mine} ran alone"
        time.sleep(0.05)
def test_unit():
    assert UNIT
@pytest.mark.root
def test_root():
    _meet("root", "boot")
@pytest.mark.boot
def test_boot():
    _meet("boot", "root")
    import tempfile
    (HERE / "temporary").write_text(tempfile.gettempdir())
    assert BOOT
"""


# One has failed beside the other, and is in its next, with a program of its own, when that is interrupted.
SLEEPING = """
import pathlib, subprocess, time, pytest
HERE = pathlib.Path(__file__).parent
@pytest.mark.root
def test_root():
    while not (HERE / "sleeper").exists():
        time.sleep(0.05)
    raise AssertionError("INTERRUPT")
@pytest.mark.boot
def test_boot_failed():
    assert False
@pytest.mark.boot
def test_boot():
    child = subprocess.Popen(["sleep", "600"])
    (HERE / "sleeper.new").write_text(str(child.pid))
    (HERE / "sleeper.new").rename(HERE / "sleeper")
    child.wait()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pyproject.toml").write_text(MARKS)
    (tmp_path / "cache").mkdir()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(lanes, "REPO_ROOT", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    return tmp_path


def _surroundings(project: Path) -> tuple[lanes.Surroundings, list[str]]:
    told: list[str] = []
    return lanes.Surroundings(project / "store", project / "cache", told.append), told


def _rest(project: Path, *, boot: bool) -> tuple[list[lanes.Lane], list[str]]:
    (project / "test_all.py").write_text(f"UNIT, BOOT = True, {boot}\n{MEET}")
    surroundings, told = _surroundings(project)
    ended = lanes.rest(surroundings)
    # pytest's own directory is not ours to remove.
    assert {p.name.partition("-")[0] for p in (project / "tmp").iterdir()} <= {"pytest"}
    return ended, told


def test_both_lanes_run_at_once_and_each_tells_its_parts(project: Path) -> None:
    ended, told = _rest(project, boot=True)
    assert [lane.status for lane in ended] == [0, 0], told
    assert [dict(lane.parts) for lane in ended] == [
        {lanes.ROOT + lanes.NOT_NIGHTLY: 1.0},
        {lanes.BOOT + lanes.NOT_NIGHTLY: 1.0},
    ]
    assert " 2 passed in " in lanes.closing_line(ended, 2)
    # What it makes is not where a test of what is left behind looks.
    assert Path((project / "temporary").read_text()).parent.parent.parent == project / "tmp"


def test_what_is_for_the_night_runs_when_it_is_asked_for(project: Path) -> None:
    (project / "test_all.py").write_text(
        "import pytest\n"
        "@pytest.mark.root\ndef test_root(): pass\n"
        "@pytest.mark.boot\ndef test_boot(): pass\n"
        "@pytest.mark.root\n@pytest.mark.nightly\ndef test_long(): pass\n"
    )
    surroundings, _ = _surroundings(project)
    assert " 2 passed" in lanes.closing_line(lanes.rest(surroundings), 1)
    assert " 3 passed" in lanes.closing_line(lanes.rest(surroundings, nightly=True), 1)


def test_a_failure_beside_the_rest_fails_the_run_and_is_shown(project: Path) -> None:
    ended, told = _rest(project, boot=False)
    assert [lane.status for lane in ended] == [0, 1]
    assert any("test_boot" in line and "FAILED" in line for line in told)
    assert " 1 failed, 1 passed in " in lanes.closing_line(ended, 2)


def test_an_interrupted_run_tells_what_the_other_lane_has_said_and_leaves_nothing(project: Path) -> None:
    (project / "test_all.py").write_text(SLEEPING)
    told: list[str] = []

    def write(line: str) -> None:
        told.append(line)
        if "INTERRUPT" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lanes.rest(lanes.Surroundings(project / "store", project / "cache", write))
    assert any("test_boot_failed" in line for line in told), told
    sleeper = int((project / "sleeper").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{sleeper}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{sleeper}").exists()


def test_no_unit_test_is_left_out_by_the_halves(project: Path) -> None:
    for folder in ("tests/unit", "tests/unit/node", "tests/unit/pool", "tests/unit/gate"):
        (project / folder).mkdir(parents=True, exist_ok=True)
        (project / folder / f"test_{Path(folder).name}_.py").write_text("def test_one(): pass\n")
    surroundings, told = _surroundings(project)
    ended = lanes.unit(surroundings)
    assert [lane.closing.strip("= ").partition(" in ")[0] for lane in ended] == ["2 passed", "2 passed"], told


def test_arguments_are_one_run(project: Path) -> None:
    (project / "test_all.py").write_text(f"UNIT, BOOT = True, False\n{MEET}")
    surroundings, told = _surroundings(project)
    ended = lanes.chosen(["-k", "unit"], surroundings, fast=False)
    assert ended.status == 0, told
    assert "1 passed, 2 deselected" in ended.closing
