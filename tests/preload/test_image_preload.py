"""``node-agent preload`` with real engines: today's; and Docker 20.10 and 26.1, containerd 1.6 and 1.7.

Their packages are unpacked into a scratch directory. Each scenario is one script in namespaces of its own, without a
network: a first engine makes the archive, which is loaded into a second one with a blank disk.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.fetch import Download, fetch
from image_builder.lab import pause
from image_builder.settings import REPO_ROOT
from image_builder.system import process
from image_builder.system.environment import environment
from tests.support.images import programs
from tests.support.registries import preload_scripts as scripts

pytestmark = pytest.mark.root

NODE = REPO_ROOT / "image_builder/node"
GOLDEN = REPO_ROOT / "tests/unit/golden/container_runtime"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TWO = "registry.lab.internal/two/layers:2.0"
TODAY = [f"repository/{name}.deb" for name in ("docker-ce_28.*", "docker-ce-cli_28.*", "containerd.io_2.1.*")]
RELEASES = {
    "bookworm": ("20.10", "1.6", ["docker.io", "containerd", "runc"]),
    "trixie": ("26.1", "1.7", ["docker.io", "docker-cli", "containerd", "runc"]),
}


@dataclass(frozen=True)
class Engines:
    """The programs of today or of one Debian release, and the names of the renderings for them.

    ``archives`` is the folder of what they made of both images.
    """

    tree: Path
    docker: str
    containerd: str
    archives: Path


@dataclass(frozen=True)
class Ran:
    """The results of a scenario in its scratch directory."""

    scratch: Path

    def text(self, name: str) -> str:
        return (self.scratch / name).read_text()

    def rc(self, name: str) -> int:
        return int(self.text(f"{name}.rc"))

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text(f"{name}.status"))["preload"]
        return found


HERE = "today" if all(map(programs.find, TODAY)) else "trixie"


@pytest.fixture(
    scope="module",
    params=[HERE, *(pytest.param(name, marks=pytest.mark.slow) for name in RELEASES if name != HERE)],
)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    work = tmp_path_factory.mktemp(request.param)
    docker, containerd, names = RELEASES.get(request.param, ("28", "2.1", []))
    packages = (
        _of_debian(work, request.param, names) if names else [p for n in TODAY for p in programs.find(n)]
    )
    for path in packages:
        process.run(["dpkg-deb", "--extract", path, work / "tree"])
    made = Engines(work / "tree", docker, containerd, work / "archives")
    for name, script in (("docker", scripts.DOCKER_ARCHIVE), ("containerd", scripts.CONTAINERD_ARCHIVE)):
        _run(made, made.archives / name, script)
        (made.archives / name / f"{name}.tar").rename(made.archives / f"{name}.tar")
    (made.archives / "containerd/pause_digest").rename(made.archives / "pause_digest")
    return made


def _of_debian(work: Path, release: str, names: Sequence[str]) -> Sequence[Path]:
    """Fetch packages of a release."""
    apt = Apt(work / "apt", debian_sources(release, ("main",), KEYRING, None), "amd64")
    apt.update()
    addresses = {source.id: source.uri for source in apt.sources}
    packages = [package for package in apt.install(names) if package.name in names]
    wanted = [Download(p.name, f"{addresses[p.repository]}/{p.path}", p.sha256, p.size) for p in packages]
    (work / "cache").mkdir()
    return list(fetch(wanted, work / "cache", work).values())


def _tar(members: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in sorted(members.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
    return made.getvalue()


def _sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _descriptor(kind: str, content: bytes, **more: Any) -> dict[str, Any]:
    media = f"application/vnd.oci.image.{kind}"
    return {"mediaType": media, "digest": _sha256(content), "size": len(content), **more}


@dataclass(frozen=True)
class _Two:
    """An image of two layers (the bytes of their tars, and compressed), its configuration, manifest and index."""

    layers: list[bytes]
    zipped: list[bytes]
    config: bytes
    manifest: bytes
    index: bytes

    @property
    def diff_ids(self) -> list[str]:
        return [_sha256(layer) for layer in self.layers]


def _two() -> _Two:
    """Return an image of two layers behind an index of two platforms."""
    layers = [_tar({"large": random.Random(1).randbytes(8_000_000)}), _tar({"small": b"two"})]
    zipped = [gzip.compress(layer, 1, mtime=0) for layer in layers]
    config = pause.encode(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Volumes": {"/data": {}}},
            "rootfs": {"type": "layers", "diff_ids": [_sha256(layer) for layer in layers]},
        }
    )
    manifest = pause.encode(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": _descriptor("config.v1+json", config),
            "layers": [_descriptor("layer.v1.tar+gzip", layer) for layer in zipped],
        }
    )
    ours = _descriptor("manifest.v1+json", manifest, platform={"architecture": "amd64", "os": "linux"})
    others = {**ours, "digest": f"sha256:{'1' * 64}", "platform": {"architecture": "arm64", "os": "linux"}}
    index_type = "application/vnd.oci.image.index.v1+json"
    index = pause.encode({"schemaVersion": 2, "mediaType": index_type, "manifests": [ours, others]})
    return _Two(layers, zipped, config, manifest, index)


def _oci_archive(two: _Two) -> bytes:
    named = _descriptor("index.v1+json", two.index, annotations={"io.containerd.image.name": TWO})
    blobs = {
        f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob
        for blob in (*two.zipped, two.config, two.manifest, two.index)
    }
    oci = {
        **blobs,
        "index.json": pause.encode({"schemaVersion": 2, "manifests": [named]}),
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
    }
    return _tar(oci)


def _docker_archive(two: _Two) -> bytes:
    files = {f"{n}/layer.tar": layer for n, layer in enumerate(two.layers)}
    entry = {"Config": "config.json", "RepoTags": [TWO], "Layers": list(files)}
    return _tar({**files, "config.json": two.config, "manifest.json": pause.encode([entry])})


def _recorded(two: _Two) -> list[dict[str, Any]]:
    """Return the images as a bake records them."""
    shared = {"platform": "linux/amd64", "bytes": 1, "pin": False}
    return [
        {
            **shared,
            "ref": pause.REFERENCE,
            "digest": f"sha256:{'2' * 64}",
            "manifest": f"sha256:{'2' * 64}",
            "id": _sha256(pause.encode(pause.configuration())),
            "diff_ids": pause.configuration()["rootfs"]["diff_ids"],
        },
        {
            **shared,
            "ref": TWO,
            "digest": _sha256(two.index),
            "manifest": _sha256(two.manifest),
            "id": _sha256(two.config),
            "diff_ids": two.diff_ids,
        },
    ]


def _write_images(scratch: Path) -> None:
    """Write two images as archives, the lab's pause and ``_two``, and the programs that describe them to the agent."""
    two = _two()
    pause.write_archive(scratch / "pause.tar")
    (scratch / "two.oci.tar").write_bytes(_oci_archive(two))
    (scratch / "two.docker.tar").write_bytes(_docker_archive(two))
    (scratch / "layer").write_text(_sha256(two.zipped[0]))
    (scratch / "images.json").write_text(json.dumps(_recorded(two)))
    for name, program in (("list", scripts.LIST), ("store", scripts.STORE), ("digests", scripts.DIGESTS)):
        (scratch / f"{name}.py").write_text(program)


