"""Pool hosts from an inventory, and everything that is wrong with them at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from image_builder.definition.connection import Connection, Hop
from image_builder.errors import DefinitionError, UsageError, VaultError
from image_builder.pool.plan.inventory import Fleet, read_connection, read_fleet
from image_builder.pool.plan.model import Host, Pool, ScaleSet
from image_builder.settings import REPO_ROOT
from tests.support.shipped import filled

GOOD = """
    all:
      children:
        images: {hosts: {worker: , worker_gpu: }}
        pools: {children: {cpu: , gpu: }}
        cpu:
          vars: {pool_image: worker, pool_vm_size: "Standard_{{ size }}", pool_zone: 1, pool_capacity: 2}
          hosts:
            cpu-0: {ansible_host: 10.0.0.1}
            cpu-1: {ansible_host: 10.0.0.2, ansible_port: 2222, pool_vm_id: 0f}
        gpu:
          vars: {pool_image: worker_gpu, pool_vm_size: Standard_ND96}
          children:
            gpu_a: {hosts: {gpu-a-0: {ansible_host: 10.0.1.1}}}
            gpu_b: {hosts: {gpu-b-0: {ansible_host: 10.0.1.2, pool_zone: "2", pool_scale_set: b}}}
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        folder = tmp_path / "inventory"
        (folder / "group_vars").mkdir(parents=True, exist_ok=True)
        (folder / "hosts.yml").write_text(dedent(text))
        (folder / "group_vars/all.yml").write_text("size: D16\n")
        return folder

    return written


def _problems(write: Write, text: str, *pools: str) -> list[str]:
    with pytest.raises(DefinitionError) as refused:
        read_fleet([write(text)], pools or ["pools"])
    return [
        f"{Path(p.where.rpartition(':')[0] or p.where).name} {p.path}: {p.reason}"
        for p in refused.value.problems
    ]


def test_who_is_off_is_left_out_and_named(write: Write) -> None:
    """They count toward the capacity; the others may be up soon, or their state is unknown."""
    off = GOOD.replace("ansible_host: 10.0.0.1", "ansible_host: 10.0.0.1, pool_power_state: deallocated")
    off = off.replace("ansible_host: 10.0.1.1", "ansible_host: 10.0.1.1, pool_power_state: Stopped")
    off = off.replace("ansible_host: 10.0.1.2", "ansible_host: 10.0.1.2, pool_power_state: starting")
    fleet = read_fleet([write(off)], ["pools"])
    assert [host.name for host in fleet.hosts] == ["cpu-1", "gpu-b-0"]
    assert fleet.skipped == {"deallocated": ("cpu-0",), "stopped": ("gpu-a-0",)}
    assert fleet.warnings == ["skipped: deallocated: cpu-0", "skipped: stopped: gpu-a-0"]
    running = read_fleet(
        [write(off.replace("deallocated", "running").replace("Stopped", "running"))], ["pools"]
    )
    assert len(running.hosts) == 4 and running.warnings == []


def test_an_id_that_no_scale_set_can_have_is_refused(write: Write) -> None:
    ids = GOOD.replace("pool_capacity: 2}", 'pool_capacity: 2, pool_scale_set_id: "gpu-0"}')
    assert _problems(write, ids, "cpu") == [
        "hosts.yml pool_scale_set_id: isn't a scale set's id in Resource Manager: `gpu-0`: cpu-0, cpu-1"
    ]


def test_a_pool_in_which_nobody_is_on_is_refused(write: Write) -> None:
    off = GOOD.replace("pool_capacity: 2}", "pool_capacity: 2, pool_power_state: deallocated}")
    assert _problems(write, off, "cpu") == [
        "inventory pool_power_state: no host runs: deallocated: cpu-0, cpu-1"
    ]


