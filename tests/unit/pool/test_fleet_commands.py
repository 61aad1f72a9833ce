"""`pool run`, `pool resume`, `pool abort`, `pool verify`: what is refused before a host is touched, all at once."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from typer.testing import CliRunner

from image_builder import errors
from image_builder.cli.main import app
from image_builder.cli.pool import run as pool_run_commands
from image_builder.pool import rollout
from image_builder.pool.plan import plan as plans
from image_builder.pool.rollout import Stop
from image_builder.pool.run.journal import journal_of, open_journal, requests_of
from image_builder.pool.run.records import Intent, Opened, Stopped
from image_builder.pool.run.rolling import STOPPED
from image_builder.pool.steps import ansible
from image_builder.verify.runner import FACTS, definition_facts
from tests.support.nodes import joins
from tests.support.pools.simulated import rolls
from tests.support.shipped import shipped

HOSTS = """
all:
  children:
    cpu:
      vars: {{pool_image: worker, pool_vm_size: D16, pool_capacity: {capacity}}}
      hosts: {{cpu-0: {{ansible_host: 10.0.0.1}}, cpu-1: {{ansible_host: 10.0.0.2}}}}
"""


@pytest.fixture(autouse=True)
def _no_host_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn every attempt to drive hosts into an error of the test, before a connection is tried."""

    def driven(prepared: rollout.Rollout, _show: object) -> None:
        raise AssertionError(f"hosts are touched: {prepared}")

    # No socket here: tests/pools/test_pool_control_plane.py queries a server.
    monkeypatch.setattr(ansible, "server_fault", lambda *_: "")
    monkeypatch.setattr(rollout, "drive", driven)
    monkeypatch.setattr(rollout, "verify", driven)


class Place:
    """A directory with an inventory of two hosts, its plan, and all that a run needs."""

    def __init__(self, folder: Path) -> None:
        self.hosts, self.plan = folder / "hosts.yml", folder / "p.json"
        self.key, self.known = folder / "key", folder / "known"
        self.facts = folder / "facts.json"
        self.hosts.write_text(HOSTS.format(capacity=2))
        self.facts.write_text(json.dumps(dict.fromkeys(FACTS) | {"image": "worker"}))
        key = Ed25519PrivateKey.generate()
        self.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        self.key.chmod(0o600)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        self.known.write_text(f"cpu-0 {public}\ncpu-1 {public}\n")
        assert call("plan", "-i", str(self.hosts), "cpu", "--out", str(self.plan))[0] == 0

    def access(self) -> list[str]:
        return ["--user", "admin", "--key", str(self.key), "--known-hosts", str(self.known)]

    def run(self, *more: str) -> tuple[int, list[str], str]:
        """Run the plan; return the exit status, the problems in short form, and standard error."""
        arguments = ("run", str(self.plan), "-i", str(self.hosts), *self.access(), *more)
        status, out, err = call(*arguments, "--json")
        problems = json.loads(out)["error"].get("problems", []) if out else []
        return status, [f"{p['path']}: {p['what']}" for p in problems], err


def call(*argv: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["pool", *argv])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_what_fits_is_driven(place: Place) -> None:
    assert "hosts are touched" in place.run("--facts", str(place.facts))[2]


def test_everything_that_is_wrong_is_told_at_once(place: Place, tmp_path: Path) -> None:
    place.hosts.write_text(HOSTS.format(capacity=2).replace("10.0.0.2", "10.0.0.3"))
    place.key.chmod(0o644)
    place.known.write_text("cpu-0 ssh-ed25519 !\n")
    status, problems, _ = place.run("--kubeconfig", str(tmp_path / "none"), "--node-configs", str(tmp_path))
    assert status == errors.DefinitionError.exit_code
    for text in (
        "plan: is older than the inventory: 1 replaced",
        "--key: " + f"{place.key}: others can read it",
        "host keys: " + f"{place.known}:1: not a key",
        "--kubeconfig: ",
        "--facts: no facts for hosts of worker",
        "--node-configs: " + f"{tmp_path} has no file for cpu-0, cpu-1",
    ):
        assert any(problem.startswith(text) for problem in problems), (text, problems)
    assert not journal_of(place.plan).exists()