def _run(engines: Engines, scratch: Path, script: str) -> Ran:
    for name in ("etc", "work", "agent/image_builder"):
        (scratch / name).mkdir(parents=True)
    # The node has no other part of this program.
    shutil.copytree(NODE, scratch / "agent/image_builder/node", ignore=shutil.ignore_patterns("__pycache__"))
    (scratch / "agent/image_builder/__init__.py").write_text("")
    _write_images(scratch)
    path = f"/usr/local/sbin:{engines.tree}/usr/sbin:{engines.tree}/usr/bin:{environment()['PATH']}"
    process.run(
        [
            *("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child"),
            *("--propagation", "private", "--mount-proc"),
            *("sh", "-c", scripts.COMMON + script, "sh", scratch),
            *(GOLDEN / f"containerd-{engines.containerd}.toml", GOLDEN / f"docker-{engines.docker}.json"),
            *(engines.tree, sys.executable, pause.REFERENCE, TWO, engines.archives),
        ],
        env={"PATH": path},
    )
    return Ran(scratch)


def _loaded(ran: Ran, name: str, *refs: str) -> None:
    assert ran.rc(name) == 0, ran.text(name)
    assert list(ran.status(name)["loaded"]) == list(refs)
    assert ran.status(name)["problems"] == []
    assert ran.status(name)["state"] == "ok"


