"""The reading of Docker's answers: recorded from Docker 26.1 on Debian 13; 20.10 writes the same."""

from __future__ import annotations

from typing import Any

import pytest

from image_builder.node.preload import docker
from image_builder.node.store import Image
from tests.unit.node.preload_answers import CONFIG, IMAGE, INDEX, LAYERS, MANIFEST, PAUSE, TWO

# docker image inspect, the relevant part
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


def docker_fault(exists: bool = True, **changes: Any) -> str:
    return docker.docker_fault(IMAGE, {**INSPECTED, **changes}, lambda _folder: exists)


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
    assert docker.layer_folders({"GraphDriver": {"Data": {"UpperDir": "/a"}}}) == ["/a"]
    assert docker.layer_folders({"GraphDriver": {"Data": None}}) == []


@pytest.mark.parametrize(
    ("ref", "familiar"),
    [
        ("docker.io/library/debian:13", "debian:13"),
        ("docker.io/team/tool:1", "team/tool:1"),
        (TWO, TWO),
    ],
)
def test_reference_is_written_as_docker_does(ref: str, familiar: str) -> None:
    assert docker.familiar(ref) == familiar


def test_digest_is_looked_for_under_dockers_name() -> None:
    image = Image("docker.io/library/debian:13", INDEX, MANIFEST, CONFIG, False, LAYERS)
    assert docker.digest_fault(image, {"RepoDigests": [f"other@{MANIFEST}", f"debian@{INDEX}"]}) == ""
    assert docker.digest_fault(image, {"RepoDigests": None}) == f"has no digest {INDEX}, only its tag"
    others = {"RepoDigests": [f"debian@{MANIFEST}", f"ubuntu@{INDEX}"]}
    assert docker.digest_fault(image, others) == (
        f"has no digest {INDEX}, only debian@{MANIFEST}, ubuntu@{INDEX}"
    )


GUARD = "preload-pin-81e631c3594f"
UNPINNED = Image(TWO, INDEX, MANIFEST, CONFIG, False, LAYERS)


def test_guard_is_named_after_the_image_id() -> None:
    assert docker.guard_name(IMAGE) == GUARD


@pytest.mark.parametrize(
    ("images", "found", "faults"),
    [
        pytest.param([IMAGE], [], {TWO: "has no container that guards it"}, id="none yet"),
        pytest.param([IMAGE], [GUARD], {}, id="there"),
        pytest.param([UNPINNED], [], {}, id="not pinned"),
        pytest.param([UNPINNED], [GUARD], {GUARD: "guards an image that is not pinned"}, id="no longer"),
        pytest.param(
            [IMAGE],
            [GUARD, "preload-pin-0"],
            {"preload-pin-0": "guards an image that is not pinned"},
            id="of another image",
        ),
    ],
)
def test_guards_are_those_of_pinned_images(
    images: list[Image], found: list[str], faults: dict[str, str]
) -> None:
    assert docker.guard_faults(images, PAUSE, found) == faults


def test_pause_image_has_no_guard() -> None:
    assert docker.guard_faults([IMAGE], TWO, []) == {}


def test_guard_gets_no_copy_of_a_volume() -> None:
    argv = docker.guard_creation(GUARD, TWO, ["/var/lib/data"])
    assert argv[-3:] == ['--mount=type=tmpfs,"destination=/var/lib/data"', TWO, "never-started"]
    assert "--pull=never" in argv


@pytest.mark.parametrize(
    ("volumes", "places"),
    [
        (["data", "./z/", "../up"], []),  # Docker makes a volume of a relative path in any container
        (["/data", "/data/", "//data/./"], ["/data"]),
        (["/x/../y", "/a b", "/deep", "/deep/er"], ["/a b", "/deep", "/deep/er", "/y"]),
        (["/a,b", '/a"b', "/a:b"], ['/a""b', "/a,b", "/a:b"]),
    ],
)
def test_the_paths_of_volumes_are_written_as_docker_reads_them(volumes: list[str], places: list[str]) -> None:
    argv = docker.guard_creation(GUARD, TWO, volumes)
    mounts = [word for word in argv if word.startswith("--mount=")]
    assert mounts == [f'--mount=type=tmpfs,"destination={place}"' for place in places]