def test_a_configuration_that_its_node_would_refuse_is_refused(place: Place, tmp_path: Path) -> None:
    good = joins.document(joins.authority().certificate)
    (tmp_path / "cpu-0.json").write_text(json.dumps(good))
    (tmp_path / "cpu-1.json").write_text(json.dumps(good | {"generation": 0, "speed": 3}))
    options = ("--facts", str(place.facts), "--node-configs", str(tmp_path))
    status, problems, _ = place.run(*options)
    assert status == errors.DefinitionError.exit_code
    (problem,) = problems
    assert problem.startswith("--node-configs: cpu-1: ") and "generation" in problem and "speed" in problem
    (tmp_path / "cpu-1.json").write_text(json.dumps(good))
    assert "hosts are touched" in place.run(*options)[2]
    for number in range(2):
        named = good | {"node": {"name": "gpu", "ip": "none"}}
        (tmp_path / f"cpu-{number}.json").write_text(json.dumps(named))
    assert place.run(*options)[1] == [
        "--node-configs: cpu-0, cpu-1: node.name: gpu can belong to only one node"
    ]


def test_fewer_hosts_than_expected_are_refused_beside_the_rest(place: Place) -> None:
    place.hosts.write_text(HOSTS.format(capacity=3))
    status, problems, _ = place.run("--facts", "none.json")
    assert status == errors.DefinitionError.exit_code
    assert any("2 of 3 hosts" in p for p in problems) and any("no such file" in p for p in problems)
    assert "plan: is older than the inventory: it had none of these faults" in problems


def test_what_goes_on_may_be_older_than_an_inventory_with_a_fault(place: Place) -> None:
    place.hosts.write_text(HOSTS.format(capacity=3))
    status, out, _ = call("resume", str(place.plan), "-i", str(place.hosts), *place.access(), "--json")
    problems = [problem["what"] for problem in json.loads(out)["error"]["problems"]]
    assert status == errors.DefinitionError.exit_code
    assert any("2 of 3 hosts" in problem for problem in problems)
    assert not any("is older than" in problem for problem in problems)


def test_a_plan_that_was_edited_is_refused(place: Place) -> None:
    place.plan.write_text(place.plan.read_text().replace('"budget": "2%"', '"budget": "9%"'))
    status, problems, _ = place.run("--facts", str(place.facts))
    assert status == errors.DefinitionError.exit_code and "was changed after it was made" in problems[0]


def test_what_hosts_there_are_is_not_needed_to_tell_the_rest(place: Place, tmp_path: Path) -> None:
    """A plan or an inventory that can't be used hides neither an invalid key nor missing host keys."""
    key = tmp_path / "no-key"
    key.write_text("nothing\n")
    key.chmod(0o600)
    access = ("--user", "admin", "--key", str(key), "--known-hosts", str(tmp_path / "none"))
    place.plan.write_text(place.plan.read_text().replace('"budget": "2%"', '"budget": "9%"'))
    place.hosts.write_text(HOSTS.format(capacity=3))
    kubeconfig = ("--kubeconfig", str(tmp_path / "kubeconfig"))
    run = ("run", str(place.plan), "-i", str(place.hosts), *kubeconfig)
    for arguments, more in (
        (run, ("was changed after it was made", "--kubeconfig: ")),
        (("verify", str(place.plan)), ("was changed after it was made",)),
        (("verify", "-i", str(place.hosts), "--pool", "cpu"), ("2 of 3 hosts",)),
    ):
        status, _, err = call(*arguments, *access)
        assert status == errors.DefinitionError.exit_code, arguments
        for message in (*more, "--key: ", "not a private key", "host keys: ", "No such file"):
            assert message in err, (arguments, message, err)


