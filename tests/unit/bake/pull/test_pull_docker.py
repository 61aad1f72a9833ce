"""Docker's own names for images, as its API lists them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest

from image_builder.bake.lock.model import LockedImage, LockedLayer
from image_builder.bake.pull import docker_engine
from image_builder.bake.pull.docker_engine import DockerEngine
from image_builder.bake.pull.model import CANT_START
from image_builder.errors import PullError
from image_builder.system.sandbox import Root

DIGEST = f"sha256:{'1' * 64}"
PAUSE = "registry.k8s.io/pause"


def image(ref: str) -> LockedImage:
    layer = LockedLayer(digest=DIGEST, size=1, diff_id=DIGEST)
    return LockedImage(
        ref=ref, platform="linux/amd64", digest=DIGEST, manifest=DIGEST, config=DIGEST, layers=[layer]
    )


class Client:
    """A Docker client whose daemon has pulled nginx from Docker Hub, and a pause image, by digest and tag.

    The lists are those of Docker 20.10's ``GET /images/json``.
    """

    def __init__(self) -> None:
        self.driver = "overlay2"
        self.names: list[dict[str, list[str] | None]] = [
            {"RepoTags": ["nginx:1.25"], "RepoDigests": [f"nginx@{DIGEST}"]},
            {"RepoTags": [f"{PAUSE}:3.10"], "RepoDigests": [f"{PAUSE}@{DIGEST}"]},
            {"RepoTags": ["<none>:<none>"], "RepoDigests": None},
        ]

    def images(self, **_: object) -> list[dict[str, Any]]:
        return [dict(entry) for entry in self.names]

    def remove_image(self, name: str) -> None:
        for entry in self.names:
            for key, names in entry.items():
                entry[key] = [n for n in names or [] if n != name]

    def info(self) -> dict[str, str]:
        return {"Driver": self.driver, "ServerVersion": "29.7.2"}

    def inspect_image(self, _: str) -> dict[str, Any]:
        return {"Config": {"Entrypoint": ["/entry"]}}

    def create_host_config(self, **_: object) -> dict[str, Any]:
        return {}

    def create_container(self, *_: object, **__: object) -> dict[str, str]:
        return {"Id": "1"}

    def start(self, _: str) -> None:
        raise docker.errors.APIError("", explanation="libcuda.so.1: cannot open shared object file")

    def left(self) -> list[str]:
        return [name for entry in self.names for names in entry.values() for name in names or []]


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()

    @contextmanager
    def connected(_: str) -> Iterator[Client]:
        yield client

    monkeypatch.setattr(docker_engine, "_connected", connected)
    return client


@pytest.fixture
def engine(tmp_path: Path) -> DockerEngine:
    return DockerEngine(Root(tmp_path, {}), "unix://", lambda: True, tmp_path / "log")


def test_images_of_docker_hub_are_kept_by_the_names_that_docker_gives_them(
    engine: DockerEngine, client: Client
) -> None:
    removed = engine.keep_only([image("docker.io/library/nginx:1.25")])
    assert client.left()[:2] == ["nginx:1.25", f"nginx@{DIGEST}"]
    assert removed == [f"{PAUSE}:3.10", f"{PAUSE}@{DIGEST}"]


def test_what_an_image_can_be_given_that_starts_on_nodes_only_is_said(
    engine: DockerEngine, client: Client
) -> None:
    with pytest.raises(PullError, match=f"no container of {PAUSE}:3.10 starts: libcuda.so.1") as error:
        engine.try_out(image(f"{PAUSE}:3.10"))
    assert error.value.hint == CANT_START and "`mode: archive`" in CANT_START


def test_a_daemon_with_another_store_than_it_was_told_is_refused(client: Client) -> None:
    docker_engine.require_overlay2("unix://")
    client.driver = "overlayfs"  # what containerd's image store calls itself
    with pytest.raises(PullError, match=r"dockerd 29\.7\.2 keeps images with overlayfs, though .* overlay2"):
        docker_engine.require_overlay2("unix://")


def test_the_bake_leaves_no_store_to_the_daemon() -> None:
    configuration = docker_engine.configuration(3)
    assert configuration["storage-driver"] == "overlay2"
    assert configuration["features"] == {"containerd-snapshotter": False}


@pytest.mark.parametrize("place", ["usr/sbin/dockerd", "usr/bin/dockerd"])
def test_the_daemon_is_where_debian_or_docker_puts_it(tmp_path: Path, place: str) -> None:
    engine = DockerEngine(Root(tmp_path, {}), "unix://", lambda: True, tmp_path / "log")
    with pytest.raises(PullError, match="there is no dockerd at /usr/sbin/dockerd or /usr/bin/dockerd"):
        _ = engine.binary
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    assert engine.binary == f"/{place}"
