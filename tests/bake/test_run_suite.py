"""Runs of real pytest processes: a run that proves nothing must never count as a verification."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from image_builder.errors import VerifyError
from image_builder.events import Monitor
from image_builder.machine.ssh import SshAddress
from image_builder.machine.vm import write_key
from image_builder.settings import REPO_ROOT, SUITE, Settings
from image_builder.verify import command
from image_builder.verify.result import SuiteResult, require_passed
from image_builder.verify.runner import observe_suite
from tests.support.images.builds import Workplace
from tests.support.ssh_server import Server

pytestmark = pytest.mark.root

HEADER = """
import os, signal, time
import pytest
from suite import booted, needs, offline

@offline
def test_good():
    '''What it is about.'''
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Copy the suite's machinery without its checks."""
    folder = tmp_path / "suite"
    folder.mkdir()
    for module in SUITE.glob("*.py"):
        if not module.name.startswith(("test_", "mutations")):
            shutil.copy(module, folder)
    ini = (SUITE / "pytest.ini").read_text(encoding="utf-8")
    (folder / "pytest.ini").write_text(ini, encoding="utf-8")
    facts = {
        "image": "x",
        "build_id": "0",
        "packages": [],
        "variables": {"image_layers": ["system"], "system_x": 1},
    }
    (tmp_path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def run(suite: Path, checks: str, *, timeout: float | None = None, target: str = "") -> SuiteResult:
    (suite / "test_it.py").write_text(checks, encoding="utf-8")
    out = suite.parent / "out"
    out.mkdir(exist_ok=True)
    result = observe_suite(
        target or f"sandbox:{out}",
        suite.parent / "facts.json",
        out,
        marker="booted" if target else "offline",
        python=Path(sys.executable),
        log=out / "log",
        suite=suite,
        timeout=timeout,
    )
    require_passed(result)
    return result


def refused(suite: Path, checks: str, **more: Any) -> str:
    with pytest.raises(VerifyError) as error:
        run(suite, checks, **more)
    return error.value.message


def test_a_green_run_leaves_its_records(suite: Path) -> None:
    more = """
@booted
def test_elsewhere():
    assert False

@offline
@needs("kubernetes")
def test_not_of_this_image():
    assert False

@offline
@needs("system", system_x=2)
def test_not_of_these_variables():
    assert False
"""
    result = run(suite, HEADER + more)
    assert [(c.name, c.outcome, c.title) for c in result.checks] == [
        ("test_it.py::test_good", "passed", "What it is about.")
    ]
    assert {n.name: n.reason for n in result.not_applicable} == {
        "test_it.py::test_not_of_this_image": "no layer kubernetes",
        "test_it.py::test_not_of_these_variables": "system_x is 1",
    }
    out = suite.parent / "out"
    assert json.loads((out / "verify.json").read_text())["verdict"] == "passed"
    assert "testcase" in (out / "junit.xml").read_text()


def test_progress_is_told(suite: Path) -> None:
    (suite / "test_it.py").write_text(HEADER, encoding="utf-8")
    out, seen = suite.parent / "out", []
    out.mkdir()
    observe_suite(
        f"sandbox:{out}",
        suite.parent / "facts.json",
        out,
        marker="offline",
        python=Path(sys.executable),
        log=out / "log",
        suite=suite,
        on_progress=lambda name, done, total: seen.append((name, done, total)),
    )
    assert seen == [("test_it.py::test_good", 1, 1)]


@pytest.mark.parametrize(
    "checks",
    [
        "",
        "from suite import booted\n@booted\ndef test_elsewhere(): pass\n",
        "from suite import needs, offline\n@offline\n@needs('gpu')\ndef test_other(): pass\n",
    ],
)
def test_nothing_collected_fails(suite: Path, checks: str) -> None:
    assert "collected no check" in refused(suite, checks)


def test_a_failing_check_fails_and_is_recorded(suite: Path) -> None:
    message = refused(suite, HEADER + "\n@offline\ndef test_bad():\n    assert 1 == 2, 'one is not two'\n")
    assert "1 of 2 checks failed" in message and "test_it.py::test_bad: one is not two" in message
    verdict = json.loads((suite.parent / "out/verify.json").read_text())
    assert verdict["verdict"] == "failed" and verdict["counts"]["failed"] == 1


def test_the_command_keeps_the_record_of_what_failed(tiny: Workplace, tmp_path: Path) -> None:
    """The tree doesn't contain a single program."""
    (tmp_path / "tree/etc").mkdir(parents=True)
    places = (
        "--facts",
        tiny.artefact / "facts.json",
        "--output",
        tmp_path / "out",
        "--store",
        tiny.store,
    )
    pages = ("--annotations", "github", "verify", tmp_path / "tree", "--summary", tmp_path / "summary.md")
    done = subprocess.run(
        [REPO_ROOT / "image-builder", *pages, *places], capture_output=True, text=True, check=False
    )
    assert done.returncode == VerifyError.exit_code, done.stderr
    assert "\n::error::" in done.stdout and "error: " in done.stderr
    assert "❌" in (tmp_path / "summary.md").read_text()
    assert "<failure" in (tmp_path / "out/junit.xml").read_text()
    assert json.loads((tmp_path / "out/verify.json").read_text())["verdict"] == "failed"


@pytest.mark.parametrize(
    "fixture",
    [
        "@pytest.fixture\ndef broken():\n    raise OSError('no')\n",
        "@pytest.fixture\ndef broken():\n    yield\n    raise OSError('no')\n",
    ],
)
def test_an_error_outside_a_check_fails(suite: Path, fixture: str) -> None:
    message = refused(suite, HEADER + fixture + "\n@offline\ndef test_bad(broken): pass\n")
    assert "1 of 2 checks failed" in message and "OSError: no" in message


@pytest.mark.parametrize(
    "end",
    [
        "os._exit(0)",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "pytest.exit('enough', 0)",
    ],
)
def test_a_pytest_that_dies_fails(suite: Path, end: str) -> None:
    refused(suite, HEADER + f"\n@offline\ndef test_end():\n    {end}\n")


# Each is a check in the suite under test, which has to refuse it.
@pytest.mark.parametrize(
    "body", ["pytest.skip('not today')", "pytest.xfail('known')", "pytest.importorskip('no_such_module')"]
)
def test_an_outcome_that_is_neither_fails(suite: Path, body: str) -> None:
    assert "neither passed nor failed" in refused(
        suite, HEADER + f"\n@offline\ndef test_odd():\n    {body}\n"
    )


def test_a_module_that_cannot_be_imported_fails(suite: Path) -> None:
    (suite / "test_other.py").write_text(HEADER, encoding="utf-8")
    refused(suite, "import no_such_module\n")


def test_a_check_for_no_side_fails(suite: Path) -> None:
    assert "neither offline nor booted" in refused(suite, "def test_nowhere(): pass\n")


def test_a_misspelt_variable_fails(suite: Path) -> None:
    checks = (
        "from suite import needs, offline\n@offline\n@needs('system', system_y=1)\ndef test_typo(): pass\n"
    )
    assert "system_y, which no role of this image has" in refused(suite, checks)


def test_a_run_that_hangs_fails(suite: Path) -> None:
    message = refused(suite, HEADER + "\n@offline\ndef test_hang():\n    time.sleep(3600)\n", timeout=3)
    assert "did not end" in message


def test_unreadable_facts_fail(suite: Path) -> None:
    (suite.parent / "facts.json").write_text("{}", encoding="utf-8")
    assert "the facts lack" in refused(suite, HEADER)


ON_A_MACHINE = """
import pytest
from suite import booted

@booted
def test_one(host):
    assert host.run("echo here").stdout == "here\\n"

@booted
def test_two(host):
    assert host.run("true").rc == 0
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(write_key(tmp_path / "key", "test"), tmp_path)
    yield made
    made.close()


def _url(server: Server, key: Path, user: str = "root") -> str:
    known_hosts = key.with_name("known_hosts")
    known_hosts.write_text(
        f"[127.0.0.1]:{server.port} {server.key.get_name()} {server.key.get_base64()}\n", encoding="utf-8"
    )
    return SshAddress(user, "127.0.0.1", server.port, key, known_hosts).url


def test_one_login_serves_all_checks_on_a_machine(suite: Path, server: Server, tmp_path: Path) -> None:
    result = run(suite, ON_A_MACHINE, target=_url(server, tmp_path / "key"))
    assert (len(result.passed), server.connections) == (2, 1)


def test_a_machine_that_lets_nobody_in_is_asked_once(suite: Path, server: Server, tmp_path: Path) -> None:
    where = f"127.0.0.1:{server.port}"
    target = _url(server, tmp_path / "key")
    (suite.parent / "out").mkdir()
    (suite.parent / "out/verify.json").write_text("{}")
    write_key(tmp_path / "other", "stranger")
    stranger = refused(suite, ON_A_MACHINE, target=_url(server, tmp_path / "other"))
    assert f"ended early: can't log in to root@{where}: Authentication failed" in stranger
    assert not (suite.parent / "out/verify.json").exists()
    server.key = paramiko.ECDSAKey.generate()
    changed = refused(suite, ON_A_MACHINE, target=target)
    assert f"can't log in to root@{where}: Host key for server" in changed
    assert server.connections == 2
    server.close()
    assert f"can't log in to root@{where}: " in refused(suite, ON_A_MACHINE, target=target)


def test_a_user_without_a_root_shell_is_told_why(suite: Path, server: Server, tmp_path: Path) -> None:
    server.user, server.instead = "admin", "echo sudo: a password is required >&2; exit 1"
    message = refused(suite, ON_A_MACHINE, target=_url(server, tmp_path / "key", "admin"))
    where = f"admin@127.0.0.1:{server.port}"
    assert f"ended early: no root shell on {where}: sudo: a password is required" in message
    assert server.connections == 1


LOST = """
@booted
def test_three_loses_the_connection(host):
    host.backend.client.close()
    host.run("true")

@booted
def test_four(host):
    try:
        host.run("true")
    except Exception:
        pass

@booted
def test_five(host):
    host.run("true")

@booted
def test_six(host):
    print("never begun")
"""


def test_a_machine_that_is_lost_and_does_not_come_back_ends_the_run(
    suite: Path, server: Server, tmp_path: Path
) -> None:
    target = _url(server, tmp_path / "key")
    server.next_key = paramiko.ECDSAKey.generate()
    message = refused(suite, ON_A_MACHINE + LOST, target=target)
    assert f"ended early: can't log in to root@127.0.0.1:{server.port}: Host key" in message
    assert server.connections == 2
    log = (suite.parent / "out/log").read_text()
    assert "::test_three_loses_the_connection FAILED" in log and "::test_six" not in log


def test_a_machine_that_is_lost_is_logged_in_to_again(suite: Path, server: Server, tmp_path: Path) -> None:
    message = refused(suite, ON_A_MACHINE + LOST, target=_url(server, tmp_path / "key"))
    assert "1 of 6 checks failed" in message and "::test_three" in message
    assert server.connections == 2


def test_a_machine_has_a_limited_time_for_all_checks(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "SUITE_SECONDS", 0.5)
    write_key(tmp_path / "key", "test")
    (tmp_path / "known_hosts").touch()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        url = SshAddress("root", "127.0.0.1", port, tmp_path / "key", tmp_path / "known_hosts").url
        with pytest.raises(VerifyError, match="did not end"):
            command.verify(
                url,
                suite.parent / "facts.json",
                tmp_path / "out",
                settings=Settings(store=tmp_path / "store"),
                monitor=Monitor(),
            )
