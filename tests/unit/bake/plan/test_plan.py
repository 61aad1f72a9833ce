"""A change to any input changes exactly the ids of the stages that it affects."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from image_builder.bake.build import make_plan
from image_builder.bake.lock.model import Lock, LockedGroup, LockedImage, LockedLayer, LockedPackage
from image_builder.bake.plan.model import Plan
from image_builder.bake.plan.resolve import resolve
from image_builder.cli.command import extensions
from image_builder.definition import ImageDefinition, load_inventory
from image_builder.errors import LockError, SpaceError
from image_builder.settings import Settings
from image_builder.system.trees import code_digests, named_digests
from tests.unit.bake.plan.tree import Tree

REPO = Path(__file__).resolve().parents[4]
# The suite receives the builder's and all roles' variables, so `verify` (seconds) depends on every one of them.
ALL = {"tools", "base", "system", "container_runtime", "seal", "verify", "disk", "convert"}
FROM_SYSTEM = {"system", "container_runtime", "seal", "verify", "disk", "convert"}
FROM_RUNTIME = FROM_SYSTEM - {"system"}
FROM_SEAL = FROM_RUNTIME - {"container_runtime"}

INVENTORY = """
all:
  children:
    images:
      hosts:
        worker:
      vars:
        image_base: {suite: trixie}
        image_layers: [system, container_runtime]
        image_formats: [qcow2]
        system_swap: false
        container_runtime_engine: "{{ site_engine }}"
        site_engine: docker
        site_unused: 1
"""


def _role(root: Path, name: str, **files: str) -> None:
    role = root / "roles" / name
    for folder in ("defaults", "vars", "tasks", "templates", "meta"):
        (role / folder).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        (role / path.replace("__", "/")).with_suffix(".yml").write_text(text)
    (role / "templates/a.conf.j2").write_text("plain\n")
    options = {"system": "swap: {type: bool}", "container_runtime": "engine: {type: str}"}.get(name)
    if options:
        spec = f"argument_specs: {{main: {{options: {{{name}_{options}}}}}}}\n"
        (role / "meta/argument_specs.yml").write_text(spec)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A small repository: this program's code, three roles of its own, two layers, an inventory."""
    folder = tmp_path_factory.mktemp("repository")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "image_builder", folder / "image_builder", ignore=ignore)
    (folder / "image_builder/suite/test_a.py").write_text("# a check\n")
    (folder / "playbooks/layers").mkdir(parents=True)
    for layer in ("system", "container_runtime"):
        text = f"- name: Layer\n  hosts: images\n  roles:\n    - role: {layer}\n"
        (folder / f"playbooks/layers/{layer}.yml").write_text(text)
        _role(
            folder,
            layer,
            vars__main=f"__{layer}_packages: [{layer}-package]\n",
            defaults__main=f"{layer}_swap: true\n" if layer == "system" else f"{layer}_engine: docker\n",
            tasks__main="- name: Task\n  ansible.builtin.debug:\n    msg: hello\n",
        )
    _role(folder, "image_seal", tasks__main="- name: Task\n  ansible.builtin.debug:\n    msg: hello\n")
    (folder / "playbooks/seal.yml").write_text("- name: Seal\n  hosts: images\n  roles: [image_seal]\n")
    (folder / "inventory").mkdir()
    (folder / "inventory/hosts.yml").write_text(INVENTORY)
    return Tree(folder)


def _definition(root: Path) -> ImageDefinition:
    return load_inventory([root / "inventory"], repo_root=root).define("worker")


def _package(sha256: str) -> LockedPackage:
    return LockedPackage(
        name="p",
        sha256=sha256,
        size=1,
        path="p.deb",
        repository="debian",
        version="1",
        architecture="amd64",
    )


