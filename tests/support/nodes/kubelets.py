"""Current kubelets with the role's rendering for them, on a worker's root with seeded images and a real containerd.

Test machines have cgroup v1 and no systemd, and their kernel settings aren't those of a node, so a kubelet gets the
role's rendering except for four things: the cgroup driver, the parent group of its pods, ``failCgroupV1``, and the
files in /proc/sys that it reads, which are replaced by files with the role's values.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from image_builder.bake.lock.model import LockedImage
from image_builder.lab.registry import HOST
from image_builder.node import mounts
from image_builder.system import cgroups, namespace, process
from tests.support.images import programs
from tests.support.registries.pulls import wait_until
from tests.support.roles.container_runtime import render
from tests.support.roles.kubelet import Rendered, containerd
from tests.support.stores.seeds import DATA, Node, Result, ctr

# The versions in the directory named by IMAGE_BUILDER_PROGRAMS.
VERSIONS = ("1.31.14", "1.35.6", "1.36.2")
NEWER_ENGINE = "containerd_2"
GOLDEN = Path(__file__).parents[2] / "unit/golden/container_runtime"
# How full the test machine's disk and memory are doesn't matter.
_LOW = {"imagefs.available": "1Mi", "nodefs.available": "1Mi", "memory.available": "1Mi"}
_PROGRAM = "/usr/bin/kubelet"
# Takes a root and a command. After pivot_root the old root is mounted on top of the new one, and is unmounted.
_PIVOT = 'cd "$0" && pivot_root . . && umount --lazy . && exec "$@"'
_NODE_IP = "198.18.0.1"
_MIRROR = "mirror.test"
_CRI_1 = '[plugins."io.containerd.grpc.v1.cri"]\n'
# Warnings of a kubelet on a test machine, and why they aren't the rendering's fault.
_EXPECTED = {
    "Flexvolume plugin directory": "the first start",
    "checkpoint is not found": "the first start",
    "Skipping pod synchronization": "it has just started",
    "Image garbage collection failed once": "it has just started",
    "failed to check if we have separate container filesystem": "it has just started",
    "kubeclient not set, assuming standalone": "no API server",
    "Skipping CSINode initialization": "no API server",
    "failed to check if node is newer": "no API server",
    "OOM events will not be reported": "no kernel messages",
    "Failed to set rlimit on max file handles": "not allowed to those who run tests",
    "with oom score": "not allowed to those who run tests",
    "unable to find data in memory cache": "it has just started",
    "Failed to process watch event": "its container has ended meanwhile",
    "an error occurred when try to find container": "its container has ended meanwhile",
}
# A CRI call that containerd 1.x doesn't have; the kubelet then uses its own configuration.
EXPECTED_OF_1_7 = "RuntimeConfig from runtime service failed"


def program(version: str, place: Path) -> Path:
    """Unpack a kubelet below ``place``."""
    place.mkdir(parents=True, exist_ok=True)
    return programs.unpack(f"kubernetes-{version}/kubelet", place)


@contextmanager
def containerd_with_cri(node: Node, pause: str) -> Iterator[Callable[[], None]]:
    """Run containerd on the node's data root with the role container_runtime's configuration for the installed series.

    Yields a function that restarts it, with whatever series is installed by then; containers keep running meanwhile.
    """
    log = node.lab.base / "containerd-cri.log"
    with _no_mounts_left(node), ExitStack() as stack:
        daemon = stack.enter_context(ExitStack())
        # Not on an overlay: pods with their own user namespace can't have files from one.
        state = node.root.path / "var/lib/kubelet"
        for folder in (node.disk / "kubelet", state):
            folder.mkdir(parents=True, exist_ok=True)
        namespace.bind(os.fspath(node.disk / "kubelet"), os.fspath(state), read_only=False)

        def restart() -> None:
            daemon.close()
            (node.root.path / "run/containerd.toml").write_text(_configuration(node, pause))
            argv = _pivoted(node.root.argv(["containerd", "--config", "/run/containerd.toml"]))
            daemon.enter_context(process.background(argv, log=log, stop_seconds=30))
            assert wait_until(lambda: "Server:" in ctr(node, "version", ok=(0, 1)), 60)

        restart()
        try:
            yield restart
        finally:
            for words in (["tasks", "rm", "--force"], ["containers", "rm"]):
                for line in ctr(node, words[0], "ls").splitlines()[1:]:
                    ctr(node, *words, line.split()[0], ok=range(256))


def _pivoted(argv: list[str]) -> list[str]:
    """Return the command with pivot_root instead of chroot: in a chroot the kernel allows no user namespaces."""
    at = argv.index("chroot")
    return [*argv[:at], "unshare", "--mount", "sh", "-c", _PIVOT, *argv[at + 1 :]]


def series(node: Node) -> str:
    """Return the installed containerd's series, such as `2.1`."""
    found = re.search(r" v?(\d+\.\d+)\.", node.root.run(["containerd", "--version"]).stdout)
    assert found
    return found[1]


