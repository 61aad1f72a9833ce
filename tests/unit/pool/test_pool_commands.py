"""The commands `pool plan`, `pool status`, `pool report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.errors import DefinitionError, UsageError
from image_builder.pool.plan import plan as plans
from image_builder.pool.plan.model import CLASSES, failed
from image_builder.pool.plan.policy import Policy
from image_builder.pool.run.journal import journal_of, open_journal
from image_builder.pool.run.records import Opened, Record
from image_builder.pool.show import report as reports
from tests.support.pools.simulated.rollouts import Faults, make, simulate
from tests.support.shipped import filled

HOSTS = """
all:
  children:
    cpu:
      vars: {pool_image: worker, pool_vm_size: D16}
      hosts: {cpu-0: {ansible_host: 10.0.0.1}, cpu-1: {ansible_host: 10.0.0.2}, cpu-2: {ansible_host: 10.0.0.3}}
"""


def _run(*argv: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["pool", *argv])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.yml"
    file.write_text(HOSTS)
    return file


def test_a_plan_is_written_and_told(hosts: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    status, answer, _ = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--json")
    assert status == 0
    plan = plans.load(out)
    answer = json.loads(answer)
    assert answer["digest"] == plan.digest and answer["pools"] == {"cpu": 3}
    assert [w["name"] for w in answer["waves"]] == ["canaries", "wave 1", "wave 2"]
    before = out.read_bytes()
    assert _run("plan", "-i", str(hosts), "cpu", "--out", str(out))[0] == 0
    assert out.read_bytes() == before


def test_a_plan_says_who_is_skipped(hosts: Path, tmp_path: Path) -> None:
    """Deallocated hosts would time out and use up the budget."""
    off = "ansible_host: 10.0.0.3, pool_power_state: deallocated"
    hosts.write_text(HOSTS.replace("ansible_host: 10.0.0.3", off))
    out = tmp_path / "p.json"
    arguments = ("plan", "-i", str(hosts), "cpu", "--out", str(out))
    status, answer, _ = _run(*arguments)
    assert status == 0 and answer.splitlines()[0].startswith("skipped: deallocated: ")
    plan = plans.load(out)
    (skipped,) = json.loads(_run(*arguments, "--json")[1])["skipped"]["deallocated"]
    assert len(plan.hosts) == 2 and skipped not in plan.host


def test_the_plan_of_a_run_that_has_begun_is_not_replaced(hosts: Path, tmp_path: Path) -> None:
    """Without it the run couldn't be resumed."""
    out = tmp_path / "p.json"
    arguments = ("plan", "-i", str(hosts), "cpu", "--out", str(out))
    assert _run(*arguments)[0] == 0
    before = plans.load(out)
    with open_journal(journal_of(out)) as journal:
        journal.append(Opened(at=1.0, plan=before.digest))
    assert _run(*arguments)[0] == 0, "the same plan is no other one"
    hosts.write_text(HOSTS.replace("10.0.0.3", "10.0.0.4"))
    status, _, err = _run(*arguments)
    assert status == errors.UsageError.exit_code and "has started" in err and "another file" in err
    assert plans.load(out) == before
    journal_of(out).write_text("damaged\n" * 2)
    assert _run(*arguments)[0] == errors.UsageError.exit_code and plans.load(out) == before
    journal_of(out).write_text("")
    assert _run(*arguments)[0] == 0 and plans.load(out) != before, "nothing was begun"