def _lock(**changes: object) -> Lock:
    groups = {
        name: LockedGroup(
            suite="trixie", components=["main"], requested=[name], packages=[_package(f"{n}" * 64)]
        )
        for n, name in enumerate(("tools", "base", "system", "container_runtime"))
    }
    values = {"image": "worker", "source_date_epoch": 1, "repositories": {"debian": None}, "groups": groups}
    return Lock(**{**values, **changes})  # type: ignore[arg-type]


def _plan(root: Path, lock: Lock | None = None) -> Plan:
    return resolve(_definition(root), lock or _lock(), root, extensions())


@pytest.fixture(scope="module")
def unchanged(tree: Tree) -> Plan:
    """The plan before any change."""
    return _plan(tree.root)


def test_every_file_in_an_id_can_be_hashed_again_as_it_was(root: Path, unchanged: Plan) -> None:
    """The executor does so before it commits a stage."""
    for stage in unchanged.stages:
        own = [root / name for name in stage.code if name not in stage.places]
        assert code_digests(root, own) | named_digests(stage.places) == stage.code, stage.name
    assert "roles/system/tasks/main.yml" in unchanged.stage("system").places
    assert "playbooks/seal.yml" in unchanged.stage("seal").places


def _changed(before: Plan, after: Plan) -> set[str]:
    old = {s.name: s.id for s in before.stages}
    assert [s.name for s in before.stages] == [s.name for s in after.stages]
    return {s.name for s in after.stages if s.id != old[s.name]}


def _append(path: str, text: str = " ") -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / path).open("a") as file:
            file.write(text)

    return change


