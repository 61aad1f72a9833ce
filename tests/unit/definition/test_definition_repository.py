"""This repository's own inventories and roles."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from image_builder.definition import (
    Inventory,
    LayerNeeds,
    engine,
    layer_needs,
    layer_reading,
    load_inventory,
    resolved_variables,
    seal_reading,
)
from image_builder.definition.placeholders import placeholders
from image_builder.definition.roles import Role, RoleBook
from image_builder.definition.values import Place
from image_builder.settings import REPO_ROOT, VaultId
from tests.support.shipped import shipped

INVENTORIES = REPO_ROOT / "inventories"
VAULT_PASSWORD = INVENTORIES / "azure_vmss" / "demo-vault-password.txt"
ROLES = list(RoleBook((REPO_ROOT,)).roles())


@cache
def _read(name: str) -> tuple[Inventory, Mapping[str, Sequence[LayerNeeds]]]:
    """Return an inventory, and what each layer of its images needs: seconds of templating, shared by several tests."""
    inventory = shipped(name)
    definitions = {image: inventory.define(image) for image in inventory.images}
    return inventory, {
        image: [layer_needs(definition, layer) for layer in definition.layers]
        for image, definition in definitions.items()
    }


@pytest.mark.parametrize("name", ["lab", "azure_vmss"])
def test_inventory_is_sound(name: str) -> None:
    inventory, needs = _read(name)
    assert {p.reason for p in inventory.problems()} <= {p.reason for p in placeholders(inventory.paths)}
    for image in inventory.images:
        definition = inventory.define(image)
        readings = [layer_reading(definition, layer) for layer in definition.layers]
        readings.append(seal_reading(definition, "playbooks/seal.yml"))
        assert [reading.unknown for reading in readings] == [()] * len(readings), "none runs in every build"
        assert len(needs[image]) == len(definition.layers) > 0
        assert resolved_variables(definition)["image_layers"] == list(definition.layers)


def test_lab_needs_nothing_but_debian() -> None:
    inventory, needs = _read("lab")
    current = {"worker_current", "worker_current_docker", "worker_join_current"}
    debians = ("minimal", "tiny", "worker_gpu", "worker", "worker_join", "worker_containerd")
    assert sorted(inventory.images) == sorted({*debians, *current})
    for image in debians:
        assert [n.repositories for n in needs[image]] == [()] * len(needs[image])
        assert [n.archives for n in needs[image]] == [()] * len(needs[image])


def test_todays_workers_come_from_the_directory_of_programs_or_from_their_makers(tmp_path: Path) -> None:
    of_makers = "{current_from: makers}"
    images = ("worker_current", "worker_current_docker", "worker_join_current")
    hosts = ", ".join(f"{image}: {of_makers}" for image in images)
    (tmp_path / "hosts.yml").write_text(f"images: {{hosts: {{{hosts}}}}}\n")
    makers = load_inventory([INVENTORIES / "lab", tmp_path / "hosts.yml"])
    for image in images:
        for inventory, scheme in ((_read("lab")[0], "file"), (makers, "https")):
            definition = inventory.define(image)
            needs = [layer_needs(definition, layer) for layer in definition.layers]
            archives = [archive for layer in needs for archive in layer.archives]
            addresses = [archive.url for archive in archives]
            addresses += [
                uri for layer in needs for repository in layer.repositories for uri in repository.uris
            ]
            assert {urllib.parse.urlsplit(address).scheme for address in addresses} == {scheme}
            assert len(archives) == (3 if image.endswith("docker") else 2), "kubelet, crictl, cri-dockerd"
            for archive in archives:
                assert re.search(r"lab/group_vars/current\.yml:\d+$", definition.place_of(archive.sha256))


def test_a_value_that_the_inventory_does_not_have_has_no_place() -> None:
    definition = _read("lab")[0].define("worker_current")
    line = definition.place_of("file:repository").rpartition(":")[2]
    text = (INVENTORIES / "lab/group_vars/current.yml").read_text().splitlines()
    assert "file:repository" in text[int(line) - 1]
    assert definition.place_of("f" * 64) == ""


def _flat(option: object) -> object:
    return engine.plain(option)


@pytest.mark.parametrize("role", ROLES, ids=[r.name for r in ROLES])
def test_argument_specs_agree_with_defaults(role: Role) -> None:
    options = role.options
    assert set(role.defaults) <= set(options), "a default without an argument spec"
    bare = {n for n, o in options.items() if n not in role.defaults and not o.get("required")}
    assert {n for n in bare if "default" in options[n]} == set()
    for name, option in options.items():
        assert option.get("description"), name
        assert name.startswith(f"{role.name}_"), name
        if "default" in option:
            assert _flat(option["default"]) == _flat(role.defaults[name]), name
    assert [n for n in role.constants if not n.startswith(f"__{role.name}_")] == []


def test_origins_are_where_ansible_says(tmp_path: Path) -> None:
    # The tags are internal to ansible-core; a new release that moves them must be noticed here.
    file = tmp_path / "x.yml"
    file.write_text("a: 1\nb:\n  - x\n  - c: true\n")
    content = engine.read_yaml(file)
    assert engine.place_of(content["a"]) == Place(str(file), 1)
    assert engine.place_in(content, ["b", 0]) == Place(str(file), 3)
    assert engine.place_in(content, ["b", 1, "c"]) == Place(str(file), 4)
    assert engine.place_in(content, ["b", 1, "c", "nothing"]) == Place(str(file), 4)


def test_demo_secret_can_be_read_with_the_demo_password() -> None:
    source = engine.read_inventory(
        [INVENTORIES / "azure_vmss"], [VaultId("default", VAULT_PASSWORD)], REPO_ROOT / "playbooks/layers"
    )
    values, _ = source.host_variables("h100-a-000000")
    assert engine.undecryptable(values, source) == []
    token: Any = engine.plain(values["pool_bootstrap_token"])
    assert set(token) == {"__vault__"}
    assert values["kubelet_node_labels"] == {"node.example/gpu": "h100"}, "a node has its image's variables"