def test_a_policy_comes_from_a_file(hosts: Path, tmp_path: Path) -> None:
    out, policy = tmp_path / "p.json", tmp_path / "policy.yml"
    policy.write_text("waves: ['100%']\nmax_unavailable: '100%'\ndeadlines: {bootstrap: 60.0}\n")
    status, _, _ = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--policy", str(policy))
    assert status == 0
    plan = plans.load(out)
    assert [len(wave.hosts) for wave in plan.waves] == [1, 2] and plan.policy.deadlines.bootstrap == 60
    policy.write_text("waves: []\nspeed: 9\nbudget: 2\n")
    status, _, err = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--policy", str(policy))
    assert status == errors.DefinitionError.exit_code
    assert all(word in err for word in ("waves", "speed", "budget", "3 problems"))
    policy.write_text("join_rate: .inf\ndeadlines: {bootstrap: .inf}\nworker_silent_seconds: .inf\n")
    status, _, err = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--policy", str(policy))
    assert status == errors.DefinitionError.exit_code
    assert all(word in err for word in ("join_rate", "deadlines.bootstrap", "worker_silent", "3 problems"))
    policy.write_text("[]\n")
    status, _, err = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--policy", str(policy))
    assert status == errors.DefinitionError.exit_code, "a list is no policy, an empty one neither"
    policy.write_text("budget: '1%'\ndeadlines: {probe: 9, verify: 9}\nbudget: '9%'\n")
    status, _, err = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--policy", str(policy))
    assert status == errors.DefinitionError.exit_code and "duplicate key budget" in err and "line 3" in err
    bad = tmp_path / "bad.yml"
    bad.write_text(HOSTS.replace("10.0.0.2", "10.0.0.1"))
    status, _, err = _run("plan", "-i", str(bad), "cpu", "none", "--out", str(out), "--policy", str(policy))
    assert status == errors.DefinitionError.exit_code and "3 problems" in err
    assert all(
        word in err for word in ("duplicate key budget", "unknown pool `none`", "is that of cpu-0, cpu-1")
    )
    policy.write_bytes(b"waves: \xff")
    status, _, err = _run("plan", "-i", str(hosts), "cpu", "--out", str(out), "--policy", str(policy))
    assert status == errors.DefinitionError.exit_code and "can't decode" in err
    assert plans.load(out) == plan


def test_a_place_that_cannot_be_written_is_a_mistake_and_no_bug(hosts: Path, tmp_path: Path) -> None:
    plan = ("plan", "-i", str(hosts), "cpu", "--out")
    assert _run(*plan, str(tmp_path / "p.json"))[0] == 0
    slices = ("slice", str(tmp_path / "p.json"), "--wave", "canaries", "--known-hosts", str(hosts), "--out")
    for arguments, place in (
        (plan, tmp_path / "none" / "p.json"),
        (plan, hosts / "p.json"),
        (plan, tmp_path),
        (slices, tmp_path),
        (slices, hosts / "slices"),
    ):
        status, _, err = _run(*arguments, str(place))
        assert status == errors.UsageError.exit_code and f"can't write {place}" in err


def test_without_an_inventory_nothing_is_planned(tmp_path: Path) -> None:
    status, _, err = _run("plan", "cpu", "--out", str(tmp_path / "p.json"))
    assert status == errors.UsageError.exit_code and "--inventory" in err
    assert list(tmp_path.iterdir()) == []


def test_a_pool_that_is_not_there_leaves_no_plan(hosts: Path, tmp_path: Path) -> None:
    status, answer, _ = _run("plan", "-i", str(hosts), "cpus", "--out", str(tmp_path / "p.json"), "--json")
    assert status == errors.DefinitionError.exit_code
    assert "did you mean `cpu`" in json.loads(answer)["error"]["problems"][0]["what"]
    assert not (tmp_path / "p.json").exists()


def _ran(folder: Path, faults: Faults, records: slice = slice(None)) -> Path:
    """Write a plan and the journal of its simulated run; return the plan's file."""
    plan = make(60)
    path = folder / "p.json"
    plans.save(plan, path)
    history: list[Record] = simulate(plan, faults)[2][records]
    with open_journal(journal_of(path)) as journal:
        for record in history:
            journal.append(record)
    return path


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    plans.save(make(60), tmp_path / "p.json")
    status, answer, _ = _run("status", str(tmp_path / "p.json"), "--json")
    assert status == 0
    answer = json.loads(answer)
    assert answer["state"] == "not started" and answer["counts"]["not started"] == 60
    assert not journal_of(tmp_path / "p.json").exists()


def test_a_finished_run_is_reported_host_by_host(tmp_path: Path) -> None:
    path = _ran(tmp_path, Faults())
    status, report, _ = _run("report", str(path), "--json")
    answer = json.loads(report)
    assert status == 0 and answer["state"] == "finished"
    assert answer["counts"]["ok"] == 60 == len(answer["results"])
    assert set(answer["counts"]) == {*CLASSES, "not started", "in work"}
    assert answer["seconds"]["bootstrap"]["p50"] < answer["seconds"]["bootstrap"]["p95"]
    assert len(answer["slowest"]) == 20
    assert all(w["passed"] > w["began"] for w in answer["waves"])
    status, text, _ = _run("status", str(path))
    assert status == 0 and text.startswith("finished\n60 hosts: 60 ok; 60 verified\n0 failed of 1 allowed")