def _replace(old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "inventory/hosts.yml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


def _executable(root: Path) -> None:
    (root / "roles/system/templates/a.conf.j2").chmod(0o755)


def test_the_same_inputs_give_the_same_plan(root: Path, unchanged: Plan) -> None:
    assert _plan(root) == unchanged
    assert {s.name for s in unchanged.stages} == ALL
    assert unchanged.build_id == unchanged.stage("seal").id


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(_append("roles/system/templates/a.conf.j2"), FROM_SYSTEM, id="a byte of a template"),
        pytest.param(_append("roles/container_runtime/tasks/main.yml"), FROM_RUNTIME, id="a byte of a task"),
        pytest.param(_append("roles/system/defaults/main.yml"), FROM_SYSTEM, id="a byte of the defaults"),
        pytest.param(
            _append("playbooks/layers/container_runtime.yml"), FROM_RUNTIME, id="a layer's playbook"
        ),
        pytest.param(_append("roles/image_seal/tasks/main.yml"), FROM_SEAL, id="the seal role"),
        pytest.param(_append("playbooks/seal.yml"), FROM_SEAL, id="the seal playbook"),
        pytest.param(_executable, FROM_SYSTEM, id="a file's executable bit"),
        pytest.param(_replace("system_swap: false", "system_swap: true"), FROM_SYSTEM, id="a variable"),
        pytest.param(
            _replace("site_engine: docker", "site_engine: containerd"),
            FROM_RUNTIME,
            id="a variable of a variable",
        ),
        pytest.param(_replace("[qcow2]", "[qcow2, vhd]"), {"verify", "convert"}, id="formats"),
        pytest.param(
            _replace("image_formats:", "image_kernel_args: [quiet]\n        image_formats:"),
            {"verify", "disk", "convert"},
            id="kernel arguments",
        ),
        pytest.param(
            _replace("image_formats:", "image_disk: {esp_size_mib: 600}\n        image_formats:"),
            {"verify", "disk", "convert"},
            id="the disk's layout",
        ),
        pytest.param(_append("image_builder/suite/test_a.py", "\nx = 1\n"), {"verify"}, id="a check"),
        pytest.param(_append("image_builder/bake/stages/root/run.py", "\nx = 1\n"), ALL, id="roots"),
        pytest.param(
            _append("image_builder/bake/stages/layer/run.py", "\nx = 1\n"), FROM_SYSTEM, id="the layer stage"
        ),
        pytest.param(
            _append("image_builder/system/environment.py", "\nx = 1\n"),
            ALL,
            id="the environment, umask, /dev",
        ),
        pytest.param(
            _append("image_builder/bake/plugins/connection/sandbox.py", "\nx = 1\n"),
            FROM_SYSTEM,
            id="the connection plugin",
        ),
        pytest.param(
            _append("image_builder/bake/stages/seal/run.py", "\nx = 1\n"), FROM_SEAL, id="the seal stage"
        ),
        pytest.param(
            _append("image_builder/bake/stages/disk/run.py", "\nx = 1\n"),
            {"disk", "convert"},
            id="the disk stage",
        ),
        pytest.param(
            _append("image_builder/bake/stages/convert/run.py", "\nx = 1\n"),
            {"convert"},
            id="the convert stage",
        ),
        pytest.param(
            _append("image_builder/verify/stage/run.py", "\nx = 1\n"), {"verify"}, id="the verify stage"
        ),
    ],
)
def test_what_a_change_reaches(
    root: Path, unchanged: Plan, change: Callable[[Path], None], expected: set[str]
) -> None:
    change(root)
    assert _changed(unchanged, _plan(root)) == expected


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_append("image_builder/events.py", "\nx = 1\n"), id="how progress is shown"),
        pytest.param(_append("image_builder/system/sandbox.py", "\n# A comment.\n"), id="a comment"),
        pytest.param(_append("image_builder/suite/test_a.py", "# A comment.\n"), id="a comment of a check"),
        pytest.param(_append("image_builder/system/process.py", "\nx = 1\n"), id="how programs are watched"),
        pytest.param(
            _append("image_builder/bake/pull/retry.py", "\nx = 1\n"), id="when a pull is tried again"
        ),
        pytest.param(
            lambda root: (root / "roles/system/README.md").write_text("prose"), id="a role's README"
        ),
        pytest.param(_replace("site_unused: 1", "site_unused: 2"), id="a variable that no role reads"),
        pytest.param(
            _replace("{suite: trixie}", "{suite: trixie, mirror: 'http://mirror.example'}"),
            id="the mirror's name",
        ),
    ],
)
def test_what_reaches_nothing(root: Path, unchanged: Plan, change: Callable[[Path], None]) -> None:
    change(root)
    assert _changed(unchanged, _plan(root)) == set()


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("tools", ALL),
        ("base", ALL - {"tools"}),
        ("system", FROM_SYSTEM),
        ("container_runtime", FROM_RUNTIME),
    ],
)
def test_a_package_reaches_its_layer_and_what_stands_on_it(
    root: Path, unchanged: Plan, group: str, expected: set[str]
) -> None:
    groups = dict(_lock().groups)
    groups[group] = LockedGroup(
        suite="trixie", components=["main"], requested=[group], packages=[_package("f" * 64)]
    )
    assert _changed(unchanged, _plan(root, _lock(groups=groups))) == expected


def test_an_archive_reaches_the_layer_that_asks_for_it(root: Path, unchanged: Plan) -> None:
    with (root / "roles/container_runtime/vars/main.yml").open("a") as file:
        file.write(
            f"__container_runtime_archives: [{{url: 'https://example.invalid/a', sha256: {'e' * 64}}}]\n"
        )
    after = _plan(root)
    assert _changed(unchanged, after) == FROM_RUNTIME
    assert after.stage("container_runtime").options["archives"] == ["e" * 64]
    assert after.stage("system").options["archives"] == []


def test_where_the_repository_lies_does_not_matter(root: Path, unchanged: Plan, tmp_path: Path) -> None:
    other = tmp_path / "repo"
    shutil.copytree(root, other)
    assert _changed(unchanged, _plan(other)) == set()


def test_a_lock_for_other_layers_is_refused(root: Path) -> None:
    groups = {n: g for n, g in _lock().groups.items() if n != "system"}
    with pytest.raises(LockError, match="no packages for stage system"):
        _plan(root, _lock(groups=groups))


# -- preload ---------------------------------------------------------------------------------------------------

