"""The answers of hosts, and what Ansible and OpenSSH say about them, as one class for each host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from image_builder.pool.plan.model import OK, Host, ended, failed
from image_builder.pool.reach import provision
from image_builder.pool.reach.hostkeys import Pinned
from image_builder.pool.reach.provision import JoinStatus
from image_builder.pool.reach.reach import Access
from image_builder.pool.run.driver import Work
from image_builder.pool.run.journal import FORMAT
from image_builder.pool.run.records import Result
from image_builder.pool.steps import ansible
from image_builder.pool.steps.ansible import CONFIGURE, START, WAIT, Results, unreached
from image_builder.settings import REPO_ROOT
from image_builder.system.journal import parse


def record(state: str, phase: str = "", code: int = 0, reason: str = "") -> str:
    phases = [
        {"name": "identity", "state": "ok", "seconds": 0.25, "code": 0, "reason": ""},
        {"name": "disk", "state": "skipped", "seconds": 0.0, "code": 0, "reason": "none"},
    ]
    document = {"format": 1, "state": state, "phase": phase, "code": code, "reason": reason, "phases": phases}
    return json.dumps(document | {"seconds": 3.0, "boot_id": "b"})


def test_a_host_that_joined() -> None:
    status = provision.read(0, record("ok").encode())
    assert status == JoinStatus(OK, "yes", (("identity", 0.25),))
    assert provision.after_join(0, record("ok")) == status


def test_a_host_that_was_never_told() -> None:
    assert provision.read(1, b"", b"") == JoinStatus(OK, "no")
    assert provision.after_join(1, "").outcome.kind == "unknown"


@pytest.mark.parametrize("answer", [(0, provision.BUSY), (1, record("running", "network"))])
def test_a_host_that_still_tries_is_neither(answer: tuple[int, str]) -> None:
    status, out = answer
    current = provision.read(status, f"{out}\n".encode())
    assert current.busy and current.joined == "unknown"
    assert provision.after_join(status, out) == provision.after_join(provision.STILL_HELD, "")
    assert provision.after_join(status, out).outcome.kind == "unknown"


@pytest.mark.parametrize(
    ("phase", "joined"),
    [("disk", "no"), ("credentials", "no"), ("join", "no"), ("kubelet", "unknown"), ("ready", "unknown")],
)
def test_a_phase_that_failed_is_told_by_the_host(phase: str, joined: str) -> None:
    status = provision.read(1, record("failed", phase, 31, "it is broken"))
    assert (status.outcome, status.joined) == (failed(phase, 31, "it is broken"), joined)
    assert provision.after_join(1, record("failed", phase, 31, "it is broken")) == status


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-1", "1e400", f"1{'0' * 400}", "true"])
def test_what_is_no_duration_is_left_out(seconds: str) -> None:
    phase = f'{{"name": "disk", "state": "ok", "seconds": {seconds}}}'
    assert provision.read(0, f'{{"state": "ok", "phases": [{phase}]}}') == JoinStatus(OK, "yes")


def test_a_host_that_tells_of_thousands_of_phases_fills_no_journal() -> None:
    phases = [{"name": f"p{n}", "state": "ok", "seconds": 1} for n in range(20000)]
    status = provision.read(0, json.dumps({"state": "ok", "phases": phases}))
    assert (status.outcome, len(status.phases)) == (OK, 64)


def test_whatever_a_host_says_the_journal_can_be_read_again() -> None:
    half = "\\ud800"
    phases = f'[{{"name": "{half}", "state": "ok", "seconds": 1}}]'
    for code in ("true", "-1", "9" * 400, '"31"', "31"):
        text = f'{{"state": "failed", "phase": "{half}", "code": {code}, "reason": "{half}", "phases": {phases}}}'
        status = provision.read(1, text)
        assert (status.outcome.kind, status.outcome.phase) == ("failed", "?")
        result = Result(
            at=1, host="a", step="probe", attempt=1, outcome=status.outcome, phases=dict(status.phases)
        )
        line = f'{{"n":1,{result.model_dump_json()[1:]}\n'
        assert parse(line.encode(), "here", FORMAT)[0] == [result]
    assert ended("dropped", "\udcff").detail == "?"
    assert provision.read(1, b"[" * 200_000).joined == "unknown"


def test_a_host_without_the_agent_is_not_told() -> None:
    status = provision.read(127, b"", b"sh: 1: exec: node-agent: not found")
    assert status.joined == "no" and status.outcome.signature == f"failed bootstrap {provision.NO_AGENT}"
    assert "node-agent: not found" in status.outcome.detail


@pytest.mark.parametrize(
    ("status", "out"),
    [
        (0, ""),
        (0, "welcome!"),
        (1, "[]"),
        (0, record("failed", "ready", 93)[:40]),
        (1, record("ok")),
        (0, '{"state": null}'),
    ],
)
def test_an_answer_that_is_not_understood_is_no_verdict(status: int, out: str) -> None:
    answer = provision.read(status, out)
    assert not answer.outcome.ok and answer.joined == "unknown"


def test_a_reason_of_any_length_fits() -> None:
    assert len(provision.read(1, record("failed", "gpu", 51, "x" * 5000)).outcome.detail) == 500


PREFIX = "Failed to connect to the host via ssh: "


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (PREFIX + "ssh: connect to host 10.0.0.1 port 22: Connection refused", "refused"),
        (PREFIX + "kex_exchange_identification: Connection closed by remote host", "refused"),
        (PREFIX + "ssh: connect to host 10.0.0.1 port 22: Connection timed out", "timeout"),
        (PREFIX + "ssh: connect to host 10.0.0.1 port 22: No route to host", "timeout"),
        (PREFIX + "Connection timed out during banner exchange", "timeout"),
        (PREFIX + "admin@10.0.0.1: Permission denied (publickey).", "auth"),
        (
            PREFIX + "No ED25519 host key is known for vm-1 and you have requested strict checking.\nHost key"
            " verification failed.",
            "host key",
        ),
        (PREFIX + "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "host key"),
        (PREFIX + "Timeout, server 10.0.0.1 not responding.", "dropped"),
        (PREFIX + "client_loop: send disconnect: Broken pipe", "dropped"),
        # From a shared connection, where the network failed in the middle of a task.
        (PREFIX, "dropped"),
        (PREFIX + "Shared connection to 10.0.0.1 closed.\nConnection reset by peer", "dropped"),
        ("Missing sudo password", "sudo"),
        ("sudo: a password is required", "sudo"),
        ("admin is not in the sudoers file.", "sudo"),
        ("Timeout (12s) waiting for privilege escalation prompt: ", "sudo"),
        (PREFIX + "something that nobody has seen", "timeout"),
        (
            PREFIX + "kex_exchange_identification: Bad remote protocol version identification: "
            "'SSH-no way through hop-0: ops@gate: Permission denied (publickey).'",
            "bastion",
        ),
    ],
)
def test_what_openssh_and_sudo_say(message: str, kind: str) -> None:
    assert unreached(message, answered=False).kind == kind


def test_a_host_that_was_told_has_not_gone_before_it_was_reached() -> None:
    refused = PREFIX + "ssh: connect to host 10.0.0.1 port 22: Connection refused"
    assert unreached(refused, answered=True).kind == "dropped"
    assert unreached(PREFIX + "?", answered=True).kind == "dropped"


class Ends(dict[str, JoinStatus]):
    """The statuses with which hosts ended; none ends twice."""

    def end(self, name: str, status: JoinStatus) -> None:
        assert name not in self
        self[name] = status


def line(host: str, task: str, end: str, **result: object) -> str:
    return json.dumps(
        {"host": host, "task": task, "what": end, "result": {k: str(v) for k, v in result.items()}}
    )


def test_each_host_of_a_slice_gets_one_end() -> None:
    ends = Ends()
    results = Results(["a", "b", "c", "d", "e", "f", "g"], ends.end)
    lost = PREFIX + "client_loop: send disconnect: Broken pipe"
    for text in (
        line("a", START, "ok", rc=0),
        line("b", START, "unreachable", msg=lost),
        line("c", START, "unreachable", msg=PREFIX + "x: Permission denied (publickey)."),
        line("d", CONFIGURE, "failed", msg="Missing sudo password"),
        line("e", START, "failed", rc=1, stderr="mkdir: No space left on device"),
        line("f", START, "ok", rc=0),
        line("g", CONFIGURE, "failed", msg="Destination /etc/node-agent not writable"),
        line("f", WAIT, "unreachable", msg=lost),
        line("a", WAIT, "ok", rc=0, stdout=record("ok")),
        line("a", WAIT, "unreachable", msg=lost),
        '{"end": 4, "tail": ""}',
    ):
        results.line(text)
    results.over("its Ansible process ended")
    classes = {name: (status.outcome.signature, status.joined) for name, status in ends.items()}
    assert classes == {
        "a": ("ok", "yes"),
        "b": ("dropped", "unknown"),
        "c": ("auth", "no"),
        "d": ("sudo", "no"),
        "e": ("failed bootstrap 3", "unknown"),
        "f": ("dropped", "unknown"),
        "g": ("failed bootstrap 2", "no"),
    }
    assert "No space left" in ends["e"].outcome.detail


def test_hosts_of_which_the_process_said_nothing_are_not_lost() -> None:
    ends = Ends()
    results = Results(["told", "not"], ends.end)
    results.line(line("told", START, "ok", rc=0))
    assert results.line("Traceback (most recent call last):") == "Traceback (most recent call last):"
    results.over("killed")
    assert {name: status.outcome.kind for name, status in ends.items()} == {
        "told": "unknown",
        "not": "dropped",
    }
    assert {status.joined for status in ends.values()} == {"unknown"} and results.unfinished == ()


def test_the_playbook_has_the_tasks_that_results_are_told_apart_by() -> None:
    [play] = yaml.safe_load((REPO_ROOT / "playbooks/bootstrap.yml").read_text())
    assert [task["name"] for task in play["tasks"]] == [CONFIGURE, START, WAIT]
    assert play["gather_facts"] is False and "serial" not in play


def slice_of(*delays: float, key: Path = Path("/keys/pool")) -> ansible.Slice:
    hosts = [
        Host(
            name=f"h{n}",
            address=f"10.0.0.{n}",
            pool="p",
            scale_set="s",
            vm_size="v",
            image="i",
            vm_id=f"vm-{n}",
        )
        for n in range(len(delays))
    ]
    work = [Work(host, 1, delay) for host, delay in zip(hosts, delays, strict=True)]
    return ansible.Slice(work, Access(Pinned(Path("/keys/hosts")), "admin", key), 900.0)


def test_a_slice_is_a_private_data_directory_without_secrets(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("-----BEGIN CANARY-----")
    folder = tmp_path / "slice"
    ansible.write(slice_of(2.0, 0.5, key=key), folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {f.relative_to(folder).as_posix() for f in files} >= {
        "inventory/hosts.json",
        "project/bootstrap.yml",
        "env/envvars",
    }
    assert not any(b"CANARY" in path.read_bytes() for path in files)
    inventory = json.loads((folder / "inventory/hosts.json").read_text())["all"]
    assert list(inventory["hosts"]) == ["h1", "h0"], "who joins first is waited for first"
    assert inventory["hosts"]["h0"]["pool_join_delay"] == 2.0
    arguments = inventory["hosts"]["h0"]["ansible_ssh_common_args"]
    assert "HostKeyAlias=vm-0" in arguments and "StrictHostKeyChecking=yes" in arguments
    settings = json.loads((folder / "env/envvars").read_text())
    assert settings["ANSIBLE_FORKS"] == "2" and settings["ANSIBLE_PIPELINING"] == "true"
    assert "ControlPersist=60s" in settings["ANSIBLE_SSH_ARGS"]
    plugins = {name: value for name, value in settings.items() if name.endswith(("_PLUGINS", "_LIBRARY"))}
    assert len(plugins) > 10 and set(plugins.values()) == {str(folder / "nowhere")}
    # Among many hosts at once, each has as long for its login as in a probe.
    assert settings["ANSIBLE_TIMEOUT"] == "60" and "ConnectTimeout=10" in settings["ANSIBLE_SSH_ARGS"]
