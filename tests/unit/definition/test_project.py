"""A user's own repository: its roles, layers and checks count in addition to this program's."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from image_builder import settings
from image_builder.bake.lock.model import Lock, LockedGroup
from image_builder.bake.plan.explain import explain
from image_builder.bake.plan.model import Plan
from image_builder.bake.plan.resolve import requirements, resolve
from image_builder.cli import init
from image_builder.cli.command import extensions
from image_builder.definition import Inventory, layer_reading, load_inventory, published_variables
from image_builder.errors import DefinitionError, UsageError
from image_builder.settings import PROJECT_VARIABLE, REPO_ROOT, project_root
from image_builder.system.trees import named_digests

ROLE = "roles/site_banner"
NO_COMMANDS = "must be a list of commands, each a text, or a mapping of `break` and `mend`"


def read(project: Path, *extra: str, checkout: Path = REPO_ROOT) -> Inventory:
    return load_inventory([project / "inventories/site"], project=project, extra=extra, repo_root=checkout)


def problems(project: Path) -> list[str]:
    found = read(project).problems()
    assert all(not p.where or p.where.startswith(os.fspath(project)) for p in found), found
    return [f"{p.where.removeprefix(f'{project}/')} {p.path}: {p.reason}" for p in found]


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_own_roles_and_layers_stand_beside_ours(project: Path) -> None:
    definition = read(project).define("node")
    assert published_variables(definition)["site_banner_owner"] == "the platform team"
    files = layer_reading(definition, "site").files
    assert files[f"project/{ROLE}/templates/motd.j2"] == project / ROLE / "templates/motd.j2"
    assert files["project/playbooks/layers/site.yml"] == project / "playbooks/layers/site.yml"
    assert files["project/ansible.cfg"] == project / "ansible.cfg"
    assert "roles/system/tasks/main.yml" in layer_reading(definition, "system").files


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The ids of a project's stages, elsewhere and before any change."""
    place = tmp_path_factory.mktemp("elsewhere") / "project"
    shutil.copytree(init.TEMPLATE, place)
    return stage_ids(place)


def test_a_layer_of_ours_is_the_same_wherever_the_repository_is(
    project: Path, unchanged: dict[str, str]
) -> None:
    assert stage_ids(project) == unchanged


def test_a_repository_may_lie_in_the_other(project: Path, unchanged: dict[str, str], tmp_path: Path) -> None:
    """A user may work in this program's checkout, or have it as a submodule."""
    checkout = tmp_path / "checkout"
    for name in ("roles", "playbooks", "image_builder"):
        shutil.copytree(
            REPO_ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "molecule")
        )
    shutil.copytree(project, checkout / "images")
    assert stage_ids(checkout / "images", checkout=checkout) == unchanged
    shutil.move(checkout, project / "tools")
    assert stage_ids(project, checkout=project / "tools") == unchanged


def test_variables_beside_playbooks_count_in_their_plays_alone(project: Path) -> None:
    beside = project / "playbooks/layers/group_vars/images.yml"
    beside.parent.mkdir()
    beside.write_text("site_banner_owner: beside\nsystem_swap_off: false\n")
    definition = read(project).define("node")
    assert published_variables(definition)["site_banner_owner"] == "beside"
    assert published_variables(definition)["system_swap_off"] is True


def plan(project: Path, *extra: str, checkout: Path = REPO_ROOT) -> Plan:
    definition = read(project, *extra, checkout=checkout).define("node")
    groups = requirements(definition, extensions()).groups
    lock = Lock(
        image="node",
        source_date_epoch=1,
        repositories={"debian": None},
        groups={
            name: LockedGroup(suite="trixie", components=["main"], requested=sorted(group.names), packages=[])
            for name, group in groups.items()
        },
    )
    return resolve(definition, lock, checkout, extensions())


def stage_ids(project: Path, *extra: str, checkout: Path = REPO_ROOT) -> dict[str, str]:
    return {stage.name: stage.id for stage in plan(project, *extra, checkout=checkout).stages}


@pytest.mark.parametrize(
    ("file", "first"),
    [
        (f"{ROLE}/templates/motd.j2", "site"),
        (f"{ROLE}/tasks/main.yml", "site"),
        ("playbooks/layers/site.yml", "site"),
        ("ansible.cfg", "system"),
        ("checks/test_site_banner.py", "verify"),
        ("checks/mutations.yml", "verify"),
    ],
)
def test_what_changes_in_the_repository_changes_the_stages_that_read_it(
    project: Path, unchanged: dict[str, str], file: str, first: str
) -> None:
    with (project / file).open("a") as stream:
        stream.write("# more\n")
    changed = [name for name, stage_id in stage_ids(project).items() if stage_id != unchanged[name]]
    assert changed[0] == first