def role(node: Node, version: str, pause: str, **more: Any) -> Rendered:
    """Return the role's rendering for a standalone kubelet of a version with the containerd in the node's root."""
    return Rendered(
        containerd(version)
        | {"container_runtime_containerd_version": series(node), "container_runtime_pause_image": pause}
        | {"kubelet_mode": "standalone", "kubelet_eviction_hard": _LOW}
        | {"kubelet_image_gc_high_threshold_percent": 100}
        | more
    )


def _configuration(node: Node, pause: str) -> str:
    text = (GOLDEN / f"containerd-{series(node)}.toml").read_text(encoding="utf-8")
    for old, new in (
        ("/mnt/local/containerd", DATA),
        ("registry.k8s.io/pause:3.10", pause),
        ("SystemdCgroup = true", "SystemdCgroup = false"),
    ):
        assert old in text
        text = text.replace(old, new)
    # Tests may run without permission to exempt a process from the kernel's OOM killer.
    spared = "restrict_oom_score_adj = true\n"
    if _CRI_1 in text:
        return text.replace(_CRI_1, f"{_CRI_1}{spared}")
    return f'{text}\n[plugins."io.containerd.cri.v1.runtime"]\n{spared}'


@contextmanager
def _no_mounts_left(node: Node) -> Iterator[None]:
    """At the end, unmount everything that containers and pods mounted in the node's root, newest first."""
    before = {mount.target for mount in mounts.listed()}
    try:
        yield
    finally:
        for mount in reversed(mounts.listed()):
            if mount.target not in before and mount.target.startswith(f"{node.root.path}/"):
                namespace.unmount(mount.target)


def use_mirror(node: Node) -> None:
    """Give the node a mirror of the lab's registry and the mirror's CA, as the role does.

    It doesn't trust the registry itself, so a pull proves both. The lab's proxy is the mirror from then on.
    """
    lab, root = node.lab, node.root
    mirror = lab.serve_proxy(_MIRROR)
    mirror.tokens, lab.proxy = lab.proxy.tokens, mirror
    lab.name(root)
    authority = root.path / "usr/local/share/ca-certificates/container-runtime-mirror.crt"
    shutil.copyfile(lab.endpoints[_MIRROR].ca, authority)
    root.run(["update-ca-certificates"])
    hosts = root.path / "etc/containerd/certs.d" / HOST / "hosts.toml"
    hosts.parent.mkdir(parents=True, exist_ok=True)
    item = {"registry": HOST, "mirrors": [{"url": f"https://{_MIRROR}"}]}
    hosts.write_text(render("hosts.toml.j2", item=item))


@dataclass
class Kubelet:
    """A running kubelet: ``manifests`` defines its pods, and ``log`` has all of its output."""

    node: Node
    manifests: Path
    log: Path
    daemon: subprocess.Popen[Any]

    def start_pod(self, name: str, image: LockedImage, **spec: Any) -> None:
        """Start a static pod with one container of an image, in the node's network unless ``spec`` differs."""
        container = {"name": "main", "image": image.ref, "imagePullPolicy": "IfNotPresent"}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"hostNetwork": True, "containers": [container], **spec},
        }
        draft = self.manifests / f".{name}"  # a kubelet skips hidden files
        draft.write_text(json.dumps(pod))
        draft.rename(self.manifests / f"{name}.json")

    def runs(self, image: LockedImage, seconds: float = 60) -> bool:
        """Wait for a container of an image; return whether one runs."""
        return wait_until(lambda: image.ref in running_images(self.node), seconds)

    def end_pods(self) -> bool:
        """Remove the manifests; return whether their containers have ended."""
        for manifest in self.manifests.iterdir():
            manifest.unlink()
        return wait_until(lambda: not running_images(self.node), 60)

    def complaints(self) -> list[str]:
        """Return its warnings, except those that are due to the test machine."""
        return complaints(self.log.read_text("utf-8", "replace"))


