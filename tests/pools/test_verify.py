"""The suite on many real hosts at once: each host's run is independent, whatever happens to another one's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_builder.errors import PoolError
from image_builder.pool.plan.model import Outcome
from image_builder.pool.reach.reach import Reach
from image_builder.pool.steps.suite import CHECKS, NO_RESULT, Runs, Suite
from image_builder.pool.steps.worker_guard import children
from image_builder.settings import LAUNCHER, Settings
from tests.bench.measures import NOT_BOOTED, be_quick
from tests.pools.conftest import lent, not_quick
from tests.support.images.builds import Workplace
from tests.support.pools.fleet import USER, Fleet
from tests.support.pools.rollouts import POLICY, command, install, signature, write_plan, write_suite
from tests.support.users import NOBODY, open_to_all

pytestmark = [pytest.mark.root, pytest.mark.hosts]

ACCEPTED = "Accepted publickey for"
SLEEP = "sleep 600"
HANGS, CRASHES, FAILS, COUNT = 1, 2, 3, 5
FATE = f"""\
import os, signal
import pytest

@pytest.mark.booted
def test_fate(host):
    number = int(host.check_output("hostname").removeprefix("host-"))
    if number == {HANGS}:
        host.run("{SLEEP}")
    if number == {CRASHES}:
        os.kill(os.getpid(), signal.SIGKILL)
    assert number != {FAILS}, "its fate"
"""


@pytest.fixture(scope="module")
def pool(hosts: Fleet) -> Iterator[Fleet]:
    with lent(hosts):
        yield hosts
    hosts.run(4, "sed", "-i", "/^.swap none swap/d", "/etc/fstab")
    not_quick(hosts, (0, 4))


def suite_of(folder: Path, **files: str) -> Suite:
    facts = folder / "facts.json"
    facts.write_text(json.dumps({"image": "minimal", "build_id": "0", "packages": [], "variables": {}}))
    write_suite(folder / "suite", **files)
    return Suite({"minimal": facts}, folder / "reports", Settings().python, folder / "suite")


@contextmanager
def runs_of(pool: Fleet, suite: Suite) -> Iterator[Runs]:
    with Reach(pool.access(keepalive_seconds=1)) as reach, Runs(suite, reach) as runs:
        yield runs


def run(runs: Runs, pool: Fleet, number: int, seconds: float = 300) -> Outcome:
    return runs.run(pool.hosts[number], seconds)


def hanging(pool: Fleet) -> set[str]:
    """Return the commands on the host that hangs, including those of runs that were given up."""
    return set(pool.run(HANGS, "pgrep", "-fx", SLEEP, ok=False).split())


def children_of(process: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def has_ended(process: int) -> bool:
    """Return whether a process is gone or a zombie."""
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_until_it_hangs(pool: Fleet, before: set[str]) -> None:
    deadline = time.monotonic() + 600
    while hanging(pool) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


OWN = """\
import pytest
from suite import booted

@booted
def test_own(host):
    '''A check of the user's, by the suite's own words.'''
    assert host.check_output("hostname") != "host-0"