def test_who_is_off_is_named_before_the_others_are_touched(place: Place) -> None:
    off = "ansible_host: 10.0.0.2, pool_power_state: deallocated"
    place.hosts.write_text(HOSTS.format(capacity=2).replace("ansible_host: 10.0.0.2", off))
    assert "plan: is older than the inventory: 1 gone" in place.run("--facts", str(place.facts))[1]
    facts = ("--facts", str(place.facts))
    verify = ("verify", "-i", str(place.hosts), "--pool", "cpu")
    assert call("plan", "-i", str(place.hosts), "cpu", "--out", str(place.plan))[0] == 0
    for arguments in (("run", str(place.plan), "-i", str(place.hosts)), verify):
        _, _, err = call(*arguments, *place.access(), *facts)
        assert err.startswith("skipped: deallocated: cpu-1\n"), err
        assert "hosts are touched" in err and "name='cpu-1'" not in err


def test_a_run_is_begun_once_and_resumed_with_its_own_journal(place: Place) -> None:
    facts = ("--facts", str(place.facts))
    resume = ("resume", str(place.plan), *place.access(), *facts)
    assert "no run of this plan has started" in call(*resume)[2]
    with open_journal(journal_of(place.plan)) as journal:
        journal.append(Opened(at=1.0, plan=plans.load(place.plan).digest))
        assert any("another process writes" in p for p in place.run(*facts)[1])
    assert any("continue it with `pool resume`" in p for p in place.run(*facts)[1])
    assert "hosts are touched" in call(*resume)[2]
    link = place.plan.with_name("latest.json")
    link.symlink_to(place.plan.name)
    assert "has started" in call("run", str(link), "-i", str(place.hosts), *place.access(), *facts)[2]
    journal_of(place.plan).unlink()
    with open_journal(journal_of(place.plan)) as journal:
        journal.append(Opened(at=1.0, plan="of another"))
    assert "is the journal of another plan" in call(*resume)[2]


def test_a_roll_is_not_resumed_without_the_journal_of_its_requests(place: Place) -> None:
    """It might reimage hosts twice. Before the first reimage that journal isn't missed."""
    rolled = rolls.plan(2)
    plans.save(rolled, place.plan)
    resume = ("resume", str(place.plan), "-i", str(place.hosts), *place.access())
    missing = f"journal: {requests_of(place.plan)} is missing"
    with open_journal(journal_of(place.plan)) as journal:
        journal.append(Opened(at=1.0, plan=rolled.digest))
    assert missing not in call(*resume)[2]
    with open_journal(journal_of(place.plan)) as journal:
        journal.append(Intent(at=2.0, step="reimage", hosts=(rolled.hosts[0].name,)))
    status, _, err = call(*resume)
    assert status == errors.DefinitionError.exit_code
    assert missing in err and f"pool abort --run {rolled.run}" in err
    requests_of(place.plan).touch()
    assert missing not in call(*resume)[2]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--key", "k"], "give exactly one of --host-ca, --known-hosts and --trust-first-use"),
        (["--key", "k", "--host-ca", "a", "--known-hosts", "b"], "give exactly one of"),
    ],
)
def test_a_choice_that_is_missing_or_double(place: Place, argv: list[str], text: str) -> None:
    status, _, err = call("run", str(place.plan), "-i", str(place.hosts), *argv)
    assert status == errors.UsageError.exit_code and text in err


def test_hosts_without_a_private_key_are_named(place: Place) -> None:
    status, _, err = call("run", str(place.plan), "-i", str(place.hosts), "--known-hosts", "b")
    assert status == errors.DefinitionError.exit_code
    assert re.search(r"--key: no private key for \S+.*: give --key, or ansible_ssh_private_key_file", err), (
        err
    )


def test_an_inventory_is_mandatory(place: Place) -> None:
    assert call("run", str(place.plan), *place.access())[0] == errors.UsageError.exit_code
    assert "give a PLAN, or an inventory" in call("verify", *place.access())[2]