def test_a_stopped_run_says_why_and_what_failed(tmp_path: Path) -> None:
    first = make(60).waves[0].hosts[0]
    path = _ran(tmp_path, Faults(fates={first: failed("gpu", 61, "")}))
    status, text, _ = _run("status", str(path))
    assert status == 1
    assert "stopped: 1 host of canaries failed, its budget is 0" in text
    assert f"1 x failed gpu 61: {first}" in text
    answer = json.loads(_run("report", str(path), "--json")[1])
    (alike,) = answer["failures"]
    assert alike["hosts"] == [first] and sum(alike["zones"].values()) == 1


def test_a_killed_run_is_interrupted_and_a_living_one_runs(tmp_path: Path) -> None:
    path = _ran(tmp_path, Faults(), slice(0, 30))
    status, answer, _ = _run("status", str(path), "--json")
    assert status == 1 and json.loads(answer)["state"] == "interrupted"
    with open_journal(journal_of(path)):
        status, answer, _ = _run("status", str(path), "--json")
        assert status == 0 and json.loads(answer)["state"] == "running"


def test_a_damaged_journal_is_an_error(tmp_path: Path) -> None:
    path = _ran(tmp_path, Faults())
    data = journal_of(path).read_bytes()
    journal_of(path).write_bytes(data.replace(b'"step":"verify"', b'"step":"vandal"', 1))
    status, _, err = _run("status", str(path))
    assert status == errors.ImageBuilderError.exit_code and "the journal is damaged" in err


def test_placeholders_are_refused_wherever_an_inventory_is_read(tmp_path: Path) -> None:
    """As `validate` does: with the file and the line of each one."""
    example = filled("azure_vmss", tmp_path)
    marked = example / "group_vars/pools/main.yml"
    marked.write_text(f"{marked.read_text()}\npool_note: x  # REPLACE\n")
    line = len(marked.read_text().splitlines())
    out = str(tmp_path / "out")
    for argv in (
        ["plan", "pools", "-i", str(example), "--out", out],
        ["render", "vmss_cpu", "-i", str(example), "--out", out],
        ["template", "vmss_h100_a", "-i", str(example), "--out", out, "--version", "2026.1125.0"],
    ):
        done = CliRunner().invoke(app, ["pool", *argv])
        assert done.exit_code == DefinitionError.exit_code, (argv, done.output)
        assert f"main.yml:{line}" in done.stderr and "REPLACE" in done.stderr and not Path(out).exists()
    name = (
        "h100=/subscriptions/REPLACE/resourceGroups/g/providers/Microsoft.Compute/virtualMachineScaleSets/v"
    )
    done = CliRunner().invoke(app, ["pool", "snapshot", name, "--out", out])
    assert done.exit_code == UsageError.exit_code and "REPLACE" in done.stderr and not Path(out).exists()


@pytest.mark.parametrize(("fates", "listed"), [(168, 168), (0, 0), (1200, 150)])
def test_a_report_lists_who_is_not_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fates: int, listed: int
) -> None:
    """At most 200 lines for 7,500 hosts; --all lists everyone."""
    plan = make(7500, Policy(budget="100%", wave_budget="100%", same_share="100%", max_unavailable="100%"))
    bad = [host.name for host in plan.hosts[:: 7500 // fates if fates else 7501]][:fates]
    progress, _, records = simulate(
        plan, Faults(fates={n: failed("gpu", 60 + i % 12) for i, n in enumerate(bad)})
    )
    document = reports.report(progress, records)
    monkeypatch.setattr("image_builder.cli.pool.plan.read_run", lambda _: (progress, records, document))
    shown = CliRunner().invoke(app, ["pool", "report", str(tmp_path / "plan.json")])
    lines = shown.stdout.splitlines()
    assert shown.exit_code == 0 and len(lines) <= 200
    hosts = [line for line in lines if line.split()[0] in progress.hosts]
    assert len(hosts) >= listed and all("ok" not in line.split() for line in hosts)
    if listed < fates:
        assert f"and {fates - len(hosts)} more hosts" in lines[-1]
    else:
        assert len(hosts) == fates
    everyone = CliRunner().invoke(app, ["pool", "report", str(tmp_path / "plan.json"), "--all"]).stdout
    assert sum(line.split()[0] in progress.hosts for line in everyone.splitlines()) == 7500
