"""Bad inventories: every possible mistake is named with its line, and all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.definition import Inventory, load_inventory
from image_builder.definition.pools import API_SERVERS, POOL_NAMES, SUBNET
from image_builder.errors import DefinitionError
from image_builder.pool.plan import inventory as pool_inventory
from image_builder.pool.plan import render, template

Load = Callable[..., Inventory]


def lines(inventory: Inventory) -> list[str]:
    return [str(p) for p in inventory.problems()]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            "x: 1\nsystem_pakages: [a]\n",
            "group_vars/workers.yml:2  system_pakages: unknown variable, did you mean `system_packages`?",
            id="unknown variable of a role",
        ),
        pytest.param(
            "image_layer: [system]\n",
            "group_vars/workers.yml:1  image_layer: unknown variable, did you mean `image_layers`?",
            id="unknown variable of the builder",
        ),
        pytest.param(
            "__system_packages: []\n",
            "group_vars/workers.yml:1  __system_packages: is internal to role `system`, "
            "did you mean `system_packages`?",
            id="internal variable",
        ),
        pytest.param(
            "system_swap: maybe\n",
            "group_vars/workers.yml:1  system_swap: argument 'system_swap' is of type str and we were "
            "unable to convert to bool: The value 'maybe' is not a valid boolean.",
            id="wrong type",
        ),
        pytest.param(
            "system_mode: tigth\n",
            "group_vars/workers.yml:1  system_mode: "
            "value of system_mode must be one of: loose, tight, got: tigth",
            id="wrong choice",
        ),
        pytest.param(
            "system_limits:\n  nofiles: 3\n",
            "group_vars/workers.yml:1  system_limits: "
            "system_limits.nofiles. Supported parameters include: nofile.",
            id="unknown key of a role's mapping",
        ),
        pytest.param(
            'system_mode: "{{ mod }}"\n',
            "group_vars/workers.yml:1  system_mode: 'mod' is undefined",
            id="undefined variable",
        ),
        pytest.param(
            'system_mode: "{{ other }}"\nother: "{{ system_mode }}"\n',
            "group_vars/workers.yml:1  system_mode: Recursive loop detected in template",
            id="variables that name each other",
        ),
        pytest.param(
            'system_mode: "{{ 1 + }}"\n',
            "group_vars/workers.yml:1  system_mode: Syntax error in template: "
            "unexpected 'end of print statement'",
            id="broken template",
        ),
        pytest.param(
            "image_base:\n  suit: trixie\n",
            "group_vars/workers.yml:2  image_base.suit: unknown key, did you mean `suite`?",
            id="unknown key",
        ),
        pytest.param(
            "image_base: {suite: trixy}\n",
            "group_vars/workers.yml:1  image_base.suite: unknown suite `trixy`, did you mean `trixie`?, "
            "known: bookworm, trixie",
            id="unknown suite",
        ),
        pytest.param(
            'image_disk:\n  filesystem: ext4\n  root_size_mib: "4096"\n',
            'group_vars/workers.yml:3  image_disk.root_size_mib: should be a valid integer, got "4096"; '
            "or should be 'auto', got \"4096\"",
            id="a number written as text",
        ),
        pytest.param(
            "image_secure_boot: 'yes'\n",
            'group_vars/workers.yml:1  image_secure_boot: should be a valid boolean, got "yes"',
            id="a text for a boolean",
        ),
        pytest.param(
            "image_disk: {esp_size_mib: 100}\n",
            "group_vars/workers.yml:1  image_disk.esp_size_mib: "
            "should be greater than or equal to 512, got 100",
            id="small ESP",
        ),
        pytest.param(
            "image_formats:\n  - raw\n  - vhdx\n",
            "group_vars/workers.yml:3  image_formats[1]: "
            "should be 'raw', 'qcow2', 'vhd' or 'tar', got \"vhdx\"",
            id="unknown format",
        ),
        pytest.param(
            "image_formats: [raw, raw]\n",
            "group_vars/workers.yml:1  image_formats: listed twice: raw",
            id="twice",
        ),
        pytest.param(
            "image_formats: [tar]\nimage_secure_boot: true\n",
            "group_vars/workers.yml:2  image_secure_boot: needs a disk format, a tar can't boot",
            id="secure boot of a tar",
        ),
        pytest.param(
            "image_secure_boot: true\nimage_gallery:\n"
            "  {subscription: 8d10da13-8125-4ba9-a717-bf7490507b3d, resource_group: images, gallery: nodes,\n"
            "  definition: worker, regions: [{name: westus3}],\n"
            "  security_type: Standard}\n",
            "group_vars/workers.yml:2  image_gallery: image_secure_boot needs another security_type "
            "than Standard",
            id="secure boot without Trusted Launch",
        ),
        pytest.param(
            "image_formats: [vhd]\nimage_disk: {root_size_mib: 2000000}\n",
            "group_vars/workers.yml:2  image_disk: a VHD for Azure holds at most 1047552 MiB",
            id="too large for Azure",
        ),
        pytest.param(
            "image_preload:\n  - ref: pause:3.10\n",
            "group_vars/workers.yml:2  image_preload[0].ref: must name registry, image and tag, such as "
            "registry.k8s.io/pause:3.10, got `pause:3.10`",
            id="a short name",
        ),
        pytest.param(
            "image_preload:\n  - ref: registry.example/a\n",
            "group_vars/workers.yml:2  image_preload[0].ref: must name registry, image and tag, such as "
            "registry.k8s.io/pause:3.10, got `registry.example/a`",
            id="an image without a tag",
        ),
        pytest.param(
            "image_preload:\n  - ref: docker.io/nginx:1.25\n",
            "group_vars/workers.yml:2  image_preload[0].ref: is a short name of Docker Hub's, write "
            "`docker.io/library/nginx:1.25`",
            id="a short name of Docker Hub",
        ),
        pytest.param(
            "image_preload:\n  - ref: index.docker.io/bitnami/nginx:1.25\n",
            "group_vars/workers.yml:2  image_preload[0].ref: is a short name of Docker Hub's, write "
            "`docker.io/bitnami/nginx:1.25`",
            id="another name of Docker Hub",
        ),
        pytest.param(
            "image_preload:\n  - ref: registry.example/a:1\n    pinned: true\n",
            "group_vars/workers.yml:3  image_preload[0].pinned: unknown key, did you mean `pin`?",
            id="an unknown key of an image",
        ),
        pytest.param(
            "image_pull: {parallel: 0}\n",
            "group_vars/workers.yml:1  image_pull.parallel: should be greater than or equal to 1, got 0",
            id="no pulls at all",
        ),
        pytest.param(
            "image_preload:\n  - ref: registry.example/a:1\n",
            "group_vars/workers.yml:1  image_preload: needs an engine, so the layer container_runtime",
            id="images without an engine",
        ),
        pytest.param(
            "image_layers: [system, container_runtime]\nimage_preload_archive: false\n"
            "image_preload:\n  - ref: registry.example/a:1\n    mode: archive\n",
            "group_vars/workers.yml:2  image_preload_archive: registry.example/a:1 has the mode archive, "
            "so nodes need the archive",
            id="an archive that is needed",
        ),
        pytest.param(
            "image_layers: [system, container_runtime]\n"
            "image_preload:\n  - ref: registry.example/a:1\n    platform: linux/arm64\n",
            "group_vars/workers.yml:2  image_preload: this image runs linux/amd64, not the platform of "
            "registry.example/a:1",
            id="another platform",
        ),
        pytest.param(
            "image_kernel_args: [root=/dev/sda1]\n",
            "group_vars/workers.yml:1  image_kernel_args: set by the builder itself: root=/dev/sda1",
            id="the builder's kernel argument",
        ),
        pytest.param(
            "image_layers:\n  - system\n  - runtme\n",
            "group_vars/workers.yml:3  image_layers[1]: unknown layer `runtme`, did you mean `runtime`?",
            id="unknown layer",
        ),
        pytest.param(
            "image_layers: [system, runtime]\n",
            "group_vars/workers.yml:1  runtime_token: role `runtime` of image `worker` needs it",
            id="required variable",
        ),
        pytest.param(
            "image_layers: [system, runtime]\nruntime_token: t\nruntime_swap: true\n",
            "group_vars/workers.yml:3  runtime_swap: has no effect: REPO/playbooks/layers/runtime.yml:5 sets it",
            id="overridden by the play",
        ),
        pytest.param(
            'image_layers: [system, runtime]\nruntime_token: t\nruntime_version: "1.3"\n',
            "group_vars/workers.yml:3  runtime_version: 1.3 is not known; known are 1.1, 1.2",
            id="unknown version",
        ),
    ],
)
def test_one_problem(load: Load, repo: Path, text: str, said: str) -> None:
    found = [line.replace(str(repo), "REPO") for line in lines(load(group_vars__workers=text))]
    assert said in found
    extra = [line for line in found if line != said and "image_base.suite: is missing" not in line]
    assert extra == []


@pytest.mark.parametrize("plain", ["    - role: runtime\n", "    - role: again\n"])
def test_a_variable_has_an_effect_where_a_use_of_its_role_does_not_pass_it(
    load: Load, repo: Path, plain: str
) -> None:
    play = repo / "playbooks/layers/runtime.yml"
    play.write_text(play.read_text() + plain)
    (repo / "roles/again/meta").mkdir(parents=True)
    meta = repo / "roles/again/meta/main.yml"
    meta.write_text("dependencies: [runtime]\n")
    text = "image_layers: [system, runtime]\nruntime_token: t\nruntime_swap: true\n"
    assert lines(load(group_vars__workers=text)) == []
    meta.write_text("dependencies:\n  - {role: runtime, runtime_swap: false, runtime_token: u}\n")
    play.write_text(play.read_text().replace("- role: runtime\n", "- role: again\n").split("      vars:")[0])
    assert lines(load(group_vars__workers=text)) == [
        f"group_vars/workers.yml:2  runtime_token: has no effect: {meta}:2 sets it",
        f"group_vars/workers.yml:3  runtime_swap: has no effect: {meta}:2 sets it",
    ]


def test_missing_builder_variables_name_the_image(load: Load) -> None:
    said = lines(load(group_vars__images="x: 1\n"))
    assert said == [
        "hosts.yml:5  image_base: image `plain` doesn't have it",
        "hosts.yml:5  image_layers: image `plain` doesn't have it",
        "hosts.yml:9  image_base: image `worker` doesn't have it",
        "hosts.yml:9  image_layers: image `worker` doesn't have it",
    ]


def test_all_problems_of_all_images_at_once(load: Load) -> None:
    inventory = load(
        group_vars__images="""
            image_base:
              suite: trixie
              architecure: amd64
            image_layers: [systm]
            system_swp: true
            """,
        group_vars__workers="image_formats: []\nsystem_modes: x\n",
    )
    with pytest.raises(DefinitionError) as raised:
        raise DefinitionError(inventory.problems())
    assert str(raised.value).splitlines() == [
        "4 problems in the definition",
        "  group_vars/images.yml:3  image_base.architecure: unknown key, did you mean `architecture`?",
        "  group_vars/images.yml:5  system_swp: unknown variable, did you mean `system_swap`?",
        "  group_vars/workers.yml:1  image_formats: must not be empty",
        "  group_vars/workers.yml:2  system_modes: unknown variable, did you mean `system_mode`?",
    ]
    with pytest.raises(DefinitionError, match="2 problems"):
        inventory.define("plain")


def test_unknown_role_in_a_layer(load: Load, repo: Path) -> None:
    play = repo / "playbooks/layers/system.yml"
    play.write_text(play.read_text() + "    - role: runtme\n")
    (said,) = lines(load())
    assert said == f"{play}:6  roles[1]: unknown role `runtme`, did you mean `runtime`?"


def test_a_layer_is_one_play(load: Load, repo: Path) -> None:
    (repo / "playbooks/layers/system.yml").write_text("- hosts: a\n- hosts: b\n")
    assert lines(load())[0].endswith("system.yml:1  system: a layer must be exactly one play")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("all: {children: {image: {hosts: {worker: }}}}\n", "no group `images`, did you mean `image`?"),
        ("all: {children: {images: {hosts: {}}}}\n", "no image in this group"),
        ("all: [\n", "hosts.yml"),
        ("all:\n  children:\n  children:\n", "duplicate"),
    ],
)
def test_unusable_inventory(load: Load, hosts: str, said: str) -> None:
    with pytest.raises(DefinitionError) as raised:
        load(hosts=hosts)
    assert said.lower() in str(raised.value).lower()


def test_duplicate_key_in_group_vars(load: Load) -> None:
    with pytest.raises(DefinitionError) as raised:
        load(group_vars__workers="system_swap: true\nx: 1\nsystem_swap: false\n")
    assert "group_vars/workers.yml:3" in str(raised.value)
    assert "uplicate" in str(raised.value)


def test_missing_inventory(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="no such file or directory"):
        load_inventory([tmp_path / "nowhere"])


def test_a_cause_is_told_once(load: Load) -> None:
    inventory = load(
        group_vars__workers="""
            image_layers: [system, runtime]
            runtime_token: t
            runtime_version: "1.3"
            system_mode: "{{ mode }}"
            mode: "{{ runtime_repository }}"
            runtime_repository: nowhere
            """
    )
    assert lines(inventory) == [
        "group_vars/workers.yml:3  runtime_version: 1.3 is not known; known are 1.1, 1.2",
        "group_vars/workers.yml:4  system_mode: value of system_mode must be one of: loose, tight, got: nowhere",
        "group_vars/workers.yml:6  runtime_repository: argument 'runtime_repository' is of type str and we were "
        "unable to convert to dict: dictionary requested, could not parse JSON or key=value",
    ]
    inventory = load(
        group_vars__workers="""
            image_layers: [system, runtime]
            runtime_token: t
            system_swap: perhaps
            """
    )
    assert [line.split(":")[0] for line in lines(inventory)] == ["group_vars/workers.yml"]


@pytest.mark.parametrize("name", ["a/b", "../evil", "x y", ".hidden", "-o"])
def test_an_images_name_is_that_of_a_file(load: Load, name: str) -> None:
    inventory = load(hosts=f"images: {{hosts: {{'{name}': }}}}\n")
    (problem,) = inventory.problems()
    assert problem.path == name
    assert problem.reason.startswith("names directories and files")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('system_packages: "vim"\n', 'can only concatenate list (not "str") to list'),
        ("runtime_version: 1.2\n", '(a number: put it in quotes, "1.2")'),
    ],
)
def test_what_keeps_a_plan_from_being_made_is_a_problem(load: Load, text: str, problem: str) -> None:
    both = "image_base: {suite: trixie}\nimage_layers: [system, runtime]\nruntime_token: t\n"
    assert any(problem in line for line in lines(load(group_vars__images=both, group_vars__workers=text)))


def test_a_name_that_is_nearly_a_known_one_is_a_warning(load: Load) -> None:
    text = "sytem_swap: true\npool_imgae: x\njoin_servre: y\nansible_bceome: true\nsite: 1\nswap_off: 1\n"
    text += 'sytem_mode: tight\nsystem_mode: "{{ sytem_mode }}"\n'
    inventory = load(group_vars__workers=text)
    assert inventory.problems() == []
    assert [str(w) for w in inventory.warnings(["worker"])] == [
        "group_vars/workers.yml:1  sytem_swap: nothing reads it; did you mean `system_swap`?",
        "group_vars/workers.yml:2  pool_imgae: nothing reads it; did you mean `pool_image`?",
        "group_vars/workers.yml:3  join_servre: nothing reads it; did you mean `join_server`?",
        "group_vars/workers.yml:4  ansible_bceome: nothing reads it; did you mean `ansible_become`?",
    ]


def test_pools_read_the_names_that_count_as_theirs() -> None:
    read = {
        name for name in (*pool_inventory._READ, *render.VARIABLES) if name.startswith(("pool_", "join_"))
    }
    assert read | {API_SERVERS, SUBNET, template.VARIABLE} == POOL_NAMES, (
        "all that is compared with an image, too"
    )