@pytest.mark.parametrize("secret", ["S3cretCLI", "{{ 'S3cret' }}CLI"])
def test_no_value_of_a_variable_is_in_a_plan(project: Path, secret: str) -> None:
    """Nor in a stage's record, which has the same parts."""
    given = [json.dumps({"site_banner_owner": value}) for value in (secret, "another")]
    first, second = (plan(project, extra) for extra in given)
    assert "S3cret" not in json.dumps(first.as_json(), default=dict)
    assert first.stage("site").id != second.stage("site").id
    assert "site_banner_owner" in first.stage("site").options["variables"]
    before = {stage.name: dict(stage.parts) for stage in first.stages}
    (site, *_) = explain(second, before)
    assert (site.stage, site.changes) == ("site", ("variable site_banner_owner changed",))


def test_what_a_role_calls_secret_is_not_published(project: Path) -> None:
    specs = project / f"{ROLE}/meta/argument_specs.yml"
    options = {"site_banner_owner": {"type": "str", "no_log": True}, "site_banner_line": {"type": "str"}}
    main = {"short_description": "A banner", "options": options}
    specs.write_text(json.dumps({"argument_specs": {"main": main}}))
    defaults = {"site_banner_owner": "nobody", "site_banner_line": "of {{ site_banner_owner }}"}
    (project / f"{ROLE}/defaults/main.yml").write_text(json.dumps(defaults))
    published = published_variables(read(project).define("node"))
    assert not {"site_banner_owner", "site_banner_line"} & published.keys() and "image_layers" in published


@pytest.mark.usefixtures("site")
def test_own_checks_are_compared_again_before_their_verdict_is_stored(project: Path) -> None:
    """So are all files with a place (``executor``). An editor's lock may be gone by then."""
    (project / "checks/.#mutations.yml").symlink_to("me@host.1:2")
    stage = plan(project).stage("verify")
    places = {
        f"checks/{name}": project / "checks" / name for name in ("mutations.yml", "test_site_banner.py")
    }
    assert stage.places == places
    assert named_digests(places).items() <= stage.code.items()


@pytest.mark.usefixtures("site")
def test_directories_of_roles_are_those_of_the_configuration(project: Path) -> None:
    (project / "shared").mkdir()
    (project / ROLE).rename(project / "shared/site_banner")
    assert problems(project) == [
        "playbooks/layers/site.yml:7 roles[0]: unknown role `site_banner`",
    ]
    change(project / "ansible.cfg", "roles_path = roles", "roles_path = roles:shared")
    assert problems(project) == []


@pytest.mark.usefixtures("site")
def test_names_that_clash_are_refused(project: Path) -> None:
    shutil.copytree(project / ROLE, project / "roles/hardening")
    shutil.copyfile(project / "playbooks/layers/site.yml", project / "playbooks/layers/node.yml")
    assert problems(project) == [
        f"playbooks/layers/node.yml node: layer of the same name as {REPO_ROOT}/playbooks/layers/node.yml: rename it",
        f"roles/hardening hardening: role of the same name as {REPO_ROOT}/roles/hardening: rename it",
    ]


@pytest.mark.usefixtures("site")
def test_metadata_that_is_no_mapping_needs_nothing(project: Path) -> None:
    (project / ROLE / "meta/main.yml").write_text("[]\n")
    assert (
        "project/roles/site_banner/meta/main.yml" in layer_reading(read(project).define("node"), "site").files
    )


@pytest.mark.usefixtures("site")
def test_a_role_with_variables_declares_them(project: Path) -> None:
    (project / ROLE / "meta/argument_specs.yml").unlink()
    reason = "has variables and no meta/argument_specs.yml that declares them"
    assert f"playbooks/layers/site.yml:7 site_banner: {reason}" in problems(project)


