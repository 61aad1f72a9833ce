"""The connection into a bake's sandbox: on which machine a task may act, and which facts it gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleConnectionFailure
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader

import image_builder.bake.ansible as plays


@pytest.fixture
def connection(tmp_path: Path) -> Any:
    connection_loader.add_directory(str(Path(plays.__file__).parent / "plugins/connection"))
    made = connection_loader.get("sandbox", PlayContext())
    options = {
        "ansible_sandbox_root": "/root-of-image",
        "ansible_sandbox_image": "node",
        "ansible_sandbox_withheld": str(tmp_path / "withheld"),
    }
    made.task = lambda **keys: made.set_options(task_keys=keys, var_options=options)
    made.task()
    return made


@pytest.mark.parametrize(
    ("task", "elsewhere"),
    [
        ({}, ""),
        ({"delegate_to": "node"}, ""),
        ({"delegate_to": None, "connection": "sandbox"}, ""),
        ({"connection": "ssh"}, ""),
        ({"delegate_to": "localhost"}, "localhost"),
        ({"delegate_to": "127.0.0.1"}, "127.0.0.1"),
        ({"delegate_to": "other", "connection": "ssh"}, "other"),
        ({"delegate_to": "node", "connection": "local"}, "localhost"),
        ({"connection": "ansible.builtin.local"}, "localhost"),
    ],
)
def test_only_tasks_for_the_image_get_a_command(
    connection: Any, task: dict[str, str], elsewhere: str
) -> None:
    connection.task(delegate_to="localhost")
    connection.task(**task)  # one connection serves the rounds of a loop
    if not elsewhere:
        assert "/root-of-image" in connection._argv("id")
        return
    with pytest.raises(AnsibleConnectionFailure, match=f"`{elsewhere}`.*`node`"):
        connection._argv("id")


FACTS = {
    "ansible_distribution": "Debian",
    "ansible_distribution_release": "trixie",
    "ansible_os_family": "Debian",
    "ansible_pkg_mgr": "apt",
    "ansible_service_mgr": "systemd",
    "ansible_architecture": "x86_64",
    "ansible_python": {"version": {"major": 3}},
    "ansible_system": "Linux",
    "ansible_env": {"HOME": "/root"},
    "ansible_user_id": "root",
    "ansible_local": {"site": {"a": 1}},
    "packages": {},
    "services": {},
    "getent_passwd": {},
}
OF_MACHINE = [
    "ansible_processor_vcpus",
    "ansible_memtotal_mb",
    "ansible_memory_mb",
    "ansible_swaptotal_mb",
    "ansible_kernel",
    "ansible_kernel_version",
    "ansible_hostname",
    "ansible_fqdn",
    "ansible_nodename",
    "ansible_domain",
    "ansible_default_ipv4",
    "ansible_all_ipv4_addresses",
    "ansible_interfaces",
    "ansible_eth0",
    "ansible_mounts",
    "ansible_devices",
    "ansible_date_time",
    "ansible_uptime_seconds",
    "ansible_virtualization_type",
    "ansible_product_name",
    "ansible_system_vendor",
    "ansible_machine_id",
    "ansible_cmdline",
    "ansible_dns",
    "ansible_system_capabilities",
    "ansible_is_chroot",
    "ansible_bios_date",
    "ansible_ssh_host_key_rsa_public",
    "ansible_loadavg",
    "facter_memorysize",
    "ohai_cpu",
    "mount_points",
    "aggregate_mounts",
]


@pytest.mark.parametrize("before", ["", "BECOME-SUCCESS-abcdef\n", "Last login: today\n"])
def test_facts_are_those_of_the_image(connection: Any, tmp_path: Path, before: str) -> None:
    facts = {**FACTS, **dict.fromkeys(OF_MACHINE, "of the machine that builds")}
    output = before + json.dumps({"changed": False, "ansible_facts": facts}) + "\n"
    kept = json.loads(connection._own_facts(output.encode()))
    assert kept == {"changed": False, "ansible_facts": FACTS}
    assert set((tmp_path / "withheld").read_text().split()) == set(OF_MACHINE)


@pytest.mark.parametrize(
    "output",
    [
        b'{"changed": true, "stdout": "ansible_facts"}',
        b'{"ansible_facts": "a text"}',
        b'["ansible_facts"]',
        b'a program says "ansible_facts" {',
        b"\xff\xfe",
        b"",
    ],
)
def test_other_output_stays_as_it_is(connection: Any, output: bytes) -> None:
    assert connection._own_facts(output) == output
