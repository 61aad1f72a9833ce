"""The connection to hosts: which of Ansible's variables count, and what is refused."""

from __future__ import annotations

import itertools
import re

import pytest
import yaml
from ansible.plugins.become import sudo
from ansible.plugins.connection import ssh

from image_builder.canonical import JSON
from image_builder.definition import connection
from image_builder.definition.connection import Connection, Hop, parse_arguments
from image_builder.definition.values import VAULT_KEY

GATE, USER_GATE = Hop(address="gate"), Hop(address="gate", port=2222, user="ops")


def test_the_variables_are_those_of_ansibles_plugin_in_its_order() -> None:
    options = yaml.safe_load(ssh.DOCUMENTATION)["options"]
    for option, names in connection.VARIABLES.items():
        documented = [entry["name"] for entry in options[option]["vars"]]
        assert list(names) == [name for name in documented if name.startswith("ansible_")]
    arguments = [
        options[name]["vars"][0]["name"] for name in ("ssh_args", "ssh_common_args", "ssh_extra_args")
    ]
    assert list(connection.ARGUMENTS) == arguments
    users = [entry["name"] for entry in yaml.safe_load(sudo.DOCUMENTATION)["options"]["become_user"]["vars"]]
    assert connection.NAMES.issuperset(users)


def test_what_an_inventory_says_of_a_host() -> None:
    values: dict[str, JSON] = {
        "ansible_host": "10.0.0.1",
        "ansible_port": "2200",
        "ansible_user": "a",
        "ansible_ssh_user": "b",
        "ansible_private_key_file": "~/key",
        "ansible_become": True,
        "ansible_ssh_args": "",
        "ansible_ssh_extra_args": "-J gate",
    }
    assert connection.read(values) == (Connection("10.0.0.1", 2200, "b", "~/key", (GATE,)), [])
    assert connection.read({}) == (Connection(), [])


@pytest.mark.parametrize(
    ("arguments", "hops"),
    [
        ("", ()),
        ("-J none", ()),
        ("-J gate", (GATE,)),
        ("-Jops@gate:2222,gate", (USER_GATE, GATE)),
        ("-J ssh://ops@gate:2222", (USER_GATE,)),
        ("-J ops@[fe80::1]:2222", (Hop(address="fe80::1", port=2222, user="ops"),)),
        ("-o ProxyJump=ops@gate:2222", (USER_GATE,)),
        ("-o 'proxyjump gate'", (GATE,)),
        ("-o ProxyCommand='ssh -W %h:%p -q ops@gate -p 2222'", (USER_GATE,)),
        ("-o ProxyCommand='/usr/bin/ssh -l ops -p2222 -W [%h]:%p gate'", (USER_GATE,)),
        ("-o ProxyCommand='ssh -i ~/gate_key -W %h:%p gate'", (Hop(address="gate", key="~/gate_key"),)),
        ("-o ProxyCommand='ssh -J gate -W %h:%p ops@gate:2222'", (GATE, USER_GATE)),
    ],
)
def test_ways_through_bastions(arguments: str, hops: tuple[Hop, ...]) -> None:
    assert parse_arguments(arguments) == hops


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("-C", "`-C` is not supported, only a way through bastions"),
        ("-o ControlMaster=auto", "`-o ControlMaster=auto` is not supported"),
        ("-o UserKnownHostsFile=/dev/null", "is not supported"),
        ("-F ~/.ssh/config", "`-F` is not supported"),
        ("elsewhere", "`elsewhere` is not supported"),
        ("-J", "`-J` is not supported"),
        ("-o 'ProxyJump", "No closing quotation"),
        ("-J gate -o ProxyJump=other", "more than one way"),
        ("-J gate,", "`` is no bastion"),
        ("-J %r@gate", "is no bastion"),
        ("-J gate:port", "is no bastion"),
        ("-J gate/x", "is no bastion"),
        ("-J 'a b'", "is no bastion"),
        ("-o ProxyCommand='nc %h %p'", "ProxyCommand `nc %h %p` is not supported"),
        ("-o ProxyCommand='ssh gate nc %h %p'", "is not supported"),
        ("-o ProxyCommand='ssh -W other:22 gate'", "is not supported"),
        ("-o ProxyCommand='ssh -W %h:%p -F none gate'", "`-F` is not supported"),
        ("-o ProxyCommand='ssh -W %h:%p -o User=x gate'", "`-o User=x` is not supported"),
    ],
)
def test_other_arguments_are_refused(arguments: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_arguments(arguments)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"ansible_port": 70000}, ("ansible_port", "must be a port, got 70000")),
        ({"ansible_ssh_port": "ssh"}, ("ansible_ssh_port", "must be a port, got ssh")),
        ({"ansible_user": ["a"]}, ("ansible_user", 'must be a text, got ["a"]')),
        ({"ansible_become_user": "app"}, ("ansible_become_user", "must be root, got app")),
        ({"ansible_connection": "local"}, ("ansible_connection", "must be ssh, got local")),
        (
            {"ansible_user": "ops", "ansible_become": "no"},
            ("ansible_become", "can't be off: what ops does on a host is done as root"),
        ),
        (
            {"ansible_ssh_common_args": "-J gate", "ansible_ssh_extra_args": "-J gate"},
            ("ansible_ssh_extra_args", "is a second way through bastions"),
        ),
    ],
)
def test_what_can_not_be_honoured_is_a_fault(values: dict[str, JSON], fault: tuple[str, str]) -> None:
    assert connection.read(values)[1] == [fault]


@pytest.mark.parametrize("name", [*itertools.chain(*connection.VARIABLES.values()), *connection.ARGUMENTS])
def test_a_vaulted_value_is_a_fault_and_not_an_empty_one(name: str) -> None:
    assert [place for place, _ in connection.read({name: {VAULT_KEY: "$ANSIBLE_VAULT;1.1;AES256"}})[1]] == [
        name
    ]


def test_root_needs_not_become_anybody() -> None:
    assert connection.read({"ansible_user": "root", "ansible_become": False})[1] == []