"""


def test_checks_of_the_users_own_are_made_on_each_host(pool: Fleet, tmp_path: Path) -> None:
    suite = replace(suite_of(tmp_path, test_fate=FATE), checks=tmp_path / "checks")
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/test_own.py").write_text(OWN)
    with runs_of(pool, suite) as runs:
        assert run(runs, pool, 0).detail == "test_own.py::test_own"
        assert run(runs, pool, 4).ok
    verdict = json.loads((tmp_path / "reports/host-0/verify.json").read_text())
    assert verdict["counts"]["own"] == 1
    (own,) = (check for check in verdict["checks"] if check["is_own"])
    assert own["name"] == "test_own.py::test_own" and own["outcome"] == "failed"


def test_a_run_that_hangs_or_crashes_is_no_other_hosts_business(pool: Fleet, tmp_path: Path) -> None:
    before = set(children())
    with runs_of(pool, suite_of(tmp_path, test_fate=FATE)) as runs, ThreadPoolExecutor(COUNT) as threads:
        futures = [threads.submit(run, runs, pool, n, 5 if n == HANGS else 300) for n in range(COUNT)]
        outcomes = [future.result() for future in futures]
    assert [(o.kind, o.code) for o in outcomes] == [
        ("ok", 0),
        ("failed", NO_RESULT),
        ("failed", NO_RESULT),
        ("failed", CHECKS),
        ("ok", 0),
    ], outcomes
    assert outcomes[HANGS].detail == "the suite did not end within 5 s"
    assert f"status {-signal.SIGKILL}" in outcomes[CRASHES].detail
    assert outcomes[FAILS].detail == "test_fate.py::test_fate"
    assert sorted(p.name for p in (tmp_path / "reports").iterdir()) == ["host-1", "host-2", "host-3"]
    assert set(children()) == before


def test_each_host_has_a_process_of_its_own(pool: Fleet, tmp_path: Path) -> None:
    note = "import os\n\n@pytest.mark.booted\ndef test_who(host):\n    host.run(f'echo {os.getpid()} >>/tmp/who')\n"
    suite = suite_of(tmp_path, test_fate=FATE, test_who=f"import pytest\n{note}")

    def process_of(number: int) -> str:
        return pool.run(number, "cat", "/tmp/who").split()[-1]

    with runs_of(pool, suite) as runs:
        assert run(runs, pool, 0).ok
        assert run(runs, pool, FAILS).detail == "test_fate.py::test_fate"
        assert run(runs, pool, 4).ok
    assert len({process_of(0), process_of(FAILS), process_of(4)}) == 3
    log = (suite.reports / f"host-{FAILS}" / "suite.log").read_text().splitlines()
    (failed,) = [line for line in log if line.startswith("FAILED")]
    assert failed.endswith("test_fate.py::test_fate")


def test_a_killed_process_ends_only_its_hosts_run(pool: Fleet, tmp_path: Path) -> None:
    before = set(children())
    with runs_of(pool, suite_of(tmp_path, test_fate=FATE)) as runs, ThreadPoolExecutor(1) as threads:
        earlier = hanging(pool)
        hangs = threads.submit(run, runs, pool, HANGS)
        wait_until_it_hangs(pool, earlier)
        (worker,) = set(children()) - before
        (process,) = children_of(worker)
        os.kill(process, signal.SIGKILL)
        assert f"status {-signal.SIGKILL}" in hangs.result(600).detail
        assert run(runs, pool, 0).ok


def test_a_killed_worker_takes_its_runs_along_and_is_replaced(pool: Fleet, tmp_path: Path) -> None:
    before = set(children())
    with runs_of(pool, suite_of(tmp_path, test_fate=FATE)) as runs, ThreadPoolExecutor(1) as threads:
        earlier = hanging(pool)
        hangs = threads.submit(run, runs, pool, HANGS)
        wait_until_it_hangs(pool, earlier)
        (worker,) = set(children()) - before
        (process,) = children_of(worker)
        os.kill(worker, signal.SIGKILL)
        assert "the suite's worker ended" in hangs.result(600).detail
        assert run(runs, pool, 0).ok
    assert set(children()) == before and has_ended(process)


def test_leaving_ends_what_still_runs(pool: Fleet, tmp_path: Path) -> None:
    before = set(children())
    with ThreadPoolExecutor(1) as threads, runs_of(pool, suite_of(tmp_path, test_fate=FATE)) as runs:
        earlier = hanging(pool)
        hangs = threads.submit(run, runs, pool, HANGS)
        wait_until_it_hangs(pool, earlier)
        (worker,) = set(children()) - before
        (process,) = children_of(worker)
        runs.__exit__(None, None, None)
        assert f"status {-signal.SIGKILL}" in hangs.result(600).detail
        assert run(runs, pool, 0).detail == "given up"
    assert set(children()) == before and has_ended(process)


def test_checks_that_can_not_be_collected_are_told(pool: Fleet, tmp_path: Path) -> None:
    with runs_of(pool, suite_of(tmp_path, test_wrong="import nothing_of_that_name\n")) as runs:
        outcome = run(runs, pool, 0)
    assert outcome.code == NO_RESULT and "test_wrong.py" in outcome.detail


def test_checks_may_use_what_pytest_has(pool: Fleet, tmp_path: Path) -> None:
    check = (
        "import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\n@pytest.mark.booted\n"
        "def test_more(host, tmp_path, n):\n    assert tmp_path.exists() and n == 1\n"
    )
    with runs_of(pool, suite_of(tmp_path, test_more=check)) as runs:
        assert run(runs, pool, 0).detail == "test_more.py::test_more[2]"


def verify(
    minimal: Workplace, pool: Fleet, folder: Path, numbers: Sequence[int], *host_keys: str | Path
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run ``pool verify`` on hosts; return the completed process, and its result."""
    plan = write_plan(pool, folder, numbers, POLICY)
    facts = minimal.artefact / "facts.json"
    host_keys = host_keys or ("--known-hosts", pool.pinned.path)
    login = ("--user", USER, "--key", pool.key, *host_keys)
    done = command("verify", plan, *login, "--facts", facts, "--reports", folder / "reports", "--json")
    return done, json.loads(done.stdout)


