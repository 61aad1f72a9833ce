"""An image's own dockerd, run in a sandbox for the duration of a bake and configured only for pulling.

Its configuration is the bake's own: no bridge, no iptables rules, no cgroup of its own, and a data root that the caller
binds to ``DATA_ROOT``. The node's daemon.json is validated separately, by the role.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import requests
import urllib3
from docker.errors import APIError, DockerException, ImageNotFound
from docker.utils.json_stream import json_stream

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull import outbound
from image_builder.bake.pull.attempt import Attempt
from image_builder.bake.pull.credentials import credentials_for, docker_header
from image_builder.bake.pull.docker_events import Failed, parse
from image_builder.bake.pull.model import CANT_START, Event, too_deep
from image_builder.bake.pull.network import NOTHING_SPECIAL, Endpoints, Network
from image_builder.bake.pull.reference import familiar, names_of
from image_builder.bake.pull.reference import parse as parse_reference
from image_builder.errors import PullError
from image_builder.system import cgroups, process
from image_builder.system.sandbox import Root
from image_builder.system.trees import remove_tree

DATA_ROOT = "/var/lib/docker"
_RUN = "run/image-builder"
_START_SECONDS, _STOP_SECONDS = 60.0, 60.0
_API_SECONDS = 120
_BLOCK = 1 << 20
# The path in Debian's package, then the one in Docker's own.
_PROGRAMS = ("/usr/sbin/dockerd", "/usr/bin/dockerd")
_FAILURES = (DockerException, requests.RequestException, urllib3.exceptions.HTTPError, OSError)
# The parts of a data root that are image data; the rest belongs to the daemon that ran.
_STORAGE = "overlay2"
_IMAGE_DATA = ("image", _STORAGE)


def configuration(downloads: int, mirrors: Sequence[str] = ()) -> dict[str, Any]:
    """Return the bake's daemon.json. All keys exist since Docker 20.10. Docker has mirrors only for Docker Hub."""
    return {
        "data-root": DATA_ROOT,
        "exec-root": "/run/docker",
        "pidfile": "/run/docker.pid",
        "hosts": ["unix:///run/docker.sock"],
        # Never left to the daemon: Docker 29 chooses containerd's store for an empty data root.
        "storage-driver": _STORAGE,
        "features": {"containerd-snapshotter": False},
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
        "cgroup-parent": cgroups.PARENT,
        "bridge": "none",
        "iptables": False,
        "ip-forward": False,
        "ip-masq": False,
        "userland-proxy": False,
        "max-concurrent-downloads": downloads,
        "raw-logs": True,
        **({"registry-mirrors": list(mirrors)} if mirrors else {}),
    }