CHECK = "checks/test_site_banner.py"


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            CHECK,
            "def test_other(): ...\n",
            [
                "checks/test_site_banner.py:1 test_other: nothing shows that it can fail: put what breaks it into "
                "checks/mutations.yml",
                "checks/mutations.yml:3 test_banner_names_the_owner: no such check",
            ],
        ),
        (
            CHECK,
            "def test_kubelet_is_enabled(): ...\n",
            None,
        ),
        (CHECK, "def test_banner_names_the_owner(:\n", None),
        (
            "checks/mutations.yml",
            "- a\n",
            ["checks/mutations.yml:1 mutations.yml: must map each check to a list of commands"],
        ),
        (
            "checks/mutations.yml",
            "test_banner_names_the_owner: rm /etc/motd\n",
            [f"checks/mutations.yml:1 test_banner_names_the_owner: {NO_COMMANDS}"],
        ),
        (
            "checks/mutations.yml",
            "test_banner_names_the_owner: []\n",
            [f"checks/mutations.yml:1 test_banner_names_the_owner: {NO_COMMANDS}"],
        ),
        (
            "checks/mutations.yml",
            "test_banner_names_the_owner: [{break: rm /etc/motd}]\n",
            [f"checks/mutations.yml:1 test_banner_names_the_owner: {NO_COMMANDS}"],
        ),
        (
            "checks/mutations.yml",
            "test_banner_names_the_owner: [{break: rm /etc/motd, mend: ''}]\n",
            [f"checks/mutations.yml:1 test_banner_names_the_owner: {NO_COMMANDS}"],
        ),
        (
            "checks/mutations.yml",
            "",
            [
                "checks/test_site_banner.py:14 test_banner_names_the_owner: nothing shows that it can fail: "
                "put what breaks it into checks/mutations.yml"
            ],
        ),
    ],
)
def test_checks_that_prove_nothing_are_refused(
    project: Path, file: str, text: str, expected: list[str] | None
) -> None:
    (project / file).write_text(text)
    found = problems(project)
    assert found and (expected is None or sorted(found) == sorted(expected))


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("file", ["more_test.py", "more/test_more.py", "test_more.py"])
def test_each_check_that_pytest_takes_needs_a_command(project: Path, file: str) -> None:
    place = project / "checks" / file
    place.parent.mkdir(exist_ok=True)
    place.write_text("class TestMore:\n    def test_more(self): ...\n")
    (found,) = problems(project)
    assert found.startswith(f"checks/{file}:2 test_more: nothing shows that it can fail")
    change(project / "checks/mutations.yml", "---\n", "---\ntest_more: ['false']\n")
    assert problems(project) == []


@pytest.mark.usefixtures("site")
def test_a_check_may_not_have_the_name_of_one_of_ours(project: Path) -> None:
    (project / CHECK).rename(project / "checks/test_kubelet.py")
    assert problems(project) == [
        "checks/test_kubelet.py test_kubelet.py: the suite has a file of this name: rename it"
    ]


def test_the_repository_is_where_ansible_would_read_its_configuration(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PROJECT_VARIABLE, raising=False)
    monkeypatch.chdir(project)
    assert project_root() == project
    assert settings.Settings().checks == project / "checks"
    project.chmod(0o777)
    with pytest.raises(UsageError, match="anybody may write"):
        project_root()
    monkeypatch.chdir(tmp_path)
    assert project_root() == REPO_ROOT and settings.Settings().checks is None
    monkeypatch.setenv(PROJECT_VARIABLE, os.fspath(project))
    assert project_root() == project
    monkeypatch.setenv(PROJECT_VARIABLE, os.fspath(project / "nowhere"))
    with pytest.raises(UsageError, match="nowhere is not a directory"):
        project_root()


@pytest.mark.usefixtures("site")
def test_a_variable_with_a_roles_prefix_is_known_or_refused(project: Path) -> None:
    change(project / "inventories/site/group_vars/images.yml", "site_banner_owner", "site_banner_onwer")
    assert problems(project) == [
        "inventories/site/group_vars/images.yml:21 site_banner_onwer: unknown variable, "
        "did you mean `site_banner_owner`?"
    ]
    with pytest.raises(DefinitionError):
        read(project).define("node")


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    "extra",
    [
        "site_banner_owner=us",
        '{"site_banner_owner": "{{ who }}", "who": "us"}',
        "site_banner_owner={{image_formats[0]}} image_formats=[]",
    ],
)
def test_extra_variables_win_over_all_others(project: Path, extra: str) -> None:
    (project / ROLE / "vars").mkdir()
    (project / ROLE / "vars/main.yml").write_text("site_banner_owner: the role's own\n")
    assert published_variables(read(project).define("node"))["site_banner_owner"] == "the role's own"
    if "image_formats" in extra:
        assert [p.path for p in read(project, extra).problems()] == ["image_formats"]
        return
    definition = read(project, extra).define("node")
    assert published_variables(definition)["site_banner_owner"] == "us"
    assert definition.extra == (extra,)


def test_extra_variables_of_a_file_are_in_the_ids_and_have_places(
    project: Path, unchanged: dict[str, str]
) -> None:
    file = project / "extra.yml"
    file.write_text("---\nsite_banner_owner: us\n")
    after = stage_ids(project, f"@{file}")
    assert next(name for name in unchanged if unchanged[name] != after[name]) == "site"
    file.write_text("---\n\nsite_banner_onwer: us\n")
    (problem,) = read(project, f"@{file}").problems()
    assert problem.where.endswith("extra.yml:3") and "did you mean `site_banner_owner`" in problem.reason
    (problem,) = read(project, "site_banner_onwer=us").problems()
    assert problem.where == "-e"