def test_pool_verify_holds_real_hosts_to_the_real_suite(
    minimal: Workplace, pool: Fleet, tmp_path: Path
) -> None:
    """The command as it is, with all checks of the image; one of two hosts is damaged, which is the only difference."""
    be_quick(pool, (0, 4))
    pool.run(4, "sh", "-c", "echo '/swap none swap sw,nofail 0 0' >>/etc/fstab")
    logins = [pool.log(number).count(ACCEPTED) for number in (0, 4)]
    done, report = verify(minimal, pool, tmp_path, (0, 4))
    # The suite continues on the connection over which the host was asked whether it had joined.
    assert [pool.log(number).count(ACCEPTED) for number in (0, 4)] == [logins[0] + 1, logins[1] + 1]
    assert done.returncode != 0 and report["counts"]["failed"] == 2, done.stderr
    failed, passed = {}, {}
    for name in ("host-0", "host-4"):
        checks = json.loads((tmp_path / "reports" / name / "verify.json").read_text())["checks"]
        failed[name] = {c["name"] for c in checks if c["outcome"] != "passed"}
        passed[name] = {c["name"] for c in checks if c["outcome"] == "passed"}
    assert len(passed["host-0"]) > 80 and {n.partition("::")[0] for n in failed["host-0"]} <= NOT_BOOTED
    assert failed["host-4"] - failed["host-0"] == {
        "test_cloud.py::test_fstab_is_the_images",
        "test_system.py::test_no_swap_is_configured",
    }
    log = (tmp_path / "reports" / "host-4" / "suite.log").read_text()
    assert re.search(r"test_system\.py:[1-9]\d*: AssertionError: /swap none swap", log), log


def test_a_host_whose_sudo_hangs_is_told_as_that(pool: Fleet, tmp_path: Path) -> None:
    pool.hang_sudo(4, answers=False)
    try:
        with runs_of(pool, suite_of(tmp_path, test_fate=FATE)) as runs:
            assert run(runs, pool, 4).kind == "sudo"
            assert run(runs, pool, 0).ok
    finally:
        pool.free_sudo(4)