@contextmanager
def running(
    root: Root,
    *,
    downloads: int,
    endpoints: Endpoints,
    log: Path,
    network: Network = NOTHING_SPECIAL,
) -> Iterator[DockerEngine]:
    """Run dockerd in ``root``, which has a network and a data root; yield the engine once it answers.

    ``downloads`` is how many layers are downloaded at once. Raises PullError with the end of its log.
    """
    run = root.path / _RUN
    run.mkdir(parents=True, exist_ok=True)
    hub = [mirror.url for mirror in network.mirrors.get("docker.io", ())]
    (run / "daemon.json").write_text(json.dumps(configuration(downloads, hub)), encoding="utf-8")
    for endpoint in endpoints.values():
        certs = root.path / "etc/docker/certs.d" / endpoint.host
        certs.mkdir(parents=True, exist_ok=True)
        (certs / "ca.crt").write_bytes(endpoint.ca.read_bytes())
    surroundings = outbound.variables(root, endpoints, network.outbound)
    argv = root.argv(["dockerd", f"--config-file=/{_RUN}/daemon.json"], surroundings, proxies=True)
    folder = os.open(root.path / "run", os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A socket's path is limited to 108 bytes; the path of a store may be longer.
        url = f"unix:///proc/self/fd/{folder}/docker.sock"
        with process.background(argv, log=log, stop_seconds=_STOP_SECONDS) as daemon:
            _wait_until_it_answers(url, lambda: daemon.poll() is None, log)
            require_overlay2(url)
            yield DockerEngine(root, url, lambda: daemon.poll() is None, log)
    finally:
        os.close(folder)


def _wait_until_it_answers(url: str, alive: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and alive():
        try:
            with _connected(url) as client:
                client.ping()
            return
        except (DockerException, requests.RequestException, OSError):
            time.sleep(0.05)
    raise PullError(f"dockerd does not start\n{process.tail(log)}")


def require_overlay2(url: str) -> None:
    """Raise PullError if a daemon doesn't store images in the way that nodes are seeded for."""
    with _connected(url) as client:
        info: dict[str, Any] = client.info()
    if info["Driver"] != _STORAGE:
        raise PullError(
            f"dockerd {info['ServerVersion']} keeps images with {info['Driver']}, though its configuration says "
            f"{_STORAGE}: nodes could not be seeded with them",
            hint="container_runtime_docker_version: 28 and earlier have no other default",
        )


@contextmanager
def _connected(url: str) -> Iterator[docker.APIClient]:
    client = docker.APIClient(base_url=url, version="auto", timeout=_API_SECONDS)
    try:
        yield client
    finally:
        client.close()


class DockerEngine:
    """A running dockerd. Methods may be called from several threads and raise PullError."""

    name = "docker"

    def __init__(self, root: Root, url: str, alive: Callable[[], bool], log: Path) -> None:
        self.root, self.url, self.alive, self.log = root, url, alive, log

    @property
    def binary(self) -> str:
        """Return the path of the daemon. Raises PullError if it is in none of the places that its packages use."""
        for path in _PROGRAMS:
            if (self.root.path / path.lstrip("/")).is_file():
                return path
        raise PullError(f"there is no dockerd at {' or '.join(_PROGRAMS)}")

    def version(self) -> str:
        """Return the daemon's version."""
        with _connected(self.url) as client:
            return str(client.version()["Version"])

    def has(self, image: LockedImage) -> bool:
        """Return whether an image is present as locked, by its digest and by its tag."""
        reference = parse_reference(image.ref)
        with _connected(self.url) as client:
            try:
                inspections = [_inspect(client, name) for name in (reference.at(image.digest), image.ref)]
            except ImageNotFound:
                return False
        return all(self._fault(image, inspection) is None for inspection in inspections)

    def pull(self, image: LockedImage, attempt: Attempt) -> None:
        """Pull an image by digest and tag it. Raises PullError with the daemon's message."""
        if reason := too_deep(self.name, image):
            raise PullError(reason)
        reference = parse_reference(image.ref)
        try:
            with _connected(self.url) as client:
                self._stream(client, image, attempt)
                client.tag(reference.at(image.digest), reference.repository, reference.tag)
                inspection = _inspect(client, image.ref)
        except (*_FAILURES, http.client.HTTPException) as error:
            raise PullError(str(getattr(error, "explanation", None) or error)) from error
        if fault := self._fault(image, inspection):
            raise PullError(fault)

    def _stream(self, client: docker.APIClient, image: LockedImage, attempt: Attempt) -> None:
        reference = parse_reference(image.ref)
        query = {"fromImage": reference.repository, "tag": image.digest, "platform": image.platform}
        headers = {"Host": "docker", **docker_header(credentials_for(reference.registry))}
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.url.removeprefix("unix://"))
            # Giving up ends the reading here; the daemon sees the connection close and stops pulling. It doesn't even
            # send its headers before it has the manifest, so this can't wait for them.
            attempt.ended_by(lambda: connection.shutdown(socket.SHUT_RDWR))
            client_side = http.client.HTTPConnection("docker")
            client_side.sock = connection
            path = f"/v{client.api_version}/images/create?{urllib.parse.urlencode(query)}"
            client_side.request("POST", path, headers=headers)
            with client_side.getresponse() as response:
                if response.status != 200:
                    raise PullError(_explanation(response.status, response.read()))
                for message in json_stream(_blocks(response)):
                    event = parse(message, time.monotonic()) if isinstance(message, Mapping) else None
                    if isinstance(event, Failed):
                        raise PullError(event.message)
                    if isinstance(event, Event):
                        attempt.observe(event)
        attempt.check()

    def _fault(self, image: LockedImage, inspection: Mapping[str, Any]) -> str | None:
        """Return how an image differs from what was locked, or None if it doesn't."""
        platform = f"{inspection.get('Os')}/{inspection.get('Architecture')}"
        if not image.platform.startswith(platform):
            return f"is for {platform}, not for {image.platform}"
        if inspection.get("Id") != image.config:
            return f"is {inspection.get('Id')}, not {image.config} as locked"
        if inspection.get("RootFS", {}).get("Layers") != [layer.diff_id for layer in image.layers]:
            return "does not have the layers that were locked"
        return None

    def mark(self, image: LockedImage, *, pin: bool) -> None:
        """Do nothing: Docker has no pins, and the kubelet protects only the pause image, which it knows by name."""

    def keep_only(self, images: Sequence[LockedImage]) -> list[str]:
        """Remove all references to other images; return those removed."""
        return self.keep_only_names(names_of(images))

    def keep_only_names(self, names: Set[str]) -> list[str]:
        """Remove all references except these; return those removed."""
        names = {familiar(name) for name in names}
        removed = []
        with _connected(self.url) as client:
            for image in client.images(all=False):
                for name in [*(image.get("RepoTags") or []), *(image.get("RepoDigests") or [])]:
                    if familiar(name) not in names and "<none>" not in name:
                        try:
                            client.remove_image(name)
                        except ImageNotFound:  # removed with its last tag
                            continue
                        removed.append(name)
        return removed

    def try_out(self, image: LockedImage) -> float | None:
        """Start and stop a container; return the seconds until it ran, None for an image without a command.

        What the command does afterwards doesn't matter: without a GPU or a network it may well fail.
        """
        with _connected(self.url) as client:
            config = _inspect(client, image.ref)["Config"]
            command = None if config.get("Cmd") or config.get("Entrypoint") else ["/nothing"]
            started = time.monotonic()
            try:
                host = client.create_host_config(network_mode="none")
                container = client.create_container(image.ref, command, host_config=host)["Id"]
                if command is None:
                    client.start(container)
                seconds = time.monotonic() - started
                client.remove_container(container, v=True, force=True)
            except (DockerException, requests.RequestException) as error:
                raise PullError(
                    f"no container of {image.ref} starts: {getattr(error, 'explanation', None) or error}",
                    hint=CANT_START,
                ) from error
        return round(seconds, 3) if command is None else None

    def unpacked_bytes(self, image: LockedImage) -> int:
        """Return the size of an image's files in bytes."""
        with _connected(self.url) as client:
            return int(_inspect(client, image.ref)["Size"])

    def layer_folders(self, image: LockedImage) -> list[str]:
        """Return the directories of an image's layers, the lowest first, relative to the data root."""
        with _connected(self.url) as client:
            data = _inspect(client, image.ref)["GraphDriver"]["Data"]
        folders = [data["UpperDir"], *(data["LowerDir"].split(":") if data.get("LowerDir") else ())]
        return [os.path.relpath(folder, DATA_ROOT) for folder in reversed(folders)]

    def save(
        self, images: Sequence[LockedImage], target: Path, progress: Callable[[int], None]
    ) -> tuple[int, str]:
        """Write what ``docker image save -o`` writes; return size and SHA-256. ``progress`` gets the bytes so far."""
        digest, size = hashlib.sha256(), 0
        try:
            with _connected(self.url) as client, target.open("xb") as sink:
                response = client.get(
                    f"{client.base_url}/v{client.api_version}/images/get",
                    params={"names": [image.ref for image in images]},
                    stream=True,
                    timeout=None,
                )
                with response:
                    if response.status_code != 200:
                        raise PullError(_explanation(response.status_code, response.content))
                    for chunk in response.iter_content(_BLOCK):
                        sink.write(chunk)
                        digest.update(chunk)
                        size += len(chunk)
                        progress(size)
        except (APIError, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise PullError(f"the images can't be saved: {error}") from error
        return size, digest.hexdigest()


def _inspect(client: docker.APIClient, name: str) -> dict[str, Any]:
    inspection: dict[str, Any] = client.inspect_image(name)  # type: ignore[no-untyped-call]
    return inspection


def _blocks(response: http.client.HTTPResponse) -> Iterator[Any]:
    while block := response.read1(_BLOCK):
        yield block


def _explanation(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return f"dockerd answered {status} {body[:200].decode(errors='replace')}"


def strip(data_root: Path) -> None:
    """Reduce a stopped daemon's data root to what belongs to its images."""
    for path in data_root.iterdir():
        if path.name not in _IMAGE_DATA:
            remove_tree(path) if path.is_dir() else path.unlink()
    for name in ("mounts", "tmp"):
        remove_tree(data_root / "image/overlay2/layerdb" / name)


def copy(source: Path, target: Path) -> None:
    """Copy the data root of an earlier bake for a new one. Files are shared: a layer's never change in place."""
    process.run(["cp", "-al", "--", f"{source}/.", target])
    # The only file that is rewritten; Docker replaces it by rename, but that isn't guaranteed.
    names = target / "image/overlay2/repositories.json"
    if names.exists():
        data = names.read_bytes()
        names.unlink()
        names.write_bytes(data)
        names.chmod(0o600)