FROM_REHEARSAL = {"rehearsal", "seal", "verify", "disk", "convert"}
FROM_STORE = {"preload_store", *FROM_REHEARSAL}
FROM_PRELOAD = {"preload", *FROM_STORE}
_PRELOAD = """image_formats: [qcow2]
        image_preload:
          - ref: registry.example/pause:3.10
            pin: true
          - ref: registry.example/large:1"""
_OPTIONAL = _replace(
    "- ref: registry.example/large:1", "- {ref: 'registry.example/large:1', required: false}"
)


def _image(ref: str, digit: str = "1") -> LockedImage:
    digest = f"sha256:{digit * 64}"
    layer = LockedLayer(digest=digest, size=10, diff_id=digest)
    return LockedImage(
        ref=ref, platform="linux/amd64", digest=digest, manifest=digest, config=digest, layers=[layer]
    )


@pytest.fixture
def preloading(root: Path) -> Path:
    """Return the same repository with two images to preload."""
    _replace("image_formats: [qcow2]", _PRELOAD)(root)
    return root


def _images(large: str = "2") -> list[LockedImage]:
    return [_image("registry.example/pause:3.10"), _image("registry.example/large:1", large)]


@pytest.fixture(scope="module")
def unchanged_preload(tree: Tree) -> Plan:
    """The plan with two images before any change."""
    _replace("image_formats: [qcow2]", _PRELOAD)(tree.root)
    plan = _plan(tree.root, _lock(images=_images()))
    tree.restore()
    return plan


def test_preload_runs_in_the_engines_tree_and_is_joined_at_the_seal(unchanged_preload: Plan) -> None:
    plan = unchanged_preload
    preload, runtime, seal = (plan.stage(name) for name in ("preload", "container_runtime", "seal"))
    assert preload.ground[0] == runtime.id
    assert preload.lowers == ()
    store, rehearsal = plan.stage("preload_store"), plan.stage("rehearsal")
    assert seal.lowers[:4] == (rehearsal.id, store.id, preload.id, runtime.id)
    assert runtime.id in preload.requires
    assert preload.id in store.requires and store.id in rehearsal.requires
    names = [stage.name for stage in plan.stages]
    assert names.index("container_runtime") < names.index("preload") < names.index("seal")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_append("roles/container_runtime/tasks/main.yml"), id="the engine's role"),
        pytest.param(_append("roles/system/templates/a.conf.j2"), id="a role below"),
        pytest.param(_append("playbooks/layers/container_runtime.yml"), id="the engine's playbook"),
        pytest.param(
            _append("image_builder/bake/stages/layer/run.py", "\nx = 1\n"), id="how layers are made"
        ),
        pytest.param(
            _append("image_builder/bake/stages/root/run.py", "\nx = 1\n"), id="how the base is made"
        ),
        pytest.param(
            _replace("image_preload:", "image_pull: {parallel: 2}\n        image_preload:"), id="pull limits"
        ),
    ],
)
def test_no_role_reaches_the_preload(
    preloading: Path, unchanged_preload: Plan, change: Callable[[Path], None]
) -> None:
    change(preloading)
    assert "preload" not in _changed(unchanged_preload, _plan(preloading, _lock(images=_images())))


def test_a_base_package_does_not_reach_the_preload_and_an_engine_package_does(
    preloading: Path, unchanged_preload: Plan
) -> None:
    for group, reached in (("base", False), ("system", False), ("container_runtime", True)):
        groups = dict(_lock().groups)
        groups[group] = LockedGroup(
            suite="trixie", components=["main"], requested=[group], packages=[_package("f" * 64)]
        )
        after = _plan(preloading, _lock(groups=groups, images=_images()))
        assert ("preload" in _changed(unchanged_preload, after)) == reached, group


