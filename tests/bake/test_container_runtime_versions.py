"""The golden renderings of the role container_runtime, given to the programs that read them.

This covers the versions in Debian's archive: Docker 20.10 and 26.1, containerd 1.6 and 1.7. Their packages are
unpacked into a scratch directory, and the daemons run in namespaces of their own, without a network.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from image_builder.bake.lock.apt import Apt, debian_sources
from image_builder.bake.lock.fetch import Download, fetch
from image_builder.errors import CommandError
from image_builder.system import process
from image_builder.system.environment import environment

pytestmark = [pytest.mark.root, pytest.mark.slow]

GOLDEN = Path(__file__).resolve().parents[1] / "unit" / "golden" / "container_runtime"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

# Everything the daemons write goes to SCRATCH or vanishes with the namespace. $1 to $3: SCRATCH, Docker's and
# containerd's configuration. The bridge is off because iptables may be missing on the host.
_START = """
set -e
mount --bind "$1/mnt" /mnt
mount -t overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/work" overlay /etc
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /opt
containerd --config "$3" >"$1/containerd.log" 2>&1 &
i=0; until ctr version >/dev/null 2>&1; do i=$((i + 1)); test $i -lt 100; sleep 0.1; done
ctr plugins ls
dockerd --config-file "$2" --containerd /run/containerd/containerd.sock --pidfile /run/docker.pid \
  --bridge=none --iptables=false --ip6tables=false >"$1/docker.log" 2>&1 &
i=0; until docker info >/dev/null 2>&1; do i=$((i + 1)); test $i -lt 150; sleep 0.1; done
docker info --format '{{json .}}'
"""


@dataclass(frozen=True)
class Engines:
    """The programs of one Debian release, and the names of the renderings for them."""

    tree: Path
    docker: str
    containerd: str

    @property
    def env(self) -> dict[str, str]:
        base = environment()["PATH"]
        return {"PATH": f"{self.tree}/usr/sbin:{self.tree}/usr/bin:{base}"}

    @property
    def daemon_json(self) -> Path:
        return GOLDEN / f"docker-{self.docker}.json"

    @property
    def config_toml(self) -> Path:
        return GOLDEN / f"containerd-{self.containerd}.toml"


RELEASES = {
    "bookworm": ("20.10", "1.6", ["docker.io", "containerd", "runc"]),
    "trixie": ("26.1", "1.7", ["docker.io", "docker-cli", "containerd", "runc"]),
}


@pytest.fixture(scope="module", params=sorted(RELEASES))
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    docker, containerd, names = RELEASES[request.param]
    work = tmp_path_factory.mktemp(request.param)
    apt = Apt(work / "apt", debian_sources(request.param, ("main",), KEYRING, None), "amd64")
    apt.update()
    addresses = {source.id: source.uri for source in apt.sources}
    packages = [package for package in apt.install(names) if package.name in names]
    assert {package.name for package in packages} == set(names)
    wanted = [Download(p.name, f"{addresses[p.repository]}/{p.path}", p.sha256, p.size) for p in packages]
    (work / "cache").mkdir()
    for path in fetch(wanted, work / "cache", work).values():
        process.run(["dpkg-deb", "--extract", path, work / "tree"])
    return Engines(work / "tree", docker, containerd)


def test_programs_are_of_the_versions_that_are_rendered(engines: Engines) -> None:
    docker = process.run(["dockerd", "--version"], env=engines.env).stdout
    containerd = process.run(["containerd", "--version"], env=engines.env).stdout
    assert f" {engines.docker}." in docker
    assert f" {engines.containerd}." in containerd


def test_containerd_takes_every_setting(engines: Engines) -> None:
    """The effective configuration has every rendered setting: no key was unknown or ignored."""
    dump = process.run(
        ["containerd", "--config", engines.config_toml, "config", "dump"], env=engines.env
    ).stdout
    rendered = tomllib.loads(engines.config_toml.read_text())
    del rendered["imports"]  # the dump lists the files that were read instead
    assert list(_missing(rendered, tomllib.loads(dump))) == []


def test_a_setting_that_containerd_does_not_know_would_be_found(engines: Engines, tmp_path: Path) -> None:
    """containerd 1.x silently ignores unknown keys, hence the comparison above."""
    wrong = tmp_path / "config.toml"
    text = engines.config_toml.read_text()
    wrong.write_text(text.replace("max_concurrent_downloads", "max_concurrent_download"))
    dump = process.run(["containerd", "--config", wrong, "config", "dump"], env=engines.env).stdout
    assert list(_missing(tomllib.loads(text), tomllib.loads(dump))) != []


def test_docker_accepts_its_configuration(engines: Engines, tmp_path: Path) -> None:
    if engines.docker == "20.10":  # as in the role's table; the test below starts it instead
        assert "--validate" not in process.run(["dockerd", "--help"], env=engines.env).stdout
        return
    process.run(["dockerd", "--validate", f"--config-file={engines.daemon_json}"], env=engines.env)
    wrong = tmp_path / "daemon.json"
    wrong.write_text(json.dumps({**json.loads(engines.daemon_json.read_text()), "storage-drivr": "overlay2"}))
    with pytest.raises(CommandError) as failure:
        process.run(["dockerd", "--validate", f"--config-file={wrong}"], env=engines.env)
    assert "storage-drivr" in failure.value.tail


def test_the_daemons_run_as_configured(engines: Engines, tmp_path: Path) -> None:
    for name in ("mnt", "etc", "work"):
        (tmp_path / name).mkdir()
    done = process.run(
        [
            *("unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child"),
            *("--propagation", "private", "--mount-proc"),
            *("sh", "-c", _START, "sh", tmp_path, engines.daemon_json, engines.config_toml),
        ],
        env=engines.env,
        timeout=60,
    )
    *plugins, last = done.stdout.strip().splitlines()
    cri = [line.split() for line in plugins if line.startswith("io.containerd.grpc.v1") and " cri " in line]
    assert [line[-1] for line in cri] == ["ok"]
    info = json.loads(last)
    assert info["Driver"] == "overlay2"
    assert info["DockerRootDir"] == "/mnt/local/docker"
    assert info["CgroupDriver"] == "systemd"
    assert info["LoggingDriver"] == "json-file"
    assert info["LiveRestoreEnabled"] is True
    assert (tmp_path / "mnt/local/docker/overlay2").is_dir()
    assert (tmp_path / "mnt/local/containerd/io.containerd.snapshotter.v1.overlayfs").is_dir()


def _missing(wanted: Mapping[str, Any], found: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Name every setting in ``wanted`` that is missing from ``found`` or differs there."""
    for key, value in wanted.items():
        other = found.get(key)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _missing(value, other, f"{path}.{key}")
        elif other not in (value, f"{value}0s"):  # Go writes "30m" as "30m0s"
            yield f"{path}.{key}: {value!r}, not {other!r}"
