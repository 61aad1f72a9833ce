"""The program that loads preloaded images, as far as it is pure. The engines' answers are recorded ones.

They come from Docker 26.1 and containerd 1.7.24 of Debian 13; containerd 1.6 of Debian 12 writes the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from image_builder.definition.values import words
from image_builder.settings import REPO_ROOT

ROLE = REPO_ROOT / "roles" / "image_preload"


def _program() -> Any:
    spec = importlib.util.spec_from_file_location("image_preload", ROLE / "files" / "image_preload.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


program = _program()

TWO = "registry.lab.internal/two/layers:2.0"
PAUSE = "registry.lab.internal/pause:1.0"
INDEX = "sha256:9b0091696d9ceaeb02a37cd4c3f77809679b764855440e98767ad3cc2378806d"
MANIFEST = "sha256:05a5fcafafd184be090e4143385e82edf69d12327c5736db45bb871422f76d96"
CONFIG = "sha256:81e631c3594f2fbff5967d16c3332b7876b627ac3da6cecaaae7550b039d2a13"
LAYERS = (
    "sha256:39deb792fec018860ec8dc27afad21a68618abf5f7993e62e1505641b69603a0",
    "sha256:c134da85c433125ffe673e063111ac80d1f38e4f43b350fd759053921c394656",
)
PAUSE_MANIFEST = "sha256:6a0dbc1a2bb597d9ea0ae506edc1a2fa153fd1a7d4ed376a6583dfbc6240c1c7"
IMAGE = program.Image(TWO, INDEX, MANIFEST, CONFIG, True, LAYERS)

ONE_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
BOTH = "io.cri-containerd.image=managed,io.cri-containerd.pinned=pinned"

# ctr -n k8s.io images list
LIST = f"""\
REF TYPE DIGEST SIZE PLATFORMS LABELS
{PAUSE} {ONE_TYPE} {PAUSE_MANIFEST} 10.8 KiB linux/amd64             io.cri-containerd.image=managed
{TWO}   {INDEX_TYPE} {INDEX} 4.8 MiB  linux/amd64,linux/arm64 {BOTH},x=y
{CONFIG} {INDEX_TYPE} {INDEX} 4.8 MiB  linux/amd64,linux/arm64 -
"""

# ctr -n k8s.io images check --snapshotter overlayfs
CHECK = f"""\
REF TYPE DIGEST STATUS SIZE UNPACKED
{PAUSE} {ONE_TYPE} {PAUSE_MANIFEST} complete (2/2)   10.3 KiB/10.3 KiB true
{TWO} {INDEX_TYPE} {INDEX} incomplete (2/3) 421.0 B/4.8 MiB   true
{CONFIG} {INDEX_TYPE} {INDEX} complete (3/3) 4.8 MiB/4.8 MiB   false
"""

# docker image inspect, what matters of it
INSPECTED = {
    "Id": CONFIG,
    "RepoTags": [TWO],
    "GraphDriver": {
        "Data": {
            "LowerDir": "/mnt/local/docker/overlay2/b612/diff",
            "MergedDir": "/mnt/local/docker/overlay2/692d/merged",
            "UpperDir": "/mnt/local/docker/overlay2/692d/diff",
            "WorkDir": "/mnt/local/docker/overlay2/692d/work",
        },
        "Name": "overlay2",
    },
    "RootFS": {"Type": "layers", "Layers": list(LAYERS)},
}

# ctr -n k8s.io content get
CONTENT: dict[str, dict[str, Any]] = {
    INDEX: {"schemaVersion": 2, "manifests": [{"digest": MANIFEST}, {"digest": f"sha256:{'1' * 64}"}]},
    MANIFEST: {"schemaVersion": 2, "config": {"digest": CONFIG}},
}


def listed(**changes: Any) -> dict[str, Any]:
    """Return what containerd lists of a good image, with other names changed."""
    labels = frozenset({program.MANAGED, program.PINNED})
    names = {TWO: program.Listed(INDEX, labels), IMAGE.by_digest: program.Listed(INDEX, labels)}
    return {**names, **changes}


def docker_fault(exists: bool = True, **changes: Any) -> str:
    answer = json.dumps([{**INSPECTED, **changes}])
    fault: str = program.docker_fault(IMAGE, answer, lambda _folder: exists)
    return fault


def containerd_fault(
    names: dict[str, Any], checked: dict[str, str], content: dict[str, dict[str, Any]] = CONTENT
) -> str:
    fault: str = program.containerd_fault(IMAGE, names, checked, content.get)
    return fault


def document(archive: Path, engine: str = "docker", **image: Any) -> dict[str, Any]:
    """Return a list of one image in an archive that exists."""
    content = archive.read_bytes()
    one = {
        "ref": TWO,
        "digest": INDEX,
        "manifest": MANIFEST,
        "id": CONFIG,
        "platform": "linux/amd64",
        "pin": False,
        "bytes": 5_000_000,
        "diff_ids": list(LAYERS),
        **image,
    }
    return {
        "format": 1,
        "engine": engine,
        "archive": {
            "path": str(archive),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        },
        "images": [one],
    }


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "images.tar"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture
def image_list(archive: Path, tmp_path: Path) -> Path:
    path = tmp_path / "images.json"
    path.write_text(json.dumps(document(archive)))
    return path


def test_digest_form_keeps_the_registrys_port() -> None:
    image = program.Image("registry.test:5000/a/b:1", INDEX, MANIFEST, CONFIG, False, LAYERS)
    assert image.by_digest == f"registry.test:5000/a/b@{INDEX}"


def test_docker_image_is_good() -> None:
    assert docker_fault() == ""


def test_docker_image_of_another_id() -> None:
    assert docker_fault(Id="sha256:0") == f"is another image: sha256:0, not {CONFIG}"


def test_docker_image_with_other_layers() -> None:
    assert docker_fault(RootFS={"Type": "layers", "Layers": [LAYERS[0]]}).startswith("has other layers")
    assert docker_fault(RootFS={"Type": "layers"}) == "has other layers: none"


def test_docker_image_whose_layers_are_gone() -> None:
    fault = docker_fault(exists=False)
    assert fault == (
        "has lost layers: /mnt/local/docker/overlay2/692d/diff, /mnt/local/docker/overlay2/b612/diff"
    )


def test_image_of_one_layer_has_no_lower_one() -> None:
    assert program.layer_folders({"GraphDriver": {"Data": {"UpperDir": "/a"}}}) == ["/a"]
    assert program.layer_folders({"GraphDriver": {"Data": None}}) == []


def test_containerds_list_is_read() -> None:
    found = program.parse_list(LIST)
    assert set(found) == {PAUSE, TWO, CONFIG}
    assert found[PAUSE].digest == PAUSE_MANIFEST
    assert found[TWO].labels == {program.MANAGED, program.PINNED, "x=y"}
    assert found[CONFIG].labels == frozenset()
    assert program.parse_list("REF TYPE DIGEST SIZE PLATFORMS LABELS \n") == {}


def test_containerds_check_is_read() -> None:
    assert program.parse_check(CHECK) == {
        PAUSE: "",
        TWO: "has not all its content: incomplete (2/3)",
        CONFIG: "is not unpacked: false",
    }


def test_containerd_image_is_good() -> None:
    assert containerd_fault(listed(), {TWO: ""}) == ""


def test_containerd_image_that_was_pulled_by_its_manifest_is_good() -> None:
    names = listed(**{TWO: program.Listed(MANIFEST, frozenset())})
    assert containerd_fault(names, {TWO: ""}) == ""


def test_containerd_image_is_missing() -> None:
    assert containerd_fault({}, {}) == "is missing"


def test_containerd_image_is_another() -> None:
    names = listed(**{TWO: program.Listed(PAUSE_MANIFEST, frozenset())})
    assert containerd_fault(names, {TWO: ""}) == f"is another image: {PAUSE_MANIFEST}, not {INDEX}"
    other = {**CONTENT, MANIFEST: {"config": {"digest": "sha256:0"}}}
    assert containerd_fault(listed(), {TWO: ""}, other) == f"is another image: sha256:0, not {CONFIG}"


def test_containerd_image_without_a_manifest() -> None:
    without = {INDEX: CONTENT[INDEX]}
    assert "is not there" in containerd_fault(listed(), {TWO: ""}, without)
    assert "does not name" in containerd_fault(listed(), {TWO: ""}, {**CONTENT, INDEX: {"manifests": []}})


def test_containerd_image_that_is_not_whole() -> None:
    assert containerd_fault(listed(), {TWO: "is not unpacked: false"}) == "is not unpacked: false"
    assert containerd_fault(listed(), {}) == "was not checked"


def test_nothing_lacks_of_a_named_and_pinned_image() -> None:
    assert list(program.lacking(IMAGE, listed())) == []


def test_pin_is_wanted_on_both_names() -> None:
    bare = program.Listed(INDEX, frozenset({program.MANAGED}))
    assert list(program.lacking(IMAGE, {TWO: bare, IMAGE.by_digest: bare})) == [
        f"io.cri-containerd.pinned=pinned on {TWO}",
        f"io.cri-containerd.pinned=pinned on {IMAGE.by_digest}",
    ]


def test_name_by_digest_is_wanted() -> None:
    names = listed()
    del names[IMAGE.by_digest]
    assert list(program.lacking(IMAGE, names)) == [f"the name {IMAGE.by_digest}"]
    stale = listed(**{IMAGE.by_digest: program.Listed(PAUSE_MANIFEST, frozenset())})
    assert list(program.lacking(IMAGE, stale)) == [f"the name {IMAGE.by_digest}"]


def test_unpinned_image_wants_no_pin() -> None:
    image = program.Image(TWO, INDEX, MANIFEST, CONFIG, False, LAYERS)
    assert program.labels(image) == {program.MANAGED}


def test_list_is_read(image_list: Path, archive: Path) -> None:
    preload = program.read_list(image_list)
    assert preload.images == (program.Image(TWO, INDEX, MANIFEST, CONFIG, False, LAYERS),)
    assert (preload.engine, preload.archive, preload.size) == ("docker", archive, 1 << 20)


def test_pause_image_is_pinned_in_any_case(image_list: Path) -> None:
    assert program.read_list(image_list, TWO).images[0].pin is True


@pytest.mark.parametrize(
    ("text", "words_of_it"),
    [
        pytest.param("{", "is not a list of preloaded images", id="no JSON"),
        pytest.param("[]", "TypeError", id="another type"),
        pytest.param('{"format": 1}', "KeyError", id="a key is missing"),
        pytest.param('{"format": 2}', "has format 2, this program reads 1", id="a newer format"),
    ],
)
def test_list_that_can_not_be_read(tmp_path: Path, text: str, words_of_it: str) -> None:
    path = tmp_path / "list.json"
    path.write_text(text)
    with pytest.raises(program.PreloadError, match=words_of_it):
        program.read_list(path)


def test_archive_is_checked_and_progress_told(image_list: Path) -> None:
    told: list[str] = []
    program.check_archive(program.read_list(image_list), told.append, 0)
    assert told == ["checking the archive: 100% of 0.00 GB"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda data: data[:-1], "is damaged: 1048575 bytes, not 1048576", id="cut"),
        pytest.param(lambda data: data[:-1] + b"x", "is damaged: its sha256 is", id="changed"),
    ],
)
def test_damaged_archive_is_refused_before_it_is_loaded(
    image_list: Path, archive: Path, damage: Any, said: str
) -> None:
    class Empty:
        """An engine without images. What it loads with must not be asked for."""

        def faults(self, images: Sequence[Any]) -> dict[str, str]:
            return {image.ref: "is missing" for image in images}

    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(program.PreloadError, match=said):
        program.bring(program.read_list(image_list), Empty(), lambda _text: None, 3)


def test_archive_that_is_gone(image_list: Path, archive: Path) -> None:
    preload = program.read_list(image_list)
    archive.unlink()
    with pytest.raises(program.PreloadError, match=re.escape(f"{archive}: No such file or directory")):
        program.check_archive(preload, lambda _text: None, 3)


def test_status_tells_of_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = tmp_path / "run" / "status.json"
    missing = tmp_path / "list.json"
    assert program.main(["--engine=docker", f"--list={missing}", f"--status={status}"]) == 1
    (line,) = status.read_text().splitlines()
    told = json.loads(line)
    assert told["problems"] == [f"{missing}: No such file or directory"]
    assert (told["images"], told["loaded"], told["bytes"]) == (0, [], 0)
    assert capsys.readouterr().out == f"image-preload: FAILED: {missing}: No such file or directory\n"


def test_list_of_the_other_engine_is_refused(
    image_list: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status.json"
    assert program.main(["--engine=containerd", f"--list={image_list}", f"--status={status}"]) == 1
    assert f"{image_list} is for docker, this node has containerd" in capsys.readouterr().out


def test_nothing_to_load_is_told_in_one_line(
    image_list: Path, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image_list.write_text(json.dumps({**document(archive), "images": []}))
    status = tmp_path / "status.json"
    assert program.main(["--engine=docker", f"--list={image_list}", f"--status={status}"]) == 0
    assert re.fullmatch(
        r"image-preload: all 0 images are there already, nothing was loaded \(\d+\.\d s\)\n",
        capsys.readouterr().out,
    )
    assert json.loads(status.read_text())["problems"] == []


def test_position_of_a_reader_is_found(archive: Path) -> None:
    with archive.open("rb", buffering=0) as stream:
        stream.read(4096)
        assert program.read_position(os.getpid(), archive) == 4096
    assert program.read_position(os.getpid(), archive) is None


@pytest.mark.parametrize(
    ("position", "begun", "told"),
    [
        pytest.param(None, False, "loading: 0% of 2.00 GB read", id="not opened yet"),
        pytest.param(500_000_000, True, "loading: 25% of 2.00 GB read", id="being read"),
        pytest.param(2_000_000_000, True, "unpacking the layers", id="read"),
        pytest.param(None, True, "unpacking the layers", id="closed"),
    ],
)
def test_stage_is_told(position: int | None, begun: bool, told: str) -> None:
    assert program.stage(position, 2_000_000_000, begun) == told


def test_failure_shows_the_command_and_the_end_of_its_output() -> None:
    text = program.failure(["docker", "load"], 1, "\n".join(f"line {n}" for n in range(40)))
    lines = text.splitlines()
    assert lines[0] == "`docker load` ended with 1"
    assert lines[1:] == [f"  line {n}" for n in range(20, 40)]
    assert "it said nothing" in program.failure(["docker", "load"], 1, "")


def test_role_does_not_read_the_list_of_the_inventory() -> None:
    """What is preloaded must not reach the id of a layer: nodes are told by a file."""
    named = {
        path.relative_to(ROLE).as_posix()
        for path in ROLE.rglob("*")
        if path.is_file() and path.suffix in (".yml", ".j2", ".py") and "molecule" not in path.parts
        if "image_preload" in words(path.read_text(encoding="utf-8"))
    }
    assert named <= {"meta/main.yml", "tasks/main.yml"}  # the role's name, and the program's file
    sources = [
        task.get("ansible.builtin.copy", {}) for task in yaml.safe_load((ROLE / "tasks/main.yml").read_text())
    ]
    assert [copy["src"] for copy in sources if copy] == ["image_preload.py"]
