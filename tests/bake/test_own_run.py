"""The end of this project's own test runs: on skips, between parts, with nothing collected, on Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.process]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, repo_root: Path) -> Run:
    """Run pytest as we do, on the test's own files."""
    folder = tmp_path / "tests"
    (folder / "unit").mkdir(parents=True)
    for path in (repo_root / "tests").glob("*.*"):
        shutil.copy(path, folder)
    for name in ("selftest", "support"):
        shutil.copytree(repo_root / "tests" / name, folder / name)
    shutil.copy(repo_root / "pyproject.toml", tmp_path)

    def start(files: dict[str, str], *argv: str, allowed: str = "") -> subprocess.CompletedProcess[str]:
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
        if allowed:
            (folder / "allowed_skips.txt").write_text(allowed)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *argv],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.fspath(repo_root)},
        )

    return start


# Given to the run under test to be refused, as below in a whole module: none of our own tests are skipped here.
SKIP = {"unit/test_a.py": "import pytest\ndef test_it(): pytest.skip('no such device')\n"}


def test_a_skip_that_is_not_allowed_fails(run: Run) -> None:
    done = run(SKIP)
    assert done.returncode == 1
    assert "test_a.py::test_it: Skipped: no such device" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("=") and "1 skipped" in done.stdout.splitlines()[-1]


def test_an_allowed_skip_passes(run: Run) -> None:
    assert run(SKIP, allowed="tests/unit/test_a.py::*  no such device\n").returncode == 0
    assert run(SKIP, allowed="tests/unit/test_a.py::*  another reason\n").returncode == 1


def test_a_skipped_module_counts(run: Run) -> None:
    done = run({"unit/test_a.py": "import pytest\npytest.skip('no', allow_module_level=True)\n"})
    assert done.returncode != 0


def test_nothing_collected_fails(run: Run) -> None:
    assert run({}).returncode == 5


def test_a_test_outside_of_unit_says_what_it_needs(run: Run) -> None:
    done = run({"bake/test_a.py": "def test_it(): pass\n"}, "-m", "")
    assert done.returncode == 4
    assert "tests outside of unit need one of the marks root, boot, gpu: test_a.py" in done.stderr


def test_a_test_lies_in_the_folder_of_a_part(run: Run) -> None:
    done = run({"e2e/test_a.py": "import pytest\n@pytest.mark.root\ndef test_it(): pass\n"}, "-m", "")
    assert done.returncode == 4
    assert "a test lies in a folder of unit, bake, preload, pools, disk, gpu: test_a.py" in done.stderr


PARTS = {
    "bake/test_a.py": "import pytest\n@pytest.mark.root\ndef test_root(): pass\n",
    "disk/test_b.py": "import pytest\n@pytest.mark.boot\ndef test_boot(): pass\n",
    "unit/test_z.py": "def test_unit(): assert {verdict}\n",
}


@pytest.mark.parametrize(("verdict", "passed"), [("True", 3), ("False", 0)])
def test_parts_run_in_order_and_stop_at_a_failure(
    run: Run, tmp_path: Path, verdict: str, passed: int
) -> None:
    report = tmp_path / "parts.json"
    files = {name: text.format(verdict=verdict) for name, text in PARTS.items()}
    done = run(files, "-v", f"--parts={report}", "-m", "not gpu")
    assert done.stdout.count(" PASSED ") == passed
    order = [word for word in ("test_unit", "test_root", "test_boot") if f"::{word} " in done.stdout]
    assert order == ["test_unit", "test_root", "test_boot"][: len(order)]
    if passed:
        assert done.returncode == 0
        assert (
            done.stdout.index("::test_unit")
            < done.stdout.index("::test_root")
            < done.stdout.index("::test_boot")
        )
        assert list(json.loads(report.read_text())) == ["unit", "bake", "disk"]
    else:
        assert done.returncode != 0
        assert "the part `unit` failed" in done.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_ends_on_signals(repo_root: Path, tmp_path: Path, number: int, status: int) -> None:
    """The work is in its own namespace; the signal reaches it, and what it started is cleaned up."""
    code = (
        "import sys, time; from image_builder.cli import command, main as cli\n"
        "import typer\n"
        "app = typer.Typer()\n"
        "@command.register(app, isolated=True)\n"
        "def wait() -> int:\n"
        "    try:\n"
        # Python notices a signal that arrives right before a sleep only after it.
        "        print('ready', flush=True)\n"
        "        for _ in range(600): time.sleep(0.1)\n"
        "    finally:\n"
        f"        open({os.fspath(tmp_path / 'cleared')!r}, 'w').close()\n"
        "    return 0\n"
        "app()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.fspath(repo_root)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(number)
    _, err = child.communicate(timeout=50)  # less than the work would take
    assert child.returncode == status
    assert "Traceback" not in err
    assert (tmp_path / "cleared").exists()
