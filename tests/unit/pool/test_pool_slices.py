"""Slices for others: a policy's workers, and private data directories whose paths all stay inside them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from image_builder.cli.main import app
from image_builder.errors import UsageError
from image_builder.pool.plan import plan as plans
from image_builder.pool.reach.hostkeys import known_as
from image_builder.pool.steps import ansible, worker_guard
from image_builder.pool.steps import slice as slice_
from tests.support.nodes import joins
from tests.support.pools.simulated.rollouts import make


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("10.0.0.9", "ssh://user@host"),
        ("ssh://runner@10.0.0.9", "needs a key and known_hosts"),
        ("ssh://runner@10.0.0.9?key=KEY", "needs a key and known_hosts"),
        ("ssh://runner@10.0.0.9?key=KEY&known_hosts=/none", "no such file: /none"),
    ],
)
def test_a_worker_is_known_and_its_key_is_there(tmp_path: Path, url: str, message: str) -> None:
    key = tmp_path / "key"
    key.touch()
    with pytest.raises(UsageError) as refused:
        slice_.parse_workers([url.replace("KEY", os.fspath(key))], "ansible-runner", 20)
    assert message in f"{refused.value.message} {refused.value.hint}"


def test_a_worker_is_reached_by_its_key_and_known_by_its_own(tmp_path: Path) -> None:
    key, known_hosts = tmp_path / "key", tmp_path / "known"
    key.write_text("a secret")
    known_hosts.touch()
    url = f"ssh://runner@10.0.0.9:2222?key={key}&known_hosts={known_hosts}"
    (worker,) = slice_.parse_workers([url], "/opt/runner/bin/ansible-runner", 20)
    login = " ".join(worker.login)
    assert login.startswith("ssh -F none -T -p 2222") and login.endswith("runner@10.0.0.9 --")
    for option in ("StrictHostKeyChecking=yes", "IdentityAgent=none", "BatchMode=yes", f'"{known_hosts}"'):
        assert option in login
    assert "a secret" not in slice_.describe(worker, key)


@pytest.mark.parametrize("silent", [1.0, 3.0, 4.5, 20.0, 600.0])
def test_a_worker_has_ended_its_slice_when_it_is_given_up(tmp_path: Path, silent: float) -> None:
    for name in ("key", "known"):
        (tmp_path / name).touch()
    url = f"ssh://runner@10.0.0.9?key={tmp_path / 'key'}&known_hosts={tmp_path / 'known'}"
    (worker,) = slice_.parse_workers([url], "ansible-runner", silent)
    options = dict(word.split("=", 1) for word in worker.login if word.startswith("ServerAlive"))
    interval, count = (int(options[f"ServerAlive{name}"]) for name in ("Interval", "CountMax"))
    assert silent + 4 <= interval * count <= silent + 7


def test_a_key_goes_to_memory_or_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    can_be_written = {"/run/user/1000", "/dev/shm", "/tmp"}
    monkeypatch.setattr(os, "access", lambda place, _: place in can_be_written)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert worker_guard._memory() == "/run/user/1000"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert worker_guard._memory() == "/dev/shm"
    can_be_written.remove("/dev/shm")
    with pytest.raises(SystemExit, match="only in memory"):
        worker_guard._memory()


def test_slices_of_a_wave_for_any_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No path of this machine and no key, join slots at the plan's rate, and everything that a host needs."""
    plan = make(12)
    file, keys, configs = tmp_path / "p.json", tmp_path / "keys", tmp_path / "configs"
    plans.save(plan, file)
    keys.write_text("".join(f"{known_as(host)} ssh-ed25519 AAAA\n" for host in plan.hosts))
    configs.mkdir()
    # No socket here: tests/pools/test_pool_control_plane.py queries a server.
    monkeypatch.setattr(ansible, "server_fault", lambda *_: "")
    authority = joins.authority().certificate
    documents = {host.name: joins.document(authority, node={"name": host.name}) for host in plan.hosts}
    for name, document in documents.items():
        (configs / f"{name}.json").write_text(json.dumps(document))
    wave = plan.waves[-1]
    arguments = [str(file), "--wave", wave.name, "--user", "admin", "--known-hosts", str(keys)]
    arguments += ["--node-configs", str(configs), "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, ["pool", "slice", *arguments])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["hosts"] == len(wave.hosts)
    hosts: dict[str, dict[str, float]] = {}
    for folder in sorted((tmp_path / "out").iterdir()):
        inventory = json.loads((folder / "inventory/hosts.json").read_text())["all"]
        hosts |= inventory["hosts"]
        assert {host["ansible_user"] for host in inventory["hosts"].values()} == {"admin"}
        assert "private_key" not in str(inventory)
        for path in (p for p in folder.rglob("*") if p.is_file()):
            assert os.fspath(tmp_path) not in path.read_text(), path
        for name, variables in inventory["hosts"].items():
            config = variables["pool_node_config"].replace("{{ inventory_dir }}", f"{folder}/inventory")
            assert json.loads(Path(config).read_text()) == documents[name]
            (known_hosts,) = re.findall(r'UserKnownHostsFile="\{\{ inventory_dir \}\}/(\S+)"', str(variables))
            assert (folder / "inventory" / known_hosts).read_bytes() == keys.read_bytes()
    assert hosts.keys() == set(wave.hosts)
    delays = sorted(variables["pool_join_delay"] for variables in hosts.values())
    assert delays == [round(n / plan.policy.join_rate, 3) for n in range(len(wave.hosts))]

    (configs / f"{wave.hosts[0]}.json").write_text("{}")
    arguments[-2] = str(tmp_path / "refused")
    done = CliRunner().invoke(app, ["pool", "slice", *arguments])
    assert done.exit_code == 3 and not (tmp_path / "refused").exists()
    (problem,) = json.loads(done.stdout)["error"]["problems"]
    assert f"{wave.hosts[0]}: format: is missing" in problem["what"]


def test_a_wave_must_be_one_of_the_plan(tmp_path: Path) -> None:
    plans.save(make(3), tmp_path / "p.json")
    (tmp_path / "keys").touch()
    arguments = ["pool", "slice", str(tmp_path / "p.json"), "--wave", "canary"]
    arguments += ["--known-hosts", str(tmp_path / "keys"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and "no wave `canary`" in done.output
    assert not (tmp_path / "out").exists()