def complaints(said: str, expected: Iterable[str] = _EXPECTED) -> list[str]:
    """Return a kubelet's lines that warn, or name something deprecated or unknown, except the expected ones."""
    wrong = re.compile(r"^\W*[WEF]\d{4} |eprecated|unknown field|strict decod")
    lines = [line for line in said.splitlines() if wrong.search(line)]
    return [line for line in lines if not any(words in line for words in expected)]


def running_images(node: Node) -> list[str]:
    """Return the images of running containers, except those of sandboxes."""
    tasks = [line.split() for line in ctr(node, "tasks", "ls").splitlines()[1:]]
    alive = {words[0] for words in tasks if words[2] == "RUNNING"}
    rows = [line.split() for line in ctr(node, "containers", "ls").splitlines()[1:]]
    return sorted(row[1] for row in rows if row[0] in alive and "/pause" not in row[1])


def image_names(node: Node) -> list[str]:
    """Return the tags of images that are complete and unpacked."""
    rows = [line.split() for line in ctr(node, "images", "check").splitlines()[1:]]
    tags = [row for row in rows if row[0].startswith(f"{HOST}/") and "@" not in row[0]]
    return sorted(row[0] for row in tags if row[3] == "complete" and row[-1] == "true")


@contextmanager
def kubelet(node: Node, path: Path, rendered: Rendered, **fields: Any) -> Iterator[Kubelet]:
    """Run a kubelet in standalone mode until the block ends; its manifests are removed then.

    ``fields`` are added to the configuration.
    """
    root = node.root.path
    config = rendered.config | {
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroups.PARENT,
        "failCgroupV1": False,
    }
    manifests = root / config["staticPodPath"].lstrip("/")
    log = node.lab.base / f"kubelet-{time.monotonic_ns()}.log"
    with cgroups.held(), _looks_like_a_node(node, path, rendered.value("__kubelet_sysctls")):
        manifests.mkdir(parents=True, exist_ok=True)
        (root / "etc/kubernetes/kubelet.yaml").write_text(yaml.safe_dump(config | fields))
        flags = [word.replace("${KUBELET_NODE_IP}", _NODE_IP) for word in rendered.command[1:]]
        flags = [re.sub(r"\$\{\w+\}", "", flag) for flag in flags if not flag.startswith("$")]
        with process.background(node.root.argv([_PROGRAM, *flags]), log=log, stop_seconds=30) as daemon:
            running = Kubelet(node, manifests, log, daemon)
            try:
                yield running
            finally:
                running.end_pods()


@contextmanager
def _looks_like_a_node(node: Node, path: Path, settings: Result) -> Iterator[None]:
    """Provide the root with the program, control groups, and files with the kernel settings that the role writes."""
    root = node.root.path
    with ExitStack() as stack:
        for hierarchy in Path("/sys/fs/cgroup").iterdir():
            (hierarchy / cgroups.PARENT.lstrip("/")).mkdir(exist_ok=True)
        wanted = {root / _PROGRAM.lstrip("/"): path}
        for name, value in settings.items():
            file = node.lab.base / name
            file.write_text(f"{value}\n")
            wanted[root / "proc/sys" / name.replace(".", "/")] = file
        (root / _PROGRAM.lstrip("/")).touch()
        # A kubelet looks for OOM messages in the kernel log, which belongs to the host.
        (root / "dev/kmsg").touch()
        for where, source in wanted.items():
            namespace.bind(os.fspath(source), os.fspath(where), read_only=True)
            stack.callback(namespace.unmount, os.fspath(where))
        yield
