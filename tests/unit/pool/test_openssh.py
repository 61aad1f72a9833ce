"""OpenSSH's way through bastions: what a slice contains of it, and what may leave this machine."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

from image_builder.definition.connection import Hop
from image_builder.pool.plan.model import Host
from image_builder.pool.reach.hostkeys import Pinned
from image_builder.pool.reach.reach import Access
from image_builder.pool.run.driver import Work
from image_builder.pool.steps import ansible, openssh
from image_builder.pool.steps.ansible import Slice

GATE, INNER = Hop(address="Gate.example", user="ops"), Hop(address="10.0.0.1", port=2222, key="~/gate%key")


def host(number: int, *hops: Hop) -> Host:
    name = f"host-{number}"
    return Host(
        name=name, address=f"10.0.1.{number}", pool="p", scale_set="s", vm_size="v", image="i", hops=hops
    )


def blocks(config: str) -> dict[str, dict[str, str]]:
    """Return the options of each block of an ssh_config."""
    result: dict[str, dict[str, str]] = {}
    for line in config.splitlines():
        key, _, value = line.strip().partition(" ")
        if key == "Host":
            result[value] = {}
        else:
            list(result.values())[-1][key] = value
    return result


def test_each_bastion_is_described_once_and_held_to_its_key() -> None:
    access = Access(Pinned(Path("/keys/hosts")), "admin", Path("/keys/pool"))
    logins = [access.login(host(1, GATE)), access.login(host(2, GATE, INNER)), access.login(host(3))]
    ways = openssh.ways(logins)
    assert list(ways.values()) == ["hop-0", "hop-1"]
    config = blocks(openssh.config(access, ways, Path("/keys/hosts"), agent=False))
    assert list(config) == ["hop-0", "hop-1", "*"]
    first, second = config["hop-0"], config["hop-1"]
    assert (first["HostName"], first["User"], first["Port"], first["ProxyJump"]) == (
        "Gate.example",
        "ops",
        "22",
        "none",
    )
    assert (second["User"], second["Port"], second["ProxyJump"]) == ("admin", "2222", "hop-0")
    assert first["IdentityFile"] == '"/keys/pool"'
    assert second["IdentityFile"] == f'"{Path("~/gate%%key").expanduser()}"'
    for block, name in ((first, "gate.example"), (second, "10.0.0.1")):
        assert (block["HostKeyAlias"], block["StrictHostKeyChecking"]) == (name, "yes")
        assert block["UserKnownHostsFile"] == '"/keys/hosts"'
    assert config["*"]["IdentityAgent"] == "none" and config["*"]["BatchMode"] == "yes"


def test_a_host_has_time_for_its_bastions() -> None:
    access = Access(Pinned(Path("/keys/hosts")), "admin", Path("/keys/pool"))
    direct, behind = access.login(host(1)), access.login(host(2, GATE))
    ways = openssh.ways([direct, behind])
    options = [openssh.host_options(access, login, ways, "../env") for login in (direct, behind)]
    works = [Work(host(1), 1, 0.0), Work(host(2, GATE), 1, 0.0)]
    for count, seconds in ((1, 10), (2, 60)):
        settings = ansible.environment(Path("slice"), Slice(tuple(works[:count]), access, 900.0))
        # Ansible's own timeout comes after these, and the first of two counts.
        assert f"-o ConnectTimeout={seconds}" in settings["ANSIBLE_SSH_ARGS"]
    assert "ProxyCommand" not in options[0]
    assert shlex.split(options[1]["ProxyCommand"]) == ["sh", "../env/bastion.sh", "hop-0", "[%h]:%p"]


def test_a_slice_for_others_takes_its_bastions_along_and_no_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("gate.example ssh-ed25519 AAAA\n")
    access = Access(Pinned(tmp_path / "keys"), key=tmp_path / "pool")
    folder = tmp_path / "slice"
    ansible.write_portable(Slice((Work(host(1, GATE, INNER), 1, 0.0),), access, 900.0), folder)
    config = blocks((folder / "env/ssh_config").read_text())
    assert config["hop-1"]["UserKnownHostsFile"] == '"known_hosts"'
    assert (folder / "env/known_hosts").read_bytes() == (tmp_path / "keys").read_bytes()
    assert config["*"]["IdentityFile"] == "none" and "IdentityFile" not in config["hop-1"]
    assert (folder / "env/bastion.sh").read_bytes() == openssh.SCRIPT.read_bytes()
    (variables,) = json.loads((folder / "inventory/hosts.json").read_text())["all"]["hosts"].values()
    assert "{{ inventory_dir }}/../env/bastion.sh" in variables["ansible_ssh_common_args"]
    assert variables["ansible_user"] == "root" and variables["ansible_become"] is False
    for path in (p for p in folder.rglob("*") if p.is_file()):
        assert os.fspath(tmp_path) not in path.read_text(), path
