"""An image's own containerd, run in a sandbox for the duration of a bake, with its own ``ctr`` for pulling.

Progress is read from where containerd keeps it: a blob that is being downloaded is a directory below the content
store's ``ingest``, with its reference, its size so far and its total. Unpacking has no such place; there, the bytes
that the daemon has written show that something is moving.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

from image_builder.bake.lock.model import LockedImage
from image_builder.bake.pull import outbound, retry
from image_builder.bake.pull.attempt import Attempt, now
from image_builder.bake.pull.gateway import Gateway, gateway
from image_builder.bake.pull.model import CANT_START, Event, too_deep
from image_builder.bake.pull.network import NOTHING_SPECIAL, Endpoints, Mirror, Network
from image_builder.bake.pull.reference import Reference, names_of
from image_builder.bake.pull.reference import parse as parse_reference
from image_builder.bake.pull.registry import STREAM, RegistryClient
from image_builder.errors import CommandError, PullError
from image_builder.system import cgroups, process
from image_builder.system.sandbox import Root
from image_builder.system.trees import remove_tree

DATA_ROOT = "/var/lib/containerd"
NAMESPACE = "k8s.io"
SNAPSHOTTER = "overlayfs"
_RUN = "run/image-builder"
_CONTENT = "io.containerd.content.v1.content"
_DATABASES = (
    "io.containerd.metadata.v1.bolt/meta.db",
    "io.containerd.snapshotter.v1.overlayfs/metadata.db",
)
_IMAGE_DATA = (_CONTENT, *(name.partition("/")[0] for name in _DATABASES))
_START_SECONDS, _STOP_SECONDS = 60.0, 60.0
_POLL_SECONDS = 0.5
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# Fewer bytes than this are the daemon's own housekeeping, not the files of a layer.
_STEP = 1 << 16
# The label that CRI's image store looks for, so that the kubelet sees the image at once.
_MANAGED = "io.cri-containerd.image=managed"
_PINNED, _NOT_PINNED = "io.cri-containerd.pinned=pinned", "io.cri-containerd.pinned="
# The CRI plugin wants a network and pods; the bake wants neither.
_CONFIGURATION = f"""\
version = 2
root = "{DATA_ROOT}"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime",
]
[grpc]
  address = "/run/containerd/containerd.sock"
