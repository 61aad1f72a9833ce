"""A good inventory: layering, selection, evaluation, and the frozen definition."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from image_builder.definition import (
    Archive,
    Inventory,
    Repository,
    layer_needs,
    layer_reading,
    load_inventory,
    resolved_variables,
)
from image_builder.errors import DefinitionError, UsageError

Load = Callable[..., Inventory]

LAYERED = {
    "hosts": """
        all:
          children:
            images:
              children:
                gpu:
                  children:
                    h100:
                      hosts:
                        trainer:
                          system_mode: tight
              hosts:
                plain:
        """,
    "group_vars__all": "system_packages: [all]\nsystem_swap: false\nlabel: from all\n",
    "group_vars__gpu": "system_packages: [gpu]\nsystem_swap: true\nlabel: from gpu\n",
    "group_vars__h100": "system_packages: [h100]\n",
    "host_vars__trainer": "label: from host\n",
}


def test_groups_layer_variables(load: Load) -> None:
    inventory = load(**LAYERED)
    assert inventory.problems() == []
    assert set(inventory.images) == {"plain", "trainer"}
    trainer, plain = inventory.define("trainer").variables, inventory.define("plain").variables
    assert (trainer["system_packages"], plain["system_packages"]) == (["h100"], ["all"])
    assert (trainer["system_swap"], plain["system_swap"]) == (True, False)
    assert (trainer["label"], plain["label"]) == ("from host", "from all")
    assert trainer["system_mode"] == "tight"
    assert trainer["group_names"] == ["gpu", "h100", "images"]


def test_selection_by_ansible_patterns(load: Load) -> None:
    inventory = load(**LAYERED)
    assert inventory.select(["gpu"]) == ("trainer",)
    assert inventory.select(["images:!gpu"]) == ("plain",)
    assert inventory.select(["tr*"]) == ("trainer",)
    assert inventory.select([]) == inventory.images
    with pytest.raises(UsageError, match="did you mean `trainer`"):
        inventory.select(["trainr"])
    with pytest.raises(UsageError, match="did you mean `plain`"):
        inventory.define("plian")


def test_definition_is_frozen_plain_json(load: Load) -> None:
    definition = load(group_vars__workers="number: 3\nmask: 0.5\nnothing:\nlist: [{a: yes}]\n").define(
        "worker"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        definition.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        definition.variables["x"] = 1  # type: ignore[index]
    assert {type(v) for v in definition.variables.values()} <= {str, int, float, bool, type(None), list, dict}
    assert json.loads(json.dumps(dict(definition.variables)))["list"] == [{"a": True}]


def test_roles_see_defaults_but_no_mirror(load: Load) -> None:
    mirrored = "image_base: {suite: bookworm, mirror: http://mirror.example/debian}\nimage_layers: [system]\n"
    definition = load(group_vars__images=mirrored).define("plain")
    assert definition.base.mirror == "http://mirror.example/debian"
    assert "mirror.example" not in json.dumps(dict(definition.variables))
    assert definition.play_variables["image_base"] == {
        "architecture": "amd64",
        "components": ["main"],
        "distribution": "debian",
        "suite": "bookworm",
    }
    assert definition.play_variables["image_formats"] == ["raw"]


def test_builder_variables_may_be_templates(load: Load) -> None:
    templated = """
        size: 2
        image_base: {suite: "{{ 'tri' ~ 'xie' }}"}
        image_layers: [system]
        image_disk: {root_size_mib: "{{ size * 1024 }}"}
        """
    definition = load(group_vars__images=templated).define("plain")
    assert (definition.base.suite, definition.disk.root_size_mib) == ("trixie", 2048)


def test_unsafe_text_stays_text(load: Load) -> None:
    inventory = load(group_vars__workers='tag: !unsafe "{{ .Name }}"\nsystem_mode: "{{ tag }}"\n')
    assert [p.reason for p in inventory.problems()] == [
        "value of system_mode must be one of: loose, tight, got: {{ .Name }}"
    ]


BOTH = """
    image_base: {suite: trixie}
    image_layers: [system, runtime]
    runtime_token: t
    """


def test_needs_of_a_layer(load: Load) -> None:
    extra = """
        runtime_version: "1.2"
        runtime_repository:
          name: engine
          uris: https://a.example https://b.example
          suites: [x]
          components: [main]
          signed_by: key
        runtime_archive: {url: "https://a.example/x.tgz", sha256: "SHA256"}
        """.replace("SHA256", "AB" * 32)
    definition = load(group_vars__images=BOTH, group_vars__workers=extra).define("worker")
    assert layer_needs(definition, "system").packages == ("systemd", "chrony", "new")
    needs = layer_needs(definition, "runtime")
    assert needs.packages == ("engine=1.2.*",)
    assert needs.repositories == (
        Repository("engine", ("https://a.example", "https://b.example"), ("x",), ("main",), "key"),
    )
    assert needs.archives == (Archive("https://a.example/x.tgz", "ab" * 32),)


def test_broken_need_names_role_variable_and_image(load: Load) -> None:
    inventory = load(group_vars__images=BOTH, group_vars__workers="runtime_repository: {name: engine}\n")
    with pytest.raises(DefinitionError, match="repository engine lacks signed_by, suites, uris"):
        inventory.define("worker")


def test_a_digest_that_is_none_is_the_definitions_fault(load: Load) -> None:
    text = 'runtime_archive: {url: "https://a.example/x.tgz", sha256: ab}\n'
    inventory = load(group_vars__images=BOTH, group_vars__workers=text)
    with pytest.raises(DefinitionError, match=r"https://a\.example/x\.tgz needs a sha256 of 64"):
        inventory.define("worker")


def test_precedence_is_ansibles(load: Load) -> None:
    # Defaults lose to the inventory; variables that the play passes win; a role's vars/ are constants.
    definition = load(group_vars__images=BOTH, group_vars__workers="system_swap: true\n").define("worker")
    resolved = resolved_variables(definition)
    assert resolved["system_swap"] is True
    assert resolved["runtime_version"] == "1.1"
    assert resolved["__runtime_versions"] == {"1.1": {}, "1.2": {}}
    assert "__system_kernel" not in resolved, "needs facts"
    assert "role_path" not in resolved


def test_what_a_play_hands_to_a_role_wins_over_the_roles_constants(load: Load, repo: Path) -> None:
    constants = repo / "roles/runtime/vars/main.yml"
    constants.write_text(f"{constants.read_text()}runtime_swap: constant\n")
    assert resolved_variables(load(group_vars__images=BOTH).define("worker"))["runtime_swap"] is False


def test_handed_over_values_belong_to_their_role(load: Load, repo: Path) -> None:
    play = repo / "playbooks/layers/runtime.yml"
    play.write_text(play.read_text().replace("{{ system_swap | default(false) }}", "{{ 1 == 1 }}"))
    resolved = resolved_variables(load(group_vars__images=BOTH).define("worker"))
    assert (resolved["runtime_swap"], resolved["system_swap"]) == (True, False)


def test_files_of_a_layer_leave_out_what_never_reaches_an_image(load: Load) -> None:
    assert list(layer_reading(load().define("plain"), "system").files) == [
        "playbooks/layers/system.yml",
        "roles/system/defaults/main.yml",
        "roles/system/meta/argument_specs.yml",
        "roles/system/tasks/main.yml",
        "roles/system/vars/main.yml",
    ]


def test_a_missing_file_of_tasks_is_a_problem(load: Load, repo: Path) -> None:
    play = repo / "playbooks/layers/system.yml"
    imports = "  pre_tasks:\n    - ansible.builtin.import_tasks: ../tasks/shared.yml\n  roles:"
    play.write_text(play.read_text().replace("  roles:", imports))
    with pytest.raises(DefinitionError, match=r"shared\.yml"):
        load().define("plain")
    (repo / "playbooks/tasks").mkdir()
    (repo / "playbooks/tasks/shared.yml").write_text("---\n")
    assert "playbooks/tasks/shared.yml" in layer_reading(load().define("plain"), "system").files


def test_what_ansible_itself_makes_is_known(load: Load, tmp_path: Path) -> None:
    text = """
        runtime_repository:
          name: engine
          uris: https://a.example
          suites: [x]
          components: [main]
          signed_by: "{{ inventory_dir }}/keys/{{ groups['workers'] | first }}.asc"
        runtime_version: "{{ hostvars['plain'].version }}"
        system_packages: ["{{ playbook_dir | basename }}", "{{ vars['site'] }}", "v{{ ansible_version.major }}"]
        site: here
        image_kernel_args:
          - "from={{ inventory_dir | basename }}"
          - "first={{ groups['workers'] | first }}"
          - "other={{ hostvars['plain'].version }}"
        """
    both = {"group_vars__images": dedent(BOTH) + 'version: "1.2"\n', "group_vars__workers": text}
    definition = load(**both).define("worker")
    (repository,) = layer_needs(definition, "runtime").repositories
    assert repository.signed_by == str(tmp_path / "inventory/keys/worker.asc")
    assert resolved_variables(definition)["runtime_version"] == "1.2"
    assert resolved_variables(definition)["system_packages"] == ["layers", "here", "v2"]
    assert definition.kernel_args == ("from=inventory", "first=worker", "other=1.2")


def test_second_load_sees_new_files(load: Load) -> None:
    assert "label" not in load().define("worker").variables
    assert load(group_vars__workers="label: new\n").define("worker").variables["label"] == "new"


def test_inventory_may_be_one_file_or_several(load: Load, repo: Path, tmp_path: Path) -> None:
    load()
    root = tmp_path / "inventory"
    more = tmp_path / "more.yml"
    more.write_text("images: {hosts: {third: }}\n")
    inventory = load_inventory([root / "hosts.yml", more], repo_root=repo)
    assert set(inventory.images) == {"plain", "worker", "third"}
    assert inventory.define("third").base.suite == "trixie"


def test_keyring_is_relative_to_the_inventory(load: Load, tmp_path: Path) -> None:
    keyed = "image_base: {suite: trixie, keyring: keys/archive.pgp}\nimage_layers: [system]\n"
    inventory = load(group_vars__images=keyed)
    assert [p.path for p in inventory.problems()] == ["image_base.keyring"]
    key = tmp_path / "inventory/keys/archive.pgp"
    key.parent.mkdir()
    key.touch()
    assert load(group_vars__images=keyed).define("plain").base.keyring == key