def test_a_pool_is_a_group_and_its_scale_sets_are_the_groups_in_it(write: Write) -> None:
    fleet = read_fleet([write(GOOD)], ["gpu", "cpu"])
    assert [pool.name for pool in fleet.pools] == ["gpu", "cpu"]
    assert {s.name: (s.hosts, s.capacity) for pool in fleet.pools for s in pool.scale_sets} == {
        "gpu_a": (1, None),
        "b": (1, None),
        "cpu": (2, 2),
    }
    by_name = {host.name: host for host in fleet.hosts}
    assert by_name["cpu-1"] == Host(
        name="cpu-1",
        address="10.0.0.2",
        port=2222,
        pool="cpu",
        scale_set="cpu",
        vm_size="Standard_D16",
        zone="1",
        image="worker",
        vm_id="0f",
    )
    assert by_name["gpu-b-0"].scale_set == "b" and by_name["gpu-b-0"].zone == "2"
    assert by_name["gpu-a-0"].zone == ""


def test_all_pools_are_a_pool_too(write: Write) -> None:
    fleet = read_fleet([write(GOOD)], ["pools"])
    assert fleet.pools[0].name == "pools" and fleet.pools[0].hosts == 4


def test_the_example_for_azure_can_be_planned(tmp_path: Path) -> None:
    here = filled("azure_vmss", tmp_path)
    fleet = read_fleet([here], ["pools"])
    assert fleet.pools == (
        Pool(
            name="pools",
            scale_sets=(
                ScaleSet(name="vmss_cpu", capacity=2, hosts=2),
                ScaleSet(name="vmss_h100_a", capacity=2, hosts=2),
            ),
        ),
    )


