"""The operations on a node's engine in the boot matrix, for Docker and for containerd."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

from image_builder.lab import pause
from image_builder.machine.ssh import SshTarget
from tests.boot.node import shell

_CTR = "ctr --namespace k8s.io"


class Engine(Protocol):
    """A node's engine. ``root`` is its data root on a node of the lab, ``name`` its name in the seed's lines."""

    name: str
    root: str

    def runs_detached(self, ssh: SshTarget, reference: str) -> bool:
        """Start a detached container, return whether it keeps running, and remove it."""

    def run(self, ssh: SshTarget, reference: str, command: str) -> str:
        """Run a shell command in a container of an image; return its output."""

    def add_image(self, ssh: SshTarget, reference: str) -> None:
        """Give the engine a small image that isn't from a bake."""

    def images(self, ssh: SshTarget) -> set[str]:
        """Return the names of the engine's images, by tag and by digest."""


class _Docker:
    name = "docker"
    root = "/mnt/local/docker"

    def runs_detached(self, ssh: SshTarget, reference: str) -> bool:
        container = shell(ssh, f"docker run --detach --network none --pull never {reference}").strip()
        state = shell(ssh, f"sleep 2\ndocker inspect --format '{{{{.State.Running}}}}' {container}").strip()
        shell(ssh, f"docker rm --force {container}")
        return state == "true"

    def run(self, ssh: SshTarget, reference: str, command: str) -> str:
        return shell(ssh, f"docker run --rm --network none --pull never {reference} sh -c '{command}'")

    def add_image(self, ssh: SshTarget, reference: str) -> None:
        _import(ssh, reference, "docker image load --quiet --input")

    def images(self, ssh: SshTarget) -> set[str]:
        form = "{{.Repository}}:{{.Tag}} {{.Repository}}@{{.Digest}}"
        listed = shell(ssh, f"docker image ls --all --no-trunc --digests --format '{form}'")
        return {name for name in listed.split() if "<none>" not in name}


class _Containerd:
    name = "containerd"
    root = "/mnt/local/containerd"

    def runs_detached(self, ssh: SshTarget, reference: str) -> bool:
        shell(ssh, f"{_CTR} run --detach --null-io {reference} matrix")
        tasks = shell(ssh, f"sleep 2\n{_CTR} tasks ls").splitlines()
        shell(ssh, f"{_CTR} tasks rm --force matrix\n{_CTR} containers rm matrix")
        return any(line.split()[::2] == ["matrix", "RUNNING"] for line in tasks)

    def run(self, ssh: SshTarget, reference: str, command: str) -> str:
        return shell(ssh, f"{_CTR} run --rm {reference} matrix sh -c '{command}'")

    def add_image(self, ssh: SshTarget, reference: str) -> None:
        _import(ssh, reference, f"{_CTR} images import")

    def images(self, ssh: SshTarget) -> set[str]:
        # The CRI names each image by its id as well.
        names = shell(ssh, f"{_CTR} images ls --quiet").split()
        return {name for name in names if not name.startswith("sha256:")}


ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (_Docker(), _Containerd())}


def engine_of(variables: Mapping[str, Any]) -> Engine:
    """Return the engine of an image, given the variables in its facts."""
    return ENGINES[variables["container_runtime_engine"]]


def _import(ssh: SshTarget, reference: str, command: str) -> None:
    ssh.put(_another_image(reference), "/run/another.tar")
    shell(ssh, f"{command} /run/another.tar\nrm /run/another.tar")


def _another_image(reference: str) -> bytes:
    """Return an archive of the lab's pause image with another id: to the kubelet, names of one id are one image."""
    layer, config = pause.layer(), pause.encode({**pause.configuration(), "author": "the boot matrix"})
    manifest = [{"Config": "config.json", "Layers": ["layer.tar"], "RepoTags": [reference]}]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in (
            ("config.json", config),
            ("layer.tar", layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return stream.getvalue()