"""


@contextmanager
def running(
    root: Root,
    *,
    downloads: int,
    endpoints: Endpoints,
    log: Path,
    network: Network = NOTHING_SPECIAL,
) -> Iterator[ContainerdEngine]:
    """Run containerd in ``root``, which has a network and a data root; yield the engine once it answers.

    ``downloads`` is how many layers of one image are downloaded at once. Raises PullError with the end of its log.
    """
    run = root.path / _RUN
    run.mkdir(parents=True, exist_ok=True)
    (run / "containerd.toml").write_text(_CONFIGURATION, encoding="utf-8")
    argv = root.argv(["containerd", "--config", f"/{_RUN}/containerd.toml"])
    with process.background(argv, log=log, stop_seconds=_STOP_SECONDS) as daemon:
        engine = ContainerdEngine(root, downloads, endpoints, daemon.pid, lambda: daemon.poll() is None, log)
        engine.network = network
        engine.outbound = outbound.variables(root, endpoints, network.outbound)
        engine.wait_until_it_answers()
        yield engine


class ContainerdEngine:
    """A running containerd. Methods may be called from several threads and raise PullError."""

    name = "containerd"
    binary = "/usr/bin/containerd"

    def __init__(
        self,
        root: Root,
        downloads: int,
        endpoints: Endpoints,
        pid: int,
        alive: Callable[[], bool],
        log: Path,
    ) -> None:
        self.root, self.downloads, self.endpoints = root, downloads, endpoints
        self.pid, self.alive, self.log = pid, alive, log
        self.data_root = root.path / DATA_ROOT.lstrip("/")
        self.network = NOTHING_SPECIAL
        self.outbound: Mapping[str, str] = {}

    def _ctr(self, *arguments: str) -> str:
        try:
            return self.root.run(["ctr", "-n", NAMESPACE, *arguments]).stdout
        except CommandError as error:
            raise PullError(error.tail or error.message) from error

    def wait_until_it_answers(self) -> None:
        """Wait for the daemon's socket; raises PullError with the end of its log."""
        deadline = now() + _START_SECONDS
        while now() < deadline and self.alive():
            try:
                self._ctr("version")
                return
            except PullError:
                time.sleep(0.05)
        raise PullError(f"containerd does not start\n{process.tail(self.log)}")

    @cached_property
    def major(self) -> int:
        """Return the first number of the version, or 0 if it isn't a number."""
        number = self.version().partition(".")[0]
        return int(number) if number.isdigit() else 0

    def version(self) -> str:
        """Return the daemon's version, without the name of its builder."""
        fields = self.root.run(["containerd", "--version"]).stdout.split()
        return fields[2].removeprefix("v") if len(fields) > 2 else ""

    def has(self, image: LockedImage) -> bool:
        """Return whether an image is present as locked, by digest and tag, complete and unpacked."""
        reference = parse_reference(image.ref)
        names = (reference.at(image.digest), image.ref)
        return all(self._is_complete(name, image.digest) for name in names)

    def _is_complete(self, name: str, digest: str) -> bool:
        rows = [line.split() for line in self._ctr("images", "check", f"name=={name}").splitlines()[1:]]
        return any(
            row[0] == name and row[2] == digest and row[3] == "complete" and row[-1] == "true" for row in rows
        )

    def pull(self, image: LockedImage, attempt: Attempt) -> None:
        """Pull an image by digest and tag it. Raises PullError with ctr's message."""
        if reason := too_deep(self.name, image):
            raise PullError(reason)
        reference = parse_reference(image.ref)
        name = reference.at(image.digest)
        log = self.log.with_name(f"{self.log.stem}-{_label(image)}.log")
        log.unlink(missing_ok=True)
        try:
            with self._hosts(image) as (folder, ways):
                command = self.pull_command(image, folder)
                with process.background(
                    self.root.argv(command, self.outbound, proxies=True), log=log
                ) as child:
                    attempt.ended_by(child.terminate)
                    while child.poll() is None:
                        for event in self._observe(image):
                            attempt.observe(event)
                        attempt.check()
                        time.sleep(_POLL_SECONDS)
                attempt.check()
                if child.returncode != 0:
                    raise PullError(_reason(log, ways, f"https://{reference.api_host}"))
        finally:
            log.unlink(missing_ok=True)
        self._ctr("images", "tag", "--force", name, image.ref)
        for image_name in (name, image.ref):
            if not self._is_complete(image_name, image.digest):
                raise PullError(f"{image_name} is not complete after it was pulled")
        for layer in image.layers:
            attempt.observe(Event(now(), layer.digest, "done"))

    def pull_command(self, image: LockedImage, hosts: str) -> list[str]:
        """Return the command that pulls an image by digest; ``hosts`` is the directory that leads to its registry."""
        argv = ["ctr", "-n", NAMESPACE, "images", "pull", "--snapshotter", SNAPSHOTTER]
        argv += ["--platform", image.platform, "--max-concurrent-downloads", str(self.downloads)]
        if self.major >= 2:
            # From 2.0 on, ctr otherwise lets the daemon's transfer service pull, which has no limit on downloads; 1.6
            # doesn't know this option.
            argv.append("--local")
        return [*argv, "--hosts-dir", hosts, parse_reference(image.ref).at(image.digest)]

    def _observe(self, image: LockedImage) -> Iterator[Event]:
        """Yield the events that the content store shows for an image's layers."""
        at = now()
        coming = dict(self._ingests())
        layers = {layer.digest: layer.size for layer in image.layers}
        for digest, (got, total) in coming.items():
            if digest in layers:
                yield Event(at, digest, "downloading", got, total or layers[digest])
        present = [d for d in layers if d not in coming and self._has_blob(d)]
        if layers and len(present) == len(layers):
            # Nothing is left to download: the daemon is now writing the files of layers.
            yield Event(at, image.layers[-1].digest, "extracting", self._written())
            present.pop()
        for digest in present:
            yield Event(at, digest, "downloaded", layers[digest], layers[digest])

    def _has_blob(self, digest: str) -> bool:
        return (self.data_root / _CONTENT / "blobs/sha256" / digest.removeprefix("sha256:")).exists()

    def _ingests(self) -> Iterator[tuple[str, tuple[int, int | None]]]:
        """Yield (digest, (bytes so far, total bytes)) of the blobs that are being downloaded."""
        for path in (self.data_root / _CONTENT / "ingest").glob("*"):
            try:
                digest = _DIGEST.search((path / "ref").read_text())
                got = (path / "data").stat().st_size
                total = (path / "total").read_text() if (path / "total").exists() else ""
            except FileNotFoundError:  # it finished in the meantime
                continue
            if digest:
                yield digest[0], (got, int(total) if total.isdigit() else None)

    def _written(self) -> int:
        """Return the bytes that the daemon has written since it started, in steps larger than a log line."""
        try:
            fields = Path(f"/proc/{self.pid}/io").read_text().split()
        except FileNotFoundError:
            return 0
        written = int(fields[fields.index("wchar:") + 1])
        return written // _STEP * _STEP

    @contextmanager
    def _hosts(self, image: LockedImage) -> Iterator[tuple[str, Sequence[Gateway]]]:
        """Write the configuration for reaching the image's registry in one pull, on the sandbox's tmpfs.

        Yields the directory, and the gateways to the registry and to those of its mirrors that require a login.
        """
        reference = parse_reference(image.ref)
        folder = self.root.path / _RUN / f"hosts-{_label(image)}"
        place = folder / reference.registry
        place.mkdir(parents=True, mode=0o700, exist_ok=True)
        with ExitStack() as stack:
            stack.callback(remove_tree, folder)
            client = stack.enter_context(self._client(reference))
            way = stack.enter_context(gateway(client)) if client.credentials else None
            ways = [way] if way else []
            endpoint = self.endpoints.get(reference.registry)
            # For the registry itself, not in a `host` table: a request refused there is repeated at `server`, without
            # this certificate and this header, and only that refusal is reported.
            lines = [
                f"server = {_toml(way.url if way else client.server)}",
                'capabilities = ["pull", "resolve"]',
            ]
            if endpoint and not way:
                shutil.copyfile(endpoint.ca, place / "ca.pem")
                lines.append(f"ca = {_toml(self._inside(place / 'ca.pem'))}")
            if way:
                lines += ["[header]", f"Authorization = [{_toml(way.authorization)}]"]
            lines.append("[host]")  # without it, containerd 1.6 and 1.7 ignore all of this
            for mirror in self.network.mirrors.get(reference.registry, ()):
                client = stack.enter_context(self._client(reference, mirror))
                if client.credentials:
                    ways.append(stack.enter_context(gateway(client)))
                    lines += _mirror_by(ways[-1], mirror)
                else:
                    lines += _mirror(mirror)
            (place / "hosts.toml").touch(mode=0o600)
            (place / "hosts.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
            yield self._inside(folder), ways

    def _client(self, reference: Reference, mirror: Mirror | None = None) -> RegistryClient:
        """Return a client of the registry or a mirror. Raises PullError if its credentials aren't available."""
        outbound = self.network.outbound
        return RegistryClient(
            reference, self.endpoints, mirror, outbound=outbound, retries=False, timeout=STREAM
        )

    def _inside(self, path: Path) -> str:
        return f"/{path.relative_to(self.root.path)}"

    def mark(self, image: LockedImage, *, pin: bool) -> None:
        """Label an image as the kubelet's plugin does, and protect it from the kubelet if wanted.

        An empty value removes a label that an earlier bake of this data root has set.
        """
        reference = parse_reference(image.ref)
        for name in (reference.at(image.digest), image.ref):
            self._ctr("images", "label", name, _MANAGED, _PINNED if pin else _NOT_PINNED)

    def keep_only(self, images: Sequence[LockedImage]) -> list[str]:
        """Remove all references to other images; return those removed."""
        return self.keep_only_names(names_of(images))

    def keep_only_names(self, names: Set[str]) -> list[str]:
        """Remove all references except these; return those removed."""
        removed = [name for name in self._ctr("images", "ls", "-q").split() if name not in names]
        if removed:
            self._ctr("images", "rm", "--sync", *removed)
        return removed

    def try_out(self, image: LockedImage) -> float | None:
        """Start and stop a container; return the seconds until it ran, None for an image without a command.

        What the command does afterwards doesn't matter: without a GPU or a network it may well fail.
        """
        name = f"rehearsal-{_label(image)}"
        config = json.loads(self._ctr("content", "get", image.config)).get("config", {})
        runs = bool(config.get("Cmd") or config.get("Entrypoint"))
        arguments = ("--snapshotter", SNAPSHOTTER, image.ref, name)
        started = time.monotonic()
        try:
            if not runs:
                self._ctr("containers", "create", *arguments, "/nothing")
                return None
            self._ctr("run", "--detach", "--null-io", "--cgroup", f"{cgroups.PARENT}/{name}", *arguments)
            return round(time.monotonic() - started, 3)
        except PullError as error:
            raise PullError(
                f"no container of {image.ref} starts: {error.message}", hint=CANT_START
            ) from error
        finally:
            if runs:
                self.root.run(["ctr", "-n", NAMESPACE, "tasks", "rm", "--force", name], ok=range(256))
            self.root.run(["ctr", "-n", NAMESPACE, "containers", "rm", name], ok=range(256))

    def unpacked_bytes(self, image: LockedImage) -> int:
        """Return the size of an image's files in bytes."""
        size, chain = 0, ""
        for layer in image.layers:
            chain = _digest(f"{chain} {layer.diff_id}") if chain else layer.diff_id
            usage = self._ctr("snapshots", "--snapshotter", SNAPSHOTTER, "usage", "-b", chain)
            size += int(usage.splitlines()[-1].split()[1])
        return size

    def layer_folders(self, image: LockedImage) -> list[str]:
        """Return the directories of an image's layers, the lowest first, relative to the data root.

        Only a mount shows where a snapshot's files are, and only a view or a writable snapshot can be mounted.
        """
        chain = ""
        for layer in image.layers:
            chain = _digest(f"{chain} {layer.diff_id}") if chain else layer.diff_id
        view = f"layers-of-{_label(image)}"
        snapshots = ("snapshots", "--snapshotter", SNAPSHOTTER)
        mounts = self._ctr(*snapshots, "view", "--mounts", view, chain)
        # Nothing refers to the view, so containerd's garbage collection may already have removed it.
        self.root.run(["ctr", "-n", NAMESPACE, *snapshots, "rm", view], ok=range(256))
        return [os.path.relpath(folder, DATA_ROOT) for folder in reversed(_lowers(mounts))]

    def save(
        self, images: Sequence[LockedImage], target: Path, progress: Callable[[int], None]
    ) -> tuple[int, str]:
        """Write what ``ctr images export`` writes; return its size and SHA-256. ``progress`` gets the bytes so far."""
        archive = self.root.path / _RUN / "out" / target.name
        self._ctr(*self.export_arguments(f"/{archive.relative_to(self.root.path)}", images))
        digest, size = hashlib.sha256(), 0
        with target.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
                progress(size)
        return size, digest.hexdigest()

    def export_arguments(self, archive: str, images: Sequence[LockedImage]) -> list[str]:
        """Return ctr's arguments for writing images to an archive."""
        # From 2.0 on, ctr otherwise lets the daemon's transfer service export, and may exit with status 0 before it has
        # written the last of the data: 2 of 60 archives were truncated with 2.1.9. 1.6 doesn't know the option.
        local = ["--local"] * (self.major > 1)
        platform = ("--platform", images[0].platform)
        return ["images", "export", *platform, *local, archive, *(image.ref for image in images)]


def _lowers(mounts: str) -> list[str]:
    """Return the directories of a view's mount as ctr prints it, the topmost first.

    A single layer is a bind mount: ``[{"Type": "bind", "Source": "/…/snapshots/1/fs", …}]``; several are an overlay:
    ``[{"Type": "overlay", "Options": ["index=off", "lowerdir=/…/2/fs:/…/1/fs"], …}]``.
    """
    (mount,) = json.loads(mounts)
    if mount["Type"] == "overlay":
        lower: str = next(o for o in mount["Options"] if o.startswith("lowerdir="))
        return lower.removeprefix("lowerdir=").split(":")
    return [mount["Source"]]


def _mirror(mirror: Mirror) -> list[str]:
    """Return the table of ``hosts.toml`` for a mirror."""
    lines = [f"[host.{_toml(mirror.url)}]", 'capabilities = ["pull", "resolve"]']
    lines += [f"{name} = true" for name in ("skip_verify", "override_path") if getattr(mirror, name)]
    return lines


def _mirror_by(way: Gateway, mirror: Mirror) -> list[str]:
    """Return the tables of ``hosts.toml`` for a mirror that requires a login."""
    host = f"host.{_toml(way.url + urllib.parse.urlsplit(mirror.url).path)}"
    return [
        f"[{host}]",
        'capabilities = ["pull", "resolve"]',
        *(["override_path = true"] if mirror.override_path else []),
        f"[{host}.header]",
        f"Authorization = [{_toml(way.authorization)}]",
    ]


def _reason(log: Path, ways: Sequence[Gateway], server: str) -> str:
    """Return why ctr failed: the registry's answer to its gateway, or else the last error line of ctr.

    ``server`` is the registry's own address; what mirrors answered to their gateways follows the reason.
    """
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ctr:")]
    reason = (errors or lines or ["ctr failed and said nothing"])[-1].removeprefix("ctr: ")
    passed_over = ""
    for way in ways:
        reason = reason.replace(way.url, way.client.server)
        if way.failure and way.client.server == server:
            reason = way.failure
        elif way.failure:
            passed_over += f"{retry.MIRROR}{way.client.server}: {way.failure}"
    return reason + passed_over


def _toml(text: str) -> str:
    """Return ``text`` as a TOML string: JSON's escapes are TOML's."""
    return json.dumps(text)


def _label(image: LockedImage) -> str:
    """Return a short name for what belongs to one image. The same content under two names has two."""
    return hashlib.sha256(image.ref.encode()).hexdigest()[:12]


def _digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def strip(data_root: Path) -> None:
    """Reduce a stopped daemon's data root to what belongs to its images."""
    for path in data_root.iterdir():
        if path.name not in _IMAGE_DATA:
            remove_tree(path) if path.is_dir() else path.unlink()
    for path in (data_root / _CONTENT / "ingest").glob("*"):
        remove_tree(path)


def copy(source: Path, target: Path) -> None:
    """Copy the data root of an earlier bake for a new one. Files are shared, except for the databases."""
    process.run(["cp", "-al", "--", f"{source}/.", target])
    for name in _DATABASES:
        path = target / name
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o600)