def test_every_problem_is_told_at_once(write: Write) -> None:
    text = """
        all:
          children:
            images: {hosts: {worker: }}
            pools: {children: {cpu: , none: , gpu: }}
            cpu:
              vars: {pool_image: wroker, pool_vm_size: D16, pool_capacity: 5}
              hosts: {cpu-0: {ansible_host: 10.0.0.1}, cpu-1: {ansible_host: 10.0.0.1}}
            none: {hosts: {}}
            gpu:
              vars: {pool_image: worker, pool_capacity: many}
              hosts: {gpu-0: {ansible_port: ssh}, gpu-1: {pool_vm_size: [1]}}
            odd:
              vars: {pool_image: worker, pool_vm_size: D16}
              hosts: {odd-0: {ansible_host: 10.0.0.9}, odd-1: {ansible_host: 10.0.0.9, pool_capacity: 4}, odd-2: }
        """
    assert sorted(_problems(write, text, "pools", "odd", "gpus")) == [
        "hosts.yml ansible_host: 10.0.0.1 is that of cpu-0, cpu-1",
        "hosts.yml ansible_host: 10.0.0.9 is that of odd-0, odd-1",
        "hosts.yml ansible_port: must be a port, got ssh: gpu-0",
        "hosts.yml pool_capacity: differs within scale set `odd`: None, 4",
        'hosts.yml pool_capacity: must be a number of hosts, got "many"',
        "hosts.yml pool_capacity: scale set `cpu` has 2 of 5 hosts in this inventory: 3 are lost",
        "hosts.yml pool_image: unknown image `wroker`, did you mean `worker`?: cpu-0, cpu-1",
        "hosts.yml pool_vm_size: is missing: gpu-0",
        "hosts.yml pool_vm_size: must be a text, got [1]: gpu-1",
        "inventory none: no host in this group",
        "inventory pool: unknown pool `gpus`, did you mean `gpu`?",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "pool_capacity: 2",
            "pool_capacity: 5",
            "pool_capacity: scale set `cpu` has 2 of 5 hosts in this inventory: 3 are lost",
        ),
        ("pool_capacity: 2", "pool_capacity: two", 'pool_capacity: must be a number of hosts, got "two"'),
        ("10.0.0.2, ansible_port: 2222", "10.0.0.1", "ansible_host: 10.0.0.1 is that of cpu-0, cpu-1"),
        (
            "cpu-0: {",
            "cpu-0: {pool_vm_id: 0f, ",
            "pool_vm_id: 0f is that of cpu-0, cpu-1",
        ),
        ("{{ size }}", "{{ sise }}", "pool_vm_size: 'sise' is undefined: cpu-0, cpu-1"),
        (
            "gpu_b: {hosts: {",
            "gpu_b: {hosts: {gpu-a-0: , ",
            "pool_scale_set: is missing, and the host is in gpu_a, gpu_b: gpu-a-0",
        ),
        (
            "gpu_a: {hosts: {",
            "gpu_a: {hosts: {worker_gpu: , ",
            "pool: is an image, not a host: `pools` has more than a pool's: worker_gpu",
        ),
        ("cpu-1: {", "..: {", "inventory_hostname: can't be the name of a directory: .."),
        ("cpu-1: {", "a/../../cpu: {", "inventory_hostname: can't be the name of a directory: a/../../cpu"),
    ],
)
def test_one_thing_that_is_wrong(write: Write, old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert [p.partition(" ")[2] for p in _problems(write, GOOD.replace(old, new))] == [expected]


def test_how_hosts_are_logged_in_to_is_by_group_and_host(write: Write) -> None:
    login = "ansible_user: 'azure{{ size }}', ansible_become: true"
    text = GOOD.replace("pool_image: worker,", f"pool_image: worker, {login},")
    way = "jump: gate, ansible_ssh_private_key_file: ~/pool, ansible_ssh_common_args: '-J ops@{{ jump }}:2222,inner'"
    text = text.replace("pool_image: worker_gpu,", f"pool_image: worker_gpu, {way},")
    text = text.replace(
        "{ansible_host: 10.0.1.1}", "{ansible_host: 10.0.1.1, ansible_user: root, jump: other}"
    )
    hosts = {host.name: host for host in read_fleet([write(text)], ["pools"]).hosts}
    assert (hosts["cpu-0"].user, hosts["cpu-0"].key, hosts["cpu-0"].hops) == ("azureD16", "", ())
    assert (hosts["gpu-a-0"].user, hosts["gpu-b-0"].user, hosts["gpu-b-0"].key) == ("root", "", "~/pool")
    inner = Hop(address="inner")
    assert hosts["gpu-a-0"].hops == (Hop(address="other", port=2222, user="ops"), inner)
    assert hosts["gpu-b-0"].hops == (Hop(address="gate", port=2222, user="ops"), inner)


def test_how_one_host_is_connected_to(write: Write) -> None:
    text = GOOD.replace("cpu-1: {", "CPU-1: {ansible_user: 'u{{ size }}', ansible_ssh_common_args: -J gate, ")
    assert read_connection([write(text)], "cpu-1") == Connection(
        "10.0.0.2", 2222, "uD16", "", (Hop(address="gate"),)
    )
    with pytest.raises(UsageError, match="no host `cpu-9` in the inventory, did you mean"):
        read_connection([write(text)], "cpu-9")
    with pytest.raises(DefinitionError, match="`-C` is not supported"):
        read_connection([write(text.replace("-J gate", "-C"))], "cpu-1")


def test_the_same_address_behind_another_bastion_is_another_hosts(write: Write) -> None:
    args = "10.0.0.1, ansible_ssh_common_args: -J {}, pool_vm_id"
    text = GOOD.replace("10.0.0.2, ansible_port: 2222, pool_vm_id", args.format("gate"))
    assert len(read_fleet([write(text)], ["cpu"]).hosts) == 2


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        (
            "ansible_ssh_common_args",
            "-o StrictHostKeyChecking=no",
            "`-o StrictHostKeyChecking=no` is not supported",
        ),
        ("ansible_ssh_extra_args", "-i /other", "`-i` is not supported"),
        (
            "ansible_ssh_common_args",
            "-o ProxyCommand='nc -x proxy %h %p'",
            "ProxyCommand `nc -x proxy %h %p` is not",
        ),
        ("ansible_user", "[a]", 'must be a text, got ["a"]'),
        ("ansible_become_method", "su", "must be sudo, got su"),
        ("ansible_connection", "winrm", "must be ssh, got winrm"),
        ("ansible_user", "'{{ nobody }}'", "'nobody' is undefined"),
    ],
)
def test_what_can_not_be_honoured_is_refused_at_its_place(
    write: Write, variable: str, value: str, reason: str
) -> None:
    text = GOOD.replace("pool_image: worker,", f"pool_image: worker, {variable}: {value},")
    (problem,) = _problems(write, text)
    assert problem.startswith(f"hosts.yml {variable}: {reason}") and problem.endswith(": cpu-0, cpu-1")