def _loaded_nothing(ran: Ran, name: str) -> None:
    _loaded(ran, name)
    assert ran.status(name)["bytes"] == 0
    assert ran.status(name)["there"] == 2
    assert "nothing was loaded" in ran.text(name)
    assert len(ran.text(name).splitlines()) == 1


def _failed(ran: Ran, name: str, code: str) -> str:
    """Return the reason why a run failed, which is also shown to people."""
    assert ran.rc(name) == 1
    status = ran.status(name)
    assert (status["state"], status["code"]) == ("failed", code), ran.text(name)
    assert f"node-agent: FAILED: {status['problems'][0]}" in ran.text(name)
    return str(status["reason"])


def _refused(ran: Ran, name: str) -> None:
    assert "/opt/images.tar is damaged: its sha256 is" in _failed(ran, name, "preload.archive")
    assert TWO not in ran.text("after-damage").splitlines()


def _had_no_room(ran: Ran, name: str) -> None:
    assert "/ is on the root filesystem, which would be " in _failed(ran, name, "preload.space")
    assert TWO not in ran.text("after-full").splitlines()


def test_docker_gets_its_images(engines: Engines, tmp_path: Path) -> None:
    ran = _run(engines, tmp_path, scripts.DOCKER)
    images = json.loads(ran.text("images.json"))

    _loaded(ran, "first", pause.REFERENCE, TWO)
    assert f"{TWO} is missing" in ran.text("first")
    _loaded_nothing(ran, "second")
    _loaded(ran, "moved", TWO)  # the tag pointed to another image
    found = {image["RepoTags"][0]: image for image in json.loads(ran.text("inspect.json"))}
    assert {ref: image["Id"] for ref, image in found.items()} == {i["ref"]: i["id"] for i in images}
    assert found[TWO]["RootFS"]["Layers"] == images[1]["diff_ids"]

    for name in ("lost", "dangling"):  # Docker believes that it has the layer, and can't be told otherwise
        assert f"{TWO} has lost layers" in _failed(ran, name, "preload.missing")
    _loaded_nothing(ran, "linked")
    _had_no_room(ran, "full")
    _refused(ran, "damaged")
    reason = _failed(ran, "dead", "preload.engine")
    assert f"`docker image inspect {pause.REFERENCE} {TWO}` ended with 1" in reason


def test_docker_seeded_or_not_is_told(engines: Engines, tmp_path: Path) -> None:
    ran = _run(engines, tmp_path, scripts.SEEDED)
    images = json.loads(ran.text("images.json"))

    def degraded(name: str, code: str) -> dict[str, Any]:
        assert ran.rc(name) == 0, ran.text(name)
        status = ran.status(name)
        assert (status["state"], status["code"]) == ("degraded", code), status
        assert f"node-agent: DEGRADED: {code}: {status['reason']}" in ran.text(name)
        return status

    unseeded = degraded("unseeded", "preload.fallback")
    assert "the seed did not run" in unseeded["reason"]
    assert unseeded["reasons"] == [f"{pause.REFERENCE} is missing", f"{TWO} is missing"]
    assert (unseeded["seeded"], list(unseeded["loaded"])) == (0, [pause.REFERENCE, TWO])
    fallback = degraded("fallback", "preload.fallback")
    assert "store.verity: block 7 is not what was baked" in fallback["reason"]
    # The other image is there from the previous load, which shows in its digest.
    assert fallback["reasons"] == [
        f"{TWO} is missing",
        f"{pause.REFERENCE} has no digest {images[0]['digest']}, only its tag",
    ]
    assert (fallback["seeded"], fallback["loaded"]) == (0, {TWO: "is missing"})
    digestless = degraded("digestless", "preload.digest")
    assert [reason.split()[0] for reason in digestless["reasons"]] == [pause.REFERENCE, TWO]
    assert digestless["bytes"] == 0
    _loaded(ran, "seeded")
    assert (ran.status("seeded")["seeded"], ran.status("seeded")["there"]) == (2, 0)


