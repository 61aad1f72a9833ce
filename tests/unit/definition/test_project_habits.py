"""Roles and layers of a user's repository, written the way Ansible users write them; and what can't be read in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from ansible.parsing.vault import VaultLib, VaultSecret

from image_builder.definition import Inventory, layer_needs, load_inventory, published_variables
from image_builder.definition.reading import PlaybookReading, layer_reading
from image_builder.definition.roles import RoleBook
from image_builder.errors import DefinitionError, VaultError

pytestmark = pytest.mark.usefixtures("site")

ROLE = "roles/site_banner"
LAYER = "playbooks/layers/site.yml"
SPECS = f"{ROLE}/meta/argument_specs.yml"
FILTER = """
class FilterModule:
    def filters(self):
        return {"shout": str.upper}
"""


def write(project: Path, file: str, text: str | bytes) -> None:
    path = project / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def read(project: Path, *extra: str) -> Inventory:
    return load_inventory([project / "inventories/site"], project=project, extra=extra)


def problems(project: Path, *extra: str) -> list[str]:
    found = read(project, *extra).problems()
    return [f"{p.where.removeprefix(f'{project}/')} {p.path}: {p.reason}" for p in found]


def packages(project: Path) -> tuple[str, ...]:
    return layer_needs(read(project).define("node"), "site").packages


@pytest.mark.parametrize("file", ["main.yaml", "main.json", "main", "main/one.yml"])
def test_variables_of_a_role_are_in_any_file_that_ansible_loads(project: Path, file: str) -> None:
    (project / ROLE / "defaults/main.yml").unlink()
    write(project, f"{ROLE}/defaults/{file}", '{"site_banner_owner": "nobody", "site_banner_tool": "figlet"}')
    write(project, f"{ROLE}/vars/{file}", '{"__site_banner_packages": ["{{ site_banner_tool }}"]}')
    assert packages(project) == ("figlet",)


def test_parameters_of_a_role_stand_beside_its_keywords(project: Path) -> None:
    owner = project / "inventories/site/group_vars/images.yml"
    owner.write_text(owner.read_text().replace("site_banner_owner:", "#"))
    entry = "- hosts: images\n  roles:\n    - role: site_banner\n      tags: [banner]\n      when: true\n"
    write(
        project,
        LAYER,
        f"{entry}      vars: {{site_banner_owner: below}}\n      site_banner_owner: a parameter\n",
    )
    assert published_variables(read(project).define("node"))["site_banner_owner"] == "a parameter"
    assert problems(project, "site_banner_owner=us") == [], "which wins"


def test_roles_are_also_beside_the_layers(project: Path) -> None:
    shutil.move(project / ROLE, project / "playbooks/layers/roles/site_banner")
    assert published_variables(read(project).define("node"))["site_banner_owner"] == "the platform team"
    shutil.copytree(project / "playbooks/layers/roles/site_banner", project / ROLE)
    (clash,) = problems(project)
    assert clash.startswith("playbooks/layers/roles/site_banner site_banner: role of the same name as")


@pytest.mark.parametrize("place", [ROLE, "playbooks/layers"])
def test_filters_of_a_role_or_beside_the_layers_make_values(project: Path, place: str) -> None:
    name = f"shout_{Path(place).name}"  # plugins stay loaded, so each needs its own name
    write(project, f"{place}/filter_plugins/{name}.py", FILTER.replace("shout", name))
    write(project, f"{ROLE}/vars/main.yml", f"__site_banner_packages: [\"{{{{ 'a' | {name} }}}}\"]\n")
    assert packages(project) == ("A",)


def test_a_list_that_depends_on_an_included_file_is_refused(project: Path) -> None:
    """There is no telling which file the play includes, and the packages of the other one would be locked."""
    main = "__site_banner_packages: '{{ __site_banner_names }}'\n"
    write(project, f"{ROLE}/vars/main.yml", main)
    write(project, f"{ROLE}/vars/debian.yml", "__site_banner_names: [figlet]\n")
    assert packages(project) == ("figlet",)
    write(project, f"{ROLE}/vars/ubuntu.yml", "__site_banner_names: [toilet]\n")
    (found,) = problems(project)
    assert found.startswith(f"{ROLE}/vars/debian.yml:1 __site_banner_names: vars/ubuntu.yml sets it, too")
    (project / ROLE / "vars/ubuntu.yml").unlink()
    write(project, f"{ROLE}/vars/main.yml", f"__site_banner_names: [toilet]\n{main}")
    (found,) = problems(project)
    assert found.startswith(f"{ROLE}/vars/debian.yml:1 __site_banner_names: vars/main.yml sets it, too")


def test_what_a_task_chooses_among_files_of_variables_has_no_value(project: Path) -> None:
    write(project, f"{ROLE}/vars/trixie.yml", "__site_banner_name: ours\n__site_banner_all: x\n")
    write(project, f"{ROLE}/vars/yookworm.yml", "__site_banner_name: theirs\n__site_banner_all: x\n")
    write(project, f"{ROLE}/defaults/main.yml", 'site_banner_owner: "{{ __site_banner_name }}"\n')
    images = project / "inventories/site/group_vars/images.yml"
    images.write_text(images.read_text().replace("site_banner_owner:", "#"))
    values = published_variables(read(project).define("node"))
    assert values["__site_banner_all"] == "x"
    assert "__site_banner_name" not in values and "site_banner_owner" not in values


PLAY_FILES = [
    ('["{{ target_distribution }}.yml"]', "debian.yml"),
    ("[[none.yml, debian.yml, site.yml]]", "debian.yml"),
    ('[["{{ target_suite }}.yml", "{{ target_distribution }}.yml"]]', "vars/debian.yml"),
]


@pytest.mark.parametrize(("names", "file"), PLAY_FILES)
def test_files_of_a_play_may_be_named_by_templates_or_lists(project: Path, names: str, file: str) -> None:
    write(project, LAYER, f"- hosts: images\n  vars_files: {names}\n  roles: [site_banner]\n")
    write(project, f"playbooks/layers/{file}", "site_tools: [figlet]\n")
    write(project, f"{ROLE}/vars/main.yml", '__site_banner_packages: "{{ site_tools }}"\n')
    assert problems(project) == [] and packages(project) == ("figlet",)


@pytest.mark.parametrize(
    ("owner", "known"),
    [
        ("{{ ansible_facts['hostname'] }}", True),
        ("{{ __site_banner_cpus }}", True),
        ("{{ site_tool }}", False),
    ],
)
def test_what_facts_decide_is_not_refused(project: Path, owner: str, known: bool) -> None:
    images = project / "inventories/site/group_vars/images.yml"
    images.write_text(images.read_text().replace("site_banner_owner:", f'site_banner_owner: "{owner}"  #'))
    write(
        project, f"{ROLE}/vars/main.yml", "__site_banner_cpus: \"{{ ansible_facts['processor_vcpus'] }}\"\n"
    )
    assert (problems(project) == []) is known
    files = '["{{ ansible_facts.os_family }}.yml"]'
    write(project, LAYER, f"- hosts: images\n  vars_files: {files}\n  roles: [site_banner]\n")
    assert problems(project) == []
    (reason,) = layer_reading(read(project).define("node"), "site").unknown
    assert reason == f"project/{LAYER}: which of its `vars_files` are read is known only while the play runs"


@pytest.mark.parametrize("file", ["argument_specs.yaml", "argument_specs.json", "main.yml", "main.yaml"])
def test_metadata_of_a_role_are_in_any_file_that_ansible_loads(project: Path, file: str) -> None:
    (project / SPECS).rename(project / ROLE / "meta/specs")
    (project / ROLE / "meta/main.yml").unlink()
    (project / ROLE / "meta/specs").rename(project / ROLE / "meta" / file)
    assert problems(project) == []
    role = RoleBook((project,)).role("site_banner")
    assert list(role.options) == ["site_banner_owner"] and project / ROLE / "meta" / file in role.declarations


def test_dependencies_are_in_any_file_that_ansible_loads(project: Path) -> None:
    (project / ROLE / "meta/main.yml").unlink()
    write(project, f"{ROLE}/meta/main.yaml", "dependencies: [needed]\n")
    write(project, "roles/needed/vars/main.yml", "__needed_packages: [figlet]\n")
    assert packages(project) == ("figlet",)


def test_a_variable_of_a_role_without_specs_says_where_to_declare_it(project: Path) -> None:
    write(project, "roles/common/tasks/main.yml", '- debug: {msg: "{{ common_motd }}"}\n')
    write(project, "inventories/site/host_vars/node.yml", "common_motd: hi\ncommon_other: hi\n")
    assert problems(project) == [
        "inventories/site/host_vars/node.yml:1 common_motd: unknown variable: declare it in "
        f"{project}/roles/common/meta/argument_specs.yml",
        "inventories/site/host_vars/node.yml:2 common_other: unknown variable",
    ]


@pytest.mark.parametrize(
    "file", [f"{ROLE}/vars/.#main.yml", f"{ROLE}/tasks/.#main.yml", "checks/.#test_a.py"]
)
def test_a_file_may_be_open_in_an_editor(project: Path, file: str) -> None:
    """Emacs locks a file with unsaved changes by a link beside it that leads nowhere."""
    (project / file).parent.mkdir(exist_ok=True)
    (project / file).symlink_to("me@host.1:2")
    assert problems(project) == []


def test_a_list_that_a_lookup_makes_is_not_taken_for_a_secret(project: Path) -> None:
    write(project, f"{ROLE}/vars/main.yml", "__site_banner_packages: [\"{{ lookup('env', 'TOOL') }}\"]\n")
    reason = "node: made by the lookup `env`, known only to a play"
    assert problems(project) == [f"{ROLE}/vars/main.yml:1 __site_banner_packages: {reason}"]


@pytest.mark.parametrize("module", ["import_role", "include_role"])
def test_a_role_that_only_tasks_bring_has_nothing_locked(project: Path, module: str) -> None:
    write(project, LAYER, f"- hosts: images\n  tasks:\n    - {module}: {{name: site_banner}}\n")
    assert problems(project) == []
    write(project, f"{ROLE}/vars/main.yml", "__site_banner_packages: [figlet]\n")
    (found,) = problems(project)
    assert found.startswith(
        f"{ROLE}/vars/main.yml:1 __site_banner_packages: isn't locked: list `site_banner` under"
    )


@pytest.mark.parametrize(
    ("hosts", "runs"),
    [
        ("all", True),
        ("[images]", True),
        ("images:!node", False),
        ("example", False),
        ("\"{{ target_hosts | default('nodes') }}\"", False),
        ("", False),
    ],
)
def test_a_layer_whose_play_would_be_skipped_is_refused(project: Path, hosts: str, runs: bool) -> None:
    write(project, LAYER, f"- hosts: {hosts}\n  roles: [site_banner]\n")
    found = problems(project)
    assert (found == []) is runs
    assert runs or (found[0].startswith(LAYER) and "layer site: its play would not run" in found[0])


@pytest.mark.parametrize(
    ("file", "text", "where"),
    [
        (SPECS, "a: [\n", f"{SPECS}:2"),
        (SPECS, "argument_specs: x\n", SPECS),
        (SPECS, "argument_specs: {main: {options: [a]}}\n", SPECS),
        (SPECS, "argument_specs: {main: {options: {site_banner_owner: str}}}\n", SPECS),
        (f"{ROLE}/tasks/main.yml", "tasks: []\n", f"{ROLE}/tasks/main.yml:1"),
        (f"{ROLE}/tasks/main.yml", "- include_tasks: nowhere.yml\n", f"{ROLE}/tasks/main.yml:1"),
        (f"{ROLE}/tasks/main.yml", "- include_role: {name: nobody}\n", f"{ROLE}/tasks/main.yml:1"),
        (f"{ROLE}/tasks/main.yml", "- import_tasks: nowhere.yml\n", LAYER),
        (f"{ROLE}/vars/main.yml", "a: [\n", f"{ROLE}/vars/main.yml:2"),
        (LAYER, "- hosts: images\n  vars: [a]\n", f"{LAYER}:2"),
        (LAYER, "- hosts: images\n  roles: [{role: site_banner, vars: [a]}]\n", f"{LAYER}:2"),
        (LAYER, "- hosts: images\n  roles: site_banner\n", f"{LAYER}:2"),
        ("checks/mutations.yml", "a: [\n", "checks/mutations.yml:2"),
        ("checks/test_more.py", b"x = '\xff'\n", "checks/test_more.py:1"),
        ("checks/test_more.py", b"\0\n", "checks/test_more.py:1"),
    ],
)
def test_what_cannot_be_read_has_a_place(project: Path, file: str, text: str | bytes, where: str) -> None:
    write(project, file, text)
    assert where in [found.split(" ")[0] for found in problems(project)]


SECRET = "correct horse"
# By vaulted file: the other files that the test needs.
VAULTED = {
    f"{ROLE}/vars/main.yml": {},
    "playbooks/layers/secret.yml": {
        LAYER: "- hosts: images\n  vars_files: [secret.yml]\n  roles: [site_banner]\n"
    },
    f"{ROLE}/vars/secret.yml": {
        f"{ROLE}/tasks/main.yml": "- ansible.builtin.include_vars: secret.yml\n",
    },
}


def vaulted(text: str) -> bytes:
    secret = VaultSecret(b"swordfish")
    ciphertext: bytes = VaultLib([("default", secret)]).encrypt(text, secret)
    return ciphertext


@pytest.mark.parametrize("file", VAULTED)
def test_files_of_variables_may_be_vaulted_as_a_whole(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Their contents are in no plan; a change to them, or to what they refer to, shows in the layer's."""
    write(project, file, vaulted(f"site_secret: {SECRET} {{{{ site_place }}}}\n"))
    for other, text in VAULTED[file].items():
        write(project, other, text)
    password = tmp_path / "password"
    password.write_text("sardine\n")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", os.fspath(password))
    with pytest.raises(VaultError, match=rf"{file}:1: the file can't be decrypted"):
        read(project).problems()
    password.write_text("swordfish\n")

    def reading(place: str) -> PlaybookReading:
        inventory = read(project, f"site_place={place}")
        assert inventory.problems() == []
        definition = inventory.define("node")
        assert SECRET not in repr(definition) and SECRET not in repr(published_variables(definition))
        return layer_reading(definition, "site")

    one = reading("here")
    assert one.unknown == () and SECRET not in repr(one)
    assert file in {name.removeprefix("project/") for name in one.files}
    assert reading("there").variables != one.variables

    for drawn in ("lookup('file', 'x')", "'x' | password_hash", "now()"):
        write(project, file, vaulted(f'site_secret: "{{{{ {drawn} }}}}"\n'))
        (reason,) = reading("here").unknown
        assert reason.endswith(f"{file}: what a vaulted template looks up is known only while the play runs")