def test_a_port_may_tell_hosts_of_one_address_apart(write: Write) -> None:
    fleet = read_fleet([write(GOOD.replace("10.0.0.2, ansible_port", "10.0.0.1, ansible_port"))], ["cpu"])
    assert [(host.address, host.port) for host in fleet.hosts] == [("10.0.0.1", 22), ("10.0.0.1", 2222)]


def test_a_host_is_of_one_pool(write: Write) -> None:
    (problem,) = _problems(write, GOOD, "cpu", "pools")
    assert problem.endswith("pool: is in pool `cpu` and in `pools`: cpu-0, cpu-1")


def test_there_is_no_default_inventory_and_no_default_pool(write: Write) -> None:
    with pytest.raises(UsageError, match="no inventory"):
        read_fleet([], ["pools"])
    with pytest.raises(UsageError, match="no pool"):
        read_fleet([write(GOOD)], [])


def test_what_can_not_be_read(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="no such file"):
        read_fleet([tmp_path / "none"], ["pools"])
    with pytest.raises(DefinitionError, match=r"hosts.yml"):
        read_fleet([write("all: [")], ["pools"])


def test_a_file_that_can_not_be_decrypted_may_hide_what_a_host_is(write: Write) -> None:
    from ansible.parsing.vault import VaultLib, VaultSecret

    folder = write(GOOD)
    secret = VaultSecret(b"password")
    secret.load()
    sealed = VaultLib([("default", secret)]).encrypt("pool_zone: '3'", secret)
    (folder / "group_vars/cpu.yml").write_bytes(sealed)
    with pytest.raises(VaultError, match=r"cpu.yml:1: the file is vaulted, and no vault password was given"):
        read_fleet([folder], ["cpu"])
    assert read_fleet([folder], ["gpu"]).pools[0].hosts == 2


def test_a_vaulted_value_that_no_plan_needs_needs_no_password(tmp_path: Path) -> None:
    fleet = read_fleet([filled("azure_vmss", tmp_path)], ["pools"])
    assert "vault" not in repr(fleet.hosts)


def _digest(fleet: Fleet) -> str:
    return fleet.inventory.digest


def test_the_digest_changes_with_every_file_and_host_and_with_nothing_else(
    write: Write, tmp_path: Path
) -> None:
    folder = write(GOOD)
    first = _digest(read_fleet([folder], ["pools"]))
    assert _digest(read_fleet([folder], ["pools"])) == first
    moved = tmp_path / "elsewhere"
    folder.rename(moved)
    assert _digest(read_fleet([moved], ["pools"])) == first
    (moved / "group_vars/other.yml").write_text("kubelet_max_pods: 30\n")
    second = _digest(read_fleet([moved], ["pools"]))
    assert second != first
    for left_by_editors in ("group_vars/.other.yml.swp", "group_vars/other.yml~", ".git/HEAD"):
        (moved / left_by_editors).parent.mkdir(exist_ok=True)
        (moved / left_by_editors).write_text("nothing that Ansible reads")
    assert _digest(read_fleet([moved], ["pools"])) == second
    (moved / "group_vars/other.yml").write_text("kubelet_max_pods: 31\n")
    assert _digest(read_fleet([moved], ["pools"])) not in (first, second)
    assert _digest(read_fleet([moved], ["cpu"])) != _digest(read_fleet([moved], ["gpu"]))


def test_variables_are_those_that_ansible_gives_a_host(write: Write) -> None:
    """Read without locations, which is ten times as fast, they equal the result of the slow way."""
    from image_builder.definition import engine

    folder = write(GOOD)
    fleet = read_fleet([folder], ["pools"])
    source = engine.read_inventory([folder], (), REPO_ROOT / "playbooks/layers")
    for host in fleet.hosts:
        slow, _ = source.host_variables(host.name)
        assert engine.plain(slow["pool_image"]) == host.image
        assert engine.plain(slow["ansible_host"]) == host.address