def test_docker_keeps_what_is_guarded(engines: Engines, tmp_path: Path) -> None:
    """Show what deletes a pinned image in Docker and what doesn't, as README.md and the how-to say."""
    ran = _run(engines, tmp_path, scripts.GUARDS)
    identity = json.loads(ran.text("images.json"))[1]["id"]
    guard = f"preload-pin-{identity.removeprefix('sha256:')[:12]}"

    (made,) = [json.loads(line) for line in ran.text("guards").splitlines()]  # none for the pause image
    assert (made["Names"], made["State"]) == (guard, "created")
    assert "image-builder.pin=1" in made["Labels"]
    assert ran.status("first")["named"] == [TWO]
    assert ran.text("volumes") == ""  # the image declares one
    assert ran.text("merged") == ""  # nothing is mounted for a guard
    _loaded_nothing(ran, "second")
    assert ran.status("second")["named"] == []

    for name in ("rm-tag", "rm-id"):
        assert ran.rc(name) == 1
        assert "conflict: unable to" in ran.text(name), ran.text(name)
    assert ran.rc("prune") == 0  # it deletes what no container uses: the pause image
    assert identity not in ran.text("prune") and ran.rc("inspect") == 0
    # With a second tag, the first can be removed; the last one can't.
    assert (ran.rc("rm-second-tag"), ran.rc("rm-last-tag")) == (0, 1)
    assert ran.text("left").splitlines() == [f"registry.lab.internal/two/layers:other {identity}"]
    _loaded(ran, "retagged", pause.REFERENCE, TWO)
    assert ran.rc("rm-other-repository") == 0  # likewise
    _loaded_nothing(ran, "restarted")
    assert ran.status("restarted")["named"] == []

    _loaded_nothing(ran, "unguarded")
    assert ran.status("unguarded")["named"] == [TWO]
    assert (
        guard in ran.text("unguarded") or ran.text("after-system-prune") == ""
    )  # it removes stopped containers
    assert ran.status("pruned")["named"] == [TWO]
    assert ran.rc("inspect-pruned") == 1  # and with --all, the images that they kept
    _loaded(ran, "lost", pause.REFERENCE, TWO)
    _loaded_nothing(ran, "unpinned")
    assert ran.status("unpinned")["named"] == [guard]
    assert ran.text("after-unpinned") == ""
    assert ran.rc("forced") == 0


def test_containerd_gets_its_images(engines: Engines, tmp_path: Path) -> None:
    ran = _run(engines, tmp_path, scripts.CONTAINERD)
    index = json.loads(ran.text("images.json"))[1]["digest"]
    by_digest = f"{TWO.rpartition(':')[0]}@{index}"

    _loaded(ran, "first", pause.REFERENCE, TWO)
    rows = {line.split()[0]: line.split() for line in ran.text("list").splitlines()[1:]}
    assert rows[TWO][2] == rows[by_digest][2] == index
    assert {name for name in rows if name.startswith("sha256:")}, "the CRI plugin named no image by its id"
    managed = "io.cri-containerd.image=managed"
    assert all(managed in row[-1].split(",") for row in rows.values()), rows
    pinned = {name for name, row in rows.items() if "io.cri-containerd.pinned=pinned" in row[-1].split(",")}
    assert pause.REFERENCE in pinned and TWO not in pinned
    checked = ran.text("check").splitlines()[1:]
    assert all(" complete (" in line and line.split()[-1] == "true" for line in checked), checked

    _loaded_nothing(ran, "second")
    assert ran.status("second")["named"] == []
    _loaded(ran, "incomplete", TWO)
    assert f"{TWO} has not all its content: incomplete (2/3)" in ran.text("incomplete")
    _loaded(ran, "moved", TWO)
    _loaded_nothing(ran, "unpinned")
    assert ran.status("unpinned")["named"] == [pause.REFERENCE]
    rows = {line.split()[0]: line.split() for line in ran.text("list-unpinned").splitlines()[1:]}
    assert "io.cri-containerd.pinned=pinned" in rows[pause.REFERENCE][-1].split(",")
    _loaded_nothing(ran, "elsewhere")  # its content is looked up in the engine if it isn't found on the disk
    _had_no_room(ran, "full")
    _refused(ran, "damaged")
    reason = _failed(ran, "dead", "preload.engine")
    assert "`ctr --namespace k8s.io images list` ended with 1" in reason
