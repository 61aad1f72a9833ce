"""Subnets that are too small for their machines and pods: of one scale set, and of several together."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from image_builder.definition import Inventory, load_inventory
from image_builder.definition.subnets import address_problem
from image_builder.errors import Problem
from tests.unit.definition import test_definition_pools

pytestmark = pytest.mark.usefixtures("unread_layers")

# Without the layers that decide nothing about a node's pods.
JOINING = test_definition_pools.JOINING.replace("[system, container_runtime, node, ", "[container_runtime, ")


@pytest.mark.parametrize(
    ("above", "pool", "told"),
    [
        ("", "pool_capacity: 600, pool_subnet: 10.40.0.0/16", "65531 addresses for 66600: 600 machines"),
        ("pool_subnet: 10.40.0.0/16", "pool_capacity: 600", "65531 addresses for 66600: 600 machines"),
        ("pool_subnet: 10.40.0.0/24", "pool_capacity: 600, pool_subnet: 10.40.0.0/15", ""),
        ("pool_subnet: 10.40.0.0/16, pool_capacity: 600, join_max_pods: 30", "", ""),
        (
            "join_max_pods: 30",
            "pool_capacity: 600, join_max_pods: 110, pool_subnet: 10.40.0.0/16",
            "for 66600",
        ),
        (
            "racks: 60",
            "pool_capacity: '{{ racks * 10 }}', pool_subnet: 10.40.0.0/16",
            "for 66600: 600 machines",
        ),
        ("", "pool_capacity: '{{ nowhere }}', pool_subnet: 10.40.0.0/16", "needs pool_capacity"),
        ("pool_capacity: 2, pool_subnet: 10.40.0.0/30", "pool_image: joining", "0 addresses for 222"),
        (
            "join_max_pods: '{{ kubelet_max_pods }}'",
            "pool_capacity: 600, pool_subnet: 10.40.0.0/16",
            "for 66600: 600 machines",
        ),
    ],
)
@pytest.mark.parametrize("hosts", ["", "      hosts:\n        node-1:\n        node-2:\n"])
def test_a_pools_subnet_holds_its_pods(tmp_path: Path, above: str, pool: str, told: str, hosts: str) -> None:
    path = tmp_path / "hosts.yml"
    groups = f"""    network:
      vars: {{pool_image: joining, {above}}}
      children:
        pool_a:
          vars: {{{pool}}}
{indent(hosts, "    ")}        pool_b:
          vars: {{pool_image: another, pool_capacity: 9000, pool_subnet: 10.40.0.0/28}}
"""
    path.write_text(JOINING.format(more="", kind="custom-data") + groups)
    problems = load_inventory([path]).problems()
    assert [problem.path for problem in problems] == ["pool_subnet"] * bool(told), problems
    if told:
        assert told in problems[0].reason
        line = 1 + next(n for n, text in enumerate(path.read_text().splitlines()) if "pool_subnet" in text)
        assert problems[0].where.endswith(f"hosts.yml:{line}")


def test_a_file_of_a_group_above_counts_more_than_what_stands_beside_the_hosts(tmp_path: Path) -> None:
    """As in Ansible: the files of the machines' groups come after everything that the inventory itself says."""
    path = tmp_path / "hosts.yml"
    groups = """    network:
      children:
        pool_a:
          vars: {pool_image: joining, pool_capacity: 600, pool_subnet: 10.0.0.0/30}
"""
    path.write_text(JOINING.format(more="", kind="custom-data") + groups)
    assert [problem.path for problem in load_inventory([path]).problems()] == ["pool_subnet"]
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars/network.yml").write_text("pool_subnet: 10.0.0.0/8\n")
    assert load_inventory([path]).problems() == []


def test_addresses_are_counted_to_the_last() -> None:
    assert address_problem("10.0.0.0/24", 25, 9) == ""  # 250 of 251
    assert "for 252" in address_problem("10.0.0.0/24", 36, 6)
    assert "200000 machines" in address_problem("10.0.0.0/8", 200_000, 110)
    for count in (None, True, 0, -5, "9"):
        assert "pool_capacity" in address_problem("10.0.0.0/24", count, 9)
    assert "must be a subnet" in address_problem("10.0.0.1/24", 1, 9)


# The pools of two images share a subnet; each needs 60 % of it, with the pods that its image's nodes have.
SHARED = """
all:
  children:
    images:
      hosts:
        large:
        small: {kubelet_max_pods: 30}
      vars:
        image_base: {suite: bookworm}
        image_layers: [container_runtime, kubernetes]
        kubelet_mode: cluster
        kubelet_source: {type: none}
        container_runtime_engine: containerd
        image_formats: [raw]
    pools:
      vars: {pool_vm_size: Standard_D16ds_v5, pool_subnet: 10.40.0.0/16}
      children:
        vmss_a:
          vars: {pool_image: large, pool_capacity: 354}
          hosts: {a-0: , a-1: }
        vmss_b:
          vars: {pool_image: small, pool_capacity: 1268}
"""
# The same without the slow reading of a kubelet's role: here the pools say how many pods their nodes have.
BRIEF = (
    SHARED.replace("[container_runtime, kubernetes]", "[system]")
    .replace("        small: {kubelet_max_pods: 30}", "        small:")
    .replace(
        """        kubelet_mode: cluster
        kubelet_source: {type: none}
        container_runtime_engine: containerd
""",
        "",
    )
    .replace("vars: {pool_vm_size", "vars: {join_max_pods: 110, pool_vm_size")
    .replace("pool_image: small, ", "pool_image: small, join_max_pods: 30, ")
)
_NETWORK = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks"


