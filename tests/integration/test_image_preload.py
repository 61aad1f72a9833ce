"""The program of the role image_preload, with real engines: Docker 20.10 and 26.1, containerd 1.6 and 1.7.

Their packages are Debian's, unpacked into a scratch directory. Each scenario is one script in namespaces of its
own, without a network: a first engine makes the archive, a second one with a blank disk gets it loaded.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder import process
from image_builder.apt import Apt, debian_sources
from image_builder.fetch import Wanted, fetch
from image_builder.lab import pause
from image_builder.settings import REPO_ROOT

pytestmark = pytest.mark.root

PROGRAM = REPO_ROOT / "roles/image_preload/files/image_preload.py"
GOLDEN = REPO_ROOT / "tests/unit/golden/container_runtime"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
TWO = "registry.lab.internal/two/layers:2.0"
RELEASES = {
    "bookworm": ("20.10", "1.6", ["docker.io", "containerd", "runc"]),
    "trixie": ("26.1", "1.7", ["docker.io", "docker-cli", "containerd", "runc"]),
}

# $1 scratch, $2 containerd's configuration, $3 Docker's, $4 the program. The engines' disk is /mnt: `blank` gives
# them another one. What the program says goes to $1/<name>, its status and exit status beside it.
_COMMON = """
set -e
scratch=$1 containerd_config=$2 docker_config=$3 program=$4
mount -t overlay -o "lowerdir=/etc,upperdir=$scratch/etc,workdir=$scratch/work" overlay /etc
mount -t tmpfs tmpfs /opt
wait_for() { i=0; until "$@" >/dev/null 2>&1; do i=$((i + 1)); test $i -lt 150; sleep 0.1; done; }
start() {
  mount -t tmpfs tmpfs /run
  mkdir -p "$scratch/disk$1"; mount --bind "$scratch/disk$1" /mnt
  containerd --config "$containerd_config" >"$scratch/containerd$1.log" 2>&1 &
  containerd=$!
  wait_for ctr version
  if test $engine = docker; then
    dockerd --config-file "$docker_config" --containerd /run/containerd/containerd.sock \\
      --pidfile /run/docker.pid --bridge=none --iptables=false --ip6tables=false >"$scratch/docker$1.log" 2>&1 &
    dockerd=$!
    wait_for docker info
  fi
}
blank() {
  if test $engine = docker; then kill $dockerd; wait $dockerd || true; fi
  kill $containerd; wait $containerd || true
  umount --recursive /mnt; umount /run
  start 2
}
preload() {
  name=$1; shift; status=0
  python3 "$program" --engine=$engine --list=/opt/list.json --status="$scratch/$name.status" --interval=0.02 "$@" \\
    >"$scratch/$name" 2>&1 || status=$?
  echo $status >"$scratch/$name.rc"
}
"""

_DOCKER = """
engine=docker
start 1
docker image load --input "$scratch/pause.tar" >/dev/null
docker image load --input "$scratch/two.docker.tar" >/dev/null
docker image save --output /opt/images.tar "$5" "$6"
python3 "$scratch/list.py" docker
blank
preload first
preload second
docker image rm "$6" >/dev/null
docker image tag "$5" "$6"
preload moved
docker image inspect "$5" "$6" >"$scratch/inspect.json"
folder=$(docker image inspect --format '{{.GraphDriver.Data.UpperDir}}' "$6")
mv "$folder" "$folder.gone"
preload lost
mv "$folder.gone" "$folder"
docker image rm "$6" >/dev/null
printf x | dd of=/opt/images.tar conv=notrunc status=none
preload damaged
docker image ls --format '{{.Repository}}:{{.Tag}}' >"$scratch/after-damage"
kill $dockerd; wait $dockerd || true
preload dead
"""

_CONTAINERD = """
engine=containerd
start 1
alias ctr='ctr --namespace k8s.io'
ctr images import "$scratch/pause.tar" >/dev/null
ctr images import "$scratch/two.oci.tar" >/dev/null
ctr images export --platform linux/amd64 /opt/images.tar "$5" "$6"
pause_digest=$(ctr images list | awk -v ref="$5" '$1 == ref {print $3}')
python3 "$scratch/list.py" containerd "$pause_digest"
blank
preload first --pause="$5"
sleep 1
ctr images list >"$scratch/list"
ctr images check >"$scratch/check"
preload second --pause="$5"
ctr content rm $(cat "$scratch/layer") >/dev/null
preload incomplete --pause="$5"
ctr images rm --sync "$6" >/dev/null
ctr images tag "$5" "$6" >/dev/null
preload moved --pause="$5"
for name in $(ctr images list --quiet); do ctr images label "$name" io.cri-containerd.pinned= >/dev/null; done
preload unpinned --pause="$5"
ctr images list >"$scratch/list-unpinned"
ctr images rm --sync "$6" >/dev/null
printf x | dd of=/opt/images.tar conv=notrunc status=none
preload damaged
ctr images list --quiet >"$scratch/after-damage"
kill $containerd; wait $containerd || true
preload dead
"""

# Run in the scenario: the archive exists there alone. Arguments: the engine, for containerd the pause image's
# digest, which that engine makes up when it takes an archive in Docker's form.
_LIST = """
import hashlib, json, pathlib, sys
here = pathlib.Path(__file__).parent
archive = pathlib.Path("/opt/images.tar").read_bytes()
images = json.loads((here / "images.json").read_text())
if len(sys.argv) > 2:
    images[0]["digest"] = images[0]["manifest"] = sys.argv[2]