def test_verification_needs_facts_of_each_image(place: Place) -> None:
    status, _, err = call("verify", str(place.plan), *place.access())
    assert status == errors.DefinitionError.exit_code and "--facts: no facts for hosts of worker" in err
    facts = ("--facts", f"worker={place.facts}")
    both = call("verify", str(place.plan), "--pool", "cpu", *place.access(), *facts)
    assert both[0] == errors.UsageError.exit_code and "--pool is for an inventory" in both[2]
    for hosts in ((str(place.plan),), ("-i", str(place.hosts), "--pool", "cpu")):
        assert "hosts are touched" in call("verify", *hosts, *place.access(), *facts)[2]


def test_facts_of_another_image_are_not_taken(place: Place) -> None:
    """Unless they are named explicitly: an inventory may use a gallery's name for an image."""
    place.facts.write_text(json.dumps(dict.fromkeys(FACTS) | {"image": "worker_gpu"}))
    assert place.run("--facts", str(place.facts))[1] == [
        "--facts: no facts for hosts of worker: give IMAGE=facts.json of a build; "
        f"{place.facts} is that of worker_gpu"
    ]
    assert "hosts are touched" in place.run("--facts", f"worker={place.facts}")[2]
    other = place.facts.with_name("other.json")
    other.write_text(json.dumps(dict.fromkeys(FACTS) | {"image": "worker"}))
    assert "hosts are touched" in place.run("--facts", str(place.facts), "--facts", str(other))[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "not JSON"), ("[]", "lacks image"), ('{"image": "worker", "artefacts": []}', "lacks build_id")],
    ids=["empty", "list", "manifest"],
)
def test_facts_that_the_suite_would_refuse_on_each_host_are_refused(
    place: Place, text: str, message: str
) -> None:
    place.facts.write_text(text)
    (problem,) = place.run("--facts", str(place.facts))[1]
    assert problem.startswith(f"--facts: {place.facts}: ") and message in problem


def test_a_build_writes_such_facts() -> None:
    definition = shipped("lab").define("minimal")
    assert definition_facts(definition, "0", [], []).keys() >= set(FACTS)


def test_abort_without_a_run(place: Place) -> None:
    assert call("abort", str(place.plan))[0] == errors.UsageError.exit_code
    journal_of(place.plan).touch()
    status, _, err = call("abort", str(place.plan))
    assert status == errors.UsageError.exit_code and "no process drives this run now" in err


def test_a_run_that_stops_already_is_not_asked_again(place: Place) -> None:
    """A second signal would end the work in progress."""
    digest = plans.load(place.plan).digest
    with open_journal(journal_of(place.plan)) as journal:
        journal.append(Opened(at=1.0, plan=digest))
        journal.append(Stopped(at=2.0, reason="a stop was requested"))
        status, out, err = call("abort", str(place.plan), "--no-wait", "--json")
        assert (status, json.loads(out)["reason"]) == (0, "a stop was requested"), err


def test_who_failed_is_taken_up_again_by_retry_alone() -> None:
    def hint(details: Mapping[str, str], **counts: int) -> str:
        return pool_run_commands._hint({"counts": {"ok": 1, **counts}, "skipped": details})

    assert hint({}, failed=1).endswith("pool resume PLAN --retry")
    assert hint({}, unknown=1, waiting=1).endswith("pool resume PLAN")
    # Those that a stop left as they were are taken up again by every resume.
    assert hint({"a": STOPPED}, skipped=1).endswith("pool resume PLAN")
    assert hint({"a": STOPPED, "b": "a pod runs"}, skipped=2).endswith("pool resume PLAN --retry")


def test_the_second_signal_ends_what_the_first_one_asked_to_stop() -> None:
    stop, woken = Stop(), SimpleQueue[str]()
    stop.wake = lambda: woken.put("woken")  # by another thread, which may be faster than the signal number
    before = signal.getsignal(signal.SIGINT)
    with stop.listening():
        assert not stop.is_requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_requested() and woken.get(timeout=60) == "woken" and stop.number == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