def _inventory(folder: Path, text: str, *changes: tuple[str, str]) -> Inventory:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "hosts.yml").write_text(text)
    return load_inventory([folder / "hosts.yml"])


def _in_azure(scale_set: str, subnet: str) -> tuple[str, str]:
    """Return the change that says which Azure subnet a scale set is in."""
    before = f"vars: {{pool_image: {scale_set}, "
    return before, f'{before}pool_azure: {{subnet: "{_NETWORK}/{subnet}"}}, '


def test_two_scale_sets_that_fit_alone_do_not_fit_together(tmp_path: Path) -> None:
    inventory = _inventory(tmp_path, SHARED)
    (problem,) = inventory.problems()
    assert problem == Problem(
        f"{tmp_path}/hosts.yml:16",
        "pool_subnet",
        "10.40.0.0/16 has 65531 addresses for 78602 of 2 scale sets: `vmss_a` 39294, `vmss_b` 39308; another subnet "
        "for some of them, a larger subnet, or fewer pods (kubelet_max_pods, join_max_pods)",
    )
    for image in ("large", "small"):
        assert inventory.problems([image]) == [problem]


def test_together_they_may_take_the_last_address(tmp_path: Path) -> None:
    """235 x 111 + 1272 x 31 = 65517; one more machine in the second is one too many."""
    assert _inventory(tmp_path, BRIEF, ("354", "235"), ("1268", "1272")).problems() == []
    assert len(_inventory(tmp_path, BRIEF, ("354", "235"), ("1268", "1273")).problems()) == 1


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        ([("pool_image: small,", "pool_image: small, pool_subnet: 10.41.0.0/16,")], False),
        ([_in_azure("large", "west/subnets/a"), _in_azure("small", "east/subnets/a")], False),
        ([_in_azure("large", "west/subnets/a"), _in_azure("small", "West/subnets/A")], True),
        ([_in_azure("large", "west/subnets/a")], True),
        ([("join_max_pods: 30,", "join_max_pods: 19,")], False),
        # The same scale set, whose hosts are also in groups for their racks.
        (
            [
                ("1268", "100"),
                ("  children:\n    images", "  children:\n    rack: {hosts: {a-1: }}\n    images"),
            ],
            False,
        ),
        # It is unknown how many machines there will be, which is reported where the pool is checked by itself.
        ([("pool_image: small, join_max_pods: 30, pool_capacity: 1268", "pool_image: elsewhere")], False),
        (
            [
                ("pool_image: small, join_max_pods: 30, pool_capacity: 1268", "pool_image: elsewhere"),
                ("pool_capacity: 354", "pool_capacity: 600"),  # one alone is reported once
            ],
            True,
        ),
    ],
)
def test_which_scale_sets_are_in_one_subnet(
    tmp_path: Path, changes: list[tuple[str, str]], is_refused: bool
) -> None:
    problems = _inventory(tmp_path, BRIEF, *changes).problems()
    assert [problem.path for problem in problems] == ["pool_subnet"] * is_refused


def test_a_pool_of_many_scale_sets_is_added_up_and_not_all_are_named(tmp_path: Path) -> None:
    """As `pool snapshot` writes them: a group for each, with its capacity, below one with what they share."""
    sets = "".join(
        f"            west_{n:02}:\n              vars: {{pool_scale_set: gpu-{n}, pool_capacity: 100}}\n"
        for n in range(12)
    )
    pool = (
        "        vmss_b:\n          vars: {pool_image: small, join_max_pods: 30, pool_capacity: 1268}\n",
        "",
    )
    west = (
        "        vmss_a:",
        f"        west:\n          vars: {{pool_image: large}}\n          children:\n{sets}        vmss_a:",
    )
    apart = ("pool_capacity: 354", "pool_capacity: 354, pool_subnet: 10.44.0.0/16")
    (problem,) = _inventory(tmp_path, BRIEF, pool, west, apart).problems()
    assert "for 133200 of 12 scale sets: `west_00` 11100, " in problem.reason
    assert "`west_07` 11100, 4 more; " in problem.reason and "west_08" not in problem.reason


def test_what_else_is_wrong_with_a_pool_hides_no_subnet(tmp_path: Path) -> None:
    """For an image that is wrong by itself, there is no number of pods to count."""
    change = ("pool_image: small,", 'pool_image: small, pool_api_server_versions: ["latest"],')
    paths = {problem.path for problem in _inventory(tmp_path, SHARED, change).problems()}
    assert paths == {"pool_api_server_versions", "pool_subnet"}
    wrong = ("kubelet_max_pods: 30", "kubelet_max_pods: many")
    inventory = _inventory(tmp_path, SHARED, wrong)
    assert "pool_subnet" not in {problem.path for problem in inventory.problems()}
    assert inventory.problems(["large"]) == []