recorded = {"path": "/opt/images.tar", "bytes": len(archive), "sha256": hashlib.sha256(archive).hexdigest()}
pathlib.Path("/opt/list.json").write_text(
    json.dumps({"format": 1, "engine": sys.argv[1], "archive": recorded, "images": images}))
"""


@dataclass(frozen=True)
class Engines:
    """Programs of one Debian release, and the names of the renderings that are for them."""

    tree: Path
    docker: str
    containerd: str


@dataclass(frozen=True)
class Ran:
    """What a scenario left in its scratch directory."""

    scratch: Path

    def text(self, name: str) -> str:
        return (self.scratch / name).read_text()

    def rc(self, name: str) -> int:
        return int(self.text(f"{name}.rc"))

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text(f"{name}.status"))
        return found


@pytest.fixture(scope="module", params=sorted(RELEASES))
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    docker, containerd, names = RELEASES[request.param]
    work = tmp_path_factory.mktemp(request.param)
    apt = Apt(work / "apt", debian_sources(request.param, ("main",), KEYRING, None), "amd64")
    apt.update()
    addresses = {source.id: source.uri for source in apt.sources}
    packages = [package for package in apt.install(names) if package.name in names]
    wanted = [Wanted(p.name, f"{addresses[p.repository]}/{p.path}", p.sha256, p.size) for p in packages]
    (work / "cache").mkdir()
    for path in fetch(wanted, work / "cache", work).values():
        process.run(["dpkg-deb", "--extract", path, work / "tree"])
    return Engines(work / "tree", docker, containerd)


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


def _write_images(scratch: Path) -> None:
    """Write two images as archives: the lab's pause, and one of two layers behind an index of two platforms."""
    pause.write_archive(scratch / "pause.tar")
    layers = [_tar({"large": random.Random(1).randbytes(8_000_000)}), _tar({"small": b"two"})]
    zipped = [gzip.compress(layer, 1, mtime=0) for layer in layers]
    diff_ids = [_sha256(layer) for layer in layers]
    config = pause.encode(
        {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}
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
    named = _descriptor("index.v1+json", index, annotations={"io.containerd.image.name": TWO})
    blobs = {
        f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob
        for blob in (*zipped, config, manifest, index)
    }
    oci = {
        **blobs,
        "index.json": pause.encode({"schemaVersion": 2, "manifests": [named]}),
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
    }
    (scratch / "two.oci.tar").write_bytes(_tar(oci))
    files = {f"{n}/layer.tar": layer for n, layer in enumerate(layers)}
    entry = {"Config": "config.json", "RepoTags": [TWO], "Layers": list(files)}
    (scratch / "two.docker.tar").write_bytes(
        _tar({**files, "config.json": config, "manifest.json": pause.encode([entry])})
    )
    (scratch / "layer").write_text(_sha256(zipped[0]))
    shared = {"platform": "linux/amd64", "bytes": 1}
    pause_config = pause.encode(pause.configuration())
    images = [
        {
            **shared,
            "ref": pause.REFERENCE,
            "digest": f"sha256:{'2' * 64}",
            "manifest": f"sha256:{'2' * 64}",
            "id": _sha256(pause_config),
            "pin": False,
            "diff_ids": pause.configuration()["rootfs"]["diff_ids"],
        },
        {
            **shared,
            "ref": TWO,
            "digest": _sha256(index),
            "manifest": _sha256(manifest),
            "id": _sha256(config),
            "pin": False,
            "diff_ids": diff_ids,
        },
    ]
    (scratch / "images.json").write_text(json.dumps(images))
    (scratch / "list.py").write_text(_LIST)


def _run(engines: Engines, scratch: Path, script: str) -> Ran:
    for name in ("etc", "work"):
        (scratch / name).mkdir()
    _write_images(scratch)
    path = f"{engines.tree}/usr/sbin:{engines.tree}/usr/bin:{process.environment()['PATH']}"
    process.run(
        [
            *("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child"),
            *("--propagation", "private", "--mount-proc"),
            *("sh", "-c", _COMMON + script, "sh", scratch),
            *(GOLDEN / f"containerd-{engines.containerd}.toml", GOLDEN / f"docker-{engines.docker}.json"),
            *(PROGRAM, pause.REFERENCE, TWO),
        ],
        env={"PATH": path},
        timeout=120,
    )
    return Ran(scratch)


def _loaded(ran: Ran, name: str, *refs: str) -> None:
    assert ran.rc(name) == 0, ran.text(name)
    assert ran.status(name)["loaded"] == list(refs)
    assert ran.status(name)["problems"] == []


def _loaded_nothing(ran: Ran, name: str) -> None:
    _loaded(ran, name)
    assert ran.status(name)["bytes"] == 0
    assert "nothing was loaded" in ran.text(name)
    assert len(ran.text(name).splitlines()) == 1


def _refused(ran: Ran, name: str) -> None:
    assert ran.rc(name) == 1
    assert "/opt/images.tar is damaged: its sha256 is" in ran.text(name)
    assert TWO not in ran.text("after-damage").splitlines()


def test_docker_gets_its_images(engines: Engines, tmp_path: Path) -> None:
    ran = _run(engines, tmp_path, _DOCKER)
    images = json.loads(ran.text("images.json"))

    _loaded(ran, "first", pause.REFERENCE, TWO)
    assert f"{TWO} is missing" in ran.text("first")
    _loaded_nothing(ran, "second")
    _loaded(ran, "moved", TWO)  # the tag led to another image
    found = {image["RepoTags"][0]: image for image in json.loads(ran.text("inspect.json"))}
    assert {ref: image["Id"] for ref, image in found.items()} == {i["ref"]: i["id"] for i in images}
    assert found[TWO]["RootFS"]["Layers"] == images[1]["diff_ids"]

    assert ran.rc("lost") == 1  # Docker believes that it has the layer, and can't be told otherwise
    assert f"{TWO} has lost layers" in ran.status("lost")["problems"][0]
    _refused(ran, "damaged")
    assert ran.rc("dead") == 1
    assert f"`docker image inspect {pause.REFERENCE}` ended with 1" in ran.text("dead")


def test_containerd_gets_its_images(engines: Engines, tmp_path: Path) -> None:
    ran = _run(engines, tmp_path, _CONTAINERD)
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
    _loaded(ran, "incomplete", TWO)
    assert f"{TWO} has not all its content: incomplete (2/3)" in ran.text("incomplete")
    _loaded(ran, "moved", TWO)
    _loaded_nothing(ran, "unpinned")
    rows = {line.split()[0]: line.split() for line in ran.text("list-unpinned").splitlines()[1:]}
    assert "io.cri-containerd.pinned=pinned" in rows[pause.REFERENCE][-1].split(",")
    _refused(ran, "damaged")
    assert ran.rc("dead") == 1
    assert "`ctr --namespace k8s.io images list` ended with 1" in ran.text("dead")