def test_what_a_vaulted_file_of_the_inventory_speaks_of_is_in_the_layers_that_name_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("swordfish\n")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", os.fspath(tmp_path / "password"))
    secret = "inventories/site/host_vars/node.yml"
    write(project, secret, vaulted(f"site_secret: {SECRET} {{{{ site_place }}}}\n"))
    write(project, f"{ROLE}/tasks/main.yml", "- ansible.builtin.debug: {msg: '{{ site_secret }}'}\n")
    definitions = [read(project, f"site_place={place}").define("node") for place in ("here", "there")]
    assert SECRET not in repr(definitions)
    one, other = (layer_reading(definition, "site").variables for definition in definitions)
    assert one["site_secret"] == other["site_secret"]
    assert (one["site_place"], other["site_place"]) == ("here", "there")

    for drawn in ("lookup('file', 'x')", "'x' | password_hash", "now()"):
        write(project, secret, vaulted(f'site_secret: "{{{{ {drawn} }}}}"\n'))
        definition = read(project).define("node")
        (reason,) = layer_reading(definition, "site").unknown
        assert reason == "site_secret: what a vaulted template looks up is known only while the play runs"


def test_a_vaulted_file_of_tasks_says_where_it_may_be(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("swordfish\n")
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", os.fspath(tmp_path / "password"))
    write(project, f"{ROLE}/tasks/main.yml", vaulted("- ansible.builtin.ping:\n"))
    (found,) = problems(project)
    assert found.startswith(f"{ROLE}/tasks/main.yml:1 ") and "which only files of variables may be" in found


def test_files_are_known_as_those_of_a_collections_role(project: Path) -> None:
    role = "collections/ansible_collections/acme/base/roles/ground"
    write(project, f"{role}/../../galaxy.yml", "namespace: acme\nname: base\nversion: 1.0.0\n")
    write(project, f"{role}/tasks/main.yml", "[]\n")
    book = RoleBook((project,))
    assert book.of_collections([project / LAYER]) == ()
    assert book.of_collections([project / LAYER, project / role / "tasks/main.yml"]) == ("acme.base.ground",)


def test_extra_variables_that_cannot_be_read_are_the_command_lines(project: Path) -> None:
    for extra in ("[1]", '{"a":', f"@{project}/nowhere.yml"):
        with pytest.raises(DefinitionError) as refused:
            read(project, extra)
        assert [p.where for p in refused.value.problems] == ["-e"]
    vaulted = project / "extra.yml"
    vaulted.write_text("$ANSIBLE_VAULT;1.1;AES256\n3031\n")
    with pytest.raises(VaultError, match=os.fspath(vaulted)):
        read(project, f"@{vaulted}")


@pytest.mark.parametrize(
    "text", ["vars_files: 5", "vars_files: {a: b}", "roles: 5", "roles: {role: site_banner}"]
)
def test_a_play_with_a_part_of_the_wrong_type_is_a_problem(project: Path, text: str) -> None:
    write(project, LAYER, f"- hosts: all\n  gather_facts: false\n  {text}\n")
    (problem,) = problems(project)
    assert problem.startswith(f"{LAYER}:3 site: ")