def test_an_image_reaches_the_preload_and_no_layer(preloading: Path, unchanged_preload: Plan) -> None:
    assert _changed(unchanged_preload, _plan(preloading, _lock(images=_images("3")))) == FROM_PRELOAD


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(_replace("pin: true", "pin: false"), FROM_PRELOAD, id="a pin"),
        pytest.param(
            _replace("- ref: registry.example/large:1", "- {ref: 'registry.example/large:1', mode: copy}"),
            FROM_STORE,
            id="what a node does with an image",
        ),
        pytest.param(
            _OPTIONAL,
            FROM_PRELOAD,
            id="whether an image may be missing",
        ),
        pytest.param(
            _replace("image_preload:", "image_preload_archive: false\n        image_preload:"),
            FROM_PRELOAD,
            id="whether there is an archive",
        ),
        pytest.param(
            _append("image_builder/bake/pull/docker_engine.py", "\nx = 1\n"), FROM_PRELOAD, id="how is pulled"
        ),
        pytest.param(
            _append("image_builder/bake/stages/preload/run.py", "\nx = 1\n"),
            FROM_PRELOAD,
            id="the preload stage",
        ),
        pytest.param(
            _replace("site_engine: docker", "site_engine: containerd"),
            FROM_PRELOAD | {"container_runtime"},
            id="the engine",
        ),
    ],
)
def test_what_reaches_the_preload(
    preloading: Path, unchanged_preload: Plan, change: Callable[[Path], None], expected: set[str]
) -> None:
    change(preloading)
    assert _changed(unchanged_preload, _plan(preloading, _lock(images=_images()))) == expected


@pytest.mark.parametrize("formats", ["[qcow2]", "[tar]"])
def test_a_root_partition_that_is_too_small_is_no_plan(preloading: Path, formats: str) -> None:
    """The error comes before anything is pulled, and names the archive's share: without the archive it fits.

    The disk is made for every format, even where only the tree is published.
    """
    layer = LockedLayer(digest=f"sha256:{'2' * 64}", size=1_000_000_000, diff_id=f"sha256:{'2' * 64}")
    images = _images()
    images[1] = images[1].model_copy(update={"layers": [layer]})
    lock = _lock(images=images)
    _replace(
        "image_formats: [qcow2]", f"image_disk: {{root_size_mib: 4000}}\n        image_formats: {formats}"
    )(preloading)
    settings = Settings(repo_root=preloading)
    with pytest.raises(SpaceError, match=r"image_disk\.root_size_mib is 4000") as caught:
        make_plan(_definition(preloading), lock, settings, extensions())
    assert "image_preload_archive: false saves about 3051 MiB" in str(caught.value.hint)
    _replace("image_preload:", "image_preload_archive: false\n        image_preload:")(preloading)
    plan = make_plan(_definition(preloading), lock, settings, extensions())
    assert plan.stage("preload").options["save"] is False


def test_an_image_without_a_digest_is_refused(preloading: Path) -> None:
    with pytest.raises(LockError, match=r"no digest for registry\.example/large:1"):
        _plan(preloading, _lock(images=_images()[:1]))


def test_an_image_that_was_left_out_is_not_pulled(preloading: Path) -> None:
    _OPTIONAL(preloading)
    lock = _lock(images=_images()[:1], left_out=["registry.example/large:1"])
    images = _plan(preloading, lock).stage("preload").options["images"]
    assert [i["ref"] for i in images] == ["registry.example/pause:3.10"]


def test_an_image_that_has_become_required_is_not_left_out(preloading: Path) -> None:
    lock = _lock(images=_images()[:1], left_out=["registry.example/large:1"])
    with pytest.raises(LockError, match=r"no digest for registry\.example/large:1"):
        _plan(preloading, lock)


def test_without_any_image_left_there_is_no_preload(preloading: Path) -> None:
    _OPTIONAL(preloading)
    _replace("pin: true", "required: false")(preloading)
    lock = _lock(left_out=["registry.example/large:1", "registry.example/pause:3.10"])
    assert "preload" not in {stage.name for stage in _plan(preloading, lock).stages}