def test_a_host_that_is_lost_in_mid_suite_is_dropped_and_verified_once_it_is_back(
    pool: Fleet, tmp_path: Path
) -> None:
    suite = suite_of(tmp_path, test_fate=FATE)
    with runs_of(pool, suite) as runs, ThreadPoolExecutor(1) as threads:
        earlier = hanging(pool)
        hangs = threads.submit(run, runs, pool, HANGS)
        wait_until_it_hangs(pool, earlier)
        pool.cut(HANGS)
        try:
            assert hangs.result(600).kind == "dropped"
        finally:
            pool.mend(HANGS)
        assert "the connection to the machine is lost" in (suite.reports / "host-1" / "suite.log").read_text()
        assert run(runs, pool, HANGS, 3).detail == "the suite did not end within 3 s"


@pytest.fixture
def mine(pool: Fleet, minimal: Workplace, tmp_path: Path) -> Path:
    """Make a directory of an ordinary user, with a login key, the hosts' keys, and the facts to verify."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for name, file in (
        ("key", pool.key),
        ("pinned", pool.pinned.path),
        ("facts.json", minimal.artefact / "facts.json"),
    ):
        (mine / name).write_bytes(file.read_bytes())
    (mine / "key").chmod(0o600)
    open_to_all(tmp_path)
    return mine


def start(mine: Path, *argv: str | Path) -> subprocess.Popen[str]:
    """Start the command line as the user, who owns everything in the directory."""
    for path in (mine, *mine.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    return subprocess.Popen(
        [LAUNCHER, *argv],
        cwd=mine,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={"PATH": os.environ["PATH"], "HOME": os.fspath(mine), "CI": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_machine_is_verified_by_an_ordinary_user(pool: Fleet, mine: Path) -> None:
    """With the command line, which starts no service and writes only where its user may."""
    address = pool.hosts[0].address
    _, public = pool.pinned.path.read_text().splitlines()[0].split(" ", 1)
    (mine / "known_hosts").write_text(f"{address} {public}\n")
    target = f"ssh://{USER}@{address}?key={mine}/key&known_hosts={mine}/known_hosts"
    checks = mine / "reports/suite.jsonl"
    with start(mine, "verify", target, "--facts", "facts.json", "--output", "reports") as verification:
        # Checks that wait for a booted machine come later, and take minutes.
        while not checks.exists() or checks.read_text().count('"outcome": "passed"') < 10:
            assert verification.poll() is None, verification.stderr and verification.stderr.read()
            time.sleep(0.1)
        verification.terminate()
    assert checks.stat().st_uid == NOBODY


def test_a_pool_is_brought_up_by_an_ordinary_user(pool: Fleet, mine: Path) -> None:
    """Planned, brought up, queried; a canary gets the whole suite, whose checks for a booted machine fail on it."""
    be_quick(pool, (0, 4))
    install(pool, (0, 4))
    policy = POLICY | {"deadlines": {"probe": 60, "bootstrap": 120, "verify": 300}}
    write_plan(pool, mine, (0, 4), policy).unlink()

    def pool_command(*argv: str | Path, status: int = 0) -> str:
        with start(mine, "pool", *argv) as child:
            out, err = child.communicate(timeout=600)
        assert child.returncode == status, err
        return out

    inventory = ("-i", "hosts.json")
    pool_command("plan", *inventory, "pool", "--policy", "policy.yml", "--out", "my.json")
    login = ("--user", USER, "--key", "key", "--known-hosts", "pinned", "--facts", "facts.json")
    status = PoolError.exit_code
    report = json.loads(pool_command("run", "my.json", *inventory, *login, "--json", status=status))
    outcomes = sorted(signature(result["outcome"]) for result in report["results"].values())
    assert outcomes == [f"failed verify {CHECKS}", "ok"], report["results"]
    assert [pool.run(number, "cat", "/var/joins") for number in (0, 4)] == ["told\n"] * 2
    (verdict,) = (mine / "my.json.reports").glob("*/verify.json")
    assert len([c for c in json.loads(verdict.read_text())["checks"] if c["outcome"] == "passed"]) > 80
    assert json.loads(pool_command("status", "my.json", "--json"))["counts"] == report["counts"]
    assert {path.lstat().st_uid for path in mine.rglob("*")} == {NOBODY}
